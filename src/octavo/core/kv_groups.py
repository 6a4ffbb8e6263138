"""KVManager for a model whose window layers give back what has left their window.

A sequence *passes* a block when no row that it may still compute reads the block's window part (``PageNeeds.num_passed``). That depends on
the number of its computed tokens alone, which never falls while it holds blocks: drafts count only once they have come true, and who is
preempted gives all blocks back. Forks begin with what their parent has passed. A part that all holders have passed is given up when
room is needed (``PagePool``), at once when nobody else could ask for it.

A sequence whose KV comes from elsewhere never gets window parts of what its tokens have passed already: nobody sends them.

So what the index offers may lack window parts. A prompt shares the longest run of offered blocks behind which all parts are there that its
next row reads. Beyond that it computes blocks that are offered already; the window part of such a block goes over to the one offered.

Memory is counted in pages; what the scheduler asks for is in whole blocks, rounded so that it never promises too much.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from octavo.core.kv_manager import KVManager
from octavo.core.kv_pages import PageNeeds
from octavo.core.kv_tiers import BlockRef, HostEntry
from octavo.core.limits import LengthLimits
from octavo.core.occupancy import KVOccupancy, count_paged
from octavo.core.page_pool import Evicted, PagePool
from octavo.core.prefix_match import PrefixMatch
from octavo.core.request import Sequence
from octavo.core.step import BlockCopy
from octavo.core.tails import PartialMatch


@dataclass(frozen=True, slots=True)
class GroupedLimits(LengthLimits):
    """A sequence holds window parts of what a chunk writes and sees, whatever its length: so more tokens fit than in whole blocks."""

    needs: PageNeeds
    num_ids: int

    @property
    def num_pool_tokens(self) -> int:
        return self.needs.most_tokens(self.num_blocks * self.needs.num_pages, self.num_ids)

    def _most_tokens(self, max_chunk: int) -> int:
        return replace(self.needs, max_chunk=max_chunk).most_tokens(self.num_blocks * self.needs.num_pages, self.num_ids)

    def _remedy(self, num_prompt: int) -> str:
        """Smaller pieces need fewer window parts at a time. The largest whole number of blocks that does is named."""
        if self.needs.max_chunk >= self.max_model_len:  # prompts may not be computed in pieces at all
            return ""
        sizes = range(self.needs.max_chunk // self.block_size * self.block_size, 0, -self.block_size)
        size = next((size for size in sizes if self._most_tokens(size) >= num_prompt), None)
        return "" if size is None else f"; it would hold the prompt with max_num_batched_tokens {size} or less"


class GroupedKV(KVManager):
    """``num_blocks``: whole blocks that the memory holds."""

    pool: PagePool

    def __init__(
        self, num_blocks: int, needs: PageNeeds, enable_prefix_caching: bool = True, fingerprint: str = "", token_granular: bool = False
    ) -> None:
        pool = PagePool(num_blocks, needs)
        super().__init__(pool.num_ids, needs.block_size, enable_prefix_caching, fingerprint, token_granular, pool)
        self.pages = pool.pages
        self.needs = needs
        self._passed: dict[int, int] = {}  # seq_id -> leading blocks that it has passed
        self._expected: dict[int, int] = {}  # seq_id -> tokens whose KV is on its way from elsewhere

    @property
    def num_pages(self) -> int:
        return self.pool.num_pages

    def num_passed(self, seq: Sequence) -> int:
        return self.needs.num_passed(seq.num_computed)

    # --- what is needed -----------------------------------------------------------------------------------------------------------------

    def num_missing(self, seq: Sequence) -> int:
        """In whole blocks, rounded up: what ``seq`` takes at a time at most, chunk by chunk, giving back what it passes."""
        missing = self.needs.missing(len(seq.token_ids), len(seq.block_table), self._num_there(seq))
        return -(-missing // self.needs.num_pages)

    def _num_there(self, seq: Sequence) -> int:
        """Tokens of ``seq`` that are computed, or brought from elsewhere: the blocks of these have the parts that they will have."""
        expected = self._expected.get(seq.seq_id, 0)
        return seq.num_computed + expected + (0 if self.restorer is None else self.restorer.num_loading(seq))

    def can_admit(self, seq: Sequence, match: PrefixMatch, num_spare: int) -> bool:
        pool, needs, nodes = self.pool, self.needs, match.nodes
        num_shared = len(nodes) + match.num_pending
        num_new = needs.missing(len(seq.token_ids), num_shared, num_shared * self.block_size)
        passed = needs.num_passed(len(nodes) * self.block_size)
        num_cached = sum(pool.ref_counts[node.block] == 0 for node in nodes)
        # Of a model whose layers all have a window, what has been passed takes an id and no page.
        if self.blocks_for(len(seq.token_ids)) - num_shared + num_cached + num_spare > pool.num_available_ids:
            return False
        num_revived = needs.num_full * num_cached
        num_revived += needs.num_window * sum(pool.ref_counts[node.block] == 0 or pool.is_loose(node.block) for node in nodes[passed:])
        return num_new + num_revived + num_spare * needs.num_pages <= pool.num_available_pages

    # --- prefix cache -------------------------------------------------------------------------------------------------------------------

    def num_found(self, seq: Sequence) -> int:
        """Blocks without the window parts that it would go on behind are of no use."""
        num_found, begin = super().num_found(seq) // self.block_size, seq.num_computed // self.block_size
        if num_found <= begin or self.index is None:
            return num_found * self.block_size
        nodes = [self.index.node(key) for key in self._chains[seq.seq_id].keys[begin + 1 : num_found + 1]]
        parts = [node is None or bool(self.pool.has_window[node.block]) for node in nodes]  # what is being computed will have them
        return (begin + self._usable(seq, (), parts)) * self.block_size

    def _trim(self, seq: Sequence, match: PrefixMatch) -> bool:
        usable = self._usable(seq, [node.block for node in match.nodes])
        match.num_unusable = len(match.nodes) - usable
        del match.nodes[usable:]
        return match.num_unusable > 0

    def _usable(self, seq: Sequence, blocks: Seq[int], more: Seq[bool] = ()) -> int:
        """How many of ``blocks`` and then of ``more``, which follow what ``seq`` has computed in whole blocks, make a beginning behind
        which it could go on. ``more``: of each, whether it has a window part."""
        whole = self.pool.has_window
        depth = seq.num_computed // self.block_size
        whole_from, usable = self.num_passed(seq), 0
        for i, has_window in enumerate((*(whole[block] for block in blocks), *more), 1):
            if not has_window:
                whole_from = depth + i
            if whole_from <= self.needs.num_passed((depth + i) * self.block_size):
                usable = i
        return usable

    def usable_entries(self, seq: Sequence, entries: list[HostEntry], match: PrefixMatch | None = None) -> list[HostEntry]:
        nodes = [] if match is None else match.nodes
        usable = self._usable(seq, [node.block for node in nodes], [entry.windowed for entry in entries])
        return entries[: max(0, usable - len(nodes))]

    def _useful_tail(self, seq: Sequence, tail: PartialMatch | None, depth: int) -> PartialMatch | None:
        tail = super()._useful_tail(seq, tail, depth)
        return tail if tail is not None and self.pool.has_window[tail.node.block] else None

    def adopt_prefix(self, seq: Sequence, match: PrefixMatch) -> int:
        num_gained = super().adopt_prefix(seq, match)
        if num_gained:
            self._pass(seq)
        return num_gained

    def adopt_tail(self, seq: Sequence, match: PrefixMatch, copies: list[BlockCopy]) -> int:
        num_gained = super().adopt_tail(seq, match, copies)
        if num_gained:
            self._pass(seq)
        return num_gained

    def publish(self, seq: Sequence) -> None:
        super().publish(seq)
        if seq.seq_id not in self.loading:
            self._pass(seq)

    def _pass(self, seq: Sequence) -> None:
        """``seq`` has computed more than before."""
        begin, end = self._passed.get(seq.seq_id, 0), self.num_passed(seq)
        if end <= begin:
            return
        for block in seq.block_table[begin:end]:
            self.pool.pass_block(block, keep=self.index is not None and self.index.offers(block))
        self._passed[seq.seq_id] = end

    def _exchange(self, own: int, offered: int) -> None:
        self.pool.acquire(offered)
        if self.pool.has_window[own] and not self.pool.has_window[offered]:
            self.pool.move_window(own, offered)
        self.pool.release(own, keep=False)

    # --- blocks -------------------------------------------------------------------------------------------------------------------------

    def _acquire_all(self, parent: Sequence, child: Sequence) -> None:
        passed = self._passed.get(parent.seq_id, 0)
        for i, block in enumerate(child.block_table):
            if i < passed:
                self.pool.acquire_passed(block)
            else:
                self.pool.acquire(block)
        self._passed[child.seq_id] = passed

    def expect(self, seq: Sequence, num_tokens: int) -> bool:
        pool, needs = self.pool, self.needs
        num_blocks, passed = self.blocks_for(num_tokens), needs.num_passed(num_tokens)
        num_pages = needs.num_full * num_blocks + needs.num_window * (num_blocks - passed)
        if num_pages > pool.num_available_pages or num_blocks > pool.num_available_ids:
            return False
        for i in range(num_blocks):
            seq.block_table.append(self._allocate(windowed=i >= passed))
        self._expected[seq.seq_id] = num_tokens
        return True

    def arrived(self, seq: Sequence) -> None:
        del self._expected[seq.seq_id]

    def release(self, seq: Sequence, forget: bool) -> None:
        self._expected.pop(seq.seq_id, None)
        for block in seq.block_table[: self._passed.pop(seq.seq_id, 0)]:
            self.pool.unpass(block)
        super().release(seq, forget)

    def _allocate(self, windowed: bool = True) -> int:
        block, evicted = self.pool.allocate_pages(windowed)
        self._evicted_all(evicted)
        return block

    def _evicted_all(self, evicted: list[Evicted]) -> None:
        for lost in evicted:
            self._evicted(lost.block, lost.pages)

    def lend(self, num_pages: int) -> list[int] | None:
        if not self.pool.may_lend(num_pages):
            return None
        pages, evicted = self.pool.lend(num_pages)
        self._evicted_all(evicted)
        return pages

    def take_back(self, pages: Iterable[int]) -> None:
        self.pool.take_back(pages)

    def _has_room_beside(self, src: int) -> bool:
        """Not counting ``src``: several pages are not copied right when they change places."""
        self.pool.acquire(src)
        has_room = self.pool.num_available > 0
        self.pool.release(src, keep=True)
        return has_room

    def _allocate_beside(self, src: int) -> int:
        self.pool.acquire(src)
        block = self._allocate()
        self.pool.release(src, keep=True)
        return block

    def add_window(self, block: int) -> Seq[int]:
        """Give ``block``, which the plan being made fills in part, a window part. Returns its pages by column, those it had left out."""
        self._evicted_all(self.pool.allocate_window(block))
        pages = self.pool.pages_of(block)
        for column in range(self.needs.num_full):
            pages[column] = -1
        return pages

    # --- reports ------------------------------------------------------------------------------------------------------------------------

    def evictable_blocks(self) -> list[tuple[BlockRef, int]]:
        """Those that have both parts alone: what is kept on disk is whole."""
        return [(ref, block) for ref, block in super().evictable_blocks() if self.pool.has_window[block]]

    def num_table_blocks(self, holders: Iterable[Sequence]) -> int:
        """In whole blocks, rounded up: what has been passed would be given back."""
        needs, num_pages = self.needs, 0
        for seq in holders:
            num_blocks = len(seq.block_table)
            num_pages += needs.num_full * num_blocks + needs.num_window * max(0, num_blocks - self.num_passed(seq))
        return -(-num_pages // needs.num_pages)

    def occupancy(self, holders: Iterable[tuple[Sequence, int]]) -> KVOccupancy:
        """As KVManager's; a slot is room for one token in the layers of one page."""
        pool, size, per_block = self.pool, self.block_size, self.needs.num_pages
        blocks = count_paged(size, pool.num_blocks, 0, 0, holders)
        found = KVOccupancy(pool.num_pages * size)
        found.num_to_come, found.num_never = blocks.num_to_come * per_block, blocks.num_never * per_block
        found.num_free = pool.num_free_pages * size
        found.num_cached = (pool.num_available_pages - pool.num_free_pages) * size
        found.num_token_states = pool.num_used_pages * size - found.num_to_come - found.num_never
        return found

    def check_invariants(self, holders: Iterable[Sequence]) -> None:
        holders = list(holders)
        super().check_invariants(holders)
        pool = self.pool
        assert self._expected.keys() <= {seq.seq_id for seq in holders}, "KV is on its way to a sequence that holds no blocks"
        passed = [0] * pool.num_ids
        assert self._passed.keys() <= {seq.seq_id for seq in holders}, "a sequence has passed blocks and holds none"
        for seq in holders:
            done = self._passed.get(seq.seq_id, 0)
            assert done <= self.num_passed(seq), f"sequence {seq.seq_id} has passed block {done - 1}, which it still reads"
            assert done == self.num_passed(seq) or seq.seq_id in self.loading, f"sequence {seq.seq_id} keeps parts it has passed"
            for block in seq.block_table[:done]:
                passed[block] += 1
            first = self.needs.num_passed(self._num_there(seq))
            for i, block in enumerate(seq.block_table[first:], first):
                assert pool.has_window[block] and not pool.is_loose(block), f"sequence {seq.seq_id} needs the window part of block {i}"
        assert passed == pool.num_passed, "the pool counts other passes than the sequences"
