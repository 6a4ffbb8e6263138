"""Random lives of schedulers whose window layers give pages back: every page that a row reads holds what was written for it."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from tests.core.harness import Harness, bound_for
from tests.core.test_kv_tiers_machine import TierMachine
from tests.core.test_scheduler_machine import SchedulerMachine
from tests.core.tier_harness import TierHarness, ToyDisk

PAGES = st.sampled_from([(1, 2, 5), (1, 5, 9), (2, 1, 3), (1, 1, 1), (3, 2, 17), (0, 2, 6)])


class GroupsMachine(SchedulerMachine):
    @initialize(
        pages=PAGES,
        num_blocks=st.integers(3, 10),
        block_size=st.sampled_from([1, 3, 4, 4]),
        max_model_len=st.integers(24, 64),
        max_num_seqs=st.integers(1, 6),
        budget=st.integers(6, 20),
        chunked=st.sampled_from([True, True, True, False]),
        caching=st.sampled_from([True, True, True, False]),
        max_itl_ms=st.sampled_from([None, None, 6.5]),
        guessing=st.sampled_from([None, None, (4, 1.0), (5, 0.8)]),
        seed=st.integers(0, 3),
        num_host_blocks=st.sampled_from([0, 12, 40]),
        lookahead=st.sampled_from([1, 1, 8]),
        policy=st.sampled_from(["fcfs", "fcfs", "static", "priority", "fair", "srf", "prefill_first"]),
        granularity=st.sampled_from(["block", "token", "token"]),
    )
    def start(self, max_itl_ms: float | None, guessing: tuple[int, float] | None, seed: int, **sizes: Any) -> None:
        sizes["granularity"] = sizes["granularity"] if sizes["caching"] else "block"
        self.set_up(Harness(max_itl_ms=bound_for(max_itl_ms, sizes["chunked"], sizes["policy"]), **sizes), guessing, seed)


class GroupTiersMachine(TierMachine):
    @initialize(
        pages=PAGES,
        num_blocks=st.integers(4, 8),
        block_size=st.sampled_from([3, 4]),
        max_model_len=st.integers(24, 64),
        max_num_seqs=st.integers(1, 6),
        budget=st.integers(6, 20),
        chunked=st.sampled_from([True, True, False]),
        max_itl_ms=st.sampled_from([None, None, 6.5]),
        num_tier_blocks=st.sampled_from([3, 4, 9, 20]),
        disk=st.builds(ToyDisk, st.integers(1, 4), st.sampled_from([0.0, 0.0, 0.2]), st.integers(0, 9)) | st.none(),
        min_tokens=st.sampled_from([1, 1, 1, 6]),
        num_host_blocks=st.sampled_from([0, 0, 12]),
        lookahead=st.sampled_from([1, 8]),
        policy=st.sampled_from(["fcfs", "fcfs", "priority", "srf"]),
        granularity=st.sampled_from(["block", "token"]),
    )
    def start(self, max_itl_ms: float | None, **sizes: Any) -> None:  # type: ignore[override]
        self.set_up(TierHarness(max_itl_ms=bound_for(max_itl_ms, sizes["chunked"], sizes["policy"]), **sizes), None)


for machine, max_examples in ((GroupsMachine, 100), (GroupTiersMachine, 60)):
    machine.TestCase.settings = settings(
        max_examples=max_examples, stateful_step_count=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
TestGroups = GroupsMachine.TestCase
TestGroupTiers = GroupTiersMachine.TestCase
