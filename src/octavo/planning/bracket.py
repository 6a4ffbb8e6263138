"""The highest rate that holds, between one that was seen to hold and one that was seen to fail.

Rates are on a geometric grid, so that searches that begin anywhere meet at the same rates and may share what was found there. It takes as
given that what fails at a rate fails at all higher ones; each bracket says what was seen, not what is believed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

LEAST_PRECISION = 1e-4  # far below what seeds differ by


@dataclass(frozen=True, slots=True)
class Bracket:
    """Requests per second. ``holds_at`` 0: at no rate that was tried; ``fails_at`` None: at none that was allowed."""

    holds_at: float
    fails_at: float | None

    def to_dict(self) -> dict[str, float | None]:
        return {"holds_at": self.holds_at, "fails_at": self.fails_at}


@dataclass(frozen=True, slots=True)
class RateGrid:
    """Rates ``(1 + precision) ** k`` for whole k, from ``low`` to ``high``."""

    precision: float = 0.1
    low: float = 1e-4
    high: float = 1e6

    def __post_init__(self) -> None:
        if not LEAST_PRECISION <= self.precision <= 1.0:
            raise ValueError(f"precision: {self.precision!r} is not allowed; from {LEAST_PRECISION:g} to 1")
        if not 0.0 < self.low < self.high < math.inf:
            raise ValueError(f"rate_range: {self.low!r}:{self.high!r} is not allowed; 0 < LOW < HIGH, finite")
        if self.first > self.last:
            raise ValueError(f"rate_range: {self.low!r}:{self.high!r} is not allowed; it holds no rate in steps of {self.precision:g}")

    def rate(self, k: int) -> float:
        return float((1.0 + self.precision) ** k)

    def nearest(self, rate: float) -> int:
        """The k of the rate of the grid next to ``rate``, within its ends."""
        k = round(math.log(rate) / math.log1p(self.precision)) if rate > 0.0 else self.first
        return min(max(k, self.first), self.last)

    @property
    def first(self) -> int:
        return math.ceil(math.log(self.low) / math.log1p(self.precision) - 1e-9)

    @property
    def last(self) -> int:
        return math.floor(math.log(self.high) / math.log1p(self.precision) + 1e-9)


def find_bracket(holds: Callable[[float], bool], grid: RateGrid, guess: float) -> Bracket:
    """The highest rate of the grid that holds and the next one, which fails: from ``guess`` in growing strides, then by halving.

    ``holds`` may be asked about O(log(distance of the guess)) rates, each once.
    """
    low, high = _around(lambda k: holds(grid.rate(k)), grid, grid.nearest(guess))
    while low is not None and high is not None and high - low > 1:
        middle = (low + high) // 2
        if holds(grid.rate(middle)):
            low = middle
        else:
            high = middle
    return Bracket(0.0 if low is None else grid.rate(low), None if high is None else grid.rate(high))


def _around(holds: Callable[[int], bool], grid: RateGrid, at: int) -> tuple[int | None, int | None]:
    """(one that holds, one that fails) with all in between unknown; None: there is none on the grid."""
    low: int | None = None
    high: int | None = None
    stride = 1
    while True:
        if holds(at):
            low = at
            if high is not None or at == grid.last:
                return low, high
            at = min(at + stride, grid.last)
        else:
            high = at
            if low is not None or at == grid.first:
                return low, high
            at = max(at - stride, grid.first)
        stride *= 2
