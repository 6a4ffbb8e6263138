"""What replayed advice says a switch would gain, against what it gains on this machine when it is thrown.

For each switch an engine is set so that the switch matters, a load is run on it, and the window is replayed. Then the switch is really
thrown and the same load run again. Runs without and with it take turns, so that a machine that drifts favours neither; the prediction is
that of the first run, made before the switch is thrown. One case gains nothing, and is to be ranked last.

Two kinds of load. Clients that wait for their answers keep an engine busy whatever its pace is, and two runs of them take as long as each
other. Arrivals of a given rate do so far from the engine's capacity; near it, a little of pace is a lot of waiting. So the switches that
raise the capacity are measured with clients, those that take most of the work away with arrivals.

The replayer is handed in: this package knows no simulator.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

from octavo.bench.tables import table
from octavo.bench.timed_load import DueRequest, run_requests
from octavo.config import EngineConfig
from octavo.core.recorded_window import RecordedWindow, WindowReplay, figures_of
from octavo.engine.engine import Engine
from octavo.engine.replay_advice import MIN_GAIN
from octavo.engine.window_snapshot import snapshot

Fields = tuple[dict[str, Any], dict[str, Any]]
Replayer = Callable[[RecordedWindow], WindowReplay]

_ALL_S = 1e9
_LOW, _HIGH = 100, 30_000  # token ids
KINDS = ("places", "pool", "kv_dtype", "policy", "chunk", "prefix_cache", "salt", "nothing")
_MATTERS = 0.1  # a real gain from here on is to be predicted
WITHIN = 0.25  # of the real gain


@dataclass(frozen=True, slots=True)
class AdviceCase:
    """``load``: of what the engine without the switch computes in a second. ``num_requests`` in each run, ``repeat`` runs each way.
    ``kinds``: of switches."""

    num_requests: int = 80
    load: float = 0.85
    repeat: int = 2
    seed: int = 0
    kinds: tuple[str, ...] = KINDS


@dataclass(frozen=True, slots=True)
class Thrown:
    """``without`` and ``with_it``: (fields of scheduler, fields of cache). ``kind``: of the switch, among the replayed ones; empty: that of
    ``name``. ``objective``: which figure it is to improve. ``num_clients``: None: arrivals by rate. ``prompt``: lengths (from, below).
    ``prefix``: tokens that all prompts begin with. ``salted``: each request has a salt of its own, and none with the switch."""

    name: str
    without: Fields
    with_it: Fields
    kind: str = ""
    objective: str = "wall"
    num_clients: int | None = None
    prompt: tuple[int, int] = (20, 160)
    prefix: int = 0
    salted: bool = False


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

    @property
    def holds(self) -> bool | None:
        """None: the switch gains too little to be judged by."""
        return None if self.real < _MATTERS else abs(self.predicted / self.real - 1.0) <= WITHIN

    @property
    def gain_nothing(self) -> list[str]:
        """The changes that advice would rank last."""
        return [change for change, gain in self.order if gain <= max(self.error, MIN_GAIN)]


def thrown_switches(block_size: int) -> list[Thrown]:
    few = 20 * 16 // block_size  # blocks: of about two sequences, and of any one
    packed = few * 32 // 17  # in the same memory: int8 with its scales makes 17 bytes of 32
    four = {"max_num_seqs": 4}
    small, large = {"max_num_batched_tokens": 128, "max_num_seqs": 16}, {"max_num_batched_tokens": 512, "max_num_seqs": 16}
    return [
        Thrown("places", ({"max_num_seqs": 4}, {}), ({"max_num_seqs": 8}, {}), num_clients=16),
        Thrown("pool", ({}, {"num_kv_blocks": few}), ({}, {"num_kv_blocks": 2 * few}), num_clients=16),
        Thrown("kv_dtype", ({}, {"num_kv_blocks": few}), ({}, {"num_kv_blocks": packed, "kv_cache_dtype": "int8"}), num_clients=16),
        Thrown("policy", ({"scheduling_policy": "static"} | four, {}), ({"scheduling_policy": "fcfs"} | four, {}), num_clients=16),
        Thrown("chunk", (large, {}), (small, {}), objective="itl_p99", prompt=(20, 600)),
        Thrown("prefix_cache", ({}, {"enable_prefix_caching": False}), ({}, {"enable_prefix_caching": True}), prefix=320),
        Thrown("salt", ({}, {}), ({}, {}), prefix=320, salted=True),
        Thrown("nothing", ({"max_num_seqs": 32}, {}), ({"max_num_seqs": 64}, {}), kind="places", num_clients=16),
    ]


def _configured(config: EngineConfig, fields: Fields) -> EngineConfig:
    scheduler, cache = replace(config.scheduler, **fields[0]), replace(config.cache, **fields[1])
    if "num_kv_blocks" in fields[1]:
        cache = replace(cache, kv_cache_memory=None)
    return replace(config, scheduler=scheduler, cache=cache).validate()


def _requests(case: AdviceCase, thrown: Thrown, rate: float, salted: bool, run: int) -> list[DueRequest]:
    """The same lengths and arrivals in every run; tokens of each run's own, so that no prompt is in a cache before its time."""
    lengths, tokens = random.Random(f"{case.seed}:lengths"), random.Random(f"{case.seed}:{run}:tokens")
    common, at_s, out = [tokens.randrange(_LOW, _HIGH) for _ in range(thrown.prefix)], 0.0, []
    for i in range(case.num_requests):
        at_s += lengths.expovariate(rate)
        own = [tokens.randrange(_LOW, _HIGH) for _ in range(lengths.randrange(*thrown.prompt))]
        out.append(DueRequest(f"{run}-{i}", at_s, common + own, lengths.randrange(10, 60), f"{run}-{i}" if salted else None))
    return out


