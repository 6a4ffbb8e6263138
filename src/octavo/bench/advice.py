"""What replayed advice says a switch would gain, against what it gains on this machine when it is thrown.

For each switch something that serves is set so that the switch matters, a load is run on it, and the window is replayed. Then the switch
is really thrown and the same load run again. Runs without and with it take turns, so that a machine that drifts favours neither; the
prediction is that of the first run, made before the switch is thrown. One case gains nothing, and is to be ranked last.

Owns the comparison and the report. What serves, its switches and its loads are ``advice_engine``'s, an engine of this process, and
``advice_cluster``'s, a front end with workers. The replayer is handed in: this package knows no simulator.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from octavo.bench.tables import table
from octavo.core.cluster_window import ClusterWindow
from octavo.core.recorded_window import RecordedWindow, WindowReplay, figures_of
from octavo.engine.replay_advice import MIN_GAIN, ReplayError, Window

Replayer = Callable[[RecordedWindow | ClusterWindow], WindowReplay]

_MATTERS = 0.1  # a real gain from here on is to be predicted
WITHIN = 0.25  # of the real gain


@dataclass(frozen=True, slots=True)
class AdviceCase:
    """``load``: where requests come by a rate, of what is computed in a second without the switch. ``num_requests`` in each run, ``repeat``
    runs each way. ``kinds``: names of the switches; empty: all."""

    num_requests: int = 80
    load: float = 0.85
    repeat: int = 2
    seed: int = 0
    kinds: tuple[str, ...] = ()


class Rig(Protocol):
    """What serves a load, and tells of it."""

    def run(self, number: int) -> None:
        """The load of that run, to its end: the same lengths in each run, and tokens that no other has."""
        ...

    def window(self, number: int) -> Window:
        """Of that run alone, the last one."""
        ...


class Trial(Protocol):
    """A switch. ``kind``: among the replayed ones; ``values``: which way it is thrown, where there are several; ``objective``: which figure
    it is to improve. ``rate``: None: clients wait for their answers; it is known once it is ``open``."""

    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def values(self) -> Seq[str]: ...
    @property
    def objective(self) -> str: ...
    @property
    def rate(self) -> float | None: ...

    def open(self) -> AbstractContextManager[tuple[Rig, Rig]]:
        """Without and with the switch, both warm."""
        ...


@dataclass(slots=True)
class Outcome:
    """``predicted`` and ``real``: share of the objective that the switch saves. ``order``: all switches with their predicted gains."""

    name: str
    change: str
    objective: str
    rate: float | None
    predicted: float
    real: float
    error: float
    seconds_each: tuple[float, float]  # the objective, without and with it
    spread: float  # slowest of the runs without the switch over the quickest, less 1
    seconds: float = 0.0
    order: list[tuple[str, float]] = field(default_factory=list)
    notes: tuple[str, ...] = ()  # of the replay

    @property
    def holds(self) -> bool | None:
        """None: the switch gains too little to be judged by."""
        return None if self.real < _MATTERS else abs(self.predicted / self.real - 1.0) <= WITHIN

    @property
    def gain_nothing(self) -> list[str]:
        """The changes that advice would rank last."""
        return [change for change, gain in self.order if gain <= max(self.error, MIN_GAIN)]


def measure(trial: Trial, repeat: int, replayer: Replayer) -> Outcome:
    """One switch."""
    begun_s, replay = time.perf_counter(), None
    found: tuple[list[float], list[float]] = ([], [])
    with trial.open() as rigs:
        for number in range(repeat):
            for rig, values in zip(rigs, found, strict=True):
                rig.run(number)
                window = rig.window(number)
                value = figures_of(window.requests).of(trial.objective)
                assert value is not None, f"{trial.name}: no request of the run tells {trial.objective}"
                values.append(value)
                replay = replay or replayer(window)
    assert replay is not None
    gains = {outcome.change: outcome.gain(replay.replayed, trial.objective) or 0.0 for outcome in replay.outcomes}
    change = change_of(trial, replay)
    means = statistics.fmean(found[0]), statistics.fmean(found[1])
    return Outcome(
        trial.name, change, trial.objective, trial.rate, gains[change], 1.0 - means[1] / means[0],
        replay.error(trial.objective) or 0.0, means, max(found[0]) / min(found[0]) - 1.0, time.perf_counter() - begun_s,
        sorted(gains.items(), key=lambda pair: -pair[1]), replay.notes,
    )  # fmt: skip


def change_of(trial: Trial, replay: WindowReplay) -> str:
    """The replayed switch that is the one thrown: by its kind, and where a kind has several by the value."""
    changes = [outcome.change for outcome in replay.outcomes if outcome.kind == trial.kind]
    if not changes:
        raise ReplayError(f"{trial.name}: the replay has not come to that switch, nor to {len(replay.skipped)} in all")
    named = [change for change in changes if change.split()[-1] in trial.values]
    return (named or changes)[0]


def run_advice(
    trials: Iterable[Trial], about: dict[str, Any], case: AdviceCase, replayer: Replayer, echo: Callable[[str], None], as_json: bool
) -> None:
    """`octavo bench advice`: the last line given to ``echo`` is the JSON record, which begins with ``about``."""
    outcomes = []
    for trial in trials:
        outcomes.append(measure(trial, case.repeat, replayer))
        if not as_json:
            echo(_line(outcomes[-1]))
    record = {
        "bench": "advice", **about, "num_requests": case.num_requests, "repeat": case.repeat, "seed": case.seed,
        "cases": [_record(one) for one in outcomes], "num_judged": sum(one.holds is not None for one in outcomes),
        "num_within": sum(one.holds is True for one in outcomes), "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip
    if not as_json:
        echo("\n" + _table(outcomes))
        judged = f"{record['num_within']} of {record['num_judged']} gains of {100 * _MATTERS:.0f} % or more"
        echo(f"{judged} were predicted within {100 * WITHIN:.0f} % of themselves")
    echo(json.dumps(record))


def _record(one: Outcome) -> dict[str, Any]:
    return {
        "name": one.name, "change": one.change, "objective": one.objective, "rate": None if one.rate is None else round(one.rate, 3),
        "predicted": round(one.predicted, 4), "real": round(one.real, 4), "error": round(one.error, 4),
        "measured_s": [round(value, 5) for value in one.seconds_each], "spread": round(one.spread, 4),
        "within": one.holds, "gain_nothing": one.gain_nothing, "notes": one.notes, "seconds": round(one.seconds, 1),
    }  # fmt: skip


def _line(one: Outcome) -> str:
    return f"{one.name}: {one.change}: predicted {100 * one.predicted:+.1f} %, real {100 * one.real:+.1f} % ({one.seconds:.0f} s)"


def _table(outcomes: list[Outcome]) -> str:
    head = ["switch", "objective", "requests/s", "s", "with it", "predicted %", "real %", "replay's error %", "runs differ by %", "within"]
    rows = [head]
    for one in outcomes:
        figures = (100 * one.predicted, 100 * one.real, 100 * one.error, 100 * one.spread)
        within = {None: "ranked last" if one.change in one.gain_nothing else "-", True: "yes", False: "NO"}[one.holds]
        values = (f"{one.seconds_each[0]:.3f}", f"{one.seconds_each[1]:.3f}")
        rate = "clients" if one.rate is None else f"{one.rate:.1f}"
        rows.append([one.change, one.objective, rate, *values, *(f"{value:.1f}" for value in figures), within])
    return table(rows, " <>>>>>>>> ")
