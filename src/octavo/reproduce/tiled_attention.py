"""Attention in tiles: the same result, less memory, and how near to the machine's peak, measured (Dao, FlashAttention-2, 2023).

The published ratios are of GPU kernels against other GPU kernels. What a CPU can show is what does not depend on them: that tiles change
nothing but the rounding, that memory grows with the prompt and not with its square, and that scores in memory cost time here too.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from octavo.bench.attention_whole import Shape, WholePrompt, measure_whole, peak_growth
from octavo.bench.in_process import Engines
from octavo.bench.kernels import KernelSpeed, attention_speed
from octavo.bench.limits import measure_limits
from octavo.engine.engine import Engine
from octavo.reproduce.figure import MEASURED, Figure, Line, Plot, Row
from octavo.reproduce.measured import NOT_TRANSFERABLE, PROBE_S, describe, times
from octavo.reproduce.setup import Setup

NUMBER = 20
NAME = "tiled-attention"
ROUNDING = 1e-5  # float32: errors of some thousand sums of products stay far below, a lost tile far above
LINEAR = 1.5  # growth of memory over that of the prompt: 1 is linear, and a square would have the ratio of the prompts


@dataclass(frozen=True, slots=True)
class Case:
    """``rows`` of prompts beside all their scores; ``long_rows``: for memory alone. Both rising."""

    rows: tuple[int, ...]
    long_rows: tuple[int, ...]
    repeat: int
    kv_dtypes: tuple[str, ...] = ("bf16", "f16", "f32", "int8")
    budget_s: float = 0.3


FULL, QUICK = Case((512, 1024, 2048), (2048, 4096, 8192), 5), Case((512, 1024), (1024, 4096), 1, ("bf16",), 0.1)


@dataclass(frozen=True, slots=True)
class Found:
    whole: Seq[WholePrompt]
    memory: dict[int, int | None]  # rows -> bytes that the process grew by
    speeds: Seq[KernelSpeed]  # of the longest of ``rows``, by type of keys and values


def run(setup: Setup) -> Figure:
    case = QUICK if setup.quick else FULL
    with Engines(setup.model, {"": {"num_kv_blocks": 16}}) as engines:
        shape = Shape.of(engines.first)
        return shown(measure(engines.first, case), f"{describe(engines)} {told(case, shape)}", shape.op.heads)


def measure(engine: Engine, case: Case) -> Found:
    shape = Shape.of(engine)
    memory = {rows: peak_growth(shape, rows) for rows in case.long_rows}
    whole = [measure_whole(shape, rows, case.repeat) for rows in case.rows]
    limits = measure_limits(shape.threads, PROBE_S)
    speeds = [attention_speed(shape.isa, limits, kv_dtype, max(case.rows), False, case.budget_s) for kv_dtype in case.kv_dtypes]
    return Found(whole, memory, speeds)


def told(case: Case, shape: Shape) -> str:
    return (
        f"One layer ({shape}) on random numbers, causal, a whole prompt in one step; error against float64 with all scores, in parts of "
        f"the largest value, float32 keys and values; times of {case.repeat} rounds in turn with NumPy, which writes all scores out in "
        "float32, medians. Memory: what the process grows by at most during the step. Peak: operations that causal attention needs, 4 x "
        "heads x head_dim a pair, over the machine's peak of dot products; bf16 queries are two numbers each, so at most 2/3 of it."
    )


def shown(found: Found, setup: str, num_heads: int) -> Figure:
    worst, num_same = max(found.whole, key=lambda one: one.error), sum(one.same_in_pieces for one in found.whole)
    in_pieces = f"{num_same} of {len(found.whole)} prompts"
    rows = [
        Row("difference to exact attention", "none but rounding", f"{worst.error:.1e} at {worst.num_rows} tokens", worst.error <= ROUNDING),
        Row("a prompt in pieces gives the same bits", "-", in_pieces, num_same == len(found.whole)),
    ]
    rows += _memory_rows(found.memory, num_heads)
    for one in found.whole:
        faster = one.scores_s / one.tiled_s
        ours = f"{times(faster)} ({1e3 * one.tiled_s:.1f} against {1e3 * one.scores_s:.1f} ms)"
        rows.append(Row(f"over scores in memory, {one.num_rows} tokens", "3x to 10x (PyTorch, A100)", ours, faster > 1))
    for speed in found.speeds:
        share = "no peak known" if speed.share is None else f"{100 * speed.share:.0f} % of {speed.limit}"
        ours = f"{share}, {speed.operations_per_s / 1e9:.0f} GFLOP/s"
        rows.append(Row(f"share of the peak, prompt of {speed.rows}, {speed.format} keys and values", "73 % (fp16, A100)", ours))
    known = [(rows_, grown) for rows_, grown in found.memory.items() if grown is not None]
    lines = [Line("scores in memory", tuple((float(n), _scores_bytes(n, num_heads) / 1e6) for n in found.memory))]
    if known:
        lines.insert(0, Line("in tiles", tuple((float(n), grown / 1e6) for n, grown in known)))
    plot = Plot("Memory of one layer's attention", "MB", lines=tuple(lines), x_label="tokens of the prompt")
    return Figure(NUMBER, "Attention in tiles", MEASURED, setup, rows, (plot,), (NOT_TRANSFERABLE,))


def _memory_rows(memory: dict[int, int | None], num_heads: int) -> list[Row]:
    small, large = min(memory), max(memory)
    few, many = memory[small], memory[large]
    what = f"memory, {small} to {large} tokens"
    if few is None or many is None:
        return [Row(what, "linear in the prompt", "not told by this system")]
    per_row, all_scores = many / large, _scores_bytes(large, num_heads)
    ours = f"{few / 1e6:.1f} to {many / 1e6:.1f} MB ({per_row / 1e3:.1f} kB a token; all scores would take {all_scores / 1e6:.0f} MB)"
    return [Row(what, "linear in the prompt", ours, many <= LINEAR * max(few, 1) * large / small and many < all_scores)]


def _scores_bytes(num_rows: int, num_heads: int) -> int:
    return 4 * num_heads * num_rows * num_rows
