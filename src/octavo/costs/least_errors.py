"""Non-negative weights of least absolute relative error: the solver behind every cost of steps that is fitted at once. Pure arithmetic.

- **Relative errors**: each observation is divided by its seconds, so that a step of 3 ms counts as much as one of 300.
- **Their absolute values**, not their squares: the price at which half of the steps are dearer and half are cheaper, so that a step which
  the operating system held up counts as one that is dearer, however much it is. By iteratively reweighted least squares (Schlossmacher,
  JASA 1973); below a share ``core`` squares count, which make more of few steps whose errors are mere scatter.
- **No weight below zero**: coordinate descent (Franc, Hlaváč & Navara, CAIP 2005) from a given start. What the observations do not tell
  apart goes to the first feature that explains it, as far as the start leaves it anything.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from operator import mul

CORE = 0.01  # nothing smaller is known of a clock and a machine
_NUM_REWEIGHTINGS = 12
_NUM_SWEEPS = 300
_CONVERGED = 1e-6  # of a weight, relative, in a sweep

Row = list[float]


def nonnegative(rows: Seq[Row], seconds: Seq[float], start: Row | None = None, core: float = CORE) -> Row:
    """Weights [features], none below 0: ``rows`` [observations][features] times weights should be ``seconds`` [observations], all above 0.
    ``start``: None: zeros."""
    scaled = [[value / took for value in row] for row, took in zip(rows, seconds, strict=True)]
    size = len(scaled[0])
    weights = [0.0] * size if start is None else list(start)
    trust = [1.0] * len(scaled)
    for _ in range(_NUM_REWEIGHTINGS):
        products, sums = _moments(scaled, trust)
        _descend(weights, products, sums)
        trust = [1.0 / max(core, abs(sum(map(mul, row, weights)) - 1.0)) for row in scaled]
    return weights


def _moments(rows: Seq[Row], trust: Seq[float]) -> tuple[list[Row], Row]:
    size = len(rows[0])
    products, sums = [[0.0] * size for _ in range(size)], [0.0] * size
    for row, weight in zip(rows, trust, strict=True):
        for i, value in enumerate(row):
            if value:
                part = weight * value
                sums[i] += part
                products[i] = [known + part * other for known, other in zip(products[i], row, strict=True)]
    return products, sums


def _descend(weights: Row, products: list[Row], sums: Row) -> None:
    """Coordinate descent in place, until nothing moves."""
    for _ in range(_NUM_SWEEPS):
        moved = 0.0
        for j, row in enumerate(products):
            if row[j] > 0.0:
                last = weights[j]
                weights[j] = max(0.0, last + (sums[j] - sum(map(mul, row, weights))) / row[j])
                moved = max(moved, abs(weights[j] - last) / (abs(weights[j]) + 1e-12))
        if moved < _CONVERGED:
            return
