"""Random lives of a scheduler on toy sizes: after every move the books balance, and in the end every text equals its plain run."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo.core.request import BeamParams, FinishReason, ParameterError
from tests.core.harness import Harness, Oracle, bound_for, make_request

tokens = st.integers(0, 2)


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(3, 10),
        block_size=st.sampled_from([1, 3, 4, 4]),
        max_model_len=st.integers(12, 40),
        max_num_seqs=st.integers(1, 6),
        budget=st.integers(6, 20),
        chunked=st.sampled_from([True, True, False]),
        caching=st.sampled_from([True, True, False]),
        max_itl_ms=st.sampled_from([None, 0.5, 6.5]),
        guessing=st.sampled_from([None, None, (4, 1.0), (5, 0.8), (3, 0.3)]),
        seed=st.integers(0, 3),
        num_host_blocks=st.sampled_from([0, 4, 12, 40]),
        lookahead=st.sampled_from([1, 1, 8]),
        policy=st.sampled_from(["fcfs", "fcfs", "static", "priority", "fair", "srf", "prefill_first"]),
        granularity=st.sampled_from(["block", "token", "token"]),
    )
    def start(self, max_itl_ms: float | None, guessing: tuple[int, float] | None, seed: int, **sizes: Any) -> None:
        sizes["granularity"] = sizes["granularity"] if sizes["caching"] else "block"
        self.set_up(Harness(max_itl_ms=bound_for(max_itl_ms, sizes["chunked"], sizes["policy"]), **sizes), guessing, seed)

    def set_up(self, harness: Harness, guessing: tuple[int, float] | None, seed: int = 0) -> None:
        """``guessing``: drafts, and how often they are right; see ``Oracle``."""
        self.harness = harness
        if guessing is not None:
            harness.guess = Oracle(harness, *guessing, seed)
        self.num_requests = 0

    @rule(
        data=st.data(),
        prompt=st.lists(tokens, min_size=1, max_size=30),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        max_tokens=st.sampled_from([None, None, 0, 1, 5, 9, 20]),
        copies=st.sampled_from([1, 1, 1, 3]),
        ignore_eos=st.booleans(),
        min_tokens=st.sampled_from([0, 0, 3]),
        logprobs=st.sampled_from([None, 2]),
        prompt_logprobs=st.sampled_from([None, None, None, 1]),
        stop_token_ids=st.sampled_from([(), (), (1,)]),
        stop=st.sampled_from([(), (), ("02",), ("11", "0")]),
        salt=st.sampled_from([None, None, "", "x"]),
        seed=st.integers(0, 2),
        priority=st.integers(-2, 2),
        user=st.sampled_from([None, "a", "b"]),
    )
    def add(self, data: st.DataObject, prompt: list[int], copies: int, **rest: Any) -> None:
        if self.num_requests and data.draw(st.booleans(), label="repeat an earlier prompt"):
            earlier = data.draw(st.sampled_from(sorted(self.harness.requests)), label="which")
            made = self.harness.requests[earlier].prompt_token_ids + self.harness.texts[earlier, 0].token_ids
            kept = data.draw(st.integers(0, len(made)), label="how much of it and of its answer")
            prompt = made[:kept] + prompt[: len(prompt) // 4 + (kept == 0)]
        for _ in range(copies):
            self.add_one(prompt, **rest)

    @rule(
        prompt=st.lists(tokens, min_size=1, max_size=12),
        beam=st.builds(BeamParams, st.integers(1, 4), st.sampled_from([0.0, 1.0]), st.sampled_from([True, False, "never"])),
        max_tokens=st.sampled_from([None, 1, 5, 12]),
        min_tokens=st.sampled_from([0, 1]),
        ignore_eos=st.booleans(),
        priority=st.integers(-2, 2),
        user=st.sampled_from([None, "a", "b"]),
    )
    def add_beams(self, beam: BeamParams, **rest: Any) -> None:
        self.add_one(beam=beam, n=beam.width, **rest)

    def add_one(self, prompt: list[int], max_tokens: int | None, min_tokens: int, **rest: Any) -> None:
        min_tokens = min(min_tokens, max_tokens or 0)
        request = make_request(f"r{self.num_requests}", prompt, max_tokens=max_tokens, min_tokens=min_tokens, **rest)
        n, name = request.params.n, "n" if request.params.beam is None else "beam_width"
        limits, max_num_seqs = self.harness.scheduler.limits, self.harness.scheduler._state.config.max_num_seqs
        room = limits.max_total_tokens if max_tokens != 0 else min(limits.max_model_len, limits.num_pool_tokens) + 1
        if len(prompt) >= room or n > max_num_seqs:
            try:
                self.harness.add(request)
            except ParameterError as error:
                assert error.param == (name if n > max_num_seqs and len(prompt) < room else "prompt")
            else:
                raise AssertionError("a request that never fits was accepted")
        else:
            self.harness.add(request)
            self.num_requests += 1

    @precondition(lambda self: self.harness.pending is None)
    @rule(steps=st.integers(1, 6))
    def steps(self, steps: int) -> None:
        for _ in range(steps):
            had_work = self.harness.scheduler.has_work
            assert (self.harness.step() is not None) == had_work

    @precondition(lambda self: self.harness.pending is None)
    @rule()
    def begin(self) -> None:
        self.harness.begin()

    @precondition(lambda self: self.harness.pending is not None)
    @rule()
    def finish(self) -> None:
        self.harness.finish()

    @precondition(lambda self: self.num_requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.harness.requests)))
        open_choices = [c for (r, c), text in self.harness.texts.items() if r == request_id and text.finish_reason is None]
        events = self.harness.abort(request_id)
        assert sorted(event.choice for event in events) == open_choices
        assert all(event.finish_reason is FinishReason.ABORT for event in events)

    @precondition(lambda self: self.num_requests % 5 == 4 and self.harness.scheduler.has_work)
    @rule()
    def fail_all(self) -> None:
        self.fail()

    @precondition(lambda self: self.num_requests % 3 == 2 and self.harness.pending is None)
    @rule(num_slots=st.integers(0, 8))
    def step_fails(self, num_slots: int) -> None:
        """On its way through the slots that it closes and opens, or after them."""
        plan = self.harness.scheduler.plan()
        if plan is not None:
            self.harness.backend.fail(plan, num_slots)
            self.fail()

    def fail(self) -> None:
        events = self.harness.scheduler.fail_all("the device is gone")
        self.harness.pending = None
        self.harness.backend.failed = True
        self.harness._receive(events)
        assert all(event.finish_reason is FinishReason.ERROR and event.error == "the device is gone" for event in events)
        self.harness.check_idle()

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "harness"):
            self.harness.check()

    def teardown(self) -> None:
        if not hasattr(self, "harness") or (self.harness.pending is None and self.harness.scheduler.in_flight_sequences):
            return  # a move failed half-way: its own error is the one to see
        if self.harness.pending is not None:
            self.harness.finish()
        self.harness.run(max_steps=2000)
        self.harness.check_idle()
        self.harness.check_texts()
        assert all(text.finish_reason is not None for text in self.harness.texts.values())


SchedulerMachine.TestCase.settings = settings(
    max_examples=120, stateful_step_count=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
TestScheduler = SchedulerMachine.TestCase
