"""Steps that take a factor longer, and a cost model that stays of its kind."""

from __future__ import annotations

import math
from array import array

import pytest

from octavo.core.cost import StepShape
from octavo.core.step import SequenceSlice, StepPlan
from octavo.costs.scaled import scaled
from tests.simulator.engines import LinearCost, PlanCost, engine, run, work

PLAN = StepPlan(0, [SequenceSlice(0, 5, [1, 2, 3], array("i"), 1, [0])])


def test_every_step_takes_so_many_times_as_long() -> None:
    shape = StepShape.of(PLAN)
    for factor in (0.5, 1.0, 1.2):
        both = scaled(LinearCost(), factor)
        assert both.seconds(PLAN) == factor * LinearCost().seconds(PLAN)
        assert both.seconds_of(shape) == factor * LinearCost().seconds_of(shape)  # type: ignore[attr-defined]
        assert not hasattr(scaled(PlanCost(), factor), "seconds_of")


def test_a_run_takes_so_many_times_as_long() -> None:
    load = [work(0.0, 9, 20), work(0.0, 3, 30)]
    one, two = run([engine()], load), run([engine(cost=scaled(LinearCost(), 2.0))], load)
    assert two.duration_s == pytest.approx(2 * one.duration_s) and two.num_jumped_steps == one.num_jumped_steps > 0


@pytest.mark.parametrize("factor", [0.0, -1.0, math.nan, math.inf])
def test_factors_without_a_meaning(factor: float) -> None:
    with pytest.raises(ValueError, match="factor: "):
        scaled(LinearCost(), factor)
