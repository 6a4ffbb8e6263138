from __future__ import annotations

import json
import random
from array import array
from pathlib import Path
from typing import Any

import pytest

from octavo.core.cost import StepShape
from octavo.core.step import SequenceSlice, StepPlan
from octavo.costs.coefficients import Coefficients, CostFileError, read_coefficients
from octavo.costs.fitted import FittedCost

COST = Coefficients((1e-3, 1e-6, 1e-5, 1e-4, 2e-4, 5e-3), host_s=1e-3, median_error=0.02, max_rows=64, about="a test")
PLAN = StepPlan(0, [SequenceSlice(0, 4, [1, 2], array("i")), SequenceSlice(1, 9, [1], array("i"), 1, [0])])


def test_a_file_gives_back_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    path.write_text(COST.to_json())
    assert read_coefficients(path) == COST


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
        ({"host_s": -1}, "host_s: -1 is not allowed; a finite number of at least 0"),
        ({"median_error": "x"}, "median_error: 'x' is not allowed"),
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
