"""Switches of an engine of this process, thrown: the trials of `octavo bench advice`.

Two kinds of load. Clients that wait for their answers keep an engine busy whatever its pace is, and two runs of them take as long as each
other. Arrivals of a given rate do so far from the engine's capacity; near it, a little of pace is a lot of waiting. So the switches that
raise the capacity are measured with clients, those that take most of the work away with arrivals.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from octavo.bench.advice import AdviceCase
from octavo.bench.timed_load import DueRequest, run_requests
from octavo.config import EngineConfig
from octavo.core.recorded_window import RecordedWindow
from octavo.engine.engine import Engine
from octavo.engine.window_snapshot import snapshot

Fields = tuple[dict[str, Any], dict[str, Any]]
Run = Callable[[Engine, list[DueRequest], int | None], float]

LOW, HIGH = 100, 30_000  # token ids
KINDS = ("places", "pool", "kv_dtype", "policy", "chunk", "prefix_cache", "salt", "nothing")


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


def configured(config: EngineConfig, fields: Fields) -> EngineConfig:
    scheduler, cache = replace(config.scheduler, **fields[0]), replace(config.cache, **fields[1])
    if "num_kv_blocks" in fields[1]:
        cache = replace(cache, kv_cache_memory=None)
    return replace(config, scheduler=scheduler, cache=cache).validate()


def _requests(case: AdviceCase, thrown: Thrown, rate: float, salted: bool, run: int) -> list[DueRequest]:
    """The same lengths and arrivals in every run; tokens of each run's own, so that no prompt is in a cache before its time."""
    lengths, tokens = random.Random(f"{case.seed}:lengths"), random.Random(f"{case.seed}:{run}:tokens")
    common, at_s, out = [tokens.randrange(LOW, HIGH) for _ in range(thrown.prefix)], 0.0, []
    for i in range(case.num_requests):
        at_s += lengths.expovariate(rate)
        own = [tokens.randrange(LOW, HIGH) for _ in range(lengths.randrange(*thrown.prompt))]
        out.append(DueRequest(f"{run}-{i}", at_s, common + own, lengths.randrange(10, 60), f"{run}-{i}" if salted else None))
    return out


@dataclass(slots=True)
class EngineRig:
    """``load``: the requests of a run. ``run_load``: as ``run_requests``."""

    engine: Engine
    load: Callable[[int], list[DueRequest]]
    num_clients: int | None
    run_load: Run

    def run(self, number: int) -> None:
        """See Rig."""
        self.run_load(self.engine, self.load(number), self.num_clients)

    def window(self, number: int) -> RecordedWindow:
        """See Rig. What came before, the engine being idle in between, is no part."""
        begin_s = min(r.arrival_s for r in self.engine.timeline.records() if r.request_id.startswith(f"{number}-"))
        return snapshot(self.engine, self.engine.clock.now() - begin_s + 1e-6)


@dataclass(slots=True)
class EngineTrial:
    """A ``Trial``."""

    config: EngineConfig
    case: AdviceCase
    thrown: Thrown
    run_load: Run = run_requests
    rate: float | None = None

    @property
    def name(self) -> str:
        return self.thrown.name

    @property
    def kind(self) -> str:
        return self.thrown.kind or self.thrown.name

    @property
    def objective(self) -> str:
        return self.thrown.objective

    @property
    def values(self) -> Seq[str]:
        return [str(value) for fields in self.thrown.with_it for value in fields.values()]

    @contextmanager
    def open(self) -> Iterator[tuple[EngineRig, EngineRig]]:
        """See Trial."""
        case, thrown = self.case, self.thrown
        with (
            closing(Engine.load(configured(self.config, thrown.without))) as without,
            closing(Engine.load(configured(self.config, thrown.with_it))) as with_it,
        ):
            rate = case.load * self._capacity(without)
            self.rate = None if thrown.num_clients else rate
            rigs = [
                EngineRig(engine, lambda run, salted=salted: _requests(case, thrown, rate, salted, run), thrown.num_clients, self.run_load)  # type: ignore[misc]
                for engine, salted in ((without, thrown.salted), (with_it, False))
            ]
            for rig in rigs:
                self.run_load(rig.engine, _requests(case, thrown, rate, thrown.salted, 99)[: case.num_requests // 4], thrown.num_clients)
            yield rigs[0], rigs[1]

    def _capacity(self, engine: Engine) -> float:
        """Requests per second of the engine with all of them there at once; the first run's steps are learned from as well."""
        for run in (97, 98):
            load = _requests(self.case, self.thrown, 1.0, self.thrown.salted, run)[: self.case.num_requests // 2]
            seconds = self.run_load(engine, [replace(one, at_s=0.0) for one in load], None)
        return len(load) / seconds


def engine_trials(config: EngineConfig, case: AdviceCase) -> list[EngineTrial]:
    """Those that the case names."""
    every = thrown_switches(config.cache.block_size)
    return [EngineTrial(config, case, one) for one in every if not case.kinds or one.name in case.kinds]
