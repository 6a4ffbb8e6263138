"""The cost of a step, learned online from the steps that were run: non-negative least squares with forgetting.

Seconds are a weighted sum. Without anything known beforehand it is of what a step holds (``StepShape``): rows, row-position pairs,
positions read, sequences, logit rows, and one. Where the machine was calibrated it is of the three parts of that cost (``parts_of``: the
step by itself, its rows, their attention), whose weights begin at 1: then what is learned is by how much the calibration is off. Owns the
weights and their fit, and says how far off it has been. Reads no clock and knows no model.

The method:

- **Relative errors** are minimised (each observation is divided by its seconds), so that a step of 3 ms counts as much as one of 300.
- **Forgetting by size class.** Observations age only when others of their class (rows, to a power of two) come. However long streams
  decode undisturbed, what was learned of prompt chunks stays; with one memory for all (the textbook's recursive least squares) it would
  fade, and the first chunk of the next prompt would be a guess.
- **Non-negative weights**, found by coordinate descent from the last ones (Franc, Hlaváč & Navara, 2005): more work never costs less,
  and a direction that the data does not tell apart stays as it was. Rows come first in the order, so a first observation prices everything
  by the row: that is dear, and caution is what an unknown machine calls for. A calibration counts as some observations of its own, so
  that a part which no step has shown stays at the pace of all.
- **Outliers** that stand alone (a step that the operating system held up) are cut to a multiple of the usual error before they are taken
  in. Two in a row on the same side are the machine's new pace: all that was learned is scaled by the smaller of the two ratios, at most by
  four, so that steps of every size follow at once; what is over is cut. So no step moves a prediction far, a process that was paused
  twice in a row is believed to be slow for two steps, and nothing of it stays.
"""

from __future__ import annotations

import statistics
from collections import deque
from operator import mul

from octavo.core.cost import StepShape
from octavo.core.step import StepPlan, StepResult
from octavo.costs.coefficients import Coefficients

_MEMORY = 0.95  # weight of an observation once the next one of its class is there: about the last 20 count
_NUM_SWEEPS = 4  # of coordinate descent per observation; the next observation goes on where this one stopped
_NUM_FEATURES = 6
_NUM_PARTS = 3  # of a calibrated cost
_CALIBRATION_WEIGHT = 0.1  # of what a calibration says of each part, in observations
_MIN_CUT = 0.1
_CUT_ERRORS = 6.0  # an outlier is off by more than this multiple of the median error
_MAX_PACE_CHANGE = 4.0  # of two steps in a row
_FIRST_OVERRUN = 0.2  # until there are enough steps to tell
_FEW = 8
_FEW_OF_CLASS = 2.8  # three observations of a size class, aged: from then on a step of that size can be an outlier
_REACH = 4  # a prediction is trusted up to this multiple of the largest step seen
_FIRST_ROWS = 16

_Row = list[float]


