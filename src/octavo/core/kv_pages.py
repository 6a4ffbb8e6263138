"""Pages: how the layers of a model share one pool of memory, so that layers with a window can give back what they will not read again.

A *block* holds the keys and values of ``block_size`` tokens in all layers. It has a *part* per group of layers: the full part, of layers
that see all positions, and the window part, of layers that see the last ``window`` alone. A part is made of equal-byte *pages*; column c of
a block is its page number c, full part first. Any page of the pool can be any column of any block, so that what window parts give up
holds full parts of others. A model without windows has one page to a block.

Says where layers lie, and what a sequence needs at most. Which page is whose is ``PagePool``'s business.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

LAYER_ALIGNMENT = 64  # bytes: a cache line
MOST_PADDING = 0.125  # of a block: above it, one page to a block takes less memory than groups save


@dataclass(frozen=True, slots=True)
class PageLayout:
    """``layers[i]`` is (column, offset in its page in bytes) of layer i. ``window``: the widest of those in the window part."""

    page_bytes: int
    num_full: int
    num_window: int
    window: int | None
    layers: tuple[tuple[int, int], ...]

    @property
    def num_pages(self) -> int:
        """Pages of a block that has both parts."""
        return self.num_full + self.num_window

    @property
    def block_bytes(self) -> int:
        return self.page_bytes * self.num_pages

    def needs(self, block_size: int, max_chunk: int) -> PageNeeds | None:
        """None: blocks are never without a part."""
        return None if self.window is None else PageNeeds(block_size, self.num_full, self.num_window, self.window, max_chunk)


def page_layout(layer_bytes: Seq[int], windows: Seq[int | None], grouped: bool = True) -> PageLayout:
    """Pages for layers whose keys and values of a block take ``layer_bytes`` each, with the window of each, if any.

    Layers are not cut: a page holds neighbours of one part. Of all page sizes that hold a run of layers, the one that wastes least is
    taken and, of equals, the largest; for layers of equal size that is the greatest common divisor of the parts' numbers of layers.
    One page to a block if nothing has a window, padding would take more than ``MOST_PADDING`` of a block, or ``grouped`` is off.
    """
    sizes = [-(-size // LAYER_ALIGNMENT) * LAYER_ALIGNMENT for size in layer_bytes]
    whole = _pack(sizes, [list(range(len(sizes)))], sum(sizes), None)
    seen = [window for window in windows if window is not None]
    if not seen or not grouped or whole is None:
        assert whole is not None
        return whole
    parts = [[i for i, window in enumerate(windows) if window is None], [i for i, window in enumerate(windows) if window is not None]]
    best: PageLayout | None = None
    for page_bytes in sorted(_page_sizes(sizes, parts), reverse=True):
        layout = _pack(sizes, parts, page_bytes, max(seen))
        if layout is not None and (best is None or layout.block_bytes < best.block_bytes):
            best = layout
    if best is None or best.block_bytes > (1 + MOST_PADDING) * whole.block_bytes:
        return whole
    return best


def _page_sizes(sizes: list[int], parts: list[list[int]]) -> set[int]:
    """Bytes of the first layers of a part, for each number of them."""
    found = set()
    for part in parts:
        total = 0
        for layer in part:
            total += sizes[layer]
            found.add(total)
    return found


def _pack(sizes: list[int], parts: list[list[int]], page_bytes: int, window: int | None) -> PageLayout | None:
    """Layers in their order into pages, each part beginning a page of its own. None when a layer is larger than a page."""
    places, column, counts = {}, -1, []
    for part in parts:
        used, first = page_bytes, column + 1
        for layer in part:
            if sizes[layer] > page_bytes:
                return None
            if used + sizes[layer] > page_bytes:
                column, used = column + 1, 0
            places[layer] = (column, used)
            used += sizes[layer]
        counts.append(column + 1 - first)
    layers = tuple(places[layer] for layer in range(len(sizes)))
    return PageLayout(page_bytes, counts[0], counts[1] if len(counts) > 1 else 0, window, layers)


@dataclass(frozen=True, slots=True)
class GuestLayout:
    """Blocks of another model in the pages of a pool: ``per_page`` of them to a page, or several pages to each. One of the two is 1."""

    pages: PageLayout
    per_page: int


def guest_layout(layer_bytes: Seq[int], page_bytes: int) -> GuestLayout | None:
    """How blocks of a model whose layers take ``layer_bytes`` each lie in pages of ``page_bytes``. None: they would waste too much of them.

    A block that fits a page gets an equal part of one, the smallest that holds it; else its layers are packed into whole pages.
    """
    sizes = [-(-size // LAYER_ALIGNMENT) * LAYER_ALIGNMENT for size in layer_bytes]
    everything, lines = [list(range(len(sizes)))], page_bytes // LAYER_ALIGNMENT
    if sum(sizes) <= page_bytes:
        per_page = max(n for n in range(1, page_bytes // sum(sizes) + 1) if lines % n == 0)
        layout = _pack(sizes, everything, page_bytes // per_page, None)
        return None if layout is None else GuestLayout(layout, per_page)
    layout = _pack(sizes, everything, page_bytes, None)
    if layout is None or layout.block_bytes > (1 + MOST_PADDING) * sum(sizes):
        return None
    return GuestLayout(layout, 1)


@dataclass(frozen=True, slots=True)
class PageNeeds:
    """How many pages sequences need. ``max_chunk``: most tokens of a sequence that one step computes.

    A row at position p reads positions above p - window in window layers. So a sequence with ``num_computed`` tokens never reads a block
    again whose last position is at most ``num_computed`` - window.
    """

    block_size: int
    num_full: int
    num_window: int
    window: int
    max_chunk: int

    @property
    def num_pages(self) -> int:
        return self.num_full + self.num_window

    def num_passed(self, num_computed: int) -> int:
        """Leading blocks whose window part no row from position ``num_computed`` on reads."""
        return max(0, num_computed - self.window + 1) // self.block_size

    @property
    def most_windows(self) -> int:
        """Window parts that a sequence holds at most at a time: what a chunk writes, and what its first row sees before it."""
        return (self.max_chunk + self.window - 2) // self.block_size + 2

    def peak(self, num_tokens: int) -> int:
        """Pages that a sequence holds at most until ``num_tokens`` of it are computed, chunk by chunk."""
        return self.missing(num_tokens, 0, 0)

    def missing(self, num_tokens: int, num_held: int, num_computed: int) -> int:
        """Pages that a sequence still takes at a time until ``num_tokens`` are computed, which holds ``num_held`` blocks."""
        num_blocks, passed = -(-num_tokens // self.block_size), self.num_passed(num_computed)
        num_new = max(0, num_blocks - num_held)
        num_windows = min(num_blocks - passed, self.most_windows) - (num_held - passed)
        return self.num_full * num_new + self.num_window * min(num_new, max(0, num_windows))

    def most_tokens(self, num_pages: int, num_ids: int) -> int:
        """Most tokens of one sequence that a pool of ``num_pages`` pages and ``num_ids`` block ids holds; always whole blocks."""
        both = min(num_pages // self.num_pages, num_ids)
        if both < self.most_windows:
            return both * self.block_size
        left = num_pages - self.most_windows * self.num_window
        return (min(left // self.num_full, num_ids) if self.num_full else num_ids) * self.block_size
