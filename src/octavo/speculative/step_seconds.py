"""Seconds of steps that only decode and verify, by their rows: a curve, learned online, since no straight line has its shape.

Reading the weights costs the same for one row as for a few; from some number of rows on arithmetic counts, and kernels go in tiles.
That curve decides whether a draft pays, so it is measured rather than assumed: a mean per bucket of rows, made monotone and interpolated.

    seconds(rows, context) = pace * (curve(rows) + slope * context)

- ``slope``, the cost of a position of KV read, is the common slope within buckets (as in an analysis of covariance), so that few rows with
  much context and many with little are told apart.
- ``pace`` follows the machine within a few steps: whatever has been seen of it lately scales the buckets that have not.
- A step that stands alone, such as one that the system held up, counts little; and while a bucket has few steps, the shortest counts.

Owns the curve; reads no clock and decides nothing.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

_FINE_ROWS = 16  # up to here every number of rows is its own bucket; then eight buckets to each doubling
_FEW = 3  # steps of a bucket until its mean is believed
_MIN_RATE = 1.0 / 48  # of a bucket's newest step
_PACE_RATE = 0.2
_LEAST_SHARE = 0.1  # of a bucket's seconds, whatever the context
_CUT = 2.0
_ALONE = 0.1  # of a surprise that stands alone
_SLOPE_MEMORY = 0.998
_REFRESH_STEPS = 16  # between two looks at the buckets


def bucket_of(num_rows: int) -> int:
    """Buckets in the order of their rows."""
    if num_rows <= _FINE_ROWS:
        return num_rows
    shift = num_rows.bit_length() - 4  # the four highest bits tell the bucket
    return 8 * shift + (num_rows >> shift)


@dataclass(slots=True)
class _SlopeData:
    """Sums over steps of their distances from the means of their buckets: context x, seconds y. Old steps fade."""

    count: float = 0.0
    xx: float = 0.0
    xy: float = 0.0
    yy: float = 0.0

    def add(self, x: float, y: float, weight: float) -> None:
        self.count = _SLOPE_MEMORY * self.count + 1.0
        self.xx = _SLOPE_MEMORY * self.xx + weight * x * x
        self.xy = _SLOPE_MEMORY * self.xy + weight * x * y
        self.yy = _SLOPE_MEMORY * self.yy + weight * y * y

    def least_slope(self) -> float:
        """The slope less twice its standard error, at least 0: steps that scatter tell little of it while their contexts are much alike."""
        if self.xx <= 0.0 or self.count < 8.0:
            return 0.0
        slope = self.xy / self.xx
        variance = max(0.0, self.yy - slope * self.xy) / self.count
        return max(0.0, slope - 2.0 * math.sqrt(variance / self.xx))


@dataclass(slots=True)
class _Bucket:
    """Running means over the steps of a bucket. ``seconds`` are at pace 1."""

    rows: float
    context: float
    seconds: float
    num_steps: int = 1
    last_step: int = 0


class StepSeconds:
    """Before the first step nothing is known and every prediction is 0."""

    def __init__(self) -> None:
        self.num_steps = 0
        self._buckets: dict[int, _Bucket] = {}
        self._pace = 1.0
        self._last_ratio = 1.0  # observed / predicted of the last step
        self._slope = 0.0
        self._slope_data = _SlopeData()
        self._rows: list[float] = []  # the monotone curve at pace 1, context taken out: its buckets
        self._seconds: list[float] = []
        self._table: list[float] = []  # and its values, by rows
        self._refresh_at = 0

    def expect(self, prices: Iterable[tuple[int, float]]) -> None:
        """What steps of so many rows take with next to no context, as (rows, seconds), is known beforehand: as if each had been seen just
        now, as often as it takes to be believed. Steps that are seen correct it as they do each other."""
        for num_rows, seconds in prices:
            self._buckets[bucket_of(num_rows)] = _Bucket(float(num_rows), 0.0, seconds, _FEW, self.num_steps)
        self._refresh_at = 0

    def observe(self, num_rows: int, num_context: int, seconds: float) -> None:
        """A step took ``seconds``. ``num_context``: positions read, once per sequence. Steps without rows or time teach nothing."""
        if num_rows < 1 or not seconds > 0.0:
            return
        self.num_steps += 1
        key = bucket_of(num_rows)
        bucket = self._buckets.get(key)
        if bucket is None:
            self._buckets[key] = _Bucket(float(num_rows), float(num_context), seconds / self._pace, last_step=self.num_steps)
            self._refresh_at = 0
        else:
            self._take(bucket, num_rows, num_context, seconds)
        self._refresh()

    def _take(self, bucket: _Bucket, num_rows: int, num_context: int, seconds: float) -> None:
        bucket.num_steps += 1
        bucket.last_step = self.num_steps
        dx = num_context - bucket.context
        expected = max(bucket.seconds + self._slope * dx, _LEAST_SHARE * bucket.seconds)
        if bucket.num_steps <= _FEW:
            if seconds / self._pace < expected:
                bucket.rows, bucket.context, bucket.seconds = float(num_rows), float(num_context), seconds / self._pace
            self._refresh_at = 0
            return
        ratio = self._judge(seconds / (self._pace * expected))
        rate = max(1.0 / bucket.num_steps, _MIN_RATE)
        self._slope_data.add(dx, ratio * expected - bucket.seconds, 1.0 - rate)
        # The pace takes its part of the surprise first: what it explains is no news of this bucket.
        pace = 1.0 + _PACE_RATE * (ratio - 1.0)
        self._pace *= pace
        bucket.rows += rate * (num_rows - bucket.rows)
        bucket.context += rate * dx
        bucket.seconds += rate * (ratio / pace * expected - bucket.seconds)

    def _judge(self, ratio: float) -> float:
        """How much of observed / predicted to believe: little of a surprise that stands alone, two in a row as the smaller of them."""
        ratio = max(1.0 / _CUT, min(_CUT, ratio))
        last, self._last_ratio = self._last_ratio, ratio
        if ratio > 1.0:
            return min(ratio, max(last, 1.0 + _ALONE))
        return max(ratio, min(last, 1.0 / (1.0 + _ALONE)))

    def knows(self, num_rows: int, max_age: int) -> bool:
        """Whether a step of about so many rows was seen often enough, and within the last ``max_age`` steps."""
        bucket = self._buckets.get(bucket_of(num_rows))
        return bucket is not None and bucket.num_steps >= _FEW and self.num_steps - bucket.last_step < max_age

    def largest_known(self, low: int, high: int, max_age: int) -> int:
        """The largest number of rows from ``low`` to ``high`` that ``knows`` holds for; ``low`` when there is none."""
        for num_rows in range(high, low, -1):
            if self.knows(num_rows, max_age):
                return num_rows
        return low

    def seconds(self, num_rows: int, num_context: int) -> float:
        """Seconds of a step. Beyond the largest bucket every row costs its average there."""
        self._refresh()
        return self._pace * (self._value(num_rows) + self._slope * num_context)

    def prices(self, first_rows: int, num_more: int, num_context: int) -> list[float]:
        """[num_more + 1] ``seconds`` of first_rows, first_rows + 1, ... rows."""
        self._refresh()
        table, end = self._table, first_rows + num_more + 1
        for num_rows in range(len(table), end):
            table.append(self._value(num_rows))
        pace, rest = self._pace, self._slope * num_context
        return [pace * (value + rest) for value in table[first_rows:end]]

    def _value(self, num_rows: int) -> float:
        """The curve at pace 1, without context."""
        rows, curve = self._rows, self._seconds
        if not rows:
            return 0.0
        i = bisect_left(rows, num_rows)
        if i == len(rows):
            return curve[-1] * num_rows / rows[-1]
        if i == 0 or rows[i] == num_rows:
            return curve[i]
        share = (num_rows - rows[i - 1]) / (rows[i] - rows[i - 1])
        return curve[i - 1] + share * (curve[i] - curve[i - 1])

    def _refresh(self) -> None:
        """Look at the buckets again, now and then: the curve moves slowly, and the pace is not part of it."""
        if self.num_steps < self._refresh_at:
            return
        self._refresh_at = self.num_steps + _REFRESH_STEPS
        self._table.clear()
        buckets = [self._buckets[key] for key in sorted(self._buckets)]
        # The slope is kept below what would leave nothing for the rows.
        self._slope = min([self._slope_data.least_slope(), *(0.9 * b.seconds / b.context for b in buckets if b.context > 0.0)])
        self._rows = [b.rows for b in buckets]
        self._seconds = monotone((b.seconds - self._slope * b.context, min(b.num_steps, 32)) for b in buckets)


def monotone(values: Iterable[tuple[float, float]]) -> list[float]:
    """The non-decreasing values nearest to (value, weight) in weighted squares: pool adjacent violators (Ayer et al., 1955)."""
    blocks: list[list[float]] = []  # [mean, weight, number of values]
    for value, weight in values:
        blocks.append([value, weight, 1])
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            mean, total, count = blocks.pop()
            last = blocks[-1]
            last[0] = (last[0] * last[1] + mean * total) / (last[1] + total)
            last[1] += total
            last[2] += count
    return [mean for mean, _, count in blocks for _ in range(int(count))]
