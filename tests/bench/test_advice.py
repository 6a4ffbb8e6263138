"""`octavo bench advice` on a device of known cost: each of its cases matters, and its prediction holds."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from octavo.bench import advice_engine
from octavo.bench.advice import AdviceCase, change_of, measure, run_advice
from octavo.bench.advice_engine import KINDS, EngineTrial, engine_trials
from octavo.bench.timed_load import DueRequest, run_requests
from octavo.config import EngineConfig
from octavo.core.recorded_window import Figures, WindowReplay
from octavo.engine.engine import Engine
from octavo.engine.replay_advice import ReplayError
from octavo.simulator.what_if import what_if
from tests.engine.scripted import bigram_config, bigram_model, byte_tokenizer
from tests.engine.timed import Law, TimedDevice, VirtualClock

NOTHING = Figures(*[None] * 6)
CASE = AdviceCase(num_requests=60, repeat=1)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines on a virtual clock, of a model with a small vocabulary."""
    tokenizer = byte_tokenizer()

    def load(config: EngineConfig) -> Engine:
        clock = VirtualClock()
        return Engine(bigram_model(tokenizer), config, TimedDevice(tokenizer.vocab_size, clock, Law(step=4e-3, noise=0.02)), clock)

    monkeypatch.setattr(Engine, "load", staticmethod(load))
    monkeypatch.setattr(advice_engine, "LOW", 4)
    monkeypatch.setattr(advice_engine, "HIGH", 250)


def run_virtually(engine: Engine, requests: list[DueRequest], num_clients: int | None) -> float:
    assert isinstance(engine.clock, VirtualClock)
    return run_requests(engine, requests, num_clients, engine.clock.advance)


def trial(case: AdviceCase, kind: str) -> EngineTrial:
    (one,) = engine_trials(bigram_config(), replace(case, kinds=(kind,)))
    one.run_load = run_virtually
    return one


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_each_case_matters_and_is_predicted(kind: str) -> None:
    outcome = measure(trial(CASE, kind), CASE.repeat, what_if)
    assert outcome.error < 0.05
    if kind == "nothing":
        assert abs(outcome.real) < 0.02 and outcome.change in outcome.gain_nothing
    else:
        assert outcome.real >= 0.1 and outcome.holds


def test_the_record() -> None:
    said, case = list[str](), AdviceCase(30, repeat=1)
    run_advice([trial(case, "salt")], {"model": "m", "load": case.load}, case, what_if, said.append, False)
    record: dict[str, Any] = json.loads(said[-1])
    assert (record["model"], record["load"], record["num_requests"]) == ("m", 0.85, 30)
    assert (record["num_judged"], record["num_within"]) == (1, 1) and "1 of 1 gains of 10 % or more" in said[-2]
    (found,) = record["cases"]
    assert found["name"] == "salt" and "--no-enable-prefix-caching" in found["gain_nothing"]


def test_a_replay_that_has_not_come_to_the_switch_says_so() -> None:
    with pytest.raises(ReplayError, match="salt: the replay has not come to that switch, nor to 3 in all"):
        change_of(trial(CASE, "salt"), WindowReplay(1, 1, NOTHING, NOTHING, (), ("a", "b", "c")))
