from __future__ import annotations

import dataclasses
import json
import math
import random
from array import array
from pathlib import Path
from typing import Any

import pytest

from octavo.core.cost import StepShape
from octavo.core.step import SequenceSlice, StepPlan
from octavo.costs.coefficients import Coefficients, CostFileError, FittedFor, KindErrors, Ramp, coefficients_of, read_coefficients
from octavo.costs.fitted import FittedCost

COST = Coefficients((1e-3, 1e-6, 1e-5, 1e-4, 2e-4, 5e-3), host_s=1e-3, median_error=0.02, max_rows=64, about="a test")
RICH = Coefficients(
    (0.0, 1e-6, 1e-5, 1e-4, 2e-4, 5e-3), 1e-3, 0.02, 64, "a test", Ramp(((1.0, 0.0), (8.0, 1e-4), (math.inf, 3e-4))),
    Ramp(((math.inf, 1e-5),)), 2e-5, 4e-4, 900, {"decode": KindErrors(40, 0.01, 0.05, -0.02)},
    FittedFor("a cpu", "avx2", 2, "a model:fast", "smollm2", "2026-11-30"),
)  # fmt: skip
PLAN = StepPlan(0, [SequenceSlice(0, 4, [1, 2], array("i")), SequenceSlice(1, 9, [1], array("i"), 1, [0])])


@pytest.mark.parametrize("cost", [COST, RICH])
def test_a_file_gives_back_what_was_written(tmp_path: Path, cost: Coefficients) -> None:
    path = tmp_path / "cost.json"
    path.write_text(cost.to_json())
    assert read_coefficients(path) == cost


