"""Random lives of a scheduler whose window layers give pages back: every page that a row reads holds what was written for it."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from tests.core.harness import Harness, Oracle
from tests.core.test_scheduler_machine import SchedulerMachine


class GroupsMachine(SchedulerMachine):
    @initialize(
        pages=st.sampled_from([(1, 2, 5), (1, 5, 9), (2, 1, 3), (1, 1, 1), (3, 2, 17), (0, 2, 6)]),
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
        policy=st.sampled_from(["fcfs", "fcfs", "static", "priority", "fair", "srf"]),
        granularity=st.sampled_from(["block", "token", "token"]),
    )
    def start(self, max_itl_ms, guessing, seed, **sizes) -> None:  # type: ignore[no-untyped-def]
        sizes["granularity"] = sizes["granularity"] if sizes["caching"] else "block"
        self.harness = Harness(max_itl_ms=max_itl_ms if sizes["chunked"] else None, **sizes)
        if guessing is not None:
            self.harness.guess = Oracle(self.harness, *guessing, seed)
        self.num_requests = 0


GroupsMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
TestGroups = GroupsMachine.TestCase
