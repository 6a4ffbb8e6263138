"""The pool of KV blocks: who holds each block id, and which block goes next when room is needed.

A block id is in exactly one state:

    free ──allocate──▶ referenced (by k tables) ──last release, kept──▶ cached ──allocate (evicted)──▶ referenced
      ▲                     │        ▲                                     │ │
      ├──last release───────┘        └───────────────acquire───────────────┘ │
      └──────────────────────────────discard─────────────────────────────────┘

*Cached* blocks are unreferenced but still hold KV that the prefix index offers; they are evicted least recently released first. Tables are
released from their end, so a block always becomes cached before its parent does, and eviction reaches leaves first.
The pool owns reference counts and order. It never knows tokens, keys or sequences.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Seq

KEPT_SHARE = 16  # this part of the pool is never lent


class BlockPool:
    """``num_blocks`` block ids, 0 .. num_blocks - 1, all free at first. Every operation is O(1)."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks: {num_blocks} is not allowed; at least 1")
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        # A stack, by the order of insertion: the block freed last is the one most likely still in a CPU cache.
        self._free = dict.fromkeys(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently released first
        self.lent: set[int] = set()  # pages, here blocks, that somebody has who gives them back when asked
        self.reclaim: Callable[[], bool] | None = None  # asks; False: nothing comes back any more

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that make room when it is needed; those that are lent count with them."""
        return len(self._cached) + len(self.lent)

    @property
    def num_used(self) -> int:
        """Blocks that at least one table references."""
        return self.num_blocks - len(self._free) - self.num_cached

    @property
    def num_available(self) -> int:
        """Blocks that ``allocate`` can still hand out."""
        return len(self._free) + len(self._cached) + len(self.lent)

    def is_whole(self, block: int) -> bool:
        """Whether ``block`` holds the keys and values of all layers. Here every block does."""
        return True

    def pages_of(self, block: int, windowed: bool = True) -> Seq[int]:
        """Where ``block`` lies, by column, for moves and copies. Here it is one page, of the same number: nothing need be said."""
        return ()

    def allocate(self) -> tuple[int, bool]:
        """Take one block with reference count 1. Returns (block, evicted); an evicted block must be forgotten by the index at once.

        Raises IndexError when none is available: callers ask ``num_available`` first.
        """
        if self._free:
            block, evicted = self._free.popitem()[0], False
        elif self._cached:
            block, evicted = self._cached.popitem(last=False)[0], True
        else:
            self._reclaim_one()
            block, evicted = self._free.popitem()[0], False
        self.ref_counts[block] = 1
        return block, evicted

    def _reclaim_one(self) -> None:
        """Have a block come back that is lent, so that one is free at least."""
        while not self._free:
            if self.reclaim is None or not self.reclaim():
                raise IndexError("no KV block is available")

    def may_lend(self, num_pages: int) -> bool:
        """Whether so many pages can be lent: never the last of them, into which running sequences are about to grow."""
        return len(self._free) + len(self._cached) - num_pages >= self.num_blocks // KEPT_SHARE

    def take(self, block: int) -> None:
        """Take this one free block with reference count 1. KeyError when it is not free."""
        del self._free[block]
        self.ref_counts[block] = 1

    def acquire(self, block: int) -> None:
        """One more table references ``block``, which is referenced or cached."""
        if self.ref_counts[block] == 0:
            del self._cached[block]  # KeyError: the block was free, so its contents mean nothing
        self.ref_counts[block] += 1

    def release(self, block: int, keep: bool) -> None:
        """One table less references ``block``; the last one leaves it cached when ``keep``, else free."""
        count = self.ref_counts[block] - 1
        if count < 0:
            raise AssertionError(f"block {block} is released more often than referenced")
        self.ref_counts[block] = count
        if count == 0:
            if keep:
                self._cached[block] = None
            else:
                self._free[block] = None

    def touch(self, block: int) -> None:
        """``block`` was of use: if it is cached, it is now the last to be evicted. Its parent, if any, must not be cached."""
        if block in self._cached:
            self._cached.move_to_end(block)

    def discard(self, block: int) -> None:
        """``block`` is cached and no longer offered: free. Raises KeyError for a block that is not cached."""
        del self._cached[block]
        self._free[block] = None

    def check_invariants(self) -> None:
        """AssertionError unless every block is exactly one of free, cached, referenced."""
        free, cached = set(self._free), set(self._cached)
        assert not free & cached, f"blocks {free & cached} are both free and cached"
        unreferenced = {b for b, count in enumerate(self.ref_counts) if count == 0}
        assert unreferenced == free | cached, f"reference counts disagree with the lists: {unreferenced ^ (free | cached)}"
        assert all(self.ref_counts[block] == 1 for block in self._lent_blocks()), "a block that is lent is not one holder's"

    def _lent_blocks(self) -> set[int]:
        return self.lent

    def eviction_order(self) -> list[int]:
        """Cached blocks, the next to be evicted first."""
        return list(self._cached)
