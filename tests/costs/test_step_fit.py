"""Prices fitted at once: a law is found again, noise and hold-ups notwithstanding, and never a negative price."""

from __future__ import annotations

import random

import pytest

from octavo.core.cost import StepShape
from octavo.costs.step_fit import fit_steps

PER = (4e-4, 3e-8, 2e-7, 3e-5, 5e-5, 2e-3)


def shapes(rng: random.Random, num: int) -> list[StepShape]:
    out = []
    for _ in range(num):
        shape = StepShape()
        for _ in range(rng.randrange(1, 20)):
            shape.add(rng.randrange(2000), 1, 1)
        if rng.random() < 0.5:
            shape.add(rng.randrange(500), rng.randrange(2, 300), rng.randrange(2))
        out.append(shape)
    return out


def seconds(shape: StepShape) -> float:
    a, b, c, d, e, f = PER
    linear = a * shape.num_rows + b * shape.num_pairs + c * shape.num_context
    return linear + d * shape.num_sequences + e * shape.num_logit_rows + f


def sample(shape: StepShape, factor: float = 1.0) -> tuple[float, ...]:
    counts = (shape.num_rows, shape.num_sequences, shape.num_logit_rows, shape.num_context, shape.num_pairs)
    return (*counts, factor * seconds(shape))


def test_a_law_is_found_again() -> None:
    fitted = fit_steps([sample(shape) for shape in shapes(random.Random(1), 200)])
    for shape in shapes(random.Random(2), 50):
        assert fitted.seconds_of(shape) == pytest.approx(seconds(shape), rel=5e-3)
    assert fitted.median_error is not None and fitted.median_error < 2e-3


def test_noise_and_hold_ups_move_it_little() -> None:
    rng = random.Random(3)
    steps = [sample(shape, rng.gauss(1.0, 0.1)) for shape in shapes(rng, 400)]
    held_up = [(*step[:-1], 30 * step[-1]) if i % 100 == 7 else step for i, step in enumerate(steps)]
    for found, most in ((fit_steps(steps), 0.03), (fit_steps(held_up), 0.06)):
        asked = shapes(random.Random(4), 50)
        ratios = [found.seconds_of(shape) / seconds(shape) for shape in asked]
        assert abs(sum(ratios) / len(ratios) - 1.0) < most


def test_no_price_is_negative_and_what_is_not_told_apart_belongs_to_the_step() -> None:
    alone = [(float(rows), 1.0, 1.0, float(rows), rows * (rows + 1) / 2, 3e-3 + 4e-4 * rows) for rows in (1, 1, 1, 5, 9, 20, 33, 60)]
    fitted = fit_steps(alone)
    assert min(fitted.seconds_per) >= 0.0
    assert fitted.seconds_per[5] == pytest.approx(3e-3, rel=0.02) and fitted.seconds_per[3] == pytest.approx(0.0, abs=1e-5)


def test_few_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="steps: 7 are not enough"):
        fit_steps([sample(shape) for shape in shapes(random.Random(1), 7)])
