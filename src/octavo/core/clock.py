"""Clocks: where the time of the engine comes from. The scheduler takes times as arguments and never reads a clock itself."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds that never run backwards; only differences mean anything."""

    def now(self) -> float: ...


class WallClock:
    """Real time since this clock was made."""

    def __init__(self) -> None:
        self._origin_s = time.monotonic()

    def now(self) -> float:
        return time.monotonic() - self._origin_s


MAX_SECONDS = 1e10  # of a clock that is no machine's own: up to there floats tell the microsecond


class VirtualClock:
    """Time that moves only when told to: the same run can be repeated, and an hour simulated in a second."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Raises ValueError for a negative or undefined number."""
        if not seconds >= 0.0:
            raise ValueError(f"seconds: {seconds!r} is not allowed; a clock only moves forward")
        self._now_s += seconds

    def advance_to(self, time_s: float) -> None:
        """Move to ``time_s``; ValueError when that is in the past."""
        if not time_s >= self._now_s:
            raise ValueError(f"time_s: {time_s!r} is not allowed; the clock already shows {self._now_s!r}")
        self._now_s = time_s
