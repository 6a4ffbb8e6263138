"""The order in which a plan moves KV blocks, for every backend: all saves, then loads and copies as they were planned."""

from __future__ import annotations

import time
from collections.abc import Callable

from octavo.core.step import BlockMove, StepPlan


def run_block_moves(
    plan: StepPlan, move: Callable[[list[BlockMove], list[BlockMove]], None], copy_block: Callable[[int, int], None]
) -> float:
    """``move`` does some saves and then some loads, ``copy_block`` copies a pool block to another. Returns the seconds that moves took."""
    saves, seconds = plan.block_saves, 0.0
    for loads, copies in plan.loads_and_copies():
        if saves or loads:
            started = time.perf_counter()
            move(saves, loads)
            seconds += time.perf_counter() - started
            saves = []
        for copy in copies:
            copy_block(copy.src_block, copy.dst_block)
    return seconds
