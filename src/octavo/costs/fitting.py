"""A step cost fitted on the measured steps of an engine, and how far off it is on steps that were kept out of the fit. Pure arithmetic.

The form is that of ``Coefficients``: prices of pairs, positions, sequences and of a step; rows and logit rows by straight pieces, since
reading weights costs the same for one row as for a few, and no straight line has both ends. The method:

- **Least absolute relative errors, no price below zero** (``least_errors``), from a first fit in which all pieces have one price, so that
  pieces of which no step tells keep that of their neighbours.
- **A mean, in the end.** A simulation adds steps up, and steps are held up more often than they are hurried: all prices are multiplied by
  what the steps took together over what they were predicted to, each at most ``_HELD_UP`` times its prediction.

Device and host are fitted apart: a step's time beside the device goes by its sequences. Either has a price of its own for what a step
takes more that follows on idleness, when threads sleep and caches are cold. Where the steps are few and of whatever sizes came along,
``window_fit`` does with the first fit alone.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import NamedTuple

from octavo.core.cost import StepShape
from octavo.core.step import StepPlan, StepResult
from octavo.costs.coefficients import Coefficients, KindErrors, Ramp
from octavo.costs.least_errors import CORE, Row, nonnegative

KINDS = ("prefill", "decode", "mixed")
MIN_STEPS = 30
_ROW_KNOTS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096)
_LOGIT_KNOTS = (1, 4, 16, 64, 256)
_HELD_UP = 3.0


class FitError(ValueError):
    """There are too few steps to fit."""


class MeasuredStep(NamedTuple):
    """``device_s``: on the device, moves of blocks left out. ``total_s``: all the time until the next step could begin.

    ``follows_idleness``: no step ran before it. ``kind``: one of KINDS.
    """

    shape: StepShape
    kind: str
    device_s: float
    total_s: float
    follows_idleness: bool = False


def measured_step(plan: StepPlan, result: StepResult, total_s: float, follows_idleness: bool = False) -> MeasuredStep:
    device_s = result.seconds - result.move_seconds
    return MeasuredStep(StepShape.of(plan), kind_of(plan), device_s, total_s - result.move_seconds, follows_idleness)


def kind_of(plan: StepPlan) -> str:
    """What a step mostly is. A slice decodes when it has something before it and, drafts apart, one row; all others are prompts."""
    num_decoding = sum(1 for piece in plan.slices if piece.start and len(piece.token_ids) - piece.num_drafts == 1)
    if num_decoding == len(plan.slices):
        return "decode"
    return "mixed" if num_decoding else "prefill"


def fit(steps: Iterable[MeasuredStep], about: str = "") -> Coefficients:
    """The prices that ``steps`` show; ``wake_s`` is that of the step alone. Raises FitError for fewer than MIN_STEPS."""
    kept = [step for step in steps if step.shape.num_rows and step.device_s > 0.0]
    if len(kept) < MIN_STEPS:
        raise FitError(f"steps: {len(kept)} were measured; at least {MIN_STEPS} are needed")
    device = device_fit(kept)
    host_s, per_sequence, host_wake_s = nonnegative(
        [[1.0, step.shape.num_sequences, step.follows_idleness] for step in kept],
        [max(1e-7, step.total_s - step.device_s) for step in kept],
    )
    fitted = replace(
        device, host_s=host_s, host_s_per_sequence=per_sequence, wake_s=device.wake_s + host_wake_s, num_steps=len(kept),
        max_rows=max(step.shape.num_rows for step in kept), about=about,
    )  # fmt: skip
    return to_the_mean(fitted, kept)


def predicted_s(cost: Coefficients, step: MeasuredStep) -> float:
    """What ``cost`` says of the seconds of a step."""
    return cost.seconds_of(step.shape) + (cost.wake_s if step.follows_idleness else 0.0)


def to_the_mean(cost: Coefficients, steps: Seq[MeasuredStep]) -> Coefficients:
    """``cost`` at the pace at which ``steps`` take together what it says, those that were held up cut. Unchanged if it says nothing."""
    predicted = [predicted_s(cost, step) for step in steps]
    took = math.fsum(min(step.total_s, _HELD_UP * seconds) for step, seconds in zip(steps, predicted, strict=True))
    return cost.times(took / math.fsum(predicted)) if any(predicted) else cost


def errors_of(cost: Coefficients, steps: Iterable[MeasuredStep]) -> dict[str, KindErrors]:
    """By kind of step, and of "all": how far ``cost``, as ``fit`` gives it, is off on ``steps``, which it has not seen. Kinds without a
    step are left out."""
    by_kind: dict[str, list[tuple[float, float]]] = {}
    for step in steps:
        if step.total_s > 0.0:
            pair = predicted_s(cost, step), step.total_s
            by_kind.setdefault(step.kind, []).append(pair)
            by_kind.setdefault("all", []).append(pair)
    return {kind: _errors(by_kind[kind]) for kind in (*KINDS, "all") if kind in by_kind}


def _errors(pairs: list[tuple[float, float]]) -> KindErrors:
    """Of (predicted, taken)."""
    off = sorted(abs(predicted / took - 1.0) for predicted, took in pairs)
    bias = math.fsum(predicted for predicted, _ in pairs) / math.fsum(took for _, took in pairs) - 1.0
    return KindErrors(len(pairs), statistics.median(off), off[math.ceil(0.9 * len(off)) - 1], bias)


def waking_s(cost: Coefficients, firsts: Iterable[tuple[StepShape, float]]) -> float:
    """What a step that follows on idleness takes more, the way of its request to it and of its token back included: the median over (its
    shape, seconds from the request to its first token), at least 0; without any that of the step alone."""
    more = [seconds - cost.seconds_of(shape) for shape, seconds in firsts]
    return max(0.0, statistics.median(more)) if more else cost.wake_s


# --- the fit ----------------------------------------------------------------------------------------------------------------------------


def device_fit(steps: Seq[MeasuredStep], has_pieces: bool = True, core: float = CORE) -> Coefficients:
    """The prices on the device. ``has_pieces``: rows and logit rows by pieces; else each has one price, at whatever number. ``core``: as of
    ``nonnegative``."""
    shapes, seconds, wakes = [s.shape for s in steps], [s.device_s for s in steps], [float(s.follows_idleness) for s in steps]
    row_ends = logit_ends = [math.inf]
    weights = nonnegative(_rows(shapes, wakes, row_ends, logit_ends), seconds, core=core)
    if has_pieces:
        row_ends = _ends(_ROW_KNOTS, max(shape.num_rows for shape in shapes))
        logit_ends = _ends(_LOGIT_KNOTS, max(shape.num_logit_rows for shape in shapes), first=0.0)
        wake_s, f, a, c, b, e, d = weights
        start = [wake_s, f, *[a] * len(row_ends), c, b, *[e] * len(logit_ends), d]
        weights = nonnegative(_rows(shapes, wakes, row_ends, logit_ends), seconds, start, core)
    wake_s, f, *prices = weights
    rows, (c, b), logits, d = prices[: len(row_ends)], prices[len(row_ends) :][:2], prices[len(row_ends) + 2 : -1], prices[-1]
    row_ramp = Ramp(((1.0, 0.0), *zip(row_ends, rows, strict=True)))
    logit_ramp = Ramp(tuple(zip(logit_ends, logits, strict=True)))
    return Coefficients((0.0, b, c, d, 0.0, f), rows=row_ramp, logit_rows=logit_ramp, wake_s=wake_s)


def _ends(knots: Seq[int], most: int, first: float = 1.0) -> list[float]:
    """Where pieces end: at the knots below three quarters of the largest number seen; the last has no end."""
    return [*(float(knot) for knot in knots if first < knot <= 0.75 * most), math.inf]


def _rows(shapes: Seq[StepShape], wakes: Seq[float], row_ends: Seq[float], logit_ends: Seq[float]) -> list[Row]:
    """Features [steps]: a wake, the step itself with its first row, rows, positions, pairs, logit rows, sequences.

    The order is that in which what steps do not tell apart is explained. Rows before positions: where nothing but prompts from their
    beginning was seen, tokens behind a long context are not to be dear for it. Sequences last: where each step held one, another one
    beside it is thought to cost its rows and no more.
    """
    found = []
    for shape, wake in zip(shapes, wakes, strict=True):
        rows, logits = _pieces(shape.num_rows, row_ends, 1.0), _pieces(shape.num_logit_rows, logit_ends, 0.0)
        found.append([wake, 1.0, *rows, shape.num_context, shape.num_pairs, *logits, shape.num_sequences])
    return found


def _pieces(number: int, ends: Seq[float], first: float) -> Row:
    """How much of ``number`` lies in each piece, the first of which begins at ``first``."""
    begins = [first, *ends]
    return [max(0.0, min(number, end) - begin) for begin, end in zip(begins, ends, strict=False)]
