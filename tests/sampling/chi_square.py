"""Pearson's chi-square test; the upper tail by series or continued fraction (Numerical Recipes, 3rd ed., section 6.2)."""

from __future__ import annotations

import math

import numpy as np

MIN_EXPECTED = 5.0  # of a cell, for the chi-square law to hold


def survival(statistic: float, df: int) -> float:
    """P(X >= statistic) for a chi-square X with ``df`` degrees of freedom: Q(df / 2, statistic / 2), the incomplete gamma function."""
    a, x = df / 2, statistic / 2
    if x <= 0:
        return 1.0
    front = math.exp(-x + a * math.log(x) - math.lgamma(a))
    if x < a + 1:  # the series of the lower function
        term = total = 1 / a
        n = a
        while abs(term) > 1e-16 * total:
            n += 1
            term *= x / n
            total += term
        return 1 - front * total
    b = x + 1 - a  # Lentz's continued fraction of the upper one
    c, d = 1e300, 1 / b
    h = d
    for i in range(1, 10_000):
        an = -i * (i - a)
        b += 2
        d = 1 / (an * d + b)
        c = b + an / c
        h *= d * c
        if abs(d * c - 1) < 1e-15:
            break
    return front * h


def p_value(observed: np.ndarray, expected: np.ndarray) -> float:
    """Of counts [cells] under expected counts [cells] of the same sum. Cells that expect fewer than 5 are counted as one.

    0 when something was observed that cannot be.
    """
    observed, expected = np.asarray(observed, np.float64).ravel(), np.asarray(expected, np.float64).ravel()
    assert math.isclose(observed.sum(), expected.sum(), rel_tol=1e-9)
    if observed[expected <= 0].any():
        return 0.0
    frequent = expected >= MIN_EXPECTED
    observed = np.append(observed[frequent], observed[~frequent].sum())
    expected = np.append(expected[frequent], expected[~frequent].sum())
    if expected[-1] < MIN_EXPECTED:  # what is left is too rare even together: it joins the rarest of the others
        rarest = expected[:-1].argmin()
        observed[rarest] += observed[-1]
        expected[rarest] += expected[-1]
        observed, expected = observed[:-1], expected[:-1]
    assert expected.size >= 2, "one cell tests nothing"
    return survival(float(((observed - expected) ** 2 / expected).sum()), expected.size - 1)
