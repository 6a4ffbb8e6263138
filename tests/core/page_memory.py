"""The KV memory backend with pages: what a row reads is checked page by page, so that a page given away too early is found at once."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from octavo.core.kv_pages import PageLayout
from octavo.core.step import BlockCopy, BlockMove, SequenceSlice, SliceResult, StepPlan, StepResult
from tests.core.kv_memory import UNWRITTEN, KVMemoryBackend, digest

LEFT_OUT = -1


def toy_layout(num_full: int, num_window: int, window: int) -> PageLayout:
    """A layer to a page."""
    return PageLayout(64, num_full, num_window, window, tuple((column, 0) for column in range(num_full + num_window)))


def page_value(column: int, entry: int) -> int:
    """What the layers of a column keep of a token, of which all together keep ``entry``."""
    return UNWRITTEN if entry == UNWRITTEN else digest(-7 - column, [entry])


class PageMemoryBackend(KVMemoryBackend):
    """Beside the blocks of ``KVMemoryBackend``, which never lose anything, keeps pages, which are overwritten by whoever has them."""

    def __init__(self, num_blocks: int, num_ids: int, block_size: int, layout: PageLayout, num_host_blocks: int = 0) -> None:
        super().__init__(num_ids, block_size, num_host_blocks)
        self.layout = layout
        self.pages = [[UNWRITTEN] * block_size for _ in range(num_blocks * layout.num_pages)]
        self.host_pages = [[[UNWRITTEN] * block_size for _ in range(layout.num_pages)] for _ in range(num_host_blocks)]
        self.table: array[int] = array("i")  # the plan's
        self.num_page_moves = 0

    def execute(self, plan: StepPlan) -> StepResult:
        assert plan.pages is not None
        self.table = plan.pages
        return super().execute(plan)

    def _save(self, move: BlockMove) -> None:
        super()._save(move)
        self._move(move, lambda page, host: host.__setitem__(slice(None), page))

    def _load(self, move: BlockMove) -> None:
        super()._load(move)
        self._move(move, lambda page, host: page.__setitem__(slice(None), host))

    def read_host(self, host_block: int) -> Any:
        """Both parts: a block without its window part is never read."""
        pages = [list(page) for page in self.host_pages[host_block]]
        assert all(UNWRITTEN not in page for page in pages)
        return super().read_host(host_block), pages

    def write_host(self, host_block: int, contents: Any) -> None:
        super().write_host(host_block, contents[0])
        self.host_pages[host_block] = [list(page) for page in contents[1]]

    def _move(self, move: BlockMove, copy) -> None:  # type: ignore[no-untyped-def]
        assert len(move.pages) == self.layout.num_pages
        for page, host in zip(move.pages, self.host_pages[move.host_block], strict=True):
            if page != LEFT_OUT:
                copy(self.pages[page], host)
                self.num_page_moves += 1

    def _copy(self, copy: BlockCopy) -> None:
        super()._copy(copy)
        assert LEFT_OUT not in copy.src_pages and LEFT_OUT not in copy.dst_pages
        for src, dst in zip(copy.src_pages, copy.dst_pages, strict=True):
            self.pages[dst][:] = self.pages[src]

    def _pages_of(self, block: int) -> Sequence[int]:
        num_pages = self.layout.num_pages
        return self.table[block * num_pages : (block + 1) * num_pages]

    def _write(self, block: int, offset: int, entry: int) -> None:
        super()._write(block, offset, entry)
        for column, page in enumerate(self._pages_of(block)):
            self.pages[page][offset] = page_value(column, entry)

    def _run(self, piece: SequenceSlice, writes: dict[tuple[int, int], int]) -> SliceResult:
        layout, size = self.layout, self.block_size
        assert layout.window is not None
        for position in range(piece.start):
            block, offset = piece.block_table[position // size], position % size
            for column, page in enumerate(self._pages_of(block)):
                if column < layout.num_full or position > piece.start - layout.window:
                    found, entry = self.pages[page][offset], self.memory[block][offset]
                    assert found == page_value(column, entry), f"position {position} is gone from column {column} of block {block}"
        return super()._run(piece, writes)
