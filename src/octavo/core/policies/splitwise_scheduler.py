"""The public simulator's machine behind the interface of ``core.scheduler.Scheduler``, as far as ``EngineLoop`` and a simulation use it.

    add ─▶ SplitwiseMachine ─▶ plan() ─▶ StepPlan ─▶ [a backend that costs time] ─▶ StepResult ─▶ apply() ─▶ TokenEvents

One iteration of a block is a step, so these rules run in the same loop, against the same cost models and arrivals as ours; ``num_repeats``
lets a simulation take a block at once. Both phases of a request run here. Memory is counted in tokens: a "block" of the gauges is one.
There are no block tables, so only a backend that computes nothing can run the plans. Never speculates, caches prefixes or splits choices.
Prompts can take all the memory that their answers would need to start; then nothing runs until a request is aborted, as there.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from types import MappingProxyType

from octavo.core.cost import StepShape
from octavo.core.limits import LengthLimits, StopRule
from octavo.core.policies.splitwise import SplitwiseLimits, SplitwiseMachine, SplitwiseTask
from octavo.core.request import FinishReason, ParameterError, Request, Sequence, SequenceStatus, num_places
from octavo.core.result_checks import StepProtocolError, TextStops, check_result
from octavo.core.slots import SlotTable
from octavo.core.state import NO_GUESSES, Draft, Guesses, SchedulerStats
from octavo.core.step import SequenceSlice, SlotOpen, StepPlan, StepResult, TokenEvent

_NO_TEXT_STOPS: TextStops = MappingProxyType({})


class _Running:
    """A request: its one sequence, and the task that stands for it in the machine now."""

    __slots__ = ("decoding", "prompt", "rule", "seq")

    def __init__(self, seq: Sequence, rule: StopRule) -> None:
        self.seq = seq
        self.rule = rule
        lengths = seq.request.arrival_s, seq.num_prompt_tokens, rule.max_tokens
        self.prompt = SplitwiseTask(self, lengths[0], True, *lengths[1:])
        self.decoding = SplitwiseTask(self, lengths[0], False, *lengths[1:]) if rule.max_tokens > 1 else None

    @property
    def task(self) -> SplitwiseTask:
        """The one that is to end next, or ended last."""
        return self.prompt if self.prompt.num_left or self.decoding is None else self.decoding


class SplitwiseScheduler:
    """``num_kv_tokens``: whose KV fits. A request reserves prompt and output whole, so one that exceeds it can never run."""

    def __init__(self, num_kv_tokens: int, limits: SplitwiseLimits = SplitwiseLimits(), max_model_len: int = 1 << 20) -> None:
        self.machine = SplitwiseMachine(num_kv_tokens, limits)
        self.limits = LengthLimits(max_model_len, num_kv_tokens, 1)
        self.stats = SchedulerStats()
        self._slots = SlotTable(num_kv_tokens // 2 + 1)  # blocked sequences keep theirs; each that has started holds two tokens at least
        self._requests: dict[str, _Running] = {}
        self._num_plans = 0
        self._num_sequences = 0
        self._is_due = True  # the batch is built anew at the next boundary
        self._left = 0  # iterations of the block that runs
        self._in_flight: Draft | None = None
        self._ended_early: list[_Running] = []  # aborted while in flight

    # --- requests -----------------------------------------------------------------------------------------------------------------------

    def add(self, request: Request, output_token_ids: Seq[int] = ()) -> None:
        """Queue a request. ParameterError when it can never run here: several choices, no max_tokens, more KV than there is; or when it
        is to go on after tokens."""
        if output_token_ids:
            raise ParameterError("output_token_ids", len(output_token_ids), "none under these rules")
        if request.request_id in self._requests:
            raise ParameterError("request_id", request.request_id, "a request with this id is not finished yet")
        self.limits.check_prompt(request)
        if num_places(request.params) != 1 or request.params.beam is not None:
            raise ParameterError("n", num_places(request.params), "1 under these rules")
        tokens, asked = list(request.prompt_token_ids), request.params.max_tokens
        most = min(self.limits.max_model_len, self.num_blocks) - len(tokens)
        if asked is None or not 1 <= asked <= most:
            raise ParameterError("max_tokens", asked, f"a number from 1 to {most}, since all of it is reserved")
        seq = Sequence(self._num_sequences, request, token_ids=tokens, num_prompt_tokens=len(tokens))
        self._num_sequences += 1
        running = self._requests[request.request_id] = _Running(seq, StopRule.of(request, asked))
        self._is_due |= self.machine.add(running.prompt)
        if running.decoding is not None:
            self._is_due |= self.machine.add(running.decoding, running.prompt)
        self.stats.num_requests += 1

    def abort(self, request_id: str) -> list[TokenEvent]:
        """End a request; nothing for an id that is not known (any more). Its memory is free at once, or with the step in flight."""
        running = self._requests.pop(request_id, None)
        if running is None:
            return []
        self.stats.num_aborted += 1
        return [self._drop(running, FinishReason.ABORT)]

    def fail_all(self, message: str) -> list[TokenEvent]:
        """End everything after an engine error; a step in flight is forgotten."""
        draft, self._in_flight = self._in_flight, None
        if draft is not None:
            self._slots.close_again(draft.plan.slot_closes)
        for running in self._ended_early:
            self._leave(running)
        self._ended_early = []
        failed, self._requests = list(self._requests.values()), {}
        self.stats.num_failed += len(failed)
        return [self._drop(running, FinishReason.ERROR, message) for running in failed]

    def _drop(self, running: _Running, reason: FinishReason, error: str | None = None) -> TokenEvent:
        seq = running.seq
        seq.status, seq.finish_reason = SequenceStatus.FINISHED, reason
        if self._in_flight is not None and seq in self._in_flight.sequences:
            self._ended_early.append(running)
        else:
            self._leave(running)
        return TokenEvent(seq.request.request_id, 0, [], finish_reason=reason, error=error)

    def _leave(self, running: _Running) -> None:
        """Before its time."""
        self.machine.remove(running.task)
        self._slots.give_back(running.seq)
        self._is_due = True

    # --- gauges -------------------------------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self._requests or self._in_flight)

    @property
    def in_flight_sequences(self) -> list[Sequence]:
        return [] if self._in_flight is None else self._in_flight.sequences

    @property
    def running_sequences(self) -> list[Sequence]:
        """Of the batch, in the order of the plan."""
        return [task.owner.seq for task in self.machine.batch]

    @property
    def waiting_sequences(self) -> list[Sequence]:
        """All that are not in the batch, by arrival."""
        batch = {task.owner for task in self.machine.batch}
        return [running.seq for running in self._requests.values() if running not in batch]

    @property
    def num_running(self) -> int:
        return len(self.machine.batch)

    @property
    def num_waiting(self) -> int:
        return len(self._requests) + len(self._ended_early) - self.num_running

    def pending_shape(self) -> StepShape:
        """See ``SchedulerGauges``: nothing is cached."""
        shape = StepShape()
        for running in self._requests.values():
            shape.add(running.seq.num_computed, len(running.seq.token_ids) - running.seq.num_computed, 1)
        return shape

    @property
    def num_pending_tokens(self) -> int:
        """As ``distributed.pools`` counts them: prompt tokens of unfinished prompts, and 1 for each unfinished request."""
        return sum(1 + (running.seq.num_prompt_tokens if running.prompt.num_left else 0) for running in self._requests.values())

    @property
    def num_blocks(self) -> int:
        return self.limits.num_blocks

    @property
    def num_used_blocks(self) -> int:
        return self.machine.num_used_tokens

    @property
    def num_free_blocks(self) -> int:
        return self.num_blocks - self.num_used_blocks

    @property
    def num_cached_blocks(self) -> int:
        return 0

    # --- steps --------------------------------------------------------------------------------------------------------------------------

    def plan(self, now: float = 0.0, drafts: Guesses = NO_GUESSES) -> StepPlan | None:
        """The next iteration, or None when there is nothing to do or no memory to do it in. Drafts are ignored."""
        if self._in_flight is not None:
            raise StepProtocolError(f"step {self._in_flight.plan.step_index} is still in flight; apply its result before planning another")
        if self._is_due:
            self._build(now)
        if self.machine.is_idle:
            return None
        plan = StepPlan(self._num_plans)
        draft = Draft(plan, 0, sequences=self.running_sequences)
        plan.slices = [self._slice(plan, seq) for seq in draft.sequences]
        plan.slot_closes = self._slots.drain_closes()
        self._num_plans += 1
        self._in_flight = draft
        return plan

    def _build(self, now: float) -> None:
        self._left, self._is_due = self.machine.build(), False
        for task in self.machine.left_out:
            task.owner.seq.status = SequenceStatus.WAITING
            self.stats.num_preemptions += 1
        for task in self.machine.joined:
            task.owner.seq.status = SequenceStatus.RUNNING
            if task.is_prompt:
                self.stats.num_started += 1
                self.stats.queue_s += now - task.arrival_s

    def _slice(self, plan: StepPlan, seq: Sequence) -> SequenceSlice:
        if seq.slot < 0:
            self._slots.take(seq)
            plan.slot_opens.append(SlotOpen.of(seq.slot, seq.request, 0, []))
        start = seq.num_computed
        seq.num_scheduled = len(seq.token_ids) - start
        return SequenceSlice(seq.seq_id, start, seq.token_ids[start:], array("i"), 1, [seq.slot], seq.request.params.logprobs)

    def apply(self, result: StepResult, text_stops: TextStops = _NO_TEXT_STOPS) -> list[TokenEvent]:
        """Take over what the step in flight drew; one event per sequence. StepProtocolError, and nothing changes, when ``result`` or
        ``text_stops`` do not belong to it."""
        draft = self._in_flight
        if draft is None:
            raise StepProtocolError("there is no step in flight")
        check_result(draft, result, text_stops)
        self._in_flight, ended_early, self._ended_early = None, self._ended_early, []
        self.stats.num_steps += 1
        self._count_iterations(1)
        events = list[TokenEvent]()
        for seq, outcome in zip(draft.sequences, result.slices, strict=True):
            self.stats.num_computed_tokens += seq.num_scheduled
            seq.num_computed, seq.num_scheduled = seq.num_computed + seq.num_scheduled, 0
            if seq.status is SequenceStatus.FINISHED:
                continue
            running = self._requests[seq.request.request_id]
            token_ids = outcome.token_ids[:]
            end = running.rule.append_tokens(seq, token_ids, text_stops.get((seq.request.request_id, 0)))
            event = TokenEvent(seq.request.request_id, 0, token_ids, logprobs=outcome.logprobs)
            self.stats.num_output_tokens += len(token_ids)
            if outcome.error is not None:
                event.finish_reason, event.error, event.error_code = FinishReason.ERROR, outcome.error, outcome.error_code
            elif end is not None:
                event.finish_reason, event.stop_reason = end
            if event.finish_reason is not None:
                self._finish(running, event.finish_reason)
            events.append(event)
        for running in ended_early:
            self._release(running)
        return events

    def _count_iterations(self, num_iterations: int) -> None:
        ended = self.machine.finish(num_iterations)
        for task in ended:
            if task.owner.seq.status is SequenceStatus.RUNNING:
                task.owner.seq.status = SequenceStatus.WAITING  # for its decoding to start, if it was a prompt
        self._left -= num_iterations
        self._is_due |= bool(ended) or self._left <= 0

    def _finish(self, running: _Running, reason: FinishReason) -> None:
        running.seq.status, running.seq.finish_reason = SequenceStatus.FINISHED, reason
        del self._requests[running.seq.request.request_id]
        self.stats.num_finished += reason is not FinishReason.ERROR
        self.stats.num_failed += reason is FinishReason.ERROR
        self._release(running)

    def _release(self, running: _Running) -> None:
        """It has ended with an iteration: by its length, which the machine knew, or before, which it did not."""
        last = running.prompt if running.decoding is None else running.decoding
        if last.num_left:
            self._leave(running)
            return
        if running.decoding is None:
            self.machine.sent(last.num_reserved)
        self._slots.give_back(running.seq)

    # --- repeated steps -----------------------------------------------------------------------------------------------------------------

    def num_repeats(self) -> int:
        """How many of the coming steps only decode all running sequences, finish none and let nobody in."""
        if self._in_flight is not None or self._is_due or self._slots.has_closes or self.machine.num_decoding != len(self._requests):
            return 0
        if any(running.rule.eos_token_ids or running.rule.stop_token_ids for running in self._requests.values()):
            return 0
        return self._left - 1

    def repeat(self, num_steps: int, token_ids: Seq[int]) -> list[tuple[int, int]]:
        """Take ``num_steps`` steps, at most ``num_repeats``: each sequence draws its one of ``token_ids`` in each. See ``repeats``."""
        if not 1 <= num_steps <= self._left - 1:
            raise ValueError(f"num_steps: {num_steps} is not allowed; from 1 to {self._left - 1}, or a sequence ends")
        for seq, token_id in zip(self.running_sequences, token_ids, strict=True):
            seq.token_ids += [token_id] * num_steps
            seq.num_computed += num_steps
        num_tokens = num_steps * self.machine.num_decoding
        self._num_plans += num_steps
        self.stats.num_steps += num_steps
        self.stats.num_computed_tokens += num_tokens
        self.stats.num_output_tokens += num_tokens
        self._count_iterations(num_steps)
        return [(1, self.machine.num_used_tokens)]

    def check_invariants(self) -> None:
        """AssertionError unless requests and machine agree. For tests: slow."""
        self.machine.check_invariants()
        assert all(running.seq.num_computed < len(running.seq.token_ids) for running in self._requests.values())
        assert self._slots.num_open == sum(running.seq.slot >= 0 for running in (*self._requests.values(), *self._ended_early))
