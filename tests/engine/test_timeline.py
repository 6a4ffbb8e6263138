"""Every moment of a request is charged to one cause: on a device of known cost every part to the digit, and without a gap for any load."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from octavo.core.request import BeamParams, SamplingParams
from octavo.core.speculative_params import SpeculativeParams
from octavo.engine.causes import Cause
from octavo.engine.engine import Engine
from octavo.engine.request_record import RequestRecord
from tests.engine.scripted import bigram_engine
from tests.engine.timed import Law, TimedRun


def seconds(run_or_engine: TimedRun | Engine, name: str) -> list[float]:
    engine = run_or_engine.engine if isinstance(run_or_engine, TimedRun) else run_or_engine
    record = engine.timeline.find(name)
    assert record is not None
    return engine.timeline.seconds_of(record, engine.clock.now())


def unexplained(record: RequestRecord) -> float:
    """The remainder of an ended request as a share of its wall time."""
    assert record.end_s is not None
    wall_s = record.end_s - record.received_s
    return abs(wall_s - sum(record.seconds)) / max(wall_s, 1e-12)


def mixed_load(engine: Engine, num_requests: int, seed: int) -> Iterator[None]:
    """Requests of many kinds, added a few at a time between steps; some are aborted on the way."""
    rng, shared = random.Random(seed), [random.Random(1).randrange(4, 200) for _ in range(64)]
    added = 0
    while added < num_requests or engine.has_work:
        for _ in range(min(num_requests - added, rng.choice((0, 0, 1, 2, 5)))):
            prompt = shared[: rng.choice((0, 16, 48, 64))] + [rng.randrange(4, 250) for _ in range(rng.choice((1, 7, 20, 90, 300)))]
            params = SamplingParams(temperature=rng.choice((0.0, 1.0)), max_tokens=rng.choice((0, 1, 2, 9, 40)), ignore_eos=True)
            options: dict = {"cache_salt": rng.choice((None, None, "a", "b"))}
            kind = rng.randrange(8)
            if kind == 0:
                params = replace(params, n=3, max_tokens=max(1, params.max_tokens or 0))
            elif kind == 1:
                params = replace(params, temperature=0.0, max_tokens=5, beam=BeamParams(2))
            elif kind == 2:
                params = replace(params, allowed_token_ids=tuple(range(4, 60)))
            elif kind == 3:
                options["speculative"] = SpeculativeParams(3, "ngram")
            engine.add(engine.prepare(prompt, params, f"r{added}", **options))
            added += 1
        if rng.random() < 0.02 and added:
            engine.abort(f"r{rng.randrange(added)}")
        engine.step()
        yield


@pytest.mark.parametrize("setting", ["tight", "paced", "static", "wide"])
def test_nothing_is_left_unexplained_on_a_virtual_clock(setting: str) -> None:
    options: dict = {"tight": {"max_num_seqs": 12}, "paced": {"max_itl_ms": 30.0}, "static": {"scheduling_policy": "static", "max_num_seqs": 8}, "wide": {}}[setting]
    run = TimedRun(Law(), num_kv_blocks={"tight": 60}.get(setting, 400), **options)
    for _ in mixed_load(run.engine, 150, seed=5):
        run.clock.advance(0.0003)
    records = run.engine.timeline.records()
    assert len(records) == 150
    assert all(record.ended_s is not None and record.snapshot == [] for record in records)
    assert max(map(unexplained, records)) < 1e-6
    assert all(min(record.seconds) > -1e-9 for record in records)


def test_nothing_is_left_unexplained_of_a_thousand_requests_on_the_wall_clock() -> None:
    engine = bigram_engine(num_kv_blocks=120, max_num_seqs=24)
    for _ in mixed_load(engine, 1000, seed=11):
        pass
    records = engine.timeline.records()
    assert len(records) == 1000
    assert max(map(unexplained, records)) <= 0.01
    assert all(min(record.seconds) > -1e-6 for record in records)
