"""A guest in the pool: it takes pages, writes over them, and gives them up when asked, while a scheduler lives its life on the rest."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from octavo.core.kv_pages import guest_layout
from octavo.core.lodging import Lodging
from tests.core.harness import Harness, make_request
from tests.core.page_memory import PageMemoryBackend
from tests.core.test_scheduler_machine import SchedulerMachine

GARBAGE = -99


class Guest:
    """Holds blocks in a list, and gives up the first of it."""

    def __init__(self, harness: Harness, num_columns: int, per_page: int) -> None:
        self.harness = harness
        self.num_columns, self.per_page = num_columns, per_page
        self.held: list[int] = []
        self.num_given_up = 0
        kv = harness.scheduler.kv
        self.lodging = Lodging(kv, num_columns, per_page, kv.num_pages, self.give_up)

    def give_up(self) -> bool:
        if not self.held:
            return False
        self.num_given_up += 1
        self.lodging.give([self.held.pop(0)])
        return True

    def take(self, num_blocks: int) -> bool:
        blocks = self.lodging.take(num_blocks)
        if blocks is not None:
            assert not set(blocks) & set(self.held) and len(set(blocks)) == num_blocks
            self.held += blocks
        self.check()
        return blocks is not None

    def give(self, index: int) -> None:
        self.lodging.give([self.held.pop(index)])
        self.check()

    def check(self) -> None:
        """Whatever is lent is written over: nobody else may read it."""
        self.lodging.check_invariants()
        self.harness.check()
        pool, backend = self.harness.scheduler.kv.pool, self.harness.backend
        memory = backend.pages if isinstance(backend, PageMemoryBackend) else backend.memory
        for page in pool.lent:
            memory[page][:] = [GARBAGE] * backend.block_size
        pages = {block // self.per_page for block in self.held}
        if self.lodging.pages is not None:
            pages = {page for b in self.held for page in self.lodging.pages[b * self.num_columns : (b + 1) * self.num_columns]}
        assert pages == pool.lent, "the guest keeps pages in which it has nothing, or has something in others"


class GuestMachine(SchedulerMachine):
    @initialize(
        pages=st.sampled_from([None, (1, 2, 5), (2, 1, 3), (0, 2, 6)]),
        shape=st.sampled_from([(1, 1), (1, 3), (2, 1)]),
        num_blocks=st.integers(3, 10),
        block_size=st.sampled_from([3, 4]),
        max_model_len=st.integers(24, 64),
        max_num_seqs=st.integers(1, 6),
        budget=st.integers(6, 20),
        caching=st.sampled_from([True, True, False]),
        guessing=st.sampled_from([None, (4, 1.0)]),
        num_host_blocks=st.sampled_from([0, 12]),
        policy=st.sampled_from(["fcfs", "fcfs", "srf"]),
        granularity=st.sampled_from(["block", "token"]),
    )
    def start(self, shape: tuple[int, int], guessing: tuple[int, float] | None, **sizes: Any) -> None:  # type: ignore[override]
        sizes["granularity"] = sizes["granularity"] if sizes["caching"] else "block"
        self.set_up(Harness(**sizes), guessing)
        self.guest = Guest(self.harness, *shape)

    @precondition(lambda self: self.harness.pending is None)
    @rule(num_blocks=st.integers(1, 5))
    def guest_takes(self, num_blocks: int) -> None:
        self.guest.take(num_blocks)

    @precondition(lambda self: self.harness.pending is None and self.guest.held)
    @rule(data=st.data())
    def guest_gives(self, data: st.DataObject) -> None:
        self.guest.give(data.draw(st.integers(0, len(self.guest.held) - 1)))


GuestMachine.TestCase.settings = settings(
    max_examples=80, stateful_step_count=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
TestGuest = GuestMachine.TestCase


@pytest.mark.parametrize("pages", [None, (1, 5, 8)])
def test_nobody_is_preempted_or_kept_waiting_for_what_is_lent(pages: tuple[int, int, int] | None) -> None:
    def run(lends: bool) -> tuple[int, int, int]:
        harness = Harness(num_blocks=32, max_model_len=300, budget=16, pages=pages, caching=False)
        guest = Guest(harness, 1, 2)
        rng = random.Random(1)
        for i in range(8):
            harness.add(make_request(f"r{i}", [rng.randrange(3) for _ in range(30)], max_tokens=20, ignore_eos=True))
        while harness.scheduler.has_work:
            while lends and guest.take(1):
                pass
            harness.step()
        harness.check_texts()
        stats = harness.scheduler.stats
        return stats.num_steps, stats.num_preemptions, guest.num_given_up

    alone, with_guest = run(False), run(True)
    assert with_guest[:2] == alone[:2] and with_guest[2] > 0 and alone[2] == 0


def test_a_guest_takes_what_nobody_uses_but_for_a_reserve() -> None:
    harness = Harness(num_blocks=32)
    guest = Guest(harness, 1, 1)
    while guest.take(1):
        pass
    assert len(guest.held) == 30 and harness.scheduler.num_used_blocks == 0  # a sixteenth is left
    harness.run_all([make_request("a", [1] * 20, max_tokens=20, ignore_eos=True)])
    assert len(guest.held) < 30


def test_how_blocks_of_a_guest_lie_in_pages() -> None:
    small = guest_layout([64 * 5] * 3, 64 * 60)  # 15 lines in pages of 60
    assert small is not None and (small.per_page, small.pages.page_bytes, small.pages.num_pages) == (4, 64 * 15, 1)
    odd = guest_layout([64 * 7] * 2, 64 * 60)  # 14 lines: 15 is the smallest part that holds it
    assert odd is not None and (odd.per_page, odd.pages.page_bytes) == (4, 64 * 15)
    equal = guest_layout([64 * 30] * 2, 64 * 60)
    assert equal is not None and (equal.per_page, equal.pages.num_pages) == (1, 1)
    large = guest_layout([64 * 30] * 6, 64 * 60)
    assert large is not None and (large.per_page, large.pages.num_pages) == (1, 3)
    assert guest_layout([64 * 70], 64 * 60) is None  # a layer is not cut
    assert guest_layout([64 * 40] * 4, 64 * 60) is None  # a third would be wasted
