"""What a measurement and a simulation of the same load are compared by, be it of an engine or of a cluster."""

from __future__ import annotations

import statistics
from typing import NamedTuple


class Limits(NamedTuple):
    """Of a request: seconds to its first token, and between tokens on average."""

    ttft_s: float
    itl_s: float


class Compared:
    """What all comparisons of a figure tell: real runs, simulated, and simulated at the pace of these runs' steps."""

    __slots__ = ()
    figure: str
    real: tuple[float, ...]
    simulated: float
    at_pace: float

    @property
    def median(self) -> float:
        return statistics.median(self.real)

    @property
    def difference(self) -> float:
        return self._off(self.simulated)

    @property
    def difference_at_pace(self) -> float:
        return self._off(self.at_pace)

    def _off(self, value: float) -> float:
        """From the median of the real runs, as a share of it; of the value itself where that is 0."""
        return (value - self.median) / (self.median or value or 1.0)

    @property
    def in_spread(self) -> bool:
        """Whether the simulated figure could be that of another real run."""
        return min(self.real) <= self.simulated <= max(self.real)


def digits(value: float) -> float:
    """As much of it as a record has."""
    return float(f"{value:.5g}")
