"""Prices fitted on steps of a known cost: found again, through noise and steps that were held up; errors computed by hand."""

from __future__ import annotations

import dataclasses
import math
import random
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.cost import StepShape
from octavo.core.step import SequenceSlice, StepPlan, StepResult
from octavo.costs.coefficients import Coefficients, KindErrors, Ramp
from octavo.costs.fitting import FitError, MeasuredStep, errors_of, fit, kind_of, measured_step, predicted_s, waking_s

TRUTH = Coefficients(
    (0.0, 2e-8, 4e-8, 0.0, 0.0, 3e-3),
    host_s=3e-4,
    rows=Ramp(((1.0, 0.0), (8.0, 5e-5), (64.0, 3e-4), (math.inf, 2.5e-4))),
    logit_rows=Ramp(((1.0, 4e-4), (math.inf, 1e-4))),
    host_s_per_sequence=2e-5,
)
"""Reading weights takes 3 ms; up to eight rows are nearly free, then arithmetic counts."""


def shape_of(rng: random.Random) -> tuple[StepShape, str]:
    """A step as scenes make it: a piece of a prompt, streams, or both."""
    kind, shape = rng.choice(("prefill", "decode", "mixed")), StepShape()
    if kind != "prefill":
        for _ in range(round(64 ** rng.random())):
            shape.add(rng.randint(5, 1500), 1, 1)
    if kind != "decode":
        shape.add(rng.choice((0, 0, rng.randint(1, 1000))), round(512 ** rng.random()), rng.randint(0, 1))
    return shape, kind


def steps_of(number: int, noise: float = 0.0, held_up: float = 0.0, seed: int = 1) -> list[MeasuredStep]:
    """Steps that scatter by ``noise``; a share ``held_up`` of them takes twelve times as long."""
    rng, steps = random.Random(seed), []
    for _ in range(number):
        shape, kind = shape_of(rng)
        host_s = TRUTH.host_s + TRUTH.host_s_per_sequence * shape.num_sequences
        factor = max(0.5, rng.gauss(1.0, noise)) * (12.0 if rng.random() < held_up else 1.0)
        device_s = sum(TRUTH.parts_of(shape)) * factor
        steps.append(MeasuredStep(shape, kind, device_s, device_s + host_s))
    return steps


def off(fitted: Coefficients, seed: int = 77) -> list[float]:
    rng = random.Random(seed)
    shapes = [shape_of(rng)[0] for _ in range(200)]
    return sorted(abs(fitted.seconds_of(shape) / TRUTH.seconds_of(shape) - 1.0) for shape in shapes)


@pytest.fixture(scope="module")
def clean() -> Coefficients:
    return fit(steps_of(220))


def test_a_cost_is_found_again(clean: Coefficients) -> None:
    """Steps without noise: of sizes that were not among them the prices are those of the truth, host and device apart."""
    errors = off(clean)
    assert errors[100] < 0.002 and errors[-1] < 0.03
    assert clean.host_s == pytest.approx(TRUTH.host_s, rel=0.02)
    assert clean.host_s_per_sequence == pytest.approx(TRUTH.host_s_per_sequence, rel=0.02)
    assert clean.seconds_per[1] == pytest.approx(2e-8, rel=0.1) and clean.seconds_per[2] == pytest.approx(4e-8, rel=0.1)
    assert clean.max_rows > 256 and clean.num_steps == 220


def test_scatter_does_not_bend_it() -> None:
    errors = off(fit(steps_of(220, noise=0.04)))
    assert errors[100] < 0.02 and errors[-1] < 0.15


def test_steps_that_were_held_up_raise_the_mean_and_leave_the_shape() -> None:
    """One step in twenty takes twelve times as long, of which three times count: a tenth more, more or less, by which are the large ones.
    Sizes stay to each other as they are."""
    fitted, rng = fit(steps_of(220, held_up=0.05)), random.Random(5)
    shapes = [shape_of(rng)[0] for _ in range(200)]
    ratios = sorted(fitted.seconds_of(shape) / TRUTH.seconds_of(shape) for shape in shapes)
    assert 1.05 < ratios[100] < 1.2
    assert ratios[-10] / ratios[10] < 1.02


def test_what_is_fitted_adds_up_to_what_was_taken() -> None:
    """More steps are held up than hurried: medians alone would promise too much."""
    steps = [step._replace(total_s=(2.0 if i % 4 == 0 else 1.0) * step.total_s) for i, step in enumerate(steps_of(220))]
    fitted = fit(steps)
    took = math.fsum(step.total_s for step in steps)
    assert math.fsum(fitted.seconds_of(step.shape) for step in steps) == pytest.approx(took, rel=1e-9)
    assert took > 1.1 * math.fsum(TRUTH.seconds_of(step.shape) for step in steps)


def test_it_begins_where_data_does() -> None:
    """Sizes of which no step tells have their neighbours' price; nothing is negative, and more rows never cost less."""
    steps = [step for step in steps_of(220) if not 8 < step.shape.num_rows < 100]
    fitted = fit(steps)
    values = [fitted.rows(n) for n in range(1, 600)]
    assert values == sorted(values) and fitted.rows(1) == 0.0
    assert fitted.rows(50) == pytest.approx(TRUTH.rows(50), rel=0.3)


