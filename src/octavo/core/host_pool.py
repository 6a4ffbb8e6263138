"""Host memory for KV blocks, as ids: which host block is free, and how many records name one that is not.

    free ──allocate──▶ held (by k records) ──last release──▶ free

A block that a plan in flight reads or writes stays held until the plan's result is there; that is its holder's business. The pool never
knows what a block holds, and never moves a byte.
"""

from __future__ import annotations


class HostPool:
    """``num_blocks`` host block ids, 0 .. num_blocks - 1 (there may be none), all free at first. Every operation is O(1)."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 0:
            raise ValueError(f"num_blocks: {num_blocks} is not allowed; at least 0")
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def allocate(self) -> int:
        """Take one block with reference count 1. IndexError when none is free: callers ask ``num_free`` first."""
        block = self._free.pop()
        self.ref_counts[block] = 1
        return block

    def acquire(self, block: int) -> None:
        """One more record names ``block``, which is held."""
        if self.ref_counts[block] == 0:
            raise AssertionError(f"host block {block} is free, so its contents mean nothing")
        self.ref_counts[block] += 1

    def release(self, block: int) -> None:
        """One record less names ``block``; the last one leaves it free."""
        if self.ref_counts[block] == 0:
            raise AssertionError(f"host block {block} is released more often than named")
        self.ref_counts[block] -= 1
        if self.ref_counts[block] == 0:
            self._free.append(block)

    def check_invariants(self) -> None:
        """AssertionError unless every block is either free or held."""
        assert len(set(self._free)) == len(self._free), "a host block is twice in the free list"
        unnamed = {block for block, count in enumerate(self.ref_counts) if count == 0}
        assert unnamed == set(self._free), "host reference counts disagree with the list"