class FittedCost:
    """A CostModel that learns, of the device alone. ``base``: what was calibrated; without it every step costs nothing before the first
    observation."""

    def __init__(self, base: Coefficients | None = None) -> None:
        self.base = base
        # What is learned: of the calibrated parts, else seconds per row, pair, position, sequence, logit row, step.
        self.factors: _Row = [0.0] * _NUM_FEATURES if base is None else [1.0] * _NUM_PARTS
        self._mean_prices: _Row = [] if base is None else base.mean_prices()
        self.num_observations = 0 if base is None else base.num_steps
        self._max_rows = 0 if base is None else base.max_rows
        self._errors: deque[float] = deque(maxlen=64)  # |predicted / observed - 1|
        self._ratios: deque[float] = deque(maxlen=32)  # observed / predicted, of steps that held more than decoding
        self._paces: deque[float] = deque(maxlen=64)  # observed / calibrated
        self._outlier = 1.0  # observed / predicted of the last step if it was an outlier, else 1
        self._num_decoding_steps = 0
        self._total = _Moments(len(self.factors))
        if base is not None:
            self._total.expect_ones(_CALIBRATION_WEIGHT)
        self._classes: dict[int, _Moments] = {}

    def seconds(self, plan: StepPlan) -> float:
        """Predicted seconds of executing ``plan``."""
        return self.seconds_of(StepShape.of(plan))

    def seconds_of(self, shape: StepShape) -> float:
        """As ``seconds`` of any plan of this shape."""
        if self.base is not None:
            fixed, rows, attention = self.base.parts_of(shape)
            x, y, z = self.factors
            return x * fixed + y * rows + z * attention
        a, b, c, d, e, f = self.factors
        return (
            a * shape.num_rows + b * shape.num_pairs + c * shape.num_context + d * shape.num_sequences + e * shape.num_logit_rows + f
        )

    @property
    def weights(self) -> _Row:
        """Seconds per row, pair, position, sequence, logit row, step. From a calibration, whose rows have no one price, rows at their mean
        price in the largest step: to split a step by, not to price one."""
        if self.base is None:
            return list(self.factors)
        fixed, rows, attention = self.factors
        a, b, c, d, e, f = self._mean_prices
        return [rows * a, attention * b, attention * c, rows * d, rows * e, fixed * f]

    @property
    def max_rows(self) -> int:
        """Rows of the largest step seen."""
        return self._max_rows

    @property
    def max_trusted_rows(self) -> int:
        """Rows up to which a prediction is more than a guess: a few times the largest step seen."""
        return max(_FIRST_ROWS, _REACH * self._max_rows)

    @property
    def median_error(self) -> float | None:
        """Median of |predicted / observed - 1| over the last 64 steps, each told before it was learned from. Before there are any that of
        the calibration, None without one."""
        errors = list(self._errors)
        if errors:
            return statistics.median(errors)
        return None if self.base is None else self.base.median_error

    @property
    def pace(self) -> float | None:
        """Median of observed / calibrated seconds over the last 64 steps: 1 while the machine is as it was. None without a calibration, and
        before the first step."""
        paces = list(self._paces)
        return statistics.median(paces) if paces else None

    @property
    def overrun(self) -> float:
        """How much longer than predicted, as a share, a step with prompt tokens may take: nine of ten of the last 32 stayed below."""
        ratios = sorted(self._ratios)
        ninth_decile = max(0.0, ratios[len(ratios) * 9 // 10] - 1.0) if ratios else 0.0
        return ninth_decile if len(ratios) >= _FEW else max(ninth_decile, _FIRST_OVERRUN)

    def step_done(self, plan: StepPlan, result: StepResult, one_in: int = 1, shape: StepShape | None = None) -> None:
        """Learn from a step that was run, moves of blocks left out. ``one_in``: fitting takes time that short steps would feel; of steps
        that only decode, which are all alike, one in so many will do. ``shape``: the plan's, from who has it."""
        if one_in > 1 and plan.num_tokens <= len(plan.slices):
            self._num_decoding_steps += 1
            if self._num_decoding_steps % one_in:
                return
        self.observe(StepShape.of(plan) if shape is None else shape, result.seconds - result.move_seconds)

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Learn that a step of this shape took ``seconds``. Steps without rows, or too short to measure, are ignored."""
        if shape.num_rows == 0 or not seconds > 0.0:
            return
        seconds = self._judge(shape, seconds)
        self.num_observations += 1
        self._max_rows = max(self._max_rows, shape.num_rows)
        scale = 1.0 / seconds
        moments = self._classes.setdefault(shape.num_rows.bit_length(), _Moments(len(self.factors)))
        self._total.add(moments.take([scale * feature for feature in self._features(shape)]))
        self._descend()

    def _features(self, shape: StepShape) -> tuple[float, ...]:
        """What the factors are of."""
        if self.base is not None:
            return self.base.parts_of(shape)
        return shape.num_rows, shape.num_pairs, shape.num_context, shape.num_sequences, shape.num_logit_rows, 1.0

    def _judge(self, shape: StepShape, seconds: float) -> float:
        """Note how far off the prediction was; return the seconds to learn from, an outlier cut."""
        predicted = self.seconds_of(shape)
        if not predicted > 0.0:
            return seconds
        ratio = seconds / predicted
        cut = 1.0 + max(_MIN_CUT, _CUT_ERRORS * (self.median_error or 0.0))
        self._errors.append(abs(1.0 / ratio - 1.0))
        if shape.num_rows > shape.num_sequences:
            self._ratios.append(ratio)
        if self.base is not None:
            self._paces.append(seconds / sum(self.base.parts_of(shape)))
        if 1.0 / cut <= ratio <= cut or not self._knows_class(shape):
            self._outlier = 1.0
            return seconds
        last, self._outlier = self._outlier, ratio
        if (last > 1.0) == (ratio > 1.0) and last != 1.0:  # the second in a row
            self._change_pace(min(last, ratio) if ratio > 1.0 else max(last, ratio))
            self._outlier = 1.0
            predicted = self.seconds_of(shape)
        return max(predicted / cut, min(predicted * cut, seconds))

    def _knows_class(self, shape: StepShape) -> bool:
        """Whether enough is known of steps about this size for one of them to be an outlier."""
        if self.base is not None and shape.num_rows <= _REACH * self.base.max_rows:
            return True
        known = self._classes.get(shape.num_rows.bit_length())
        return known is not None and known.count >= _FEW_OF_CLASS

    def _change_pace(self, factor: float) -> None:
        """Every step takes ``factor`` times what it took, within limits: scale what was learned."""
        factor = max(1.0 / _MAX_PACE_CHANGE, min(_MAX_PACE_CHANGE, factor))
        for moments in (self._total, *self._classes.values()):
            moments.scale(1.0 / factor)
        self.factors[:] = [factor * one for one in self.factors]

    def _descend(self) -> None:
        """Coordinate descent towards the non-negative factors of least squared relative error."""
        weights, rows, targets = self.factors, self._total.products, self._total.sums
        for _ in range(_NUM_SWEEPS):
            for j, row in enumerate(rows):
                curvature = row[j]
                if curvature > 0.0:
                    slope = targets[j] - sum(map(mul, row, weights))
                    weights[j] = max(0.0, weights[j] + slope / curvature)


class _Moments:
    """Sums over observations x (whose target is 1): ``products`` of x_i x_j, ``sums`` of x_i, ``count`` of the observations' weight."""

    __slots__ = ("count", "products", "sums")

    def __init__(self, num_features: int) -> None:
        self.products: list[_Row] = [[0.0] * num_features for _ in range(num_features)]
        self.sums: _Row = [0.0] * num_features
        self.count = 0.0

    def expect_ones(self, weight: float) -> None:
        """As if each feature had been seen alone, with the weight 1, in ``weight`` observations."""
        for j, row in enumerate(self.products):
            row[j] += weight
            self.sums[j] += weight

    def take(self, x: _Row) -> tuple[list[_Row], _Row]:
        """Age what is here, add ``x``, and return by how much that changed products and sums."""
        fading = _MEMORY - 1.0
        changes = [[fading * p + xi * xj for p, xj in zip(row, x, strict=True)] for row, xi in zip(self.products, x, strict=True)]
        change = [fading * s + xi for s, xi in zip(self.sums, x, strict=True)]
        self.count += fading * self.count + 1.0
        self.add((changes, change))
        return changes, change

    def scale(self, factor: float) -> None:
        """As if every x had been ``factor`` times as large."""
        self.sums[:] = [factor * value for value in self.sums]
        for row in self.products:
            row[:] = [factor * factor * value for value in row]

    def add(self, changes: tuple[list[_Row], _Row]) -> None:
        for row, change in zip(self.products, changes[0], strict=True):
            row[:] = [p + c for p, c in zip(row, change, strict=True)]
        self.sums[:] = [s + c for s, c in zip(self.sums, changes[1], strict=True)]
