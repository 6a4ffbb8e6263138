"""What a preemption is expected to cost, learned from steps that follow a known law."""

from __future__ import annotations

import pytest

from octavo.core.step import BlockMove, SequenceSlice, SliceResult, StepPlan, StepResult
from octavo.costs.fitted import FittedCost
from octavo.costs.preemption import PreemptionModel

ROW_S, STEP_S, BLOCK_S = 0.0005, 0.004, 0.00002


def step(num_rows: int, num_moves: int = 0) -> tuple[StepPlan, StepResult]:
    plan = StepPlan(0, [SequenceSlice(0, 0, [0] * num_rows, None)])  # type: ignore[arg-type]
    plan.block_saves = [BlockMove(i, i) for i in range(num_moves)]
    move_s = BLOCK_S * num_moves
    return plan, StepResult(0, [SliceResult()], STEP_S + ROW_S * num_rows + move_s, move_s)


def test_both_prices_are_learned() -> None:
    model = PreemptionModel(bytes_per_block=1 << 20)
    for i in range(150):
        model.observe(*step(1 + i * 37 % 256, num_moves=(i % 4 == 0) * (1 + i % 7)))
    for num_tokens in (16, 100, 400):
        assert model.recompute_seconds(num_tokens) == pytest.approx(ROW_S * num_tokens, rel=0.05)
    assert model.swap_seconds(10) == pytest.approx(10 * BLOCK_S, rel=0.05)


def test_before_anything_is_known() -> None:
    model = PreemptionModel(bytes_per_block=4_000_000)
    assert model.recompute_seconds(100) == 0.0  # nothing says that it costs anything
    assert model.swap_seconds(2) == pytest.approx(0.002)  # 4 GB/s


def test_a_cost_that_another_feeds_is_not_fed_twice() -> None:
    device = FittedCost()
    model = PreemptionModel(1000, device)
    model.observe(*step(10, num_moves=2))
    assert device.num_observations == 0 and model.device is device
    assert model.seconds_per_block > 0
