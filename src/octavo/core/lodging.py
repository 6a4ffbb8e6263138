"""Blocks of another model's KV in pages that the pool of the first one lends: a draft model's.

    pool ──lend──▶ lodging: free ──take──▶ taken ──give──▶ free, and when nothing of its pages is taken any more, back to the pool

Both models compete for the same memory. The pool lends what is free or cached, and asks for pages before it lets a running sequence wait
or be preempted: then the guest gives up blocks, which cost it some computing and nobody else anything.

Owns which block is in which pages. What is given up first is the guest's business.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable

from octavo.core.kv_manager import KVManager


class Lodging:
    """``num_columns`` pages to a block, or ``per_page`` blocks to a page: one of the two is 1. Then ids are places in memory, else
    ``pages[b * num_columns + c]`` is the page of column c of block b.

    ``give_up``: has the guest give some blocks; False when it has none.
    """

    def __init__(self, kv: KVManager, num_columns: int, per_page: int, num_pages: int, give_up: Callable[[], bool]) -> None:
        """``num_pages``: of the pool."""
        assert num_columns == 1 or per_page == 1
        self._kv, self._num_columns, self._per_page = kv, num_columns, per_page
        self._give_up = give_up
        self._free: dict[int, None] = {}  # of pages some of which is taken
        self._num_taken: dict[int, int] = {}  # by page, where there are several blocks to a page
        self._ids = list(range(num_pages // num_columns - 1, -1, -1)) if num_columns > 1 else []
        self.pages: array[int] | None = array("i", bytes(4 * (num_pages // num_columns) * num_columns)) if num_columns > 1 else None
        kv.pool.reclaim = self._reclaim

    def take(self, num_blocks: int) -> list[int] | None:
        """So many blocks, or None when there is no room for them."""
        num_lacking = num_blocks - len(self._free)
        if num_lacking > 0:
            lent = self._kv.lend(-(-num_lacking // self._per_page) * self._num_columns)
            if lent is None:
                return None
            self._divide(lent)
        blocks = [self._free.popitem()[0] for _ in range(num_blocks)]
        if self._per_page > 1:
            for block in blocks:
                self._num_taken[block // self._per_page] += 1
        return blocks

    def _divide(self, lent: list[int]) -> None:
        if self.pages is None:
            for page in lent:
                self._num_taken[page] = 0
                self._free.update(dict.fromkeys(range(page * self._per_page, (page + 1) * self._per_page)))
            return
        for i in range(0, len(lent), self._num_columns):
            block = self._ids.pop()
            self.pages[block * self._num_columns : (block + 1) * self._num_columns] = array("i", lent[i : i + self._num_columns])
            self._free[block] = None

    def give(self, blocks: Iterable[int]) -> None:
        """What ``take`` gave. Pages of which nothing is taken any more go back."""
        for block in blocks:
            if self.pages is not None:
                self._kv.take_back(self.pages[block * self._num_columns : (block + 1) * self._num_columns])
                self._ids.append(block)
                continue
            page = block // self._per_page
            self._free[block] = None
            if self._per_page > 1:
                self._num_taken[page] -= 1
            if self._per_page == 1 or self._num_taken[page] == 0:
                for part in range(page * self._per_page, (page + 1) * self._per_page):
                    del self._free[part]
                self._num_taken.pop(page, None)
                self._kv.take_back((page,))

    def _reclaim(self) -> bool:
        """Have something come back to the pool. False: the guest has nothing any more."""
        num_lent = len(self._kv.pool.lent)
        while len(self._kv.pool.lent) == num_lent:
            if not self._give_up():
                return False
        return True

    def check_invariants(self) -> None:
        """AssertionError unless every page that is lent is known here, and some of each is taken or about to be."""
        lent = self._kv.pool.lent
        if self.pages is not None:
            taken = (len(self.pages) // self._num_columns - len(self._ids)) * self._num_columns
            assert taken == len(lent), f"{taken} pages are in use here, {len(lent)} are lent"
            return
        assert self._num_taken.keys() == lent, "other pages are lent than are known here"
        for page, count in self._num_taken.items():
            free = sum(part in self._free for part in range(page * self._per_page, (page + 1) * self._per_page))
            assert self._per_page == 1 or count + free == self._per_page, f"a block of page {page} is lost"