def test_a_file_of_the_first_version_is_read(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    data = json.loads(COST.to_json())
    kept = {name: data[name] for name in ("format", "seconds_per", "host_s", "median_error", "max_rows", "about")}
    path.write_text(json.dumps(kept | {"version": 1}))
    assert read_coefficients(path) == COST


def test_pieces_are_straight_and_join() -> None:
    ramp = Ramp(((1.0, 0.0), (8.0, 2.0), (math.inf, 0.5)))
    assert [ramp(n) for n in (0, 1, 2, 8, 9, 100)] == [0.0, 0.0, 2.0, 14.0, 14.5, 60.0]
    assert [ramp.times(2.0)(n) for n in (2, 9)] == [4.0, 29.0] and Ramp()(7) == 0.0
    for pieces in (((1.0, 0.0),), ((2.0, 1.0), (2.0, 1.0), (math.inf, 1.0)), ((math.inf, -1.0),), ((math.inf, math.nan),)):
        with pytest.raises(ValueError, match="pieces: .* is not allowed"):
            Ramp(pieces)


def test_parts_terms_and_multiples_of_a_cost_with_pieces() -> None:
    shape = StepShape.of(PLAN)
    fixed, rows, attention = RICH.parts_of(shape)
    assert (fixed, attention) == pytest.approx((5e-3, 1e-6 * 21 + 1e-5 * 16))
    assert rows == pytest.approx(2e-4 + 2e-4 + 2e-4 + 1e-5)
    assert RICH.seconds(PLAN) == pytest.approx(fixed + rows + attention + 1e-3 + 4e-5)
    assert RICH.terms(PLAN).seconds == pytest.approx(RICH.seconds(PLAN), rel=1e-12)
    assert RICH.times(3.0).seconds(PLAN) == pytest.approx(3.0 * RICH.seconds(PLAN), rel=1e-12)
    assert RICH.mean_prices() == pytest.approx([(7e-4 + 56 * 3e-4) / 64, 1e-6, 1e-5, 1e-4, 2e-4 + 1e-5, 5e-3])
    assert RICH.corrected([2.0, 3.0, 5.0]).parts_of(shape) == pytest.approx((2.0 * fixed, 3.0 * rows, 5.0 * attention))


def test_what_a_cost_holds_for_is_more_than_its_date() -> None:
    key = FittedFor("a cpu", "avx2", 2, "a model:fast", "smollm2", "2026-11-30")
    assert key.same_as(FittedFor("a cpu", "avx2", 2, "a model:fast"))
    for other in (("b", "avx2", 2, "a model:fast"), ("a cpu", "avx512", 2, "a model:fast"), ("a cpu", "avx2", 1, "a model:fast")):
        assert not key.same_as(FittedFor(*other))


def test_any_file_is_a_cost_or_an_error_of_its_kind() -> None:
    """Every field replaced by every kind of nonsense: refused by CostFileError or taken, and then nothing costs less than nothing."""
    whole = json.loads(RICH.to_json())
    nonsense = (None, True, -1, 1.5, 10**400, math.nan, math.inf, "x", [], [1], [[1, 2, 3]], [[None, -1]], {}, {"row": [[None, "x"]]})
    num_refused = 0
    for name in whole:
        for value in nonsense:
            try:
                cost = coefficients_of(whole | {name: value})
            except CostFileError:
                num_refused += 1
            else:
                assert 0.0 <= cost.seconds(PLAN) < math.inf
    assert num_refused > 100


def test_a_cost_that_is_nothing_is_refused() -> None:
    """Rates are requests over seconds: of steps that take none there is no rate."""
    nothing = Coefficients((0.0,) * 6)
    with pytest.raises(CostFileError, match="seconds_per: a step of one row costs nothing"):
        coefficients_of(nothing.to_dict())
    assert coefficients_of(dataclasses.replace(nothing, host_s=1e-3).to_dict()).host_s == 1e-3


def test_pieces_go_as_far_as_numbers_do() -> None:
    ramp = Ramp(((1e19, 1.0), (1e20, 2.0), (math.inf, 0.0)))
    assert ramp(1e19) == 1e19 and ramp(1e20) == ramp(1e21) == pytest.approx(1e19 + 2 * 9e19)


def test_what_a_fitted_cost_knows_is_kept() -> None:
    fitted, rng = FittedCost(), random.Random(0)
    for _ in range(200):
        shape = StepShape()
        for _ in range(rng.randint(1, 6)):
            shape.add(rng.randint(0, 400), rng.choice((1, 1, 40)), 1)
        fitted.observe(shape, 0.002 + 1e-4 * shape.num_rows + 2e-6 * shape.num_context)
    kept = Coefficients.of(fitted)
    for _ in range(50):
        shape = StepShape().plus(rng.randint(0, 400), rng.randint(1, 40), 1)
        assert kept.seconds_of(shape) == pytest.approx(fitted.seconds_of(shape), rel=1e-12)
    assert kept.max_rows == fitted.max_rows and kept.median_error == fitted.median_error


def test_terms_add_up_to_the_seconds() -> None:
    assert COST.terms(PLAN).seconds == pytest.approx(COST.seconds(PLAN), rel=1e-12)
    assert COST.seconds(PLAN) == pytest.approx(3e-3 + 1e-6 * (5 + 6 + 10) + 1e-5 * 16 + 2e-4 + 2e-4 + 6e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, '"format": "octavo-step-cost"'),
        ({"version": 3}, '"version": 1 or 2'),
        ({"seconds_per": {"row": 1}}, "seconds_per: an object with exactly row, pair"),
        ({"host_s": -1}, "host_s: -1 is not allowed; a number from 0 to 1e.12"),
        ({"host_s": 1e13}, "host_s: 10000000000000.0 is not allowed"),
        ({"median_error": "x"}, "median_error: 'x' is not allowed"),
        ({"wake_s": None}, "wake_s: null is not allowed"),
        ({"pieces": {"row": [[8, 1.0]]}}, "pieces row: .* the last one has no end"),
        ({"pieces": {"logit_row": [[None, -1.0]]}}, "pieces logit_row: -1.0 is not allowed"),
        ({"pieces": [1]}, "pieces row: a list of at most 64 pairs"),
        ({"errors": {"decode": {}}}, "errors decode: an object with exactly"),
        ({"errors": 3}, "errors: 3 is not allowed"),
        ({"fitted_for": {"machine": "m"}}, "fitted_for: an object with the texts"),
    ],
)
def test_a_wrong_file_is_refused_by_its_field(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "cost.json"
    path.write_text(json.dumps(json.loads(COST.to_json()) | change))
    with pytest.raises(CostFileError, match=message):
        read_coefficients(path)
    path.write_text("no json")
    with pytest.raises(CostFileError, match="it is no JSON"):
        read_coefficients(path)
    path.write_text(COST.to_json().replace("0.001,", "NaN,", 1))
    with pytest.raises(CostFileError, match="nan is not allowed"):
        read_coefficients(path)
