"""The predicted gap: what has passed, the host's share, and the device's with its margin."""

from __future__ import annotations

from array import array

import pytest

from octavo.core.cost import StepShape
from octavo.core.step import SequenceSlice, StepPlan, StepResult
from octavo.costs.gap import GapModel

PLAN = StepPlan(0, [SequenceSlice(0, 9, [1], array("i", [0]), num_samples=1, sample_slots=[0])])
SHAPE = StepShape.of(PLAN)


def run_steps(model: GapModel, host_s: list[float], device_s: float = 0.01, now: float = 0.0) -> float:
    """Steps one right after the other; returns when the last one ended."""
    for host in host_s:
        model.begin(now)
        now += host + device_s
        model.end(PLAN, StepResult(0, [], device_s), now)
    return now


def test_a_gap_is_what_has_passed_and_host_and_device() -> None:
    model = GapModel()
    now = run_steps(model, [0.002] * 20)
    model.begin(now + 0.005)
    margin = 1.0 + model.device.overrun
    assert model.gap_seconds(SHAPE) == pytest.approx(0.005 + 0.002 + 0.01 * margin, rel=1e-6)
    assert model.gap_seconds(StepShape()) == pytest.approx(0.005 + 0.002)


def test_one_host_step_in_ten_may_be_longer() -> None:
    model = GapModel()
    run_steps(model, [0.001] * 29 + [0.050] * 3)
    assert model.host_s == pytest.approx(0.001)
    run_steps(model, [0.050])
    assert model.host_s == pytest.approx(0.050)


def test_little_known_of_the_host_is_taken_at_its_worst() -> None:
    model = GapModel()
    assert model.host_s == 0.001
    run_steps(model, [0.0001, 0.02, 0.0001])
    assert model.host_s == pytest.approx(0.02)
