"""Random lives of a scheduler whose evicted blocks go to host memory and disk: the moves and checks of the machine without tiers, on top
of which reads come late, fail, and are given up."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from tests.core.harness import bound_for
from tests.core.test_scheduler_machine import SchedulerMachine
from tests.core.tier_harness import TierHarness, ToyDisk


class TierMachine(SchedulerMachine):
    harness: TierHarness

    @initialize(
        num_blocks=st.integers(4, 8),
        block_size=st.sampled_from([3, 4]),
        max_model_len=st.integers(20, 40),
        max_num_seqs=st.integers(1, 6),
        budget=st.integers(6, 20),
        chunked=st.sampled_from([True, True, False]),
        max_itl_ms=st.sampled_from([None, None, 0.5, 6.5]),
        num_tier_blocks=st.sampled_from([2, 3, 4, 9]),
        disk=st.builds(ToyDisk, st.integers(1, 4), st.sampled_from([0.0, 0.0, 0.2]), st.integers(0, 9)) | st.none(),
        min_tokens=st.sampled_from([1, 1, 1, 6]),
        guessing=st.sampled_from([None, None, (4, 1.0), (3, 0.3)]),
        seed=st.integers(0, 3),
        num_host_blocks=st.sampled_from([0, 0, 12]),
        lookahead=st.sampled_from([1, 8]),
        policy=st.sampled_from(["fcfs", "fcfs", "static", "priority", "fair", "srf", "prefill_first"]),
        granularity=st.sampled_from(["block", "token"]),
        rounds=st.booleans(),
    )
    def start(self, max_itl_ms: float | None, guessing: tuple[int, float] | None, seed: int, **sizes: Any) -> None:
        self.set_up(TierHarness(max_itl_ms=bound_for(max_itl_ms, sizes["chunked"], sizes["policy"]), **sizes), guessing, seed)

    @precondition(lambda self: self.num_requests and self.harness.pending is None)
    @rule(num=st.integers(1, 4), more=st.lists(st.integers(0, 2), max_size=4), apart=st.booleans())
    def conversations_go_on(self, num: int, more: list[int], apart: bool) -> None:
        """One after the other, each of which takes the blocks of the last, or all at once."""
        for earlier in list(self.harness.requests.values())[:num]:
            rest = {"n": 1, "max_tokens": 2, "min_tokens": 0, "ignore_eos": True, "salt": earlier.cache_salt}
            self.add_one(earlier.prompt_token_ids + more, **rest)
            if apart:
                self.harness.run(max_steps=2000)

    @precondition(lambda self: self.harness.pending is None)
    @rule()
    def run_out(self) -> None:
        self.harness.run(max_steps=2000)

    @precondition(lambda self: self.harness.pending is None)
    @rule()
    def begin_once(self) -> None:
        """Sequences may be left that wait for the disk."""
        self.harness.begin_once()


TierMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
TestTiers = TierMachine.TestCase
