"""The price of the steps of a recorded window: of whatever sizes came along, host time in it. Pure arithmetic.

``fitting`` measures an engine on purpose, steps of every size; here they are what clients asked for. So of rows there is one price and no
pieces, which few steps would bend where the next one matters. Of sizes that were not seen a straight line is a guess: where the engine has
a calibrated cost, its parts (the step by itself, its rows, their attention; the host's with the first two) are kept in their form and
brought to the window's pace. Only a calibration that the window's own prices beat by far is let go: it is of another time.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence as Seq
from dataclasses import replace

from octavo.core.cost import StepShape
from octavo.costs.coefficients import Coefficients
from octavo.costs.fitting import FitError, MeasuredStep, device_fit, to_the_mean
from octavo.costs.least_errors import nonnegative

MIN_STEPS = 8
_BEATEN = 2.0  # the median error of a calibration over that of the window's own prices
_LEAST_ERROR = 0.02  # below which errors are the machine's
_SHOWN = 0.05  # of the steps' time
_CORE = 0.1  # errors up to it count by their squares: steps are few, and of a machine that is busy

Sample = Seq[float]
"""(rows, sequences, logit rows, positions read, pairs, seconds) of a step."""


def fit_window(samples: Seq[Sample], base: Coefficients | None = None, about: str = "") -> Coefficients:
    """The prices of ``samples``. ``base``: of the engine's calibration. Steps without rows or seconds are left out. Raises FitError when
    there are fewer than MIN_STEPS of them."""
    steps = [_step(sample) for sample in samples if sample[0] > 0 and sample[-1] > 0.0]
    if len(steps) < MIN_STEPS:
        raise FitError(f"steps: {len(steps)} are not enough to fit a cost on; at least {MIN_STEPS}")
    found = _finished(device_fit(steps, has_pieces=False, core=_CORE), steps, about)
    if base is None:
        return found
    based = _finished(_at_pace(base, steps), steps, about)
    return based if _error(based) <= _BEATEN * max(_error(found), _LEAST_ERROR) else found


def _step(sample: Sample) -> MeasuredStep:
    *counts, seconds = sample
    return MeasuredStep(StepShape(*map(int, counts)), "", seconds, seconds)


def _finished(cost: Coefficients, steps: Seq[MeasuredStep], about: str) -> Coefficients:
    cost = to_the_mean(cost, steps)
    error = statistics.median(abs(cost.seconds_of(step.shape) / step.total_s - 1.0) for step in steps)
    max_rows = max(cost.max_rows, *(step.shape.num_rows for step in steps))
    return replace(cost, median_error=error, max_rows=max_rows, num_steps=len(steps), about=about)


def _error(cost: Coefficients) -> float:
    assert cost.median_error is not None
    return cost.median_error


def _at_pace(base: Coefficients, steps: Seq[MeasuredStep]) -> Coefficients:
    """``base`` with each part at what the steps say; one that makes up less than ``_SHOWN`` of them stays at the pace of all."""
    shapes, seconds = [step.shape for step in steps], [step.total_s for step in steps]
    pace = statistics.median(step.total_s / max(base.seconds_of(step.shape), 1e-12) for step in steps)
    parts = [_parts(base, shape) for shape in shapes]
    num_alone = math.ceil(_SHOWN * len(steps))
    alone = [[float(i == j) for j in range(3)] for i in range(3)] * num_alone  # as if each had been seen by itself so many times
    fixed, rows, attention = nonnegative([*parts, *alone], [*seconds, *[pace] * len(alone)], [pace] * 3)
    return replace(
        base.corrected([fixed, rows, attention]), host_s=fixed * base.host_s, host_s_per_sequence=rows * base.host_s_per_sequence,
        errors={}, fitted_for=None,
    )  # fmt: skip


def _parts(base: Coefficients, shape: StepShape) -> list[float]:
    fixed, rows, attention = base.parts_of(shape)
    return [fixed + base.host_s, rows + base.host_s_per_sequence * shape.num_sequences, attention]
