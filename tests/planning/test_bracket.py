"""The search for the highest rate that holds: against trying every rate of the grid."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.planning.bracket import Bracket, RateGrid, find_bracket


def every_rate(capacity: float, grid: RateGrid) -> Bracket:
    """All rates of the grid, one by one."""
    rates = [grid.rate(k) for k in range(grid.first, grid.last + 1)]
    holding, failing = [rate for rate in rates if rate <= capacity], [rate for rate in rates if rate > capacity]
    return Bracket(max(holding, default=0.0), min(failing, default=None))


@given(
    st.floats(-6.0, 6.0).map(lambda x: 10.0**x), st.floats(-5.0, 5.0).map(lambda x: 10.0**x), st.sampled_from([0.02, 0.1, 0.5, 1.0]),
    st.floats(-4.0, 0.0).map(lambda x: 10.0**x), st.floats(0.1, 4.0).map(lambda x: 10.0**x),
)  # fmt: skip
@settings(max_examples=100, deadline=None)
def test_finds_what_trying_every_rate_finds(capacity: float, guess: float, precision: float, low: float, high: float) -> None:
    try:
        grid = RateGrid(precision, low, high)
    except ValueError:
        return  # no rate of the grid lies between
    asked = list[float]()

    def holds(rate: float) -> bool:
        asked.append(rate)
        return rate <= capacity

    assert find_bracket(holds, grid, guess) == every_rate(capacity, grid)
    assert len(set(asked)) == len(asked)  # nothing is asked twice
    distance = abs(grid.nearest(min(max(capacity, low), high)) - grid.nearest(guess)) + 2
    assert len(asked) <= 2 * math.log2(distance) + 3
    assert all(low * (1 - 1e-6) <= rate <= high * (1 + 1e-6) for rate in asked)


def test_a_good_guess_takes_two_questions() -> None:
    grid, asked = RateGrid(0.1), list[float]()
    bracket = find_bracket(lambda rate: asked.append(rate) is None and rate <= 10.0, grid, 9.8)
    assert len(asked) == 2 and bracket.holds_at <= 10.0 < (bracket.fails_at or 0.0)
    assert bracket.fails_at == pytest.approx(1.1 * bracket.holds_at)


def test_searches_from_elsewhere_meet_at_the_same_rates() -> None:
    assert len({find_bracket(lambda rate: rate <= 7.3, RateGrid(0.1), guess) for guess in (0.01, 1.0, 7.0, 8.0, 1e5)}) == 1


def test_ends_of_the_range() -> None:
    grid = RateGrid(0.1, 1.0, 100.0)
    assert find_bracket(lambda rate: False, grid, 5.0) == Bracket(0.0, grid.rate(grid.first))
    assert find_bracket(lambda rate: True, grid, 5.0) == Bracket(grid.rate(grid.last), None)


@pytest.mark.parametrize(
    ("precision", "low", "high", "message"),
    [
        (0.0, 1, 2, "precision: 0.0 is not allowed"),
        (1e-17, 1, 2, "precision: 1e-17 is not allowed; from 0.0001 to 1"),
        (1.5, 1, 2, "precision: 1.5 is not allowed"),
        (math.nan, 1, 2, "precision: nan is not allowed"),
        (0.1, 0, 2, "rate_range: 0:2 is not allowed"),
        (0.1, 2, 1, "rate_range: 2:1 is not allowed"),
        (0.1, 1, math.inf, "rate_range: 1:inf is not allowed"),
        (1.0, 4.1, 7.9, "it holds no rate"),
    ],
)
def test_grids_that_hold_nothing(precision: float, low: float, high: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RateGrid(precision, low, high)
