"""The fitted cost model: it learns a known law, keeps what it learned, and is not thrown by a step that was held up."""

from __future__ import annotations

import math
import random
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.cost import StepShape
from octavo.core.step import SequenceSlice, StepPlan, StepResult
from octavo.costs.coefficients import Coefficients
from octavo.costs.fitted import FittedCost
from tests.engine.timed import Law


def decoding(num_sequences: int, context: int) -> StepShape:
    shape = StepShape()
    for _ in range(num_sequences):
        shape.add(context - 1, 1, 1)
    return shape


def chunked(num_sequences: int, start: int, num_tokens: int) -> StepShape:
    return decoding(num_sequences, 200).plus(start, num_tokens, 0)


def mixed(rng: random.Random) -> StepShape:
    """Steps of a busy server: decoding beside a piece of a prompt, or alone."""
    shape = decoding(rng.randint(1, 16), rng.randint(20, 800))
    return shape.plus(rng.randrange(0, 3000), rng.randint(8, 200), rng.randint(0, 1)) if rng.random() < 0.6 else shape


def trained(law: Law, num_steps: int = 300, seed: int = 1) -> FittedCost:
    cost, rng = FittedCost(), random.Random(seed)
    for _ in range(num_steps):
        shape = mixed(rng)
        cost.observe(shape, law.seconds(shape) * max(0.5, rng.gauss(1.0, law.noise)))
    return cost


def worst_error(cost: FittedCost, law: Law) -> float:
    rng = random.Random(99)
    return max(abs(cost.seconds_of(shape) / law.seconds(shape) - 1.0) for shape in (mixed(rng) for _ in range(300)))


LAWS = [Law(), Law(step=5e-2, row=1e-4, pair=1e-7), Law(step=0.0, row=2e-3, pair=0.0), Law(step=2e-3, row=4e-4, pair=8e-7)]


@pytest.mark.parametrize("law", LAWS)
def test_a_law_is_learned(law: Law) -> None:
    cost = trained(law)
    assert worst_error(cost, law) < 0.02
    assert cost.median_error is not None and cost.median_error < 0.01


def test_noise_stays_noise() -> None:
    """Steps that scatter by 5 %: predictions are far better than that, and the stated error is that of the scatter (median 3.4 %)."""
    law = Law(noise=0.05)
    cost = trained(law, num_steps=600)
    assert worst_error(cost, law) < 0.06
    assert cost.median_error is not None and 0.02 < cost.median_error < 0.05
    assert 0.03 < cost.overrun < 0.12


def test_before_and_after_the_first_step() -> None:
    """One step prices everything by the row: more than the truth for prompts, whatever the step's fixed part is."""
    cost, law = FittedCost(), Law()
    assert cost.seconds_of(decoding(3, 10)) == 0.0 and cost.median_error is None
    cost.observe(decoding(4, 100), law.seconds(decoding(4, 100)))
    assert cost.seconds_of(decoding(4, 100)) == pytest.approx(law.seconds(decoding(4, 100)), rel=1e-6)
    assert cost.seconds_of(chunked(4, 0, 64)) > law.seconds(chunked(4, 0, 64))
    assert cost.max_trusted_rows == 16
    cost.observe(chunked(4, 0, 64), law.seconds(chunked(4, 0, 64)))
    assert cost.max_trusted_rows == 4 * 68


def test_ten_steps_of_a_prompt_are_enough() -> None:
    cost, law = FittedCost(), Law(pair=8e-7)
    for i in range(40):
        cost.observe(decoding(8, 80 + i), law.seconds(decoding(8, 80 + i)))
    start = 0
    for num_tokens in (16, 40, 90, 80, 75, 70, 66, 62, 60, 58):
        cost.observe(chunked(8, start, num_tokens), law.seconds(chunked(8, start, num_tokens)))
        start += num_tokens
    assert cost.seconds_of(chunked(8, start, 60)) == pytest.approx(law.seconds(chunked(8, start, 60)), rel=0.05)


