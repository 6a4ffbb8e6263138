"""The block pool against a model that keeps its blocks in plain sets and lists."""

from __future__ import annotations

import random

import pytest

from octavo.core.block_pool import BlockPool


def test_free_blocks_go_before_cached_ones_and_cached_ones_in_order_of_release() -> None:
    pool = BlockPool(4)
    blocks = [pool.allocate()[0] for _ in range(4)]
    with pytest.raises(IndexError):
        pool.allocate()
    for block, keep in zip(blocks, (True, False, True, True), strict=True):
        pool.release(block, keep)
    assert pool.eviction_order() == [blocks[0], blocks[2], blocks[3]] and (pool.num_free, pool.num_cached, pool.num_used) == (1, 3, 0)
    pool.acquire(blocks[0])
    pool.release(blocks[0], keep=True)  # used again: now the last to go
    assert [pool.allocate() for _ in range(4)] == [(blocks[1], False), (blocks[2], True), (blocks[3], True), (blocks[0], True)]


def test_wrong_moves_are_errors() -> None:
    pool = BlockPool(2)
    with pytest.raises(KeyError):
        pool.acquire(0)  # a free block holds nothing worth sharing
    block, _ = pool.allocate()
    pool.release(block, keep=False)
    with pytest.raises(AssertionError, match="more often than referenced"):
        pool.release(block, keep=False)
    with pytest.raises(ValueError, match="num_blocks: 0"):
        BlockPool(0)


@pytest.mark.parametrize("seed", range(20))
def test_random_moves_equal_a_plain_model(seed: int) -> None:
    rng, pool = random.Random(seed), BlockPool(6)
    holders: dict[int, int] = {}
    cached: list[int] = []
    for _ in range(300):
        move = rng.random()
        if move < 0.4 and len(holders) < 6:
            block, evicted = pool.allocate()
            assert evicted == (len(holders) + len(cached) == 6)
            if evicted:
                assert block == cached.pop(0)
            assert block not in holders and block not in cached
            holders[block] = 1
        elif move < 0.55 and (holders or cached):
            block = rng.choice([*holders, *cached])
            pool.acquire(block)
            holders[block] = holders.get(block, 0) + 1
            cached = [b for b in cached if b != block]
        elif holders:
            block, keep = rng.choice(list(holders)), rng.random() < 0.6
            pool.release(block, keep)
            holders[block] -= 1
            if not holders[block]:
                del holders[block]
                cached += [block] if keep else []
        pool.check_invariants()
        assert pool.eviction_order() == cached
        assert (pool.num_used, pool.num_cached, pool.num_available) == (len(holders), len(cached), 6 - len(holders))
        assert {b: pool.ref_counts[b] for b in holders} == holders
