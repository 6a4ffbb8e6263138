"""Lines of a log that anybody can bring about: the first few as they come, the rest as a count. From any thread.

    say ─▶ line, line, ... ─▶ (limit) ─▶ counted ─▶ "512 more within 10 s (500 times: ..., 12 times: ...)"

So a flood of connections neither fills a disk nor hides what else is said, and none of it goes untold: what was counted is told when the
period is over, or with ``flush``; without a timer for that, each is a line. Owns the counts; knows nothing of what they are of.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Protocol

PERIOD_S = 10.0
MAX_LINES = 5  # of a period, in full
MAX_REASONS = 8  # that are counted apart


class Timer(Protocol):
    """What ``threading.Timer`` makes."""

    daemon: bool

    def start(self) -> None: ...

    def cancel(self) -> None: ...


class FloodLog:
    """``what`` begins every line, which are of that ``level``. ``timer(seconds, call)`` makes a timer that is not started yet."""

    def __init__(
        self,
        logger: logging.Logger,
        what: str,
        level: int = logging.WARNING,
        max_lines: int = MAX_LINES,
        period_s: float = PERIOD_S,
        timer: Callable[[float, Callable[[], None]], Timer] = threading.Timer,
    ) -> None:
        self._logger, self._what, self._level = logger, what, level
        self._max_lines, self._period_s, self._make_timer = max_lines, period_s, timer
        self._lock = threading.Lock()
        self._timer: Timer | None = None  # while a period goes on
        self._number = 0  # of the period: a timer of one before it does nothing
        self._num_lines = 0
        self._counts: Counter[str] = Counter()

    def say(self, reason: str, source: str = "", error: BaseException | None = None) -> None:
        """One more. ``source``: whose doing it is, which lines alone show; ``error``: whose traceback they have."""
        with self._lock:
            if self._timer is None:
                self._begin()
            is_line = self._num_lines < self._max_lines
            if is_line:
                self._num_lines += 1
            elif reason in self._counts or len(self._counts) < MAX_REASONS:
                self._counts[reason] += 1
            else:
                self._counts["other reasons"] += 1
        if is_line:
            self._logger.log(self._level, "%s%s: %s", self._what, f" {source}" if source else "", reason, exc_info=error)

    def flush(self) -> None:
        """Tell what was counted. The next one is a line again."""
        with self._lock:
            timer, self._timer = self._timer, None
            counts, self._counts = self._counts, Counter()
        if timer is not None:
            timer.cancel()
        self._tell(counts)

    def _begin(self) -> None:
        self._number += 1
        self._num_lines = 0
        try:
            timer = self._make_timer(self._period_s, partial(self._is_over, self._number))
            timer.daemon = True  # the process may end meanwhile
            timer.start()
        except RuntimeError:  # no more threads: whoever has something to say has trouble enough
            self._timer = None
        else:
            self._timer = timer

    def _is_over(self, number: int) -> None:
        with self._lock:
            if number != self._number or self._timer is None:
                return
            counts, self._counts = self._counts, Counter()
            if counts:  # it goes on: a few lines again, and counts
                self._begin()
            else:
                self._timer = None
        self._tell(counts)

    def _tell(self, counts: Counter[str]) -> None:
        if counts:
            reasons = ", ".join(f"{count} times: {reason}" for reason, count in counts.most_common())
            self._logger.log(self._level, "%s: %d more within %g s (%s)", self._what, counts.total(), self._period_s, reasons)