def test_long_decoding_does_not_wear_out_what_is_known_of_prompts() -> None:
    law = Law(noise=0.03)
    cost, rng = trained(law), random.Random(5)
    for i in range(5000):
        shape = decoding(8, 100 + i % 2000)
        cost.observe(shape, law.seconds(shape) * rng.gauss(1.0, law.noise))
    for start in (0, 1000, 2500):
        shape = chunked(8, start, 100)
        assert cost.seconds_of(shape) == pytest.approx(law.seconds(shape), rel=0.08)


@pytest.mark.parametrize("factor", [0.3, 1.6, 10.0])
def test_a_step_that_stands_alone_teaches_little(factor: float) -> None:
    cost, law = trained(Law()), Law()
    shape = chunked(8, 500, 100)
    before = cost.seconds_of(shape)
    cost.observe(shape, law.seconds(shape) * factor)
    assert cost.seconds_of(shape) == pytest.approx(before, rel=0.03)


def test_a_slower_machine_is_believed() -> None:
    cost, law = trained(Law()), Law()
    for i in range(8):
        shape = chunked(8, 100 * i, 100)
        cost.observe(shape, 2 * law.seconds(shape))
    for shape in (chunked(8, 800, 100), chunked(8, 800, 40), decoding(8, 300)):
        assert cost.seconds_of(shape) == pytest.approx(2 * law.seconds(shape), rel=0.15)


def test_steps_without_rows_or_time_teach_nothing() -> None:
    cost = FittedCost()
    cost.observe(StepShape(), 1.0)
    cost.observe(decoding(1, 5), 0.0)
    assert cost.num_observations == 0


shapes = st.builds(
    lambda streams, start, rows, logits: decoding(streams, 50).plus(start, rows, logits),
    st.integers(0, 20), st.integers(0, 5000), st.integers(1, 500), st.integers(0, 1),
)  # fmt: skip


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.tuples(shapes, st.floats(1e-6, 100.0)), min_size=1, max_size=40), shapes)
def test_more_work_never_costs_less(steps: list[tuple[StepShape, float]], shape: StepShape) -> None:
    """Whatever nonsense is observed, weights are finite and not negative, so a larger step is never predicted to be shorter."""
    cost = FittedCost()
    for step, seconds in steps:
        cost.observe(step, seconds)
    assert all(0.0 <= weight < float("inf") for weight in cost.weights)
    assert 0.0 <= cost.seconds_of(shape) <= cost.seconds_of(shape.plus(7, 16, 0))


# --- from a calibration -----------------------------------------------------------------------------------------------------------------

CALIBRATED = Coefficients((4e-4, 4e-8, 1e-7, 0.0, 5e-5, 2e-3), host_s=1e-3, median_error=0.03, max_rows=512, num_steps=900)


def device_s(shape: StepShape) -> float:
    return sum(CALIBRATED.parts_of(shape))


def told(cost: FittedCost, factor: float, num_steps: int, noise: float = 0.02, seed: int = 3) -> None:
    """Steps that take ``factor`` times what was calibrated."""
    rng = random.Random(seed)
    for _ in range(num_steps):
        shape = mixed(rng)
        cost.observe(shape, device_s(shape) * factor * max(0.5, rng.gauss(1.0, noise)))


def worst_of(cost: FittedCost, factor: float) -> float:
    rng = random.Random(99)
    return max(abs(cost.seconds_of(shape) / (factor * device_s(shape)) - 1.0) for shape in (mixed(rng) for _ in range(200)))


def test_a_calibrated_cost_is_known_before_the_first_step() -> None:
    """Of the device: the host's share is not what steps are compared with."""
    cost, shape = FittedCost(CALIBRATED), decoding(3, 100)
    assert cost.seconds_of(shape) == pytest.approx(CALIBRATED.seconds_of(shape) - 1e-3)
    assert (cost.median_error, cost.num_observations, cost.max_trusted_rows, cost.pace) == (0.03, 900, 4 * 512, None)


@pytest.mark.parametrize("factor", [0.7, 1.0, 1.15, 2.0])
def test_a_pace_other_than_the_calibrated_one_is_learned(factor: float) -> None:
    cost = FittedCost(CALIBRATED)
    told(cost, factor, 150)
    assert worst_of(cost, factor) < 0.06
    assert cost.pace == pytest.approx(factor, rel=0.02)
    assert cost.median_error is not None and cost.median_error < 0.05
    assert Coefficients.of(cost).seconds_of(mixed(random.Random(4))) == pytest.approx(
        cost.seconds_of(mixed(random.Random(4))) + CALIBRATED.host_s, rel=1e-12
    )


