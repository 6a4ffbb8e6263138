"""Restoring is chosen when what was measured says that it is sooner than computing."""

from __future__ import annotations

import pytest

from octavo.core.step import BlockMove, SequenceSlice, StepPlan, StepResult
from octavo.costs.fitted import FittedCost
from octavo.costs.restore import FIRST_WAIT_S, RestoreModel

TOKEN_S = 1e-3


def observe(model: RestoreModel, num_tokens: int, num_moves: int = 0, move_s: float = 0.0) -> None:
    from array import array

    pieces = [SequenceSlice(0, 0, [1] * num_tokens, array("i", range(64)))] if num_tokens else []
    plan = StepPlan(0, pieces, block_loads=[BlockMove(i, i) for i in range(num_moves)])
    results = StepResult(0, [], TOKEN_S * num_tokens + move_s, move_s)
    model.step_done(plan, results)


def test_until_something_is_measured_restoring_is_tried() -> None:
    model = RestoreModel()
    assert model.recompute_s(0, 16) == FIRST_WAIT_S
    assert model.restoring_pays(0, 16, 1, 0) and model.restoring_pays(0, 16, 0, 1)


def test_the_measured_way_that_is_sooner_is_taken() -> None:
    model = RestoreModel()
    for num_tokens in (16, 32, 64, 128, 16, 32, 64, 128):
        observe(model, num_tokens, num_moves=4, move_s=4 * 2e-3)
    assert model.recompute_s(0, 160) == pytest.approx(0.160, rel=0.05)
    assert model.restore_s(10, 0) == pytest.approx(0.020)
    model.blocks_read(10, 10 * 5e-3)
    assert model.restore_s(0, 10) == pytest.approx(0.070)
    assert model.restoring_pays(0, 160, 10, 0) and model.restoring_pays(0, 160, 0, 10)
    for _ in range(40):
        model.blocks_read(10, 10 * 20e-3)
    assert model.restoring_pays(0, 160, 10, 0) and not model.restoring_pays(0, 160, 0, 10)


def test_a_step_s_moves_are_no_part_of_what_computing_takes() -> None:
    model = RestoreModel()
    for num_tokens in (16, 32, 64, 128) * 3:
        observe(model, num_tokens, num_moves=100, move_s=1.0)
    assert model.recompute_s(0, 64) == pytest.approx(0.064, rel=0.05)


def test_a_shared_step_cost_is_told_by_its_owner() -> None:
    device = FittedCost()
    model = RestoreModel(device)
    for num_tokens in (16, 32, 64, 128):
        observe(model, num_tokens)
    assert device.num_observations == 0 and model.recompute_s(0, 16) == FIRST_WAIT_S
