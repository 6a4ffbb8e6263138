"""Ids of host blocks: free or held, never both, never lost."""

from __future__ import annotations

import random

import pytest

from octavo.core.host_pool import HostPool


def test_a_random_life_keeps_the_books() -> None:
    rng, pool = random.Random(1), HostPool(6)
    held: list[int] = []
    for _ in range(500):
        if held and rng.random() < 0.4:
            pool.release(held.pop(rng.randrange(len(held))))
        elif held and rng.random() < 0.3:
            held.append(rng.choice(held))
            pool.acquire(held[-1])
        elif pool.num_free:
            block = pool.allocate()
            assert block not in held
            held.append(block)
        pool.check_invariants()
        assert pool.num_used == len(set(held)) == 6 - pool.num_free


def test_misuse_is_an_error() -> None:
    pool = HostPool(1)
    block = pool.allocate()
    with pytest.raises(IndexError):
        pool.allocate()
    pool.release(block)
    for move in (pool.acquire, pool.release):
        with pytest.raises(AssertionError, match=f"host block {block} is"):
            move(block)
    with pytest.raises(ValueError, match="num_blocks: -1 is not allowed"):
        HostPool(-1)
