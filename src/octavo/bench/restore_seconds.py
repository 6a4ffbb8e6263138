"""What it takes to bring one preempted sequence back, by computing its tokens again and by moving its blocks: predicted, and measured.

The prediction is that of the engine's own PreemptionModel, by which ``--preemption auto`` chooses. Measured are steps made by hand on the
engine's backend: one that decodes a sequence, with and without the rows to be computed again; and the moves of the blocks to host memory
and back. In turn, medians. The KV of the pool is overwritten: nothing may run, and nothing may be asked of the engine afterwards.
"""

from __future__ import annotations

import random
import statistics
from array import array
from dataclasses import asdict, dataclass
from typing import Any

from octavo.core.step import BlockMove, SequenceSlice, StepPlan
from octavo.engine.engine import Engine

NUM_ROUNDS = 7
MAX_ROWS = 512  # of one step


@dataclass(frozen=True, slots=True)
class RestoreSeconds:
    """Seconds for one sequence of ``num_tokens``. Swapping is both ways: out when it gives way, in when it comes back."""

    num_tokens: int
    recompute_predicted_s: float
    recompute_measured_s: float
    swap_predicted_s: float
    swap_measured_s: float

    def record(self) -> dict[str, Any]:
        return {name: round(value, 7) for name, value in asdict(self).items()}


def restore_seconds(engine: Engine, num_tokens: int) -> RestoreSeconds:
    """Of an idle engine that chooses between the two (``preemption`` auto), and whose pool holds the sequence and one block more."""
    model, block_size = engine.preemption_model, engine.config.cache.block_size
    num_blocks = -(-num_tokens // block_size)
    assert model is not None and not engine.has_work and num_blocks < engine.num_kv_blocks
    rng = random.Random(3)
    tokens = [rng.randrange(engine.backend.vocab_size) for _ in range(num_tokens)]
    blocks = range(1, 1 + num_blocks)  # block 0 is that of the sequence that decodes
    recompute, swap = list[float](), list[float]()
    for _ in range(1 + NUM_ROUNDS):  # the first warms up
        recompute.append(_recompute_seconds(engine, tokens, array("i", blocks)))
        swap.append(_swap_seconds(engine, blocks))
    return RestoreSeconds(
        num_tokens,
        model.recompute_seconds(num_tokens),
        statistics.median(recompute[1:]),
        model.swap_seconds(2 * num_blocks),
        statistics.median(swap[1:]),
    )


def _recompute_seconds(engine: Engine, tokens: list[int], table: array[int]) -> float:
    """What steps get longer by when they compute ``tokens`` as well."""
    seconds = 0.0
    for start in range(0, len(tokens), MAX_ROWS):
        rows = SequenceSlice(1, start, tokens[start : start + MAX_ROWS], table)
        seconds += _step_seconds(engine, [rows]) - _step_seconds(engine, [])
    return seconds


def _step_seconds(engine: Engine, others: list[SequenceSlice]) -> float:
    """Of a step that decodes one sequence, beside ``others``."""
    return engine.backend.execute(StepPlan(0, [SequenceSlice(0, 0, [0], array("i", [0])), *others])).seconds


def _swap_seconds(engine: Engine, blocks: range) -> float:
    moves = [BlockMove(block, i) for i, block in enumerate(blocks)]
    return sum(engine.backend.execute(plan).move_seconds for plan in (StepPlan(0, block_saves=moves), StepPlan(0, block_loads=moves)))
