"""Prices of a window's steps: a law is found again, noise and hold-ups notwithstanding; beyond what was seen a calibration says more."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from octavo.core.cost import StepShape
from octavo.costs.coefficients import Coefficients, Ramp
from octavo.costs.fitting import FitError
from octavo.costs.window_fit import fit_window

LAW = Coefficients((4e-4, 3e-8, 2e-7, 3e-5, 5e-5, 2e-3))


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


def decoding(rng: random.Random, num: int, context: int = 300) -> list[StepShape]:
    out = []
    for _ in range(num):
        shape = StepShape()
        for _ in range(rng.randrange(1, 9)):
            shape.add(rng.randrange(context), 1, 1)
        out.append(shape)
    return out


def prompt(num_tokens: int, start: int = 0) -> StepShape:
    return StepShape().plus(start, num_tokens, 1)


def sample(shape: StepShape, seconds: float) -> tuple[float, ...]:
    return shape.num_rows, shape.num_sequences, shape.num_logit_rows, shape.num_context, shape.num_pairs, seconds


def samples(asked: list[StepShape], law: Coefficients = LAW, noise: float = 0.0, seed: int = 3) -> list[tuple[float, ...]]:
    rng = random.Random(seed)
    return [sample(shape, law.seconds_of(shape) * max(0.5, rng.gauss(1.0, noise))) for shape in asked]


def off(found: Coefficients, law: Coefficients, asked: list[StepShape]) -> list[float]:
    return sorted(abs(found.seconds_of(shape) / law.seconds_of(shape) - 1.0) for shape in asked)


def test_a_law_is_found_again() -> None:
    fitted = fit_window(samples(shapes(random.Random(1), 200)))
    assert off(fitted, LAW, shapes(random.Random(2), 50))[-1] < 5e-3
    assert fitted.median_error is not None and fitted.median_error < 2e-3
    assert fitted.num_steps == 200 and fitted.max_rows > 200


def test_noise_and_hold_ups_move_it_little() -> None:
    steps = samples(shapes(random.Random(3), 400), noise=0.1)
    held_up = [(*step[:-1], 30 * step[-1]) if i % 100 == 7 else step for i, step in enumerate(steps)]
    for found, most in ((fit_window(steps), 0.03), (fit_window(held_up), 0.06)):
        asked = shapes(random.Random(4), 50)
        ratios = [found.seconds_of(shape) / LAW.seconds_of(shape) for shape in asked]
        assert abs(sum(ratios) / len(ratios) - 1.0) < most


def test_no_price_is_negative_and_what_is_not_told_apart_belongs_to_the_step() -> None:
    """Prompts alone, one at a time: sequences, logit rows and the step are not told apart, nor are rows and positions."""
    alone = [sample(prompt(rows), 3e-3 + 4e-4 * rows) for rows in (1, 1, 1, 5, 9, 20, 33, 60)]
    fitted = fit_window(alone)
    assert min(fitted.seconds_per) >= 0.0
    assert sum(fitted.parts_of(prompt(1))) == pytest.approx(3.4e-3, rel=0.02) and fitted.seconds_per[5] == pytest.approx(3.4e-3, rel=0.02)
    assert fitted.seconds_per[3] == pytest.approx(0.0, abs=1e-5)
    assert fitted.seconds_of(prompt(1, 5000)) == pytest.approx(3.4e-3, rel=0.02)


def test_few_steps_are_refused() -> None:
    for base in (None, LAW):
        with pytest.raises(FitError, match="steps: 7 are not enough"):
            fit_window([*samples(shapes(random.Random(1), 7)), (0.0, 0.0, 0.0, 0.0, 0.0, 1.0)], base)


# --- from a calibration -----------------------------------------------------------------------------------------------------------------

BENT = Coefficients(
    (0.0, 2e-8, 1e-7, 0.0, 0.0, 3e-3),
    host_s=4e-4,
    rows=Ramp(((1.0, 0.0), (8.0, 5e-5), (64.0, 4e-4), (math.inf, 2e-4))),
    host_s_per_sequence=2e-5,
    max_rows=512,
)
"""Up to eight rows are nearly free: where that ends no step of a window that only decodes can tell."""


@pytest.mark.parametrize("pace", [0.6, 1.0, 1.4])
def test_sizes_that_were_not_seen_are_those_of_the_calibration_at_the_pace_of_the_window(pace: float) -> None:
    steps = samples(decoding(random.Random(1), 300), BENT.times(pace), noise=0.03)
    based, straight = fit_window(steps, BENT), fit_window(steps)
    unseen = [prompt(64), prompt(256), prompt(512, 500)]
    assert off(based, BENT.times(pace), unseen)[-1] < 0.05
    assert off(straight, BENT.times(pace), unseen)[-1] > 0.3
    assert off(based, BENT.times(pace), decoding(random.Random(2), 50))[-1] < 0.03


def test_a_part_that_is_dearer_than_calibrated_is_seen() -> None:
    """Attention takes three times what it did: longer contexts than any that was seen are priced by that, and the step as it was."""
    law = BENT.corrected([1.0, 1.0, 3.0])
    based = fit_window(samples(decoding(random.Random(1), 300, 8000), law, noise=0.03), BENT)
    assert off(based, law, [StepShape().plus(20_000, 1, 1), *decoding(random.Random(2), 50, 8000)])[-1] < 0.05
    assert based.seconds_per[5] == pytest.approx(law.seconds_per[5], rel=0.1)


def test_a_calibration_that_says_nothing_of_these_steps_is_let_go() -> None:
    other = replace(BENT, seconds_per=(0.0, 0.0, 0.0, 4e-3, 0.0, 0.0), rows=Ramp())
    steps = samples(shapes(random.Random(1), 200), noise=0.02)
    assert fit_window(steps, other) == fit_window(steps)
    nothing = Coefficients((0.0,) * 6)
    assert fit_window(steps, nothing) == fit_window(steps)
