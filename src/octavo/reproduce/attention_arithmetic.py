"""FlashAttention-2 (Dao, 2023): what follows from its published figures by arithmetic, and what its tiles save, counted.

Its speeds are of GPUs and are not made here; that tiles are exact and save memory is measured elsewhere.
"""

from __future__ import annotations

from octavo.reproduce.figure import ARITHMETIC, Figure, Line, Plot, Row
from octavo.reproduce.setup import Setup

NUMBER = 20
NAME = "attention-arithmetic"
PEAK_TFLOPS, OTHER_TFLOPS = 312.0, 19.5  # A100: matrix products in 16 bit, everything else in 32
HEADS, HEAD_DIM, BLOCK = 16, 128, 128
LENGTHS = tuple(2**power for power in range(9, 15))
CLAIMS = (  # what, published, ours from other published figures
    ("operations that are no matrix product are dearer by", "16x", f"{PEAK_TFLOPS / OTHER_TFLOPS:.0f}x"),
    ("230 TFLOP/s forward, of the peak", "73 %", f"{100 * 230 / PEAK_TFLOPS:.0f} %"),
    ("225 TFLOP/s in training, of the peak", "72 %", f"{100 * 225 / PEAK_TFLOPS:.0f} %"),
    ("training of GPT3-2.7B at 8k, over FlashAttention (225 / 175)", "1.3x", f"{225 / 175:.1f}x"),
    ("the same, over no FlashAttention (225 / 80)", "2.8x", f"{225 / 80:.1f}x"),
)


def run(setup: Setup) -> Figure:
    rows = [Row(what, published, ours, ours == published) for what, published, ours in CLAIMS]
    longest = LENGTHS[-1]
    rows.append(Row(f"tiles of a causal {longest}-token sequence that are skipped", "", f"{100 * skipped_share(longest):.1f} %"))
    rows.append(Row(f"scores of a {longest}-token sequence, {HEADS} heads, 16 bit", "", f"{scores_bytes(longest) / 2**30:.0f} GiB"))
    rows.append(Row("what is kept of them: a 32-bit sum per row and head", "", f"{kept_bytes(longest) / 2**20:.0f} MiB"))
    lines = tuple(
        Line(label, tuple((float(length), float(count(length))) for length in LENGTHS))
        for label, count in (("all scores", scores_bytes), ("what is kept of them", kept_bytes))
    )
    plot = Plot("Memory of one layer's scores", "bytes", lines=lines, x_label="tokens in the sequence", log_x=True, log_y=True)
    how = (
        f"A100: {PEAK_TFLOPS:g} TFLOP/s in matrix products, {OTHER_TFLOPS:g} otherwise. Tiles of {BLOCK} x {BLOCK}, {HEADS} heads of "
        f"{HEAD_DIM}. Published shares and ratios recomputed from published speeds."
    )
    notes = ("230 of 312 is 73.7 %: the published 73 % is cut off, not rounded.",)
    return Figure(NUMBER, "FlashAttention-2 by arithmetic", ARITHMETIC, how, rows, (plot,), notes)


def skipped_share(length: int) -> float:
    """Of the square tiles of a causal sequence, those wholly above the diagonal."""
    blocks = length // BLOCK
    return (blocks - 1) / (2 * blocks)


def scores_bytes(length: int) -> int:
    return 2 * HEADS * length * length


def kept_bytes(length: int) -> int:
    return 4 * HEADS * length
