"""The buddy allocator against a twin that keeps nothing but which units are taken."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.buddy import BuddyAllocator, Chunk, chunk_size


@dataclass
class Twin:
    """Free chunks are found anew each time: all aligned powers of two that are free as a whole and in no larger one that is."""

    num_units: int
    taken: list[Chunk] = field(default_factory=list)

    def is_free(self, chunk: Chunk) -> bool:
        units = set(range(*self.ends(chunk)))
        return max(units) < self.num_units and not any(units & set(range(*self.ends(other))) for other in self.taken)

    @staticmethod
    def ends(chunk: Chunk) -> tuple[int, int]:
        return chunk.first, chunk.first + chunk.num_units

    def free_chunks(self) -> list[Chunk]:
        sizes = [1 << k for k in range(self.num_units.bit_length())]
        free = [Chunk(first, size) for size in sizes for first in range(0, self.num_units, size) if self.is_free(Chunk(first, size))]
        return sorted(chunk for chunk in free if not any(self.holds(other, chunk) for other in free))

    @staticmethod
    def holds(outer: Chunk, inner: Chunk) -> bool:
        return outer.num_units > inner.num_units and outer.first <= inner.first < outer.first + outer.num_units

    def allocate(self, num_units: int) -> Chunk | None:
        size = 1
        while size < num_units:
            size *= 2
        fits = [chunk for chunk in self.free_chunks() if chunk.num_units >= size]
        if not fits:
            return None
        smallest = min(fits, key=lambda chunk: (chunk.num_units, chunk.first))
        self.taken.append(Chunk(smallest.first, size))
        return self.taken[-1]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(num_units=st.integers(1, 45), moves=st.lists(st.tuples(st.booleans(), st.integers(1, 20), st.integers(0, 30)), max_size=30))
def test_it_does_what_the_twin_does(num_units: int, moves: list[tuple[bool, int, int]]) -> None:
    buddy, twin = BuddyAllocator(num_units), Twin(num_units)
    for allocates, size, which in moves:
        if allocates:
            num_available = buddy.num_available(size)
            made = buddy.allocate(size)
            assert made == twin.allocate(size) and (made is not None) == (num_available > 0)
        elif twin.taken:
            buddy.release(twin.taken.pop(which % len(twin.taken)))
        buddy.check_invariants()
        assert buddy.free_chunks() == twin.free_chunks() and buddy.taken_chunks() == sorted(twin.taken)
        free = [chunk.num_units for chunk in twin.free_chunks()]
        assert (buddy.num_free, buddy.largest_free) == (sum(free), max(free, default=0))
        assert buddy.num_available(size) == sum(units // chunk_size(size) for units in free)
    for chunk in twin.taken:
        buddy.release(chunk)
    assert buddy.free_chunks() == BuddyAllocator(num_units).free_chunks(), "merged back to what it was"


def test_the_chunks_of_the_paper_s_pool() -> None:
    """15,728 slots hold seven chunks of 2,048; 1,392 are left over (8.85 %), of which the largest request that succeeds has 1,024."""
    buddy = BuddyAllocator(15_728)
    chunks = [buddy.allocate(2048) for _ in range(8)]
    assert chunks.pop() is None
    assert sorted(chunk for chunk in chunks if chunk) == [Chunk(2048 * i, 2048) for i in range(7)]
    assert chunks[0] == Chunk(12_288, 2048), "from the smallest chunk that holds it"
    assert (buddy.num_free, buddy.largest_free) == (1392, 1024)
    assert buddy.fragmentation == 1 - 1024 / 1392


def test_free_units_that_no_request_can_use() -> None:
    buddy = BuddyAllocator(8)
    singles = [buddy.allocate(1) for _ in range(8)]
    assert buddy.fragmentation == 0.0 and buddy.largest_free == 0, "nothing is free, so nothing is in pieces"
    for chunk in singles[::2]:
        assert chunk is not None
        buddy.release(chunk)
    assert (buddy.num_free, buddy.largest_free, buddy.fragmentation) == (4, 1, 0.75)
    assert buddy.allocate(2) is None and buddy.num_available(2) == 0


@pytest.mark.parametrize("chunk", [Chunk(0, 2), Chunk(0, 8), Chunk(4, 4), Chunk(0, 3)])
def test_only_what_was_handed_out_comes_back(chunk: Chunk) -> None:
    buddy = BuddyAllocator(8)
    taken = buddy.allocate(4)
    assert taken == Chunk(0, 4)
    with pytest.raises(ValueError, match="not handed out"):
        buddy.release(chunk)
    buddy.release(taken)
    with pytest.raises(ValueError, match="not handed out"):
        buddy.release(taken)
    buddy.check_invariants()


def test_sizes() -> None:
    assert [chunk_size(n) for n in (1, 2, 3, 4, 5, 25, 32, 33)] == [1, 2, 4, 4, 8, 32, 32, 64]
    assert BuddyAllocator(983).largest_chunk == 512
    with pytest.raises(ValueError, match="num_units: 0"):
        BuddyAllocator(0)
