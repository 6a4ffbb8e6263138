"""Calibrating: scenes that fit any engine and cover its sizes, and a real engine measured with them. Nothing depends on what steps take."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest

from octavo.config import BackendConfig, CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from octavo.costs.coefficients import Coefficients, read_coefficients
from octavo.costs.fitting import MIN_STEPS
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.calibrate import HELD_OUT, Calibration, Calibrator, SceneLimits, calibrate, scenes
from octavo.engine.engine import Engine
from octavo.engine.step_costs import fitted_for, write_cost
from tests.models.tiny import write_tiny_gguf

LIMITS = SceneLimits(max_tokens=2048, max_num_seqs=64, max_rows=512, num_pool_tokens=130_000)
KINDS = {"prompt", "decode", "mixed", "context", "drafts", "logits"}


@pytest.mark.parametrize(
    "limits",
    [LIMITS, SceneLimits(8, 1, 1, 16), SceneLimits(64, 2, 16, 64), SceneLimits(200, 4096, 1 << 16, 4000), SceneLimits(2, 1, 512, 9)],
)
def test_scenes_are_within_the_limits(limits: SceneLimits) -> None:
    for scene in itertools.islice(scenes(limits), 60):
        assert scene.requests
        for one in scene.requests:
            assert min(one.num_prompt, one.num_output) >= 1 and one.num_prompt + one.num_output <= limits.max_tokens
        if len(scene.requests) > 1:
            assert len(scene.requests) <= limits.max_num_seqs
            assert sum(one.num_prompt + one.num_output for one in scene.requests) <= limits.num_pool_tokens
        assert all(one.after < scene.requests[0].num_output or one.after == 0 for one in scene.requests[1:]) or limits.max_tokens < 100


def test_scenes_cover_every_size_and_are_told_by_their_seed() -> None:
    first = list(itertools.islice(scenes(LIMITS), 60))
    assert first == list(itertools.islice(scenes(LIMITS), 60)) != list(itertools.islice(scenes(LIMITS, seed=1), 60))
    assert {scene.kind for scene in first[:12]} == KINDS
    assert {scene.kind for scene in first[HELD_OUT - 1 :: HELD_OUT]} == KINDS  # of those that are kept out, too
    prompts = [scene.requests[0].num_prompt for scene in first if scene.kind == "prompt"]
    batches = [len(scene.requests) for scene in first if scene.kind == "decode"]
    for sizes, marks in ((prompts, (4, 32, 128, 512, 1280)), (batches, (2, 8, 24, 64))):
        bins = [0, *marks]
        assert all(any(low < size <= high for size in sizes) for low, high in itertools.pairwise(bins)), sizes
    drafts = {one.num_drafts for scene in first if scene.kind == "drafts" for one in scene.requests}
    assert len(drafts) >= 4 and max(drafts) > 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("models") / "rand.gguf", context=256)


def engine_of(model: Path) -> Engine:
    scheduler = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64)
    return Engine.load(EngineConfig(ModelConfig(str(model)), CacheConfig(num_kv_blocks=128), scheduler, BackendConfig(threads=1)))


def test_a_real_engine_is_measured(model: Path, tmp_path: Path) -> None:
    """Steps of every kind, with the time beside the device; a fifth of the scenes kept out; the engine whole and idle afterwards."""
    engine, shown = engine_of(model), list[str]()

    async def measured() -> Calibration:
        running = AsyncEngine(engine)
        running.start()
        try:
            calibrator = Calibrator(running)
            await calibrator.run(0.0, shown.append)
            for _ in range(12):
                num_scenes = calibrator.calibration.num_scenes
                await calibrator.run(0.0)
                assert calibrator.calibration.num_scenes == num_scenes + 1
            assert engine.step_log is None and not engine.has_work and engine.metrics.num_failed_steps == 0
            engine.scheduler.check_invariants()
            return calibrator.calibration
        finally:
            await running.stop()

    calibration = asyncio.run(measured())
    assert len(calibration.train) >= 2 * MIN_STEPS and calibration.held_out and calibration.firsts
    assert len(shown) > 1 and "scenes" in shown[-1]
    steps = calibration.train + calibration.held_out
    assert {step.kind for step in steps} == {"prefill", "decode", "mixed"}
    assert all(0.0 < step.device_s <= step.total_s for step in steps)
    assert any(step.shape.num_logit_rows > step.shape.num_sequences for step in steps if step.kind == "decode")  # drafts
    assert any(step.shape.num_logit_rows > 3 for step in steps if step.kind == "prefill")  # rows that are scored
    assert any(step.follows_idleness for step in steps)
    cost = calibration.cost(engine)
    key = fitted_for(engine.backend)
    assert cost.fitted_for is not None and key is not None and cost.fitted_for.same_as(key) and cost.fitted_for.threads == 1
    assert cost.errors["all"].num_steps > 0 and cost.median_error == cost.errors["all"].median
    assert cost.max_rows == 64 and 0 < cost.num_steps <= len(calibration.train)
    write_cost(cost, tmp_path / "cost.json")
    assert read_coefficients(tmp_path / "cost.json") == cost


def test_all_in_one(model: Path) -> None:
    engine = engine_of(model)
    cost = calibrate(engine, 0.05)
    assert isinstance(cost, Coefficients) and cost.num_steps >= MIN_STEPS and "scenes in" in cost.about
    with pytest.raises(RuntimeError, match="closed"):
        engine.backend.kv_capacity(0)


def test_a_request_that_fails_ends_it(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(model)
    monkeypatch.setattr(engine.backend, "execute", lambda plan: 1 / 0)
    with pytest.raises(RuntimeError, match="a request of .* tokens failed: .*ZeroDivisionError"):
        calibrate(engine, 0.05)
