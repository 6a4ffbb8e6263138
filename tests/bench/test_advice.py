"""`octavo bench advice` on a device of known cost: each of its cases matters, and its prediction holds."""

from __future__ import annotations

import json
from typing import Any

import pytest

from octavo.bench import advice
from octavo.bench.advice import AdviceCase, measure, run_advice, thrown_switches
from octavo.bench.timed_load import DueRequest, run_requests
from octavo.config import EngineConfig
from octavo.engine.engine import Engine
from octavo.simulator.what_if import what_if
from tests.engine.scripted import bigram_config, bigram_model, byte_tokenizer
from tests.engine.timed import Law, TimedDevice, VirtualClock

CASE = AdviceCase(num_requests=60, repeat=1)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines on a virtual clock, of a model with a small vocabulary."""
    tokenizer = byte_tokenizer()

    def load(config: EngineConfig) -> Engine:
        clock = VirtualClock()
        return Engine(bigram_model(tokenizer), config, TimedDevice(tokenizer.vocab_size, clock, Law(step=4e-3, noise=0.02)), clock)

    monkeypatch.setattr(Engine, "load", staticmethod(load))
    monkeypatch.setattr(advice, "_LOW", 4)
    monkeypatch.setattr(advice, "_HIGH", 250)


def run_virtually(engine: Engine, requests: list[DueRequest], num_clients: int | None) -> float:
    assert isinstance(engine.clock, VirtualClock)
    return run_requests(engine, requests, num_clients, engine.clock.advance)


@pytest.mark.soak
@pytest.mark.parametrize("kind", advice.KINDS)
def test_each_case_matters_and_is_predicted(kind: str) -> None:
    (thrown,) = (one for one in thrown_switches(16) if one.name == kind)
    outcome = measure(bigram_config(), CASE, thrown, what_if, run_virtually)
    assert outcome.error < 0.05
    if kind == "nothing":
        assert abs(outcome.real) < 0.02 and outcome.change in outcome.gain_nothing
    else:
        assert outcome.real >= 0.1 and outcome.holds


def test_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "measure", lambda *args: measure(*args, run_virtually))
    said = list[str]()
    run_advice(bigram_config(), AdviceCase(30, repeat=1, kinds=("salt",)), what_if, said.append, False)
    record: dict[str, Any] = json.loads(said[-1])
    assert (record["num_judged"], record["num_within"]) == (1, 1) and "1 of 1 gains of 10 % or more" in said[-2]
    (case,) = record["cases"]
    assert case["name"] == "salt" and "--no-enable-prefix-caching" in case["gain_nothing"]
