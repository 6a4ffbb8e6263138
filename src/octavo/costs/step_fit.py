"""Prices of a step fitted at once on a sample of measured steps: non-negative weighted least squares.

``fitted`` learns on the go, forgets, and sees the device alone; here all steps are at hand, and their seconds may hold the host's time as
well. Owns nothing; reads no clock.

The method: seconds are a weighted sum of what a step holds (``StepShape``). Squared errors are weighted by 1 / predicted^2, found by
reweighting from 1 / measured^2, so that the fit hits the mean of steps of all sizes; the weights are kept from going negative by
coordinate descent (Franc, Hlavac & Navara, 2005). A step that took several times what its like take is cut to that multiple: it was the
machine's, and one in a hundred of them would tilt the prices of a whole size.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence as Seq

from octavo.costs.coefficients import Coefficients

NUM_FEATURES = 6
MIN_STEPS = 8
_CUT = 3.0  # times what was predicted
_NUM_ROUNDS = 4  # of reweighting
_NUM_SWEEPS = 400
_ORDER = (0, 5, 2, 1, 4, 3)
"""Of the descent: what the steps do not tell apart goes to the first that explains it. Rows, then the step itself, which reads the weights
whatever it holds; sequences last: where each step held one, another one beside it is thought to cost its rows and no more."""

Sample = Seq[float]
"""(rows, sequences, logit rows, positions read, pairs, seconds) of a step."""


def fit_steps(steps: Seq[Sample], about: str = "") -> Coefficients:
    """The prices of ``steps``. Raises ValueError when there are fewer than MIN_STEPS of them."""
    rows = [(_features(step), step[-1]) for step in steps if step[0] > 0 and step[-1] > 0.0]
    if len(rows) < MIN_STEPS:
        raise ValueError(f"steps: {len(rows)} are not enough to fit a cost on; at least {MIN_STEPS}")
    weights = _solve([(x, s, 1.0 / (s * s)) for x, s in rows], [0.0] * NUM_FEATURES)
    for _ in range(_NUM_ROUNDS):
        weighted = []
        for x, seconds in rows:
            predicted = max(_price(weights, x), 1e-9)
            weighted.append((x, min(seconds, _CUT * predicted), 1.0 / (predicted * predicted)))
        weights = _solve(weighted, weights)
    error = statistics.median(abs(_price(weights, x) / seconds - 1.0) for x, seconds in rows)
    a, b, c, d, e, f = weights
    return Coefficients((a, b, c, d, e, f), 0.0, error, int(max(x[0] for x, _ in rows)), about)


def _features(step: Sample) -> tuple[float, ...]:
    """In the order of ``Coefficients.seconds_per``."""
    num_rows, num_sequences, num_logit_rows, num_context, num_pairs, _ = step
    return (num_rows, num_pairs, num_context, num_sequences, num_logit_rows, 1.0)


def _price(weights: Seq[float], x: Seq[float]) -> float:
    return sum(weight * value for weight, value in zip(weights, x, strict=True))


def _solve(weighted: Seq[tuple[tuple[float, ...], float, float]], start: Seq[float]) -> list[float]:
    """Minimise the sum of w (price - s)^2 over weights of at least 0, from ``start`` on. Features are scaled to one size first."""
    places = range(NUM_FEATURES)
    scales = [max((abs(x[i]) for x, _, _ in weighted), default=1.0) or 1.0 for i in places]
    products = [[0.0] * NUM_FEATURES for _ in places]
    targets = [0.0] * NUM_FEATURES
    for x, seconds, w in weighted:
        scaled = [x[i] / scales[i] for i in places]
        for i, value in enumerate(scaled):
            targets[i] += w * value * seconds
            row = products[i]
            for j, other in enumerate(scaled):
                row[j] += w * value * other
    found = [start[i] * scales[i] for i in places]
    for _ in range(_NUM_SWEEPS):
        most = 0.0
        for i in _ORDER:
            row = products[i]
            if row[i] > 0.0:
                before = found[i]
                slope = targets[i] - sum(p * v for p, v in zip(row, found, strict=True))
                found[i] = max(0.0, before + slope / row[i])
                most = max(most, abs(found[i] - before))
        if most <= 1e-12 * max(found):
            break
    return [found[i] / scales[i] for i in places]
