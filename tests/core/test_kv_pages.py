"""Where layers lie in pages, and what sequences need of them: against every way there is, by counting."""

from __future__ import annotations

import itertools

import pytest

from octavo.core.kv_pages import LAYER_ALIGNMENT, PageLayout, PageNeeds, page_layout

KB = 1024


def check_layout(layout: PageLayout, sizes: list[int], windows: list[int | None]) -> None:
    """No two layers share a byte, none is cut, and no column mixes layers with a window and without."""
    taken: dict[int, list[tuple[int, int]]] = {}
    for i, (column, offset) in enumerate(layout.layers):
        assert offset >= 0 and offset % LAYER_ALIGNMENT == 0 and offset + sizes[i] <= layout.page_bytes
        taken.setdefault(column, []).append((offset, offset + sizes[i]))
        if layout.window is not None:
            assert (column >= layout.num_full) == (windows[i] is not None)
    assert sorted(taken) == list(range(layout.num_pages))
    for spans in taken.values():
        for (_, end), (begin, _) in itertools.pairwise(sorted(spans)):
            assert end <= begin


def laid_out(sizes: list[int], windows: list[int | None], grouped: bool = True) -> PageLayout:
    layout = page_layout(sizes, windows, grouped)
    check_layout(layout, sizes, windows)
    return layout


def test_layers_alike_make_pages_of_their_greatest_common_divisor() -> None:
    gemma3_270m = laid_out([KB] * 18, [None if i % 6 == 5 else 512 for i in range(18)])
    assert (gemma3_270m.page_bytes, gemma3_270m.num_full, gemma3_270m.num_window, gemma3_270m.window) == (3 * KB, 1, 5, 512)
    gemma2 = laid_out([KB] * 26, [4096 if i % 2 == 0 else None for i in range(26)])
    assert (gemma2.page_bytes, gemma2.num_full, gemma2.num_window) == (13 * KB, 1, 1)
    odd = laid_out([KB] * 26, [None if i % 6 == 5 else 512 for i in range(26)])  # 4 and 22
    assert (odd.page_bytes, odd.num_full, odd.num_window) == (2 * KB, 2, 11)
    mistral = laid_out([KB] * 5, [4096] * 5)
    assert (mistral.page_bytes, mistral.num_full, mistral.num_window) == (5 * KB, 0, 1)


def test_without_windows_a_block_is_one_page() -> None:
    for windows, grouped in (([None] * 4, True), ([None, 32, None, 32], False)):
        layout = laid_out([KB] * 4, windows, grouped)
        assert (layout.num_pages, layout.window, layout.page_bytes) == (1, None, 4 * KB)
        assert layout.needs(16, 512) is None


def test_layers_of_several_head_sizes_share_pages() -> None:
    windows: list[int | None] = [None if i % 6 == 5 else 1024 for i in range(12)]
    sizes = [4 * KB if window is None else 2 * KB for window in windows]
    layout = laid_out(sizes, windows)
    assert layout.block_bytes == sum(sizes)  # 2 x 4 KB beside 10 x 2 KB: nothing is wasted
    assert (layout.page_bytes, layout.num_full, layout.num_window) == (4 * KB, 2, 5)
    uneven = laid_out([3 * KB if window is None else 2 * KB for window in windows], windows)
    assert uneven.num_window and uneven.block_bytes <= 1.125 * (2 * 3 + 10 * 2) * KB


def test_where_padding_would_waste_too_much_a_block_stays_one_page() -> None:
    layout = laid_out([7 * KB, 1 * KB], [None, 64])
    assert (layout.num_pages, layout.window) == (1, None)


def test_several_windows_are_kept_for_the_widest() -> None:
    assert laid_out([KB] * 4, [None, 32, 64, None]).window == 64


def first_read(position: int, window: int) -> int:
    """The formula of attention: a row at ``position`` sees position - window + 1 .. position."""
    return max(0, position - window + 1)


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 33])
def test_a_block_is_passed_exactly_when_no_later_row_reads_it(block_size: int, window: int) -> None:
    needs = PageNeeds(block_size, 1, 1, window, 8)
    for num_computed in range(100):
        read = {position // block_size for row in range(num_computed, 110) for position in range(first_read(row, window), row + 1)}
        assert needs.num_passed(num_computed) == min(read)


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("window", [1, 5, 16, 40])
@pytest.mark.parametrize("parts", [(1, 5), (3, 1), (0, 2)])
def test_needs_hold_for_a_sequence_computed_in_chunks(block_size: int, window: int, parts: tuple[int, int]) -> None:
    """Whatever the chunks, nothing beyond the peak is ever held; and what is missing half-way is enough for each step of the rest."""
    num_tokens = 137
    for chunk in (1, 3, 16, 29):
        needs = PageNeeds(block_size, *parts, window, chunk)
        promised = list[int]()
        for computed in range(0, num_tokens, chunk):
            num_blocks = -(-computed // block_size)
            held = needs.num_full * num_blocks + needs.num_window * (num_blocks - needs.num_passed(computed))
            promised.append(held + needs.missing(num_tokens, num_blocks, computed))
            num_blocks = -(-min(num_tokens, computed + chunk) // block_size)
            assert needs.num_full * num_blocks + needs.num_window * (num_blocks - needs.num_passed(computed)) <= min(promised)
        assert promised[0] == needs.peak(num_tokens) <= needs.num_pages * -(-num_tokens // block_size)


@pytest.mark.parametrize("parts", [(1, 5), (3, 1), (0, 2)])
def test_the_longest_sequence_of_a_pool(parts: tuple[int, int]) -> None:
    needs = PageNeeds(4, *parts, 9, 7)
    for num_blocks in range(1, 40):
        num_pages, num_ids = num_blocks * needs.num_pages, 50
        most = needs.most_tokens(num_pages, num_ids)
        fits = [n for n in range(1, 4 * num_ids + 1) if needs.peak(n) <= num_pages]
        assert most == max(fits)
