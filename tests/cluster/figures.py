"""What a chaos run showed, from what its clients saw: pure arithmetic over times."""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tests.cluster.schedule import Round

WINDOW_S = 2.0  # over which a rate is taken
FULL_SHARE = 0.8  # of the calm rate: at this it is called full again
BEFORE_S = 8.0  # of calm before a round, in which its calm rate is taken


@dataclass(slots=True)
class Seen:
    """One request as its client saw it. ``arrivals``: (time, characters) of the pieces of its answer, times on the run's clock.

    ``failure``: why there is no whole answer. ``wrong``: in what the answer is not the right one.
    """

    number: int
    sent_s: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    end_s: float = 0.0
    failure: str | None = None
    wrong: str | None = None

    @property
    def longest_pause_s(self) -> float:
        """Without anything new: from the sending to the end."""
        times = [self.sent_s, *(time for time, _ in self.arrivals), self.end_s]
        return max(after - before for before, after in zip(times, times[1:], strict=False))


class Rate:
    """Characters per second that all clients together got, over windows of ``WINDOW_S``."""

    def __init__(self, seen: Iterable[Seen]) -> None:
        pieces = sorted(piece for one in seen for piece in one.arrivals)
        self._times = [time for time, _ in pieces]
        self._sums = [0]
        for _, size in pieces:
            self._sums.append(self._sums[-1] + size)

    def over(self, begin_s: float, end_s: float) -> float:
        first, last = bisect.bisect_left(self._times, begin_s), bisect.bisect_left(self._times, end_s)
        return (self._sums[last] - self._sums[first]) / (end_s - begin_s)

    def median(self, begin_s: float, end_s: float) -> float:
        """Of the windows that fit; ValueError when none does."""
        starts = range(int((end_s - begin_s) / WINDOW_S))
        if not starts:
            raise ValueError(f"no window of {WINDOW_S:g} s fits between {begin_s:g} and {end_s:g} s")
        return statistics.median(self.over(begin_s + WINDOW_S * i, begin_s + WINDOW_S * (i + 1)) for i in starts)

    def lowest(self, begin_s: float, end_s: float, step_s: float = 0.1) -> float:
        """Of all windows that begin in the interval."""
        return min(self.over(t, t + WINDOW_S) for t in _steps(begin_s, end_s, step_s))

    def full_again_s(self, since_s: float, until_s: float, full: float, step_s: float = 0.1) -> float | None:
        """Seconds from ``since_s`` to the first window at the rate ``full``, its own length not counted; None: not before ``until_s``."""
        return next((t - since_s for t in _steps(since_s, until_s - WINDOW_S, step_s) if self.over(t, t + WINDOW_S) >= full), None)


def _steps(begin_s: float, end_s: float, step_s: float) -> Iterable[float]:
    return (begin_s + step_s * i for i in range(int((end_s - begin_s) / step_s) + 1))


@dataclass(frozen=True, slots=True)
class RoundResult:
    """``recovery_s`` counts from the end of the last event; None: the calm was over before the rate was full again. ``lowest_share`` of the
    calm rate. ``longest_pause_s`` of the streams that were open."""

    round: Round
    recovery_s: float | None
    lowest_share: float
    longest_pause_s: float


def drift(seen: Sequence[Seen], lead: tuple[float, float], end_s: float) -> float:
    """The rate of the last calm as a share of the first one's."""
    rate = Rate(seen)
    return rate.median(end_s - BEFORE_S, end_s) / rate.median(*lead)


def judge(seen: Sequence[Seen], rounds: Sequence[Round], lead: tuple[float, float], end_s: float) -> list[RoundResult]:
    """Each round against the rate of the calm before it, or of the calm ``lead`` where that was lower: other work on the machine may come
    and go. ``end_s``: of the load."""
    rate = Rate(seen)
    ends = [one.at_s for one in rounds[1:]] + [end_s]
    results = []
    for one, until_s in zip(rounds, ends, strict=True):
        calm = min(rate.median(*lead), rate.median(one.at_s - BEFORE_S, one.at_s))
        pauses = [record.longest_pause_s for record in seen if record.sent_s < until_s and record.end_s > one.at_s]
        lowest = rate.lowest(one.at_s, one.end_s) / calm if calm else 0.0
        results.append(RoundResult(one, rate.full_again_s(one.end_s, until_s, FULL_SHARE * calm), lowest, max(pauses, default=0.0)))
    return results
