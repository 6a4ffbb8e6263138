"""The pool of pages against a twin that keeps every order as a plain list, after every one of many random moves."""

from __future__ import annotations

import random

import pytest

from octavo.core.kv_pages import PageNeeds
from octavo.core.page_pool import PagePool

FULL, WINDOW, NUM_BLOCKS = 2, 5, 6


class Twin:
    """Which blocks are held, by how many, who has passed them; what can be evicted, least recently used first."""

    def __init__(self) -> None:
        self.pool = PagePool(NUM_BLOCKS, PageNeeds(4, FULL, WINDOW, 8, 16))
        self.holders: dict[int, list[bool]] = {}  # block -> of each holder, whether it has passed
        self.whole: dict[int, bool] = {}
        self.order: list[tuple[str, int]] = []

    @property
    def num_free_pages(self) -> int:
        live = [*self.holders, *(block for kind, block in self.order if kind == "block")]
        return NUM_BLOCKS * (FULL + WINDOW) - sum(FULL + WINDOW * self.whole[block] for block in live)

    def allocate(self, windowed: bool) -> None:
        need, gone = FULL + WINDOW * windowed, []
        loose = {block for kind, block in self.order if kind == "window"}
        evictable = sum(FULL + WINDOW * (self.whole[b] and b not in loose) for kind, b in self.order if kind == "block")
        evictable += WINDOW * len(loose)
        assert self.pool.num_available_pages == self.num_free_pages + evictable
        if need > self.num_free_pages + evictable:
            with pytest.raises(IndexError):
                self.pool.allocate_pages(windowed)
            return
        while self.num_free_pages < need:
            kind, block = self.order.pop(0)
            if kind == "block":
                gone.append((block, self.whole[block]))
                self.order = [entry for entry in self.order if entry[1] != block]
            self.whole[block] = False
        block, evicted = self.pool.allocate_pages(windowed)
        assert [(lost.block, -1 not in lost.pages) for lost in evicted] == gone
        self.holders[block], self.whole[block] = [False], windowed

    def settle(self, block: int, keep: bool) -> None:
        """``block`` is held, and perhaps by nobody any more who reads its window part."""
        if all(self.holders[block]) and self.whole[block] and ("window", block) not in self.order:
            if keep:
                self.order.append(("window", block))
            else:
                self.whole[block] = False

    def pass_block(self, block: int, keep: bool) -> None:
        if False in self.holders[block]:
            self.holders[block].remove(False)
            self.holders[block].append(True)
            self.pool.pass_block(block, keep)
            self.settle(block, keep)

    def release(self, block: int, keep: bool) -> None:
        if self.holders[block].pop(0):
            self.pool.unpass(block)
        self.pool.release(block, keep)
        if self.holders[block]:
            return self.settle(block, keep)
        del self.holders[block]
        if keep:
            self.order.append(("block", block))
        else:
            self.order = [entry for entry in self.order if entry[1] != block]

    def acquire(self, block: int, passed: bool) -> None:
        if passed and block in self.holders:
            self.pool.acquire_passed(block)
            self.holders[block].append(True)
            return
        self.pool.acquire(block)
        self.order = [entry for entry in self.order if entry[1] != block]
        self.holders.setdefault(block, []).append(False)

    def complete(self, block: int, other: int) -> None:
        """The window part of ``block`` goes over to ``other``, or one is allocated."""
        if self.whole[other]:
            return
        if self.whole[block] and False in self.holders[block] and other in self.holders and False in self.holders[other]:
            self.pool.move_window(block, other)
            self.whole[block], self.whole[other] = False, True
        elif other in self.holders and False in self.holders[other] and self.num_free_pages >= WINDOW:
            assert self.pool.allocate_window(other) == []
            self.whole[other] = True

    def check(self) -> None:
        pool = self.pool
        pool.check_invariants()
        assert [("window", ~entry) if entry < 0 else ("block", entry) for entry in pool._order] == self.order
        assert pool.num_free_pages == self.num_free_pages
        for block, passes in self.holders.items():
            assert pool.ref_counts[block] == len(passes) and pool.num_passed[block] == sum(passes)
            assert pool.is_whole(block) == self.whole[block] == (-1 not in pool.pages_of(block))
        assert pool.num_used + pool.num_cached + pool.num_free == NUM_BLOCKS


@pytest.mark.parametrize("seed", range(10))
def test_every_move_is_that_of_the_twin(seed: int) -> None:
    rng, twin = random.Random(seed), Twin()
    for _ in range(400):
        held, cached = sorted(twin.holders), twin.pool.eviction_order()
        move = rng.choice(["allocate", "allocate", "pass", "pass", "release", "acquire", "complete", "touch", "discard"])
        if move == "allocate":
            twin.allocate(rng.random() < 0.7)
        elif move == "pass" and held:
            twin.pass_block(rng.choice(held), rng.random() < 0.8)
        elif move == "release" and held:
            twin.release(rng.choice(held), rng.random() < 0.8)
        elif move == "acquire" and (held or cached):
            twin.acquire(rng.choice([*held, *cached]), rng.random() < 0.3)
        elif move == "complete" and held:
            twin.complete(rng.choice(held), rng.choice(held))
        elif move == "touch" and cached:
            block = rng.choice(cached)
            twin.pool.touch(block)
            twin.order.remove(("block", block))
            twin.order.append(("block", block))
        elif move == "discard" and cached:
            block = rng.choice(cached)
            twin.pool.discard(block)
            twin.order = [entry for entry in twin.order if entry[1] != block]
        twin.check()


def test_blocks_without_their_window_part_are_many() -> None:
    pool = PagePool(4, PageNeeds(4, 1, 5, 8, 16))
    assert pool.num_available == 4 and pool.num_ids == 24
    for _ in range(24):
        pool.allocate_pages(windowed=False)
    assert pool.num_available == 0 and pool.num_used == 4
    with pytest.raises(IndexError):
        pool.allocate_pages(windowed=False)


def test_where_nothing_is_left_of_a_block_its_id_is_what_runs_out() -> None:
    pool = PagePool(2, PageNeeds(4, 0, 3, 8, 16))
    blocks = [pool.allocate_pages(windowed=False)[0] for _ in range(pool.num_ids - 1)]
    assert pool.num_available == 1
    for block in blocks:
        pool.release(block, keep=True)
    block, evicted = pool.allocate_pages()
    assert not evicted  # one id was free
    block, evicted = pool.allocate_pages()
    assert [lost.block for lost in evicted] == blocks[:1] and pool.num_available == 0
    pool.check_invariants()