def test_a_part_that_is_dearer_is_found() -> None:
    """Attention takes three times what was calibrated, all else what it did."""
    cost, rng = FittedCost(CALIBRATED), random.Random(8)

    def truth(shape: StepShape) -> float:
        fixed, rows, attention = CALIBRATED.parts_of(shape)
        return fixed + rows + 3.0 * attention

    for _ in range(400):
        shape = mixed(rng)
        cost.observe(shape, truth(shape))
    shapes_seen = [mixed(rng) for _ in range(100)]
    assert max(abs(cost.seconds_of(shape) / truth(shape) - 1.0) for shape in shapes_seen) < 0.08
    shape = decoding(4, 5000)  # mostly attention, and of a kind that was not seen
    assert cost.factors[2] > 2.0 and cost.seconds_of(shape) == pytest.approx(truth(shape), rel=0.2)


@pytest.mark.parametrize("num_paused", [1, 2, 5])
@pytest.mark.parametrize("factor", [0.01, 30.0, 1e4])
@pytest.mark.parametrize("base", [None, CALIBRATED], ids=["learned", "calibrated"])
def test_a_process_that_is_paused_is_believed_for_two_steps(base: Coefficients | None, factor: float, num_paused: int) -> None:
    """However long steps are held up, each pair of them moves the prediction by a factor of four at most; a few steps at the old pace bring
    it back, and none of it is left."""
    cost = FittedCost(base)
    told(cost, 1.0, 200)
    rng, moved = random.Random(17), 1.0
    for _ in range(num_paused):
        shape = mixed(rng)
        cost.observe(shape, factor * device_s(shape))
        off = cost.seconds_of(shape) / device_s(shape)
        assert 4.0 ** -(num_paused // 2) * 0.8 <= off <= 4.0 ** (num_paused // 2) * 1.25
        moved = max(moved, off, 1.0 / off)
    assert num_paused > 1 or moved < 1.05
    told(cost, 1.0, 2 * (num_paused + 1), noise=0.0, seed=5)
    assert worst_of(cost, 1.0) < 0.25
    told(cost, 1.0, 60, seed=6)
    assert worst_of(cost, 1.0) < 0.08


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(st.tuples(shapes, st.floats(1e-6, 100.0)), min_size=1, max_size=40), shapes)
def test_whatever_is_observed_a_calibrated_cost_stays_a_cost(steps: list[tuple[StepShape, float]], shape: StepShape) -> None:
    cost = FittedCost(CALIBRATED)
    for step, seconds in steps:
        cost.observe(step, seconds)
    assert all(0.0 <= one < math.inf for one in (*cost.factors, *cost.weights))
    assert 0.0 <= cost.seconds_of(shape) <= cost.seconds_of(shape.plus(7, 16, 0))


def test_one_price_for_each_kind_of_work() -> None:
    """What splits a step: without a calibration what is learned, with one the calibrated prices as corrected."""
    learned = trained(Law())
    assert learned.weights == learned.factors and learned.weights is not learned.factors
    calibrated = FittedCost(CALIBRATED)
    assert calibrated.weights == pytest.approx(CALIBRATED.seconds_per)
    told(calibrated, 2.0, 150)
    corrected = [calibrated.factors[i] for i in (1, 2, 2, 1, 1, 0)]
    assert calibrated.weights == pytest.approx([x * y for x, y in zip(corrected, CALIBRATED.seconds_per, strict=True)])


def test_of_steps_that_only_decode_some_will_do() -> None:
    """Prompts and drafts always teach."""
    cost, table = FittedCost(), array("i")
    decode = StepPlan(0, [SequenceSlice(0, 9, [1], table, 1, [0])])
    prompt = StepPlan(0, [SequenceSlice(0, 0, [1, 2], table, 1, [0])])
    for i in range(32):
        cost.step_done(decode, StepResult(i, [], 0.01), one_in=8)
    assert cost.num_observations == 4
    cost.step_done(prompt, StepResult(0, [], 0.01), one_in=8)
    cost.step_done(decode, StepResult(0, [], 0.01))
    assert cost.num_observations == 6
