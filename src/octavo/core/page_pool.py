"""A pool of blocks made of pages: whose each page is, and which goes next when room is needed.

As ``BlockPool``, whose states and rules hold, with one more thing that can be evicted: a window part that nobody will read again.

    window part:  none ──allocate──▶ in use ──all holders passed it──▶ loose ──evicted──▶ none
                                       ▲                                │
                                       └────a new holder will read it───┘

A holder *passes* a block when its window has left it for good. A *loose* part stays as long as there is room, for a prompt that begins
with the same tokens and ends early; loose parts and cached blocks are evicted in one order, that of their last use. An evicted part leaves
its block where it is: a referenced block goes on without it, and so does a cached one. A block without its window part holds so little that
there are more block ids than whole blocks fit.

Reads no tokens, keys or sequences.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from octavo.core.block_pool import KEPT_SHARE, BlockPool
from octavo.core.kv_pages import PageNeeds

IDS_PER_BLOCK = 8  # of a model whose layers all have a window: nothing is left of a block when its window part goes


class Evicted(NamedTuple):
    """A cached block that was evicted whole, and its pages (as ``PagePool.pages_of``), which keep what they hold until somebody writes."""

    block: int
    pages: array[int]


class PagePool(BlockPool):
    """``num_blocks`` whole blocks of ``needs.num_pages`` pages.

    ``pages[b * needs.num_pages + c]`` is the page of column c of block b: of a block that is not free, and of its window part as long as it
    has one. Entries without a meaning are pages of the pool all the same.
    """

    def __init__(self, num_blocks: int, needs: PageNeeds) -> None:
        num_pages = needs.num_pages
        num_ids = num_blocks * num_pages // needs.num_full if needs.num_full else num_blocks * IDS_PER_BLOCK
        super().__init__(num_ids)
        self.num_blocks = num_blocks
        self.num_ids = num_ids
        self.needs = needs
        self.pages = array("i", bytes(4 * num_ids * num_pages))
        self.has_window = bytearray(num_ids)
        self.num_passed = [0] * num_ids  # holders of a block that have passed it
        self._per_block, self._full, self._window = num_pages, needs.num_full, needs.num_window
        self._free_pages = list(range(num_blocks * num_pages - 1, -1, -1))
        self._num_evictable = 0  # pages of cached blocks and loose window parts
        self._order: OrderedDict[int, None] = OrderedDict()  # b: cached block, ~b: loose window part of b; least recently used first

    # --- counts -------------------------------------------------------------------------------------------------------------------------

    @property
    def num_pages(self) -> int:
        return self.num_blocks * self._per_block

    @property
    def num_free_pages(self) -> int:
        return len(self._free_pages)

    @property
    def num_available_pages(self) -> int:
        """Pages that ``allocate_pages`` can still hand out; those that are lent come back when they are needed."""
        return len(self._free_pages) + self._num_evictable + len(self.lent)

    @property
    def num_used_pages(self) -> int:
        """Pages that some sequence is to read or write."""
        return self.num_pages - self.num_available_pages

    @property
    def num_available(self) -> int:
        """Whole blocks that ``allocate`` can still hand out."""
        return min(self.num_available_pages // self._per_block, self.num_available_ids)

    @property
    def num_available_ids(self) -> int:
        """Blocks that ``allocate_pages`` can still hand out, were there pages without end."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        """Memory in use, in whole blocks, rounded up. Free, cached and used ones add up to ``num_blocks``."""
        return -(-self.num_used_pages // self._per_block)

    @property
    def num_free(self) -> int:
        return min(len(self._free_pages) // self._per_block, self.num_blocks - self.num_used)

    @property
    def num_cached(self) -> int:
        return self.num_blocks - self.num_used - self.num_free

    def is_whole(self, block: int) -> bool:
        return bool(self.has_window[block])

    def pages_of(self, block: int, windowed: bool = True) -> array[int]:
        """By column; -1 for those of the window part where a block has none, or unless ``windowed``."""
        first = block * self._per_block
        found = self.pages[first : first + self._per_block]
        if not (windowed and self.has_window[block]):
            found[self._full :] = array("i", [-1]) * self._window
        return found

    # --- blocks -------------------------------------------------------------------------------------------------------------------------

    def allocate_pages(self, windowed: bool = True) -> tuple[int, list[Evicted]]:
        """Take a block with reference count 1, without a window part unless ``windowed``. Returns it and what was evicted for it.

        Raises IndexError when there is no room: callers ask ``num_available`` first.
        """
        num_pages = self._per_block if windowed else self._full
        if num_pages > self.num_available_pages or not (self._free or self._cached):
            raise IndexError("no KV block is available")
        evicted = self._make_room(num_pages, needs_id=True)
        block = self._free.popitem()[0]
        self.ref_counts[block] = 1
        self._put_pages(block * self._per_block, num_pages)
        self.has_window[block] = windowed
        return block, evicted

    def allocate_window(self, block: int) -> list[Evicted]:
        """Give ``block``, which is referenced and has none, a window part. As ``allocate_pages``."""
        assert self.ref_counts[block] > 0 and not self.has_window[block]
        if self._window > self.num_available_pages:
            raise IndexError("no KV pages are available")
        evicted = self._make_room(self._window)
        self._put_pages(block * self._per_block + self._full, self._window)
        self.has_window[block] = True
        return evicted

    def may_lend(self, num_pages: int) -> bool:
        return len(self._free_pages) + self._num_evictable - num_pages >= self.num_pages // KEPT_SHARE

    def lend(self, num_pages: int) -> tuple[list[int], list[Evicted]]:
        """Pages for somebody who gives them back when asked (``take_back``), after ``may_lend``; and what was evicted for them."""
        evicted = self._make_room(num_pages)
        pages = [self._free_pages.pop() for _ in range(num_pages)]
        self.lent.update(pages)
        return pages, evicted

    def take_back(self, pages: Iterable[int]) -> None:
        for page in pages:
            self.lent.remove(page)
            self._free_pages.append(page)

    def _lent_blocks(self) -> set[int]:
        return set()

    def _put_pages(self, first: int, num_pages: int) -> None:
        for place in range(first, first + num_pages):
            self.pages[place] = self._free_pages.pop()

    def _make_room(self, num_pages: int, needs_id: bool = False) -> list[Evicted]:
        """Give up what was of use least recently, until pages, and an id, are free."""
        evicted = list[Evicted]()
        while len(self._free_pages) < num_pages or (needs_id and not self._free):
            if not self._order:
                if self.reclaim is None or not self.reclaim():
                    raise IndexError("no KV pages are available")
                continue
            entry = next(iter(self._order))
            if entry < 0:
                self._tighten(~entry)
                self._give_window(~entry)
                continue
            evicted.append(Evicted(entry, self.pages_of(entry)))
            self.discard(entry)
        return evicted

    def allocate(self) -> tuple[int, bool]:
        raise NotImplementedError("several blocks may be evicted for one: see allocate_pages")

    def take(self, block: int) -> None:
        raise NotImplementedError("pages are of no particular block")

    def acquire(self, block: int) -> None:
        """As BlockPool's; the new holder is going to read the window part, unless it passes the block."""
        if self.ref_counts[block] == 0:
            self._uncache(block)
        self._tighten(block)
        self.ref_counts[block] += 1

    def acquire_passed(self, block: int) -> None:
        """One more table references ``block``, which is referenced, and never reads its window part."""
        assert self.ref_counts[block] > 0, f"block {block} is nobody's"
        self.ref_counts[block] += 1
        self.num_passed[block] += 1

    def release(self, block: int, keep: bool) -> None:
        """As BlockPool's, by a holder that has not passed it, or has been taken back by ``unpass``."""
        count = self.ref_counts[block] - 1
        if count < 0:
            raise AssertionError(f"block {block} is released more often than referenced")
        self.ref_counts[block] = count
        if count:
            self._loosen_if_passed(block, keep)
        elif keep:
            self._cached[block] = self._order[block] = None
            self._num_evictable += self._full
            if self.has_window[block] and ~block not in self._order:
                self._num_evictable += self._window
        else:
            self._free_block(block)

    def touch(self, block: int) -> None:
        if block in self._cached:
            self._cached.move_to_end(block)
            self._order.move_to_end(block)

    def discard(self, block: int) -> None:
        self._uncache(block)
        self._free_block(block)

    def _uncache(self, block: int) -> None:
        """``block`` is not cached any more, and may be evicted no more, a loose window part apart."""
        del self._cached[block], self._order[block]
        self._num_evictable -= self._full
        if self.has_window[block] and ~block not in self._order:
            self._num_evictable -= self._window

    def _free_block(self, block: int) -> None:
        """``block``, which is neither referenced nor cached, is free."""
        if self.has_window[block]:
            self._tighten(block)
            self._give_window(block)
        first = block * self._per_block
        self._free_pages.extend(reversed(self.pages[first : first + self._full]))
        self._free[block] = None

    # --- window parts -------------------------------------------------------------------------------------------------------------------

    def pass_block(self, block: int, keep: bool) -> None:
        """One of the holders will not read the window part of ``block`` any more. ``keep``: somebody else might."""
        self.num_passed[block] += 1
        self._loosen_if_passed(block, keep)

    def unpass(self, block: int) -> None:
        """A holder that has passed ``block`` is about to release it."""
        self.num_passed[block] -= 1

    def move_window(self, src: int, dst: int) -> None:
        """``dst``, which has none, gets the window part of ``src``, which holds the same tokens; both are referenced."""
        assert self.has_window[src] and not self.has_window[dst] and ~src not in self._order
        a, b = src * self._per_block + self._full, dst * self._per_block + self._full
        self.pages[b : b + self._window] = self.pages[a : a + self._window]
        self.has_window[src], self.has_window[dst] = False, True

    def _loosen_if_passed(self, block: int, keep: bool) -> None:
        if self.num_passed[block] < self.ref_counts[block] or not self.has_window[block] or ~block in self._order:
            return
        if keep:
            self._order[~block] = None
            self._num_evictable += self._window
        else:
            self._give_window(block)

    def _tighten(self, block: int) -> None:
        """The window part of ``block`` is not loose any more."""
        if ~block in self._order:
            del self._order[~block]
            self._num_evictable -= self._window

    def _give_window(self, block: int) -> None:
        """The pages of the window part, which is not loose, are free."""
        first = block * self._per_block + self._full
        self._free_pages.extend(reversed(self.pages[first : first + self._window]))
        self.has_window[block] = False

    # --- checks -------------------------------------------------------------------------------------------------------------------------

    def is_loose(self, block: int) -> bool:
        return ~block in self._order

    def check_invariants(self) -> None:
        """Also: every page is free or of exactly one block, and what counts as evictable is."""
        super().check_invariants()
        assert [entry for entry in self._order if entry >= 0] == list(self._cached), "the orders of eviction disagree"
        held = [*self._free_pages, *self.lent]
        num_evictable = 0
        for block, count in enumerate(self.ref_counts):
            loose, passed = ~block in self._order, self.num_passed[block]
            assert 0 <= passed <= count, f"block {block} is passed by {passed} of {count} holders"
            assert not loose or self.has_window[block], f"block {block} has lost the window part that is loose"
            if block in self._free:
                assert not self.has_window[block], f"block {block} is free and has a window part"
                continue
            assert loose or not self.has_window[block] or count == 0 or passed < count, f"block {block} keeps a window part for nobody"
            held += [page for page in self.pages_of(block) if page >= 0]
            num_evictable += self._full if count == 0 else 0
            num_evictable += self._window if self.has_window[block] and (loose or count == 0) else 0
        assert sorted(held) == list(range(self.num_pages)), "a page is lost, or of two blocks"
        assert num_evictable == self._num_evictable, f"{num_evictable} pages can be evicted, not {self._num_evictable}"
