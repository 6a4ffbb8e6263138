"""A scheduler, a KV memory backend, and a client that keeps every event: runs requests and compares them with plain runs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace

from octavo.config import CacheConfig, SchedulerConfig
from octavo.core.cost import StepShape
from octavo.core.match_report import MatchReport
from octavo.core.request import FinishReason, Request, SamplingParams, Sequence
from octavo.core.scheduler import Scheduler
from octavo.core.step import StepPlan, StepResult, TokenEvent
from tests.core.beam_twin import plain_beams
from tests.core.kv_memory import EOS, VOCAB, KVMemoryBackend, Text, plain_run, text_stop
from tests.core.page_memory import PageMemoryBackend, toy_layout

Guess = Callable[[Sequence], list[int]]


def make_request(
    request_id: str,
    prompt: Iterable[int],
    seed: int = 0,
    salt: str | None = None,
    priority: int = 0,
    user: str | None = None,
    **params: object,
) -> Request:
    sampling = SamplingParams(**params)  # type: ignore[arg-type]
    return Request(request_id, list(prompt), sampling, seed, frozenset([EOS]), cache_salt=salt, priority=priority, user=user)


class RowCost:
    """A GapCost: a millisecond per row and 0.1 ms per logit row, plus what has passed since ``ended_s``."""

    max_trusted_rows = 1 << 30

    def __init__(self) -> None:
        self.ended_s = self.passed_s = 0.0

    def begin(self, now: float) -> None:
        self.passed_s = now - self.ended_s

    def gap_seconds(self, shape: StepShape) -> float:
        return self.passed_s + 1e-3 * shape.num_rows + 1e-4 * shape.num_logit_rows


class Harness:
    def __init__(
        self,
        num_blocks: int = 8,
        block_size: int = 4,
        max_model_len: int = 64,
        max_num_seqs: int = 4,
        budget: int = 8,
        chunked: bool = True,
        caching: bool = True,
        max_itl_ms: float | None = None,
        granularity: str = "block",
        guess: Guess | None = None,
        lookahead: int = 1,
        num_host_blocks: int = 0,
        preemption: str = "auto",
        policy: str = "fcfs",
        reservation: str = "paged",
        pages: tuple[int, int, int] | None = None,
    ) -> None:
        """``pages``: of the full part, of the window part, and the window."""
        config = SchedulerConfig(
            max_num_seqs,
            budget,
            max_itl_ms,
            enable_chunked_prefill=chunked,
            scheduling_policy=policy,
            preemption=preemption,
            admission_lookahead=lookahead,
        )
        self.cost = None if max_itl_ms is None else RowCost()
        cache = CacheConfig(
            block_size=block_size, enable_prefix_caching=caching, prefix_granularity=granularity, kv_reservation=reservation
        )
        layout = None if pages is None else toy_layout(*pages)
        self.scheduler = Scheduler(config, cache, num_blocks, max_model_len, "toy", self.cost, num_host_blocks, layout=layout)
        self.backend = KVMemoryBackend(num_blocks, block_size, num_host_blocks)
        if layout is not None:
            num_ids = len(self.scheduler._state.kv.pool.ref_counts)
            self.backend = PageMemoryBackend(num_blocks, num_ids, block_size, layout, num_host_blocks)
        self.requests: dict[str, Request] = {}
        self.texts: dict[tuple[str, int], Text] = {}
        self.num_cached: dict[tuple[str, int], int] = {}
        self.reports: dict[str, MatchReport] = {}
        self.sums: dict[tuple[str, int], float] = {}  # of hypotheses
        self.pending: StepResult | None = None
        self.guess = guess
        self.granularity = granularity
        self.plans: list[StepPlan] = []
        self.continued: set[str] = set()

    def add(self, request: Request, num_made: int = 0) -> None:
        """``num_made``: output tokens that were made elsewhere, of which nobody hears here."""
        made = plain_run(request, 0, self.scheduler.limits.max_total_tokens) if num_made else Text()
        self.scheduler.add(request, made.token_ids[:num_made])
        self.requests[request.request_id] = request
        for choice in range(request.params.n):
            self.texts[request.request_id, choice] = Text()
        if num_made:
            self.continued.add(request.request_id)
            logprobs = made.logprobs[: num_made if request.params.logprobs is not None else 0]
            self.texts[request.request_id, 0] = Text(made.token_ids[:num_made], logprobs, made.prompt_logprobs)
        self.check()

    def begin(self) -> StepPlan | None:
        """Plan and execute, but do not apply."""
        drafts = {} if self.guess is None else {seq.seq_id: self.guess(seq) for seq in self.scheduler.decoding_sequences}
        plan = self.scheduler.plan(drafts=drafts)
        self.check()
        if plan is not None:
            self.plans.append(plan)
            self.pending = self.backend.execute(plan)
        return plan

    def finish(self) -> list[TokenEvent]:
        assert self.pending is not None
        result, self.pending = self.pending, None
        events = self.scheduler.apply(result, self._text_stops(result))
        self.check()
        self._receive(events)
        return events

    def step(self) -> StepPlan | None:
        plan = self.begin()
        if plan is not None:
            self.finish()
        return plan

    def abort(self, request_id: str) -> list[TokenEvent]:
        events = self.scheduler.abort(request_id)
        self.check()
        self._receive(events)
        return events

    def run(self, max_steps: int = 5000) -> None:
        for _ in range(max_steps):
            if self.step() is None:
                return
        raise AssertionError(f"not done after {max_steps} steps")

    def run_all(self, requests: Iterable[Request]) -> None:
        """Run requests together to their end and compare each with its plain run."""
        for request in requests:
            self.add(request)
        self.run()
        self.check_texts()

    def check(self) -> None:
        self.scheduler.check_invariants()

    def check_texts(self) -> None:
        for key in self.texts:
            self.check_text(*key)

    def check_text(self, request_id: str, choice: int) -> None:
        if self.requests[request_id].params.beam is not None:
            return self.check_beam(request_id, choice)
        got = self.texts[request_id, choice]
        want = plain_run(self.requests[request_id], choice, self.scheduler.limits.max_total_tokens)
        if got.finish_reason is FinishReason.ABORT or got.finish_reason is FinishReason.ERROR or got.finish_reason is None:
            assert got.token_ids == want.token_ids[: len(got.token_ids)]
            assert got.logprobs == want.logprobs[: len(got.logprobs)]
        else:
            assert got == want, f"{request_id} choice {choice}"

    def check_beam(self, request_id: str, choice: int) -> None:
        """A hypothesis comes whole or not at all."""
        got, request = self.texts[request_id, choice], self.requests[request_id]
        if got.finish_reason in (FinishReason.ABORT, FinishReason.ERROR, None):
            assert got.token_ids == []
            return
        want = plain_beams(request, self.scheduler.limits.max_output_tokens(request))[choice]
        assert (got.token_ids, got.finish_reason, got.stop_reason) == (want.token_ids, want.reason, want.stop_reason)
        assert self.sums[request_id, choice] == want.sum_logprob
        assert request.params.logprobs is None or sum(got.logprobs) == want.sum_logprob

    def check_idle(self) -> None:
        """Nothing runs: every block is free or offered by the cache, every slot closed or about to be."""
        scheduler = self.scheduler
        self.check()
        assert not scheduler.has_work and scheduler.plan() is None
        assert scheduler.num_running == scheduler.num_waiting == scheduler.num_used_blocks == 0
        assert scheduler.num_used_host_blocks == 0
        assert scheduler.num_free_blocks + scheduler.num_cached_blocks == scheduler.num_blocks

    def _text_stops(self, result: StepResult) -> dict[tuple[str, int], tuple[int, str]]:
        stops = {}
        for seq, outcome in zip(self.scheduler.in_flight_sequences, result.slices, strict=True):
            for i, token in enumerate(outcome.token_ids):
                behind = outcome.token_ids[:i] if seq.num_drafts else []  # several tokens of one choice, or one of each
                key = (seq.request.request_id, seq.choice if seq.num_drafts else seq.choice + i)
                stop = text_stop(seq.request, [*seq.output_token_ids, *behind, token])
                if stop is not None and key not in stops:
                    stops[key] = (1 + len(behind), stop)
        return stops

    def _receive(self, events: list[TokenEvent]) -> None:
        for event in events:
            text = self.texts[event.request_id, event.choice]
            assert text.finish_reason is None, "an event after the last one"
            text.token_ids += event.token_ids
            if event.logprobs is not None:
                assert [entry.token_id for entry in event.logprobs] == event.token_ids
                text.logprobs += [entry.logprob for entry in event.logprobs]
            if event.prompt_logprobs is not None:
                assert not text.prompt_logprobs, "prompt log-probabilities come once"
                assert [entry.token_id for entry in event.prompt_logprobs] == self.requests[event.request_id].prompt_token_ids[1:]
                text.prompt_logprobs = [entry.logprob for entry in event.prompt_logprobs]
            text.finish_reason, text.stop_reason = event.finish_reason, event.stop_reason
            assert event.num_cached_tokens < len(self.requests[event.request_id].prompt_token_ids), "the last token always runs"
            if event.cumulative_logprob is not None:
                self.sums[event.request_id, event.choice] = event.cumulative_logprob
            self.num_cached[event.request_id, event.choice] = event.num_cached_tokens
            if event.match_report is not None:
                assert event.request_id not in self.reports, "a report comes once"
                self.reports[event.request_id] = event.match_report
            self._check_match(event)

    def _check_match(self, event: TokenEvent) -> None:
        """What is said of the prefix cache: who was answered was looked up, and what was used of it is part of what it knew."""
        scheduler, request = self.scheduler, self.requests[event.request_id]
        num_cached, report = event.num_cached_tokens, self.reports.get(event.request_id)
        unit = 1 if self.granularity == "token" else scheduler._state.kv.block_size
        assert num_cached % unit == 0, f"{num_cached} tokens were found in blocks of {unit}"
        if report is None:
            failed = event.finish_reason in (FinishReason.ABORT, FinishReason.ERROR)
            unasked = scheduler._state.kv.index is None or request.params.prompt_logprobs is not None
            unasked = unasked or event.request_id in self.continued
            assert failed or unasked, f"{event.request_id} was looked up, and nothing is said of it"
            return
        assert num_cached + report.num_computed <= report.position < len(request.prompt_token_ids), f"{num_cached} of {report}"
        assert report.num_computed % unit == 0 and (report.num_computed > 0) == (report.computed_end is not None)


class Oracle:
    """Drafts of up to ``most`` tokens, each the one that will be drawn with probability ``hit``, else another."""

    def __init__(self, harness: Harness, most: int, hit: float, seed: int = 0) -> None:
        self._harness, self._most, self._hit = harness, most, hit
        self._random = random.Random(seed)
        self._texts: dict[tuple[str, int], list[int]] = {}

    def __call__(self, seq: Sequence) -> list[int]:
        key = (seq.request.request_id, seq.choice)
        if key not in self._texts:
            params = replace(seq.request.params, ignore_eos=True, stop=(), stop_token_ids=(), prompt_logprobs=None)
            endless = replace(seq.request, params=params)
            self._texts[key] = plain_run(endless, seq.choice, self._harness.scheduler.limits.max_total_tokens + self._most).token_ids
        coming = self._texts[key][seq.num_output_tokens :][: self._random.randint(0, self._most)]
        return [token if self._random.random() < self._hit else (token + 1) % VOCAB for token in coming]


def bound_for(max_itl_ms: float | None, chunked: bool, policy: str) -> float | None:
    """The bound on gaps that a configuration may have: None where it would be refused."""
    return max_itl_ms if chunked and policy != "prefill_first" else None