@settings(max_examples=3, deadline=None, derandomize=True)
@given(st.lists(st.floats(1e-6, 10.0), min_size=30, max_size=40), st.integers(0, 99))
def test_whatever_is_measured_no_price_is_below_zero(seconds: list[float], seed: int) -> None:
    rng = random.Random(seed)
    fitted = fit([MeasuredStep(*shape_of(rng), device_s, device_s) for device_s in seconds])
    assert all(0.0 <= one < math.inf for one in fitted.seconds_per) and 0.0 <= fitted.host_s < math.inf
    assert all(each >= 0.0 for _, each in (*fitted.rows.pieces, *fitted.logit_rows.pieces))


def test_too_few_steps_and_steps_that_do_not_count() -> None:
    steps = steps_of(29)
    with pytest.raises(FitError, match="29 were measured; at least 30"):
        fit(steps)
    with pytest.raises(FitError, match="29 were measured"):
        fit([*steps, MeasuredStep(StepShape(), "decode", 1.0, 1.0)])


def test_what_follows_on_idleness_has_a_price_of_its_own() -> None:
    """All prompts find the engine idle, which takes 4 ms on the device and 1 ms beside it: they teach the price of rows all the same."""
    steps = [
        step if step.kind != "prefill"
        else step._replace(follows_idleness=True, device_s=step.device_s + 4e-3, total_s=step.total_s + 5e-3)
        for step in steps_of(220)
    ]
    fitted = fit(steps)
    assert fitted.wake_s == pytest.approx(5e-3, rel=0.03)
    assert off(fitted)[100] < 0.01
    for step in steps[:10]:
        wake_s = fitted.wake_s if step.follows_idleness else 0.0
        assert predicted_s(fitted, step) == fitted.seconds_of(step.shape) + wake_s
    assert errors_of(fitted, steps)["prefill"].median < 0.01


def test_errors_on_steps_that_were_kept_out() -> None:
    """Predicted 10 ms of steps that took 10, 8, 12.5 and 20: off by 0, 25, 20 and 50 %. One that follows on idleness is said to take 12."""
    cost, shape = Coefficients((0.0, 0.0, 0.0, 0.0, 0.0, 0.01), wake_s=0.002), StepShape(num_rows=1)
    took = [MeasuredStep(shape, "decode", 0.0, seconds) for seconds in (0.010, 0.008, 0.0125, 0.020)]
    slow_start = MeasuredStep(shape, "prefill", 0.0, 0.016, follows_idleness=True)
    errors = errors_of(cost, [*took, MeasuredStep(shape, "mixed", 0.0, 0.01), slow_start])
    assert list(errors) == ["prefill", "decode", "mixed", "all"]
    assert errors["prefill"].median == pytest.approx(0.25) and errors["prefill"].bias == pytest.approx(-0.25)
    assert errors["mixed"] == KindErrors(1, 0.0, 0.0, 0.0)
    assert errors["decode"].num_steps == 4
    assert errors["decode"].median == pytest.approx(0.225) and errors["decode"].p90 == pytest.approx(0.5)
    assert errors["decode"].bias == pytest.approx(0.04 / 0.0505 - 1.0)
    assert errors["all"].num_steps == 6 and errors["all"].median == pytest.approx(0.225)
    assert errors_of(cost, []) == {}


def test_waking_is_what_is_over() -> None:
    cost, shape = Coefficients((0.0, 0.0, 0.0, 0.0, 0.0, 0.01)), StepShape(num_rows=1)
    assert waking_s(cost, [(shape, 0.012), (shape, 0.011), (shape, 0.5)]) == pytest.approx(0.002)
    assert waking_s(cost, [(shape, 0.005)]) == waking_s(cost, []) == 0.0
    assert waking_s(dataclasses.replace(cost, wake_s=0.003), []) == 0.003


def test_kinds_and_what_a_measured_step_holds() -> None:
    table = array("i")
    prompt, last = SequenceSlice(0, 0, [1] * 8, table), SequenceSlice(1, 8, [1] * 4, table, 1, [0])
    stream = SequenceSlice(2, 9, [1], table, 1, [0])
    drafted = SequenceSlice(3, 5, [1, 2, 3], table, 3, [0], num_drafts=2)
    assert kind_of(StepPlan(0, [prompt, last])) == "prefill"
    assert kind_of(StepPlan(0, [stream, drafted])) == "decode"
    assert kind_of(StepPlan(0, [stream, prompt])) == "mixed"
    assert kind_of(StepPlan(0, [SequenceSlice(0, 0, [1], table)])) == "prefill"
    step = measured_step(StepPlan(0, [stream, drafted]), StepResult(0, [], 0.5, 0.125), 0.75, True)
    assert step == MeasuredStep(StepShape(4, 2, 4, 10 + 8, 10 + 6 + 7 + 8), "decode", 0.375, 0.625, True)
