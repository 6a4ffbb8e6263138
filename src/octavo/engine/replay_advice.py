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

from octavo.core.cluster_window import ClusterWindow
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
FEWER = "fewer"  # kinds of switches that begin so save something else

Window = RecordedWindow | ClusterWindow
Replayer = Callable[[Window], WindowReplay]
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
    elif abs(gain) <= MIN_GAIN and outcome.kind.startswith(FEWER):
        why = f"{outcome.why}: it costs nothing ({100 * gain:+.1f} %)"
    elif abs(gain) <= MIN_GAIN:
        why = f"{outcome.why}: it gains nothing ({100 * gain:+.1f} %)"
    else:
        what = f"{100 * abs(gain):.1f} % {'less' if gain > 0 else 'more'}"
        why = f"{outcome.why}: what it gains cannot be told, {what} is within the replay's error of {100 * error:.1f} %"
        return Advice(outcome.change, 0.0, why, basis, error, is_told=False)
    return Advice(outcome.change, 0.0, why, basis, error)


class Replays:
    """Replays of windows, one at a time; the last one is kept. ``now``: the clock of whoever recorded them. May be asked on any thread."""

    def __init__(self, replayer: Replayer, now: Callable[[], float], shows_misses: bool = True) -> None:
        self._replayer, self._now, self._shows_misses = replayer, now, shows_misses
        self._lock = threading.Lock()  # who comes meanwhile waits and takes its result
        self._places = threading.Semaphore(MAX_WAITING)
        self._done_s = 0.0  # when the last one was
        self.last: ReplayedAdvice | None = None

    def of(self, window_s: float, take: Callable[[], Window]) -> ReplayedAdvice:
        """A replay of the last ``window_s`` seconds, which ``take`` takes, not older than FRESH_S, or one that was under way. Takes
        seconds. Raises ReplayError, and what ``take`` raises."""
        if not self._places.acquire(blocking=False):
            raise ReplayError(f"{MAX_WAITING} others are asking; ask again later")
        try:
            asked_s = self._now()
            with self._lock:
                last = self.last
                if last is None or last.window_s != window_s or asked_s > max(last.made_s + FRESH_S, self._done_s):
                    now_s = self._now()
                    self.last = last = ReplayedAdvice(self._replayer(take()), now_s, window_s)
                    self._done_s = self._now()
                return last
        finally:
            self._places.release()

    def shown(self, objective: str) -> dict[str, Any] | None:
        """The last one, as the API has it; None: there was none."""
        advice = self.last
        if advice is None:
            return None
        replay, error = advice.replay, advice.replay.error(objective)
        return {
            "objective": objective,
            "age_s": round(self._now() - advice.made_s, 3),
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


class ReplayAdvisor:
    """An Advisor whose advice for a window is replayed; for single requests it asks ``rules``."""

    def __init__(self, engine: Engine, replayer: Replayer, rules: Advisor, shows_misses: bool = True) -> None:
        self._engine, self._rules, self._shows_misses = engine, rules, shows_misses
        self.replays = Replays(replayer, engine.clock.now, shows_misses)

    def of_request(self, timeline: Timeline, record: RequestRecord, seconds: Seq[float], wall_s: float) -> list[Advice]:
        """See Advisor."""
        return self._rules.of_request(timeline, record, seconds, wall_s)

    def of_window(self, timeline: Timeline, records: Seq[RequestRecord], window_s: float) -> list[Advice]:
        """See Advisor. Takes seconds. Raises ReplayError."""
        return self.replayed(window_s).ranked(OBJECTIVES[0], self._shows_misses)

    def replayed(self, window_s: float) -> ReplayedAdvice:
        """See ``Replays.of``."""
        return self.replays.of(window_s, lambda: snapshot(self._engine, window_s))