def _window(engine: Engine, run: int) -> RecordedWindow:
    """Of one run alone: what came before it, the engine being idle in between, is no part."""
    begin_s = min(r.arrival_s for r in engine.timeline.records() if r.request_id.startswith(f"{run}-"))
    return snapshot(engine, engine.clock.now() - begin_s + 1e-6)


def _measured(engine: Engine, run: int, objective: str) -> float:
    """The objective's seconds in a run, of all its requests."""
    requests = _window(engine, run).requests
    value = figures_of(requests).of(objective)
    assert value is not None
    return value


Run = Callable[[Engine, list[DueRequest], int | None], float]


def measure(config: EngineConfig, case: AdviceCase, thrown: Thrown, replayer: Replayer, run_load: Run = run_requests) -> Outcome:
    """One switch. ``run_load``: as ``run_requests``."""
    begun_s = time.perf_counter()
    found: tuple[list[float], list[float]] = ([], [])
    replay: WindowReplay | None = None
    with (
        closing(Engine.load(_configured(config, thrown.without))) as without,
        closing(Engine.load(_configured(config, thrown.with_it))) as with_it,
    ):
        rate = case.load * _capacity(without, case, thrown, run_load)
        for engine in (without, with_it):
            run_load(engine, _requests(case, thrown, rate, thrown.salted, 99)[: case.num_requests // 4], thrown.num_clients)
        for run in range(case.repeat):
            run_load(without, _requests(case, thrown, rate, thrown.salted, run), thrown.num_clients)
            found[0].append(_measured(without, run, thrown.objective))
            replay = replay or replayer(_window(without, run))
            run_load(with_it, _requests(case, thrown, rate, False, run), thrown.num_clients)
            found[1].append(_measured(with_it, run, thrown.objective))
    assert replay is not None
    gains = {outcome.change: outcome.gain(replay.replayed, thrown.objective) or 0.0 for outcome in replay.outcomes}
    change = _change_of(thrown, replay)
    means = statistics.fmean(found[0]), statistics.fmean(found[1])
    return Outcome(
        thrown.name, change, thrown.objective, None if thrown.num_clients else rate, gains[change], 1.0 - means[1] / means[0],
        replay.error(thrown.objective) or 0.0, means, max(found[0]) / min(found[0]) - 1.0, time.perf_counter() - begun_s,
        sorted(gains.items(), key=lambda pair: -pair[1]),
    )  # fmt: skip


def _capacity(engine: Engine, case: AdviceCase, thrown: Thrown, run_load: Run) -> float:
    """Requests per second of the engine with all of them there at once; the first run's steps are learned from as well."""
    for run in (97, 98):
        requests = [replace(one, at_s=0.0) for one in _requests(case, thrown, 1.0, thrown.salted, run)[: case.num_requests // 2]]
        seconds = run_load(engine, requests, None)
    return len(requests) / seconds


def _change_of(thrown: Thrown, replay: WindowReplay) -> str:
    """The replayed switch that is the one thrown: by its kind, and where a kind has several by the value."""
    changes = [outcome.change for outcome in replay.outcomes if outcome.kind == (thrown.kind or thrown.name)]
    values = [str(value) for fields in thrown.with_it for value in fields.values()]
    named = [change for change in changes if any(change.split()[-1] == value for value in values)]
    return (named or changes)[0]


def run_advice(config: EngineConfig, case: AdviceCase, replayer: Replayer, echo: Callable[[str], None], as_json: bool) -> None:
    """`octavo bench advice`: the last line given to ``echo`` is the JSON record."""
    outcomes = []
    for thrown in thrown_switches(config.cache.block_size):
        if thrown.name not in case.kinds:
            continue
        outcomes.append(measure(config, case, thrown, replayer))
        if not as_json:
            echo(_line(outcomes[-1]))
    record = {
        "bench": "advice", "model": config.model.model, "num_requests": case.num_requests, "load": case.load, "repeat": case.repeat,
        "seed": case.seed, "cases": [_record(one) for one in outcomes], "num_judged": sum(one.holds is not None for one in outcomes),
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
        "within": one.holds, "gain_nothing": one.gain_nothing, "seconds": round(one.seconds, 1),
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
