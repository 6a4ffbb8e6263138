"""Block tables over the pool, and nothing of what blocks hold: growing, sharing, giving back, lending.

What ``KVManager`` adds is the prefix cache. How memory is kept other than in blocks of one page, taken one by one, is up to its subclasses
(``kv_groups``, ``reservation``), which say so in these methods.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from octavo.core.block_pool import BlockPool
from octavo.core.occupancy import KVOccupancy, count_paged
from octavo.core.request import Sequence
from octavo.core.step import BlockCopy


class BlockTables:
    """``pool``: of blocks of ``block_size`` tokens."""

    pages: array[int] | None = None  # page of each column of each block; None: a block is one page, of the same number

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        if block_size < 1:
            raise ValueError(f"block_size: {block_size} is not allowed; at least 1")
        self.block_size = block_size
        self.pool = pool
        self._unfilled: set[int] = set()  # blocks that a plan not yet applied fills, by copying: what they hold is not sure

    def _allocate(self, windowed: bool = True) -> int:
        """A block that nobody has, without a part for window layers unless ``windowed``. IndexError when there is none."""
        return self.pool.allocate()[0]

    @property
    def num_pages(self) -> int:
        """Pages of the pool."""
        return self.pool.num_blocks

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_missing(self, seq: Sequence) -> int:
        """Blocks that ``seq`` lacks to compute all its known tokens; 0 when it holds more, for drafts."""
        return max(0, self.blocks_for(len(seq.token_ids)) - len(seq.block_table))

    def reserve(self, seq: Sequence) -> None:
        """``seq`` leaves the queue. Here its blocks come one by one; ``reservation.ReservedKV`` takes them all now."""

    def take_copies(self) -> list[BlockCopy]:
        """Copies that the next plan begins with. Here none: shared blocks are copied when they are written."""
        return []

    def grow(self, seq: Sequence, num_tokens: int, copies: list[BlockCopy]) -> bool:
        """Make the next ``num_tokens`` positions of ``seq`` writable by it alone. False, and nothing changed, when blocks are short.

        A copy-on-write is added to ``copies``, which take effect in order before anything is computed.
        """
        table, size, start = seq.block_table, self.block_size, seq.num_computed
        num_missing = -(-(start + num_tokens) // size) - len(table)
        shared = start % size != 0 and self.pool.ref_counts[table[start // size]] > 1
        if num_missing <= 0 and not shared:
            return True
        if num_missing + shared > self.pool.num_available:
            return False
        if shared:
            src, dst = table[start // size], self._allocate()
            self._copy(src, dst, copies)
            table[start // size] = dst
            self.pool.release(src, keep=False)
        for _ in range(num_missing):
            table.append(self._allocate())
        return True

    def expect(self, seq: Sequence, num_tokens: int) -> bool:
        """Blocks for the KV of the first ``num_tokens`` tokens of ``seq``, which holds none: it comes from elsewhere.

        False, and nothing changed, when blocks are short. ``seq.num_scheduled`` says the number until ``arrived``.
        """
        return self.grow(seq, num_tokens, [])

    def arrived(self, seq: Sequence) -> None:
        """What ``seq`` expected is there: its ``num_computed`` says so from here on."""

    def truncate(self, seq: Sequence) -> None:
        """Give back the blocks behind the computed tokens: they were for drafts that did not come true."""
        table = seq.block_table
        for block in reversed(table[self.blocks_for(seq.num_computed) :]):
            self.pool.release(block, keep=False)
        del table[self.blocks_for(seq.num_computed) :]

    def append_block(self, seq: Sequence, shared: int | None, windowed: bool = True) -> int:
        """Lengthen the table of ``seq`` by a block that is filled from outside: a new one, or ``shared``, which has an owner already.

        ``windowed``: it is to have a part for window layers.
        """
        if shared is None:
            block = self._allocate(windowed)
            self._unfilled.add(block)
        else:
            block = shared
            self.pool.acquire(block)
        seq.block_table.append(block)
        return block

    def add_window(self, block: int) -> Seq[int]:
        """Give ``block``, appended without it, a part for window layers. Returns where that lies, by column. Here every block has all."""
        raise AssertionError(f"block {block} has all parts")

    def is_being_filled(self, seq: Sequence) -> bool:
        """Whether the plan not yet applied is to copy into a block of ``seq``."""
        return bool(self._unfilled) and any(block in self._unfilled for block in seq.block_table)

    def plan_ended(self) -> None:
        """The copies of the plan have taken effect, or are nobody's any more."""
        self._unfilled.clear()

    def num_to_grow(self, group: Seq[Sequence]) -> int:
        """Blocks that a group needs to make all its known tokens writable, each by its sequence alone, copies on write included."""
        num_blocks, writers = 0, dict[int, int]()
        for seq in group:
            num_blocks += self.num_missing(seq)
            if seq.num_computed % self.block_size:
                block = seq.block_table[seq.num_computed // self.block_size]
                writers[block] = writers.get(block, 0) + 1
        return num_blocks + sum(min(count, self.pool.ref_counts[block] - 1) for block, count in writers.items())

    def _acquire_all(self, parent: Sequence, child: Sequence) -> None:
        for block in child.block_table:
            self.pool.acquire(block)

    def num_passed(self, seq: Sequence) -> int:
        """Leading blocks of ``seq`` of which it needs no part for window layers any more. Here it needs all of each."""
        return 0

    def lend(self, num_pages: int) -> list[int] | None:
        """So many pages for somebody who gives them back when the pool asks for them (``BlockPool.reclaim``). None: there is no room.

        What is evicted for them goes nowhere: not for a pool with tiers.
        """
        if not self.pool.may_lend(num_pages):
            return None
        blocks = [self._allocate() for _ in range(num_pages)]
        self.pool.lent.update(blocks)
        return blocks

    def take_back(self, pages: Iterable[int]) -> None:
        for block in pages:
            self.pool.lent.remove(block)
            self.pool.release(block, keep=False)

    def _has_room_beside(self, src: int) -> bool:
        """Whether there is a block to copy ``src``, which is offered, into; it may be ``src`` itself."""
        return self.pool.num_available > 0

    def _allocate_beside(self, src: int) -> int:
        self.pool.touch(src)
        return self._allocate()

    def _copy(self, src: int, dst: int, copies: list[BlockCopy]) -> None:
        copies.append(BlockCopy(src, dst, self.pool.pages_of(src), self.pool.pages_of(dst)))
        self._unfilled.add(dst)

    def num_table_blocks(self, holders: Iterable[Sequence]) -> int:
        """Blocks that ``holders`` would take if they shared none."""
        return sum(len(seq.block_table) for seq in holders)

    def occupancy(self, holders: Iterable[tuple[Sequence, int]]) -> KVOccupancy:
        """What the pool's slots are used for. ``holders``: as for ``count_paged``."""
        pool = self.pool
        return count_paged(self.block_size, pool.num_used, pool.num_cached, pool.num_free, holders)
