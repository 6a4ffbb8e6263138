"""Calibrated costs of this machine: found by engines that they hold for and by no others, corrected by live steps, shown in the metrics."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path

import pytest

from octavo.config import BackendConfig, CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from octavo.core.cost import StepShape
from octavo.core.request import SamplingParams
from octavo.core.step import StepPlan
from octavo.costs.coefficients import Coefficients, coefficients_of
from octavo.engine.engine import Engine
from octavo.engine.step_costs import calibrated_cost, cost_file, cost_folder, fitted_for, write_cost
from octavo.engine.window_snapshot import snapshot
from octavo.simulator.replay import replay_recording
from tests.engine.timed import Law, TimedRun
from tests.models.tiny import write_tiny_gguf

COST = Coefficients((1e-5, 0.0, 0.0, 0.0, 0.0, 1e-4), host_s=1e-4, median_error=0.04, max_rows=128, num_steps=500)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("models") / "rand.gguf", context=256)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path))
    return tmp_path


def engine_of(model: Path, threads: int = 1, kv_cache_dtype: str = "auto", **scheduler: object) -> Engine:
    settings = SchedulerConfig(**{"max_num_seqs": 8, "max_num_batched_tokens": 64, **scheduler})  # type: ignore[arg-type]
    cache = CacheConfig(num_kv_blocks=64, kv_cache_dtype=kv_cache_dtype)
    return Engine.load(EngineConfig(ModelConfig(str(model)), cache, settings, BackendConfig(threads=threads)))


def written(model: Path, cost: Coefficients = COST) -> Path:
    """The cost of the engine of ``engine_of``, kept where engines look."""
    engine = engine_of(model)
    engine.close()
    key = fitted_for(engine.backend, "tiny", "2026-11-30")
    assert key is not None
    path = cost_file(key)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_cost(dataclasses.replace(cost, fitted_for=key), path)
    return path


def run(engine: Engine, num_requests: int = 4) -> None:
    for i in range(num_requests):
        engine.add(engine.prepare([5 + i] * 70, SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)))
    while engine.has_work:
        engine.step()


def test_an_engine_starts_from_what_was_calibrated_for_it(model: Path, home: Path) -> None:
    path = written(model)
    assert path.parent == home / "costs"
    engine = engine_of(model)
    try:
        base = engine.step_cost.base
        assert base is not None and base.fitted_for is not None and base.fitted_for.model == "tiny"
        assert engine.step_cost.median_error == 0.04
        assert engine.step_cost.seconds_of(StepShape(num_rows=10, num_sequences=1)) == pytest.approx(2e-4)
    finally:
        engine.close()


def test_drafting_begins_with_the_calibrated_prices_of_rows(model: Path, home: Path) -> None:
    """And goes by what is seen as soon as something is."""
    engine = engine_of(model)
    assert not engine.speculator.control.cost.knows(4, 512)
    engine.close()
    written(model)
    engine = engine_of(model)
    prices = engine.speculator.control.cost
    for num_rows in (1, 4, 16, 24, 64):
        assert prices.knows(num_rows, 512)
        assert prices.seconds(num_rows, 0) == pytest.approx(1e-4 + 1e-5 * num_rows)
    assert not prices.knows(128, 512)  # more than a step of this engine has
    for _ in range(200):
        prices.observe(4, 40, 5e-3)
    assert prices.seconds(4, 40) == pytest.approx(5e-3, rel=0.02)
    engine.close()


@pytest.mark.parametrize("other", [{"threads": 2}, {"kv_cache_dtype": "f32"}])
def test_another_number_of_threads_or_type_starts_from_nothing(model: Path, home: Path, other: dict[str, object]) -> None:
    written(model)
    engine = engine_of(model, **other)  # type: ignore[arg-type]
    assert engine.step_cost.base is None and engine.step_cost.median_error is None
    engine.close()


def test_a_file_that_is_damaged_or_says_it_is_for_something_else_is_a_warning(
    model: Path, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = written(model)
    whole = path.read_text()
    damaged = (whole[: len(whole) // 2], "", whole.replace('"threads": 1', '"threads": 3'), whole.replace("octavo-step-cost", "x"))
    nothing = dataclasses.replace(COST, seconds_per=(0.0,) * 6)
    for content in (*damaged, nothing.to_json()):
        path.write_text(content)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "octavo.engine"):
            engine = engine_of(model)
            engine.close()
        assert engine.step_cost.base is None
        assert len(caplog.records) == 1 and str(path) in caplog.text and "learned anew" in caplog.text
    assert not [file for file in path.parent.iterdir() if file != path]


def test_without_a_folder_nothing_is_looked_for(model: Path, home: Path) -> None:
    engine = engine_of(model)
    assert not cost_folder().exists() and calibrated_cost(engine.backend) is None
    engine.close()


def test_backends_that_do_not_say_what_they_run_on_are_not_calibrated() -> None:
    engine = TimedRun(Law()).engine
    assert fitted_for(engine.backend) is None and engine.step_cost.base is None


def test_every_engine_learns_and_shows_how_far_off_it_is(model: Path, home: Path) -> None:
    """With a bound on gaps or without, from a calibration or from nothing; the same cost for all that ask."""
    from octavo.engine.metric_families import metric_families
    from octavo.server.prometheus import exposition

    def shown(engine: Engine, name: str) -> float:
        (line,) = [line for line in exposition(metric_families(engine))[0].decode().splitlines() if line.startswith(name + " ")]
        return float(line.split()[1])

    for calibrate, scheduler in ((False, {}), (True, {}), (True, {"max_itl_ms": 50.0})):
        if calibrate:
            written(model)
        engine = engine_of(model, **scheduler)  # type: ignore[arg-type]
        assert shown(engine, "octavo_step_cost_pace_ratio") != shown(engine, "octavo_step_cost_pace_ratio")  # nan
        before = engine.step_cost.num_observations
        run(engine)
        assert engine.step_cost.num_observations > before
        assert shown(engine, "octavo_step_cost_error_ratio") == engine.step_cost.median_error
        pace = engine.step_cost.pace
        assert (pace is not None) == calibrate
        assert pace is None or shown(engine, "octavo_step_cost_pace_ratio") == pace > 0.0
        assert engine.gap_model is None or engine.gap_model.device is engine.step_cost
        engine.close()


def test_a_window_carries_what_was_calibrated(model: Path, home: Path) -> None:
    for calibrate in (False, True):
        if calibrate:
            written(model)
        engine = engine_of(model)
        run(engine)
        carried = snapshot(engine, 1e9).engine.step_cost
        engine.close()
        assert (None if carried is None else coefficients_of(json.loads(json.dumps(carried)))) == engine.step_cost.base
        assert (carried is not None) == calibrate


def test_what_a_step_holds_is_counted_once(model: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted, count = list[int](), StepShape.of.__func__  # type: ignore[attr-defined]

    def counting(cls: type[StepShape], plan: StepPlan) -> StepShape:
        counted.append(plan.step_index)
        return count(cls, plan)  # type: ignore[no-any-return]

    engine = engine_of(model)
    monkeypatch.setattr(StepShape, "of", classmethod(counting))
    run(engine)
    engine.close()
    assert len(counted) == len(set(counted)) >= 4


def test_a_bounded_run_from_a_calibration_is_replayed(model: Path, home: Path, tmp_path: Path) -> None:
    """The recording says what was known beforehand, and in each line by how much that was corrected."""
    written(model)
    engine = engine_of(model, max_itl_ms=2.0, record=str(tmp_path / "run.jsonl"))
    run(engine, 8)
    engine.close()
    assert engine.step_cost.base is not None and len(engine.step_cost.factors) == 3 and len(engine.step_cost.weights) == 6
    assert replay_recording(tmp_path / "run.jsonl").num_plans == engine.scheduler.stats.num_steps > 20


def test_a_step_log_has_the_time_from_step_to_step() -> None:
    """On a virtual clock: device, host, and which steps follow on idleness."""
    from octavo.engine.step_log import StepLog, bias
    from tests.engine.timed import HOST_S

    law = Law()
    timed = TimedRun(law)
    log = timed.engine.step_log = StepLog()
    for name in ("a", "b"):
        timed.add(name, 30, 4)
        timed.run_until(name, 4)
        timed.clock.advance(5.0)
    steps = log.take()
    assert [step.kind for step in steps] == ["prefill", "decode", "decode", "decode"] * 2
    assert [step.follows_idleness for step in steps] == [True, False, False, False] * 2
    for step in steps:
        assert step.device_s == pytest.approx(law.seconds(step.shape), rel=1e-9)
        assert step.total_s == pytest.approx(step.device_s + HOST_S, rel=1e-6)
    assert log.steps == []
    same = Coefficients((law.row, law.pair, law.position, 0.0, law.logit_row, law.step), HOST_S)
    assert bias(same, steps) == pytest.approx(0.0, abs=1e-9) and bias(same.times(2.0), steps) == pytest.approx(1.0)
    assert bias(same, []) == 0.0
