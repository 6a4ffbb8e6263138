"""Prices learned from loads: of prompts and of steps, apart."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.distributed.learned_costs import LearnedCosts
from tests.distributed.views import View

SECONDS = st.just(0.0) | st.floats(1e-9, 10.0)


def steps(learned: LearnedCosts, index: int, sizes: list[int], base_s: float, sequence_s: float) -> None:
    for size in sizes:
        learned.saw(View(index, pending_tokens=size, num_sequences=size, pending_s=base_s + sequence_s * size))


def prompt(index: int, tokens: int, seconds: float, **options: int) -> View:
    return View(index, pending_tokens=tokens, num_sequences=1, pending_s=seconds, **options)


@given(st.lists(st.integers(1, 500), min_size=2, max_size=40, unique=True), st.floats(0.0, 1.0), st.floats(1e-5, 0.1))
def test_a_line_of_steps_is_learned(sizes: list[int], base_s: float, sequence_s: float) -> None:
    learned = LearnedCosts()
    steps(learned, 3, sizes, base_s, sequence_s)
    most_s = base_s + sequence_s * max(sizes)
    assert learned.step(3) == pytest.approx((base_s, sequence_s), rel=1e-3, abs=1e-4 * most_s)
    assert learned.token_s(View(3), 7, 100) == pytest.approx(base_s + 7 * sequence_s, rel=1e-3, abs=1e-3 * most_s)
    learned.forget(3)
    assert learned.step(3) == LearnedCosts().step(0)


def test_a_step_that_takes_as_long_for_many_costs_nothing_for_one_more() -> None:
    learned = LearnedCosts()
    steps(learned, 0, [1, 2, 3, 4], 0.5, -0.01)
    base_s, sequence_s = learned.step(0)
    assert sequence_s == 0.0 and base_s == pytest.approx(0.475, abs=0.01)


def test_a_step_of_few_says_nothing_of_a_prompt() -> None:
    learned = LearnedCosts()
    learned.saw(prompt(0, 1000, 0.1))
    steps(learned, 1, [1, 2, 1, 2], 0.02, 1e-5)
    assert learned.prompt_s(View(0), 0, 500) == learned.prompt_s(View(1), 0, 500) == pytest.approx(0.05)  # alike until it tells otherwise


def test_who_is_slow_is_found_out_and_can_show_otherwise() -> None:
    learned = LearnedCosts()
    for _ in range(8):
        learned.saw(prompt(0, 1000, 0.1))
        learned.saw(prompt(1, 1000, 0.4))
    assert learned.prompt_token_s(0) == pytest.approx(1e-4)
    assert 3.5e-4 < learned.prompt_token_s(1) < 4e-4 and learned.prompt_token_s(0) < learned.prompt_token_s(2) < learned.prompt_token_s(1)
    for _ in range(8):
        learned.saw(prompt(1, 1000, 0.1))
    assert learned.prompt_token_s(1) < 1.3e-4
    learned.saw(prompt(1, 10, 0.02))  # mostly the step: it hardly moves the price
    assert learned.prompt_token_s(1) < 1.4e-4


def test_guesses_of_others_are_not_learned_from() -> None:
    learned = LearnedCosts()
    learned.saw(prompt(0, 1000, 9.0, num_unseen=1))
    assert learned.prompt_token_s(0) == LearnedCosts().prompt_token_s(0)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1000), st.integers(0, 50), SECONDS), max_size=30))
def test_prices_are_never_below_zero_whatever_was_told(told: list[tuple[int, int, int, float]]) -> None:
    learned = LearnedCosts()
    for index, tokens, num_sequences, seconds in told:
        learned.saw(View(index, pending_tokens=tokens, num_sequences=num_sequences, pending_s=seconds))
    for index in range(4):
        base_s, sequence_s = learned.step(index)
        assert base_s >= -1e-9 and sequence_s >= 0.0 and learned.prompt_token_s(index) > 0.0
