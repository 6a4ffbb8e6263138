"""A quantile sketch: millions of times in a few hundred counters, every quantile within half a percent.

DDSketch (Masson, Rim & Lee, VLDB 2019, section 2): a value x falls into bucket ceil(log(x) / log(gamma)), whose middle is off by at most a
share alpha of x, with gamma = (1 + alpha) / (1 - alpha). Deterministic, independent of the order of values, and sketches add up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

ALPHA = 0.005
_GAMMA = (1.0 + ALPHA) / (1.0 - ALPHA)
_SCALE = 2.0**40
_INVERSE_LOG_GAMMA = 1.0 / math.log(_GAMMA)


@dataclass(slots=True)
class QuantileSketch:
    """Of numbers from 0 up, in any unit."""

    count: int = 0
    scaled_total: int = 0  # whole multiples of 2 ** -40, so that sums do not depend on their order
    least: float = math.inf
    most: float = 0.0
    num_zeros: int = 0
    buckets: dict[int, int] = field(default_factory=dict)

    def add(self, value: float, count: int = 1) -> None:
        """Take in ``value``, ``count`` times. Raises ValueError for a negative one or nan."""
        if value > 0.0:
            bucket = math.ceil(math.log(value) * _INVERSE_LOG_GAMMA)
            self.buckets[bucket] = self.buckets.get(bucket, 0) + count
        elif value == 0.0:
            self.num_zeros += count
        else:
            raise ValueError(f"value: {value!r} is not allowed; at least 0")
        self.count += count
        self.scaled_total += int(value * _SCALE) * count
        if value < self.least:
            self.least = value
        if value > self.most:
            self.most = value

    def merge(self, other: QuantileSketch) -> None:
        """Take in all that ``other`` has."""
        for bucket, count in other.buckets.items():
            self.buckets[bucket] = self.buckets.get(bucket, 0) + count
        self.count += other.count
        self.scaled_total += other.scaled_total
        self.num_zeros += other.num_zeros
        self.least = min(self.least, other.least)
        self.most = max(self.most, other.most)

    @property
    def mean(self) -> float | None:
        return self.scaled_total / _SCALE / self.count if self.count else None

    def quantile(self, share: float) -> float | None:
        """The value that a ``share`` (0 to 1) of all values is at most, within ALPHA of it; None when there is none.

        By nearest rank: the value number max(1, ceil(share * count)) in ascending order.
        """
        if not 0.0 <= share <= 1.0:
            raise ValueError(f"share: {share!r} is not allowed; from 0 to 1")
        if not self.count:
            return None
        left = max(1, math.ceil(share * self.count)) - self.num_zeros
        if left <= 0:
            return 0.0
        for bucket in sorted(self.buckets):
            left -= self.buckets[bucket]
            if left <= 0:
                middle = 2.0 * _GAMMA**bucket / (1.0 + _GAMMA)
                return min(max(middle, self.least), self.most)
        return self.most  # not reached: the counts add up to ``count``

    def summary(self) -> dict[str, float | int | None]:
        """Mean, 50th, 90th and 99th percentile, largest; all None when there is no value."""
        quantiles = {f"p{round(share * 100)}": self.quantile(share) for share in (0.5, 0.9, 0.99)}
        return {"count": self.count, "mean": self.mean, **quantiles, "max": self.most if self.count else None}
