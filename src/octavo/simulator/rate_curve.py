"""How a figure of a system, its latency say, grows with the rate of requests, and the highest rate at which it stays within a limit.

Owns the grid of rates and the search; what is measured at a rate is a function's business. Each rate is run once, for all limits.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from math import log
from statistics import median

_MOST_STEPS = 200  # of the grid, in either direction


@dataclass(frozen=True, slots=True)
class RateBracket:
    """Requests per second: within the limit at ``holds_at`` (0: at no rate that was tried), not at ``fails_at``, the next of the grid."""

    holds_at: float
    fails_at: float

    def __str__(self) -> str:
        return f"{self.holds_at:.3g} / {self.fails_at:.3g}"


@dataclass(slots=True)
class RateCurve:
    """``measure`` of a rate, on the grid first * ratio**i. ``measure`` is taken to grow with the rate: a search that finds a rate that
    fails tries none above it."""

    measure: Callable[[float], float]
    first: float = 1.0
    ratio: float = 1.1
    found: dict[int, float] = field(default_factory=dict)  # place on the grid -> what was measured

    def rate(self, place: int) -> float:
        return float(self.first * self.ratio**place)

    def at(self, place: int) -> float:
        if place not in self.found:
            self.found[place] = self.measure(self.rate(place))
        return self.found[place]

    def bracket(self, limit: float) -> RateBracket:
        """By steps that double from what is known already, then by halving. Raises ValueError when all rates hold, far up the grid.

        Upwards no step more than doubles the rate: what is far beyond the limit takes long to run.
        """
        holding = [place for place, value in self.found.items() if value <= limit]
        failing = [place for place, value in self.found.items() if value > limit]
        high = min(failing, default=None)
        low = max((place for place in holding if high is None or place < high), default=None)
        stride, most_up = 1, max(1, int(log(2.0) / log(self.ratio)))
        while high is None or low is None:
            if low is None:
                place = 0 if high is None else high - stride
                if place < -_MOST_STEPS:
                    return RateBracket(0.0, self.rate(high or 0))
            else:
                place = low + min(stride, most_up)
                if place > _MOST_STEPS:
                    raise ValueError(f"rate: {self.rate(low)!r} still holds; no rate that fails was found")
            if self.at(place) <= limit:
                low = place
            else:
                high = place
            stride *= 2
        while high - low > 1:
            middle = (low + high) // 2
            if self.at(middle) <= limit:
                low = middle
            else:
                high = middle
        return RateBracket(self.rate(low), self.rate(high))

    @property
    def points(self) -> tuple[tuple[float, float], ...]:
        """(rate, what was measured) of all rates that were run."""
        return tuple((self.rate(place), value) for place, value in sorted(self.found.items()))


def ratio_of(above: Seq[RateBracket], below: Seq[RateBracket]) -> tuple[float, float, float]:
    """(least, middle, most) of the ratios of true highest rates that brackets of the same seeds allow: least and most over all seeds; the
    middle is the median over seeds of the ratio of rates that hold. A bracket that starts at 0 allows any ratio."""
    pairs = list(zip(above, below, strict=True))
    least = min(a.holds_at / b.fails_at for a, b in pairs)
    most = max(a.fails_at / b.holds_at if b.holds_at else float("inf") for a, b in pairs)
    return least, median(a.holds_at / b.holds_at if b.holds_at else float("inf") for a, b in pairs), most
