"""A buddy allocator: runs of units whose lengths are powers of two, split in halves and merged again.

After Knowlton, "A fast storage allocator" (CACM 1965). A chunk of 2^k units begins at a multiple of 2^k; its *buddy* is the other half of
the chunk of 2^(k+1) units that both come from. Free buddies are merged at once, so the free chunks are always the largest aligned ones that
the free units make up. Owns which units are free; never knows what they hold or who asks.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple


class Chunk(NamedTuple):
    """Units ``first`` .. ``first`` + ``num_units`` - 1; ``num_units`` is a power of two that divides ``first``."""

    first: int
    num_units: int


def chunk_size(num_units: int) -> int:
    """Units of the smallest chunk that holds ``num_units``, which is at least 1: the next power of two."""
    return 1 << (num_units - 1).bit_length()


class BuddyAllocator:
    """``num_units`` units, any number from 1; all free at first, as chunks of falling powers of two."""

    def __init__(self, num_units: int) -> None:
        if num_units < 1:
            raise ValueError(f"num_units: {num_units} is not allowed; at least 1")
        self.num_units = num_units
        self.num_free = num_units
        self._free: list[list[int]] = [[] for _ in range(num_units.bit_length())]  # [order]: first units of free chunks of 2^order, rising
        self._taken: dict[int, int] = {}  # first unit of a chunk handed out -> its order
        first = 0
        for order in reversed(range(num_units.bit_length())):
            if num_units >> order & 1:
                self._free[order].append(first)
                first += 1 << order

    @property
    def largest_chunk(self) -> int:
        """Units of the largest chunk of an empty allocator: what can be handed out at most."""
        return 1 << (self.num_units.bit_length() - 1)

    @property
    def largest_free(self) -> int:
        """Units of the largest free chunk; 0: none is free."""
        return max((1 << order for order, firsts in enumerate(self._free) if firsts), default=0)

    @property
    def fragmentation(self) -> float:
        """External fragmentation: the share of the free units that the largest request which now succeeds would leave free. 0: none."""
        return 1 - self.largest_free / self.num_free if self.num_free else 0.0

    def num_available(self, num_units: int) -> int:
        """How many chunks for ``num_units`` each can be had now."""
        order = (num_units - 1).bit_length()
        return sum(len(firsts) << (k - order) for k, firsts in enumerate(self._free) if k >= order)

    def allocate(self, num_units: int) -> Chunk | None:
        """A chunk that holds ``num_units``: from the smallest free chunk that does, the first of these. None: there is none."""
        wanted = (num_units - 1).bit_length()
        order = next((k for k in range(wanted, len(self._free)) if self._free[k]), None)
        if order is None:
            return None
        first = self._free[order].pop(0)
        while order > wanted:  # keep the lower half, free the upper one
            order -= 1
            insort(self._free[order], first + (1 << order))
        self._taken[first] = order
        self.num_free -= 1 << order
        return Chunk(first, 1 << order)

    def release(self, chunk: Chunk) -> None:
        """Give back a chunk that ``allocate`` returned; its free buddies are merged with it. ValueError when it is not handed out."""
        first, order = chunk.first, chunk.num_units.bit_length() - 1
        if self._taken.get(first) != order or chunk.num_units != 1 << order:
            raise ValueError(f"chunk: {chunk} is not allowed; it is not handed out")
        del self._taken[first]
        self.num_free += 1 << order
        while order + 1 < len(self._free):
            buddies, buddy = self._free[order], first ^ (1 << order)
            place = bisect_left(buddies, buddy)
            if place == len(buddies) or buddies[place] != buddy:
                break
            del buddies[place]
            first, order = min(first, buddy), order + 1
        insort(self._free[order], first)

    def free_chunks(self) -> list[Chunk]:
        """By their first unit."""
        return sorted(Chunk(first, 1 << order) for order, firsts in enumerate(self._free) for first in firsts)

    def taken_chunks(self) -> list[Chunk]:
        """Chunks handed out, by their first unit."""
        return sorted(Chunk(first, 1 << order) for first, order in self._taken.items())

    def check_invariants(self) -> None:
        """AssertionError unless the chunks are aligned, make up all units, and no two free ones are buddies that could be merged."""
        free, taken = self.free_chunks(), self.taken_chunks()
        end = 0
        for chunk in sorted(free + taken):
            assert chunk.first == end, f"units before {chunk} are lost or in two chunks"
            assert chunk.first % chunk.num_units == 0, f"{chunk} is not aligned"
            end += chunk.num_units
        assert end == self.num_units, f"{self.num_units} units, {end} of them in chunks"
        assert self.num_free == sum(chunk.num_units for chunk in free), f"num_free {self.num_free} disagrees with {free}"
        for chunk in free:
            assert Chunk(chunk.first ^ chunk.num_units, chunk.num_units) not in free, f"{chunk} and its buddy are free and not merged"
