"""Advice from a replay: the recent window is run again in a simulator with one switch changed at a time.

The simulator is handed in (``Replayer``), since the engine knows none. A replay is made on demand alone, by whatever thread asks; it takes
seconds, which are the replayer's to spend elsewhere. The last one is kept and answers whoever asks again soon.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo.core.recorded_window import OBJECTIVES, RecordedWindow, SwitchOutcome, WindowReplay
from octavo.core.words import counted
from octavo.engine.advice import Advice, Advisor
from octavo.engine.request_record import RequestRecord
from octavo.engine.window_snapshot import snapshot

if TYPE_CHECKING:
    from octavo.engine.engine import Engine
    from octavo.engine.timeline import Timeline

FRESH_S = 20.0  # so long a replay answers for the same window
MAX_WAITING = 8  # askers at a time
MIN_GAIN = 0.02  # of the objective: less is nothing, however small the error

Replayer = Callable[[RecordedWindow], WindowReplay]
"""Runs a window again. Raises ReplayError when that cannot be done."""


class ReplayError(RuntimeError):
    """The window cannot be replayed; the message says why."""


@dataclass(frozen=True, slots=True)
class ReplayedAdvice:
    """``made_s``: when, on the engine's clock; ``window_s``: of how many seconds."""

    replay: WindowReplay
    made_s: float
    window_s: float

    def ranked(self, objective: str, shows_misses: bool = True) -> list[Advice]:
        """Of each kind of switch the best way, by what it saves of the objective; those that save nothing come last, with a gain of 0.

        A gain that is not above the replay's own error cannot be told, and one below MIN_GAIN is nothing. Empty when the objective cannot
        be told.
        """
        replay, error = self.replay, self.replay.error(objective)
        measured = replay.measured.of(objective)
        if error is None or measured is None:
            return []
        best = dict[str, tuple[float, SwitchOutcome]]()
        for outcome in replay.outcomes:
            gain = outcome.gain(replay.replayed, objective)
            if gain is not None and (shows_misses or outcome.kind != "salt") and gain > best.get(outcome.kind, (float("-inf"),))[0]:
                best[outcome.kind] = gain, outcome
        ordered = sorted(best.values(), key=lambda pair: -pair[0])
        return [_advice(gain, outcome, measured, max(error, MIN_GAIN), error, replay) for gain, outcome in ordered]


def _advice(gain: float, outcome: SwitchOutcome, measured: float, least: float, error: float, replay: WindowReplay) -> Advice:
    basis = f"replay of {counted(replay.num_requests, 'request')}"
    if gain > least:
        return Advice(outcome.change, gain * measured, f"{outcome.why}: {100 * gain:.0f} % less", basis, error)
    if gain < -least:
        why = f"{outcome.why}: it gains nothing, {-100 * gain:.0f} % more"
    elif abs(gain) <= MIN_GAIN:
        why = f"{outcome.why}: it gains nothing ({100 * gain:+.1f} %)"
    else:
        what = f"{100 * abs(gain):.1f} % {'less' if gain > 0 else 'more'}"
        why = f"{outcome.why}: what it gains cannot be told, {what} is within the replay's error of {100 * error:.1f} %"
        return Advice(outcome.change, 0.0, why, basis, error, is_told=False)
    return Advice(outcome.change, 0.0, why, basis, error)


class ReplayAdvisor:
    """An Advisor whose advice for a window is replayed; for single requests it asks ``rules``. ``objective``: what it ranks by."""

    def __init__(self, engine: Engine, replayer: Replayer, rules: Advisor, shows_misses: bool = True) -> None:
        self._engine, self._replayer, self._rules, self._shows_misses = engine, replayer, rules, shows_misses
        self._lock = threading.Lock()  # one replay at a time; who comes meanwhile waits and takes its result
        self._places = threading.Semaphore(MAX_WAITING)
        self.last: ReplayedAdvice | None = None

    def of_request(self, timeline: Timeline, record: RequestRecord, seconds: Seq[float], wall_s: float) -> list[Advice]:
        """See Advisor."""
        return self._rules.of_request(timeline, record, seconds, wall_s)

    def of_window(self, timeline: Timeline, records: Seq[RequestRecord], window_s: float) -> list[Advice]:
        """See Advisor. Takes seconds. Raises ReplayError."""
        return self.replayed(window_s).ranked(OBJECTIVES[0], self._shows_misses)

    def replayed(self, window_s: float) -> ReplayedAdvice:
        """A replay of the last ``window_s`` seconds, not older than FRESH_S. Takes seconds. Raises ReplayError."""
        if not self._places.acquire(blocking=False):
            raise ReplayError(f"{MAX_WAITING} others are asking; ask again later")
        try:
            return self._replayed(window_s)
        finally:
            self._places.release()

    def _replayed(self, window_s: float) -> ReplayedAdvice:
        with self._lock:
            last, now_s = self.last, self._engine.clock.now()
            if last is None or last.window_s != window_s or now_s - last.made_s > FRESH_S:
                window = snapshot(self._engine, window_s)
                self.last = last = ReplayedAdvice(self._replayer(window), now_s, window_s)
            return last

    def shown(self, advice: ReplayedAdvice, objective: str) -> dict[str, Any]:
        """As the API has it."""
        replay, error = advice.replay, advice.replay.error(objective)
        return {
            "objective": objective,
            "age_s": round(self._engine.clock.now() - advice.made_s, 3),
            "window_s": advice.window_s,
            "num_requests": replay.num_requests,
            "num_compared": replay.num_compared,
            "measured_s": replay.measured.of(objective),
            "replayed_s": replay.replayed.of(objective),
            "error": None if error is None else round(error, 4),
            "advice": [one.shown() for one in advice.ranked(objective, self._shows_misses)],
            "skipped": list(replay.skipped),
            "notes": list(replay.notes),
        }
