"""On a real model and the wall clock: nothing of a thousand requests is left unexplained, and slow-downs that were planted are named.

The same on a device of known cost, in `make test`: tests/engine/test_timeline.py, tests/engine/test_planted.py, test_slow_reader.py.
Hurt is who took a fifth longer than in either of two runs without the plant; so a machine that is held up now and then hurts nobody.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from octavo.bench.timed_load import DueRequest, run_requests
from octavo.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from octavo.engine.causes import NAMES, Cause
from octavo.engine.engine import Engine
from octavo.engine.explain import Explanation, explain
from tests.engine.test_timeline import mixed_load, unexplained
from tests.server.harness import RunningServer, wait_until
from tests.server.test_slow_reader import read_all

pytestmark = [pytest.mark.soak, pytest.mark.model]

NAMED = 0.95
NUM_REQUESTS = 120


def engine_of(path: Path, num_kv_blocks: int = 4096, **scheduler: Any) -> Engine:
    return Engine.load(EngineConfig(ModelConfig(str(path), "m"), CacheConfig(num_kv_blocks=num_kv_blocks), SchedulerConfig(**scheduler)))


def test_nothing_is_left_unexplained_of_a_thousand_requests(smollm2_path: Path) -> None:
    with closing(engine_of(smollm2_path, num_kv_blocks=160, max_num_seqs=24)) as engine:
        for _ in mixed_load(engine, 1000, seed=11):
            pass
        records = engine.timeline.records()
    assert len(records) == 1000
    assert max(map(unexplained, records)) <= 0.01
    assert all(min(record.seconds) > -1e-6 for record in records)


@dataclass(frozen=True)
class Plant:
    """``load``: of what the engine computes in a second. ``options``: of both engines; ``planted``: more of the one with the plant."""

    causes: frozenset[Cause]
    load: float
    options: dict[str, Any]
    planted: dict[str, Any]
    prefix: int = 0


PLANTS = {
    "tiny pool": Plant(frozenset({Cause.QUEUED_KV, Cause.PREEMPTED, Cause.RECOMPUTED}), 0.7, {}, {"num_kv_blocks": 12}),
    "one huge prompt": Plant(frozenset({Cause.OTHERS_PREFILL, Cause.QUEUED_PROMPT}), 0.4, {}, {}),
    "long queue": Plant(frozenset({Cause.QUEUED_BATCH, Cause.QUEUED_TOKENS}), 0.4, {"max_num_seqs": 6}, {}),
    "cold cache": Plant(frozenset({Cause.CACHE_MISS}), 0.4, {}, {}, prefix=480),
}


def tokens(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(100, 30_000) for _ in range(num_tokens)]


def load_of(plant: Plant, rate: float, run: str) -> list[DueRequest]:
    """The same arrivals and lengths in each run, other tokens."""
    shape, rng, at_s, out = random.Random(1), random.Random(run), 0.0, []
    common = tokens(rng, plant.prefix)
    for i in range(NUM_REQUESTS):
        at_s += shape.expovariate(rate)
        out.append(DueRequest(f"{run}{i}", at_s, common + tokens(rng, shape.randrange(20, 80)), shape.randrange(10, 30)))
    return out


def with_plant(name: str, load: Sequence[DueRequest]) -> list[DueRequest]:
    rng, middle_s = random.Random(name), load[len(load) // 4].at_s
    more = list[DueRequest]()
    if name == "one huge prompt":
        more = [DueRequest("huge", middle_s, tokens(rng, 7000), 4)]
    elif name == "long queue":
        more = [DueRequest(f"burst{i}", middle_s, tokens(rng, 10), 40) for i in range(250)]
    elif name == "cold cache":
        return [replace(one, cache_salt=one.name) for one in load]
    return sorted([*load, *more], key=lambda one: one.at_s)


def accounts(engine: Engine, run: str) -> dict[str, Explanation]:
    """By the request's name without the run's."""
    found = [record for record in engine.timeline.records() if record.request_id.startswith(run)]
    return {record.request_id.removeprefix(run): explain(engine.timeline, record, engine.clock.now()) for record in found}


def capacity(engine: Engine, plant: Plant) -> float:
    """Requests per second with all there at once."""
    for run in ("warm", "full"):
        load = [replace(one, at_s=0.0) for one in load_of(plant, 1.0, run)]
        seconds = run_requests(engine, load)
    return len(load) / seconds


@pytest.mark.parametrize("name", PLANTS)
def test_the_planted_cause_is_named(smollm2_path: Path, name: str) -> None:
    plant = PLANTS[name]
    with (
        closing(engine_of(smollm2_path, **plant.options)) as plain,
        closing(engine_of(smollm2_path, **plant.options | plant.planted)) as planted,
    ):
        rate = plant.load * capacity(plain, plant)
        run_requests(planted, load_of(plant, rate, "w")[:20])
        for run in ("a", "b"):
            run_requests(plain, load_of(plant, rate, run))
        run_requests(planted, with_plant(name, load_of(plant, rate, "c")))
        first, second, third = (accounts(*one) for one in ((plain, "a"), (plain, "b"), (planted, "c")))
    assert len(first) == len(second) == len(third) == NUM_REQUESTS
    hurt = [found for key, found in third.items() if found.wall_s >= 1.2 * max(first[key].wall_s, second[key].wall_s)]
    assert len(hurt) >= 20, f"the plant hurts {len(hurt)}"
    named = sum(found.main in plant.causes for found in hurt) / len(hurt)
    print(f"{name}: named in {named:.3f} of {len(hurt)} that it hurt; others: {others(hurt, plant.causes)}")
    assert named >= NAMED
    assert max(abs(found.remainder_s) / found.wall_s for found in third.values()) <= 0.01


def others(hurt: Sequence[Explanation], causes: frozenset[Cause]) -> dict[str, int]:
    out = dict[str, int]()
    for found in hurt:
        if found.main not in causes:
            out[NAMES[found.main]] = out.get(NAMES[found.main], 0) + 1
    return out


NUM_READERS = 24
BODY = {"prompt": tokens(random.Random(1), 20), "max_tokens": 120, "ignore_eos": True, "logprobs": 20, "temperature": 0, "stream": True}


@pytest.fixture(scope="module")
def server(smollm2_path: Path) -> Iterator[RunningServer]:
    with RunningServer(engine_of(smollm2_path, max_num_seqs=32)) as running:
        running.limit_buffers(4096)
        yield running


def read_after(server: RunningServer, waits: bool) -> list[Explanation]:
    """All streams at once, read as they come, or only when all has been made and as long again has passed."""
    timeline, before = server.engine.timeline, len(server.engine.timeline.records())
    begun_s = time.monotonic()
    connections = [server.send_raw("POST", "/v1/completions", json.dumps(BODY).encode(), 4096) for _ in range(NUM_READERS)]
    if waits:
        made = before + NUM_READERS
        wait_until(lambda: len(timeline.records()) == made and all(r.ended_s is not None for r in timeline.records()), 120.0)
        time.sleep(time.monotonic() - begun_s)
    readers = [threading.Thread(target=read_all, args=(connection,)) for connection in connections]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    wait_until(lambda: all(record.sent_s is not None for record in timeline.records()))
    return [explain(timeline, record, 0.0) for record in timeline.records()[before:]]


def test_slow_readers_are_named(server: RunningServer) -> None:
    read_after(server, False)
    plain, slow = read_after(server, False), read_after(server, True)
    worst_s = max(found.wall_s for found in plain)
    hurt = [found for found in slow if found.wall_s >= 1.2 * worst_s]
    assert len(hurt) >= 20
    assert sum(found.main is Cause.SLOW_READER for found in hurt) >= NAMED * len(hurt)
    assert max(abs(found.remainder_s) / found.wall_s for found in slow) <= 0.01
