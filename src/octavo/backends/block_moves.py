"""The order in which a plan moves KV blocks, for every backend: all saves, then loads and copies as planned; and the pages of a block."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from octavo.core.step import BlockMove, StepPlan

LEFT_OUT = -1  # in place of a page: that part of the block is not there


def pages_of(block: int, pages: Sequence[int], num_columns: int) -> Sequence[int]:
    """The pages of a block by column: those that a plan says, else those that lie there from the beginning."""
    return pages or range(block * num_columns, (block + 1) * num_columns)


def run_block_moves(
    plan: StepPlan,
    move: Callable[[list[BlockMove], list[BlockMove]], None],
    copy_page: Callable[[int, int], None],
    num_columns: int = 1,
) -> float:
    """``move`` does some saves and then some loads, ``copy_page`` copies a page to another; a block has ``num_columns`` of them.

    Returns the seconds that moves took.
    """
    saves, seconds = plan.block_saves, 0.0
    for loads, copies in plan.loads_and_copies():
        if saves or loads:
            started = time.perf_counter()
            move(saves, loads)
            seconds += time.perf_counter() - started
            saves = []
        for copy in copies:
            pages = pages_of(copy.dst_block, copy.dst_pages, num_columns)
            for src, dst in zip(pages_of(copy.src_block, copy.src_pages, num_columns), pages, strict=True):
                if not (copy.src_pages and LEFT_OUT in (src, dst)):
                    copy_page(src, dst)
    return seconds
