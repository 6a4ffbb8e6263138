"""`octavo bench preemption`: what it runs is what it says, its counts add up, and cases that cannot be are refused."""

from __future__ import annotations

import json

import pytest

from octavo.bench.preemption import WAYS, PreemptionCase, _crossover, run_preemption, run_way, way_config
from octavo.bench.restore_seconds import restore_seconds
from octavo.config import BackendConfig, CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from octavo.engine.engine import Engine
from tests.models.tiny import write_tiny_gguf

CASE = PreemptionCase(num_requests=12, num_prompt=20, num_output=60, share=0.3, block_sizes=(16, 32), repeat=2)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    path = write_tiny_gguf(tmp_path_factory.mktemp("models") / "rand.gguf")
    scheduler = SchedulerConfig(admission_lookahead=1)
    return EngineConfig(ModelConfig(str(path)), CacheConfig(), scheduler, backend=BackendConfig(threads=1))


def test_the_record(config: EngineConfig) -> None:
    lines: list[str] = []
    run_preemption(config, CASE, lines.append, as_json=False)
    shown, record = lines[0], json.loads(lines[1])
    assert [size["block_size"] for size in record["block_sizes"]] == [16, 32]
    for size in record["block_sizes"]:
        assert size["num_kv_blocks"] == 288 // size["block_size"]
        recompute, swap = size["recompute"], size["swap"]
        assert recompute["num_moved_blocks"] == 0 and recompute["num_recomputed_tokens"] > 0 and recompute["move_us_per_block"] is None
        assert swap["num_moved_blocks"] > 0 == swap["num_recomputed_tokens"] and swap["move_us_per_block"] > 0
        assert all(size[way]["num_preemptions"] > 0 and size[way]["output_tok_s"] > 0 for way in WAYS)
        assert size["swap_over_recompute"] == pytest.approx(swap["output_tok_s"] / recompute["output_tok_s"], abs=1e-3)
        assert swap["num_swaps"] == swap["num_preemptions"] and recompute["num_swaps"] == 0
        assert size["restore"]["num_tokens"] == 50
        for way, name in (("recompute", "recompute_measured_s"), ("swap", "swap_measured_s")):
            assert way in shown and f"{1e3 * size['restore'][name]:.3f}" in shown
    assert set(record["crossover"]) == {"predicted", "measured"} and shown.count("Crossover") == 2
    run_preemption(config, PreemptionCase(6, 20, 40, 0.4, (16,), 1), lines.append, as_json=True)
    assert len(lines) == 3 and json.loads(lines[2])["bench"] == "preemption"


def test_a_run_counts_what_it_did(config: EngineConfig) -> None:
    engine = Engine.load(way_config(config, CASE, 16, "swap"))
    prompts = [[5 + i] * CASE.num_prompt for i in range(CASE.num_requests)]
    first, second = (run_way(engine, CASE, prompts) for _ in range(2))
    assert first.outputs == second.outputs and [len(output) for output in first.outputs] == [60] * 12
    assert first.num_computed_tokens == 12 * 79 >= second.num_computed_tokens  # the second finds prompts in the cache
    assert first.num_moves > 0 and first.move_s > 0
    engine.close()


def test_a_pool_that_holds_no_request_is_refused(config: EngineConfig) -> None:
    with pytest.raises(ValueError, match="--share: 0.1 of 360 tokens is 2 blocks of 16, and 4 are needed"):
        run_preemption(config, PreemptionCase(6, 20, 40, 0.1, (16,), 1), print, as_json=True)


def test_what_one_sequence_takes_to_come_back(config: EngineConfig) -> None:
    """Measured on the backend: the steps and moves that are asked of it, and nothing else."""
    engine = Engine.load(way_config(config, CASE, 16, "auto"))
    run_way(engine, CASE, [[5 + i] * CASE.num_prompt for i in range(CASE.num_requests)])
    plans, execute = [], engine.backend.execute
    engine.backend.execute = lambda plan: plans.append(plan) or execute(plan)  # type: ignore[method-assign, func-returns-value]
    found = restore_seconds(engine, 50)
    assert min(found.recompute_predicted_s, found.swap_predicted_s, found.swap_measured_s) > 0
    assert found.swap_predicted_s == engine.preemption_model.swap_seconds(8)  # type: ignore[union-attr]
    with_rows = [plan for plan in plans if len(plan.slices) == 2]
    assert {plan.slices[1].num_tokens for plan in with_rows} == {50} and len(with_rows) == sum(len(plan.slices) == 1 for plan in plans)
    moves = [len(plan.block_saves) + len(plan.block_loads) for plan in plans if not plan.slices]
    assert set(moves) == {4} and len(moves) == 2 * len(with_rows)
    assert not {block for plan in with_rows for block in plan.slices[1].block_table} & set(with_rows[0].slices[0].block_table)
    engine.close()


@pytest.mark.parametrize(
    ("swap", "crossover"), [([1, 1, 1], 16), ([9, 1, 1], 32), ([9, 9, 1], 64), ([9, 9, 9], None), ([1, 9, 1], 64), ([1, 1, 9], None)]
)
def test_the_crossover_is_where_swapping_begins_to_pay_for_good(swap: list[int], crossover: int | None) -> None:
    seconds = zip((16, 32, 64), swap, strict=True)
    results = [{"block_size": size, "restore": {"swap_measured_s": s, "recompute_measured_s": 5}} for size, s in seconds]
    assert _crossover(results, "measured") == crossover == _crossover(results[::-1], "measured")
