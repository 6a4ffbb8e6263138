from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.simulator.sketch import ALPHA, QuantileSketch

VALUES = st.lists(st.one_of(st.just(0.0), st.floats(1e-9, 1e6)), min_size=1, max_size=60)


def sketch_of(values: list[float]) -> QuantileSketch:
    sketch = QuantileSketch()
    for value in values:
        sketch.add(value)
    return sketch


@given(VALUES, st.floats(0.0, 1.0))
def test_quantiles_are_within_the_stated_error(values: list[float], share: float) -> None:
    exact = sorted(values)[max(1, math.ceil(share * len(values))) - 1]
    found = sketch_of(values).quantile(share)
    assert found is not None and abs(found - exact) <= ALPHA * exact * 1.000001


@given(VALUES)
def test_order_and_grouping_do_not_matter(values: list[float]) -> None:
    assert sketch_of(values) == sketch_of(values[::-1])
    merged = sketch_of(values[: len(values) // 2])
    merged.merge(sketch_of(values[len(values) // 2 :]))
    assert merged == sketch_of(values)
    counted = QuantileSketch()
    for value in set(values):
        counted.add(value, values.count(value))
    assert counted == sketch_of(values)


def test_mean_and_ends() -> None:
    sketch = sketch_of([0.0, 1.0, 2.0])
    assert (sketch.mean, sketch.least, sketch.most, sketch.quantile(0.0), sketch.quantile(1.0)) == (1.0, 0.0, 2.0, 0.0, 2.0)
    assert sketch.summary()["count"] == 3


def test_of_nothing_there_is_nothing() -> None:
    assert QuantileSketch().summary() == {"count": 0, "mean": None, "p50": None, "p90": None, "p99": None, "max": None}


@pytest.mark.parametrize("value", [-1.0, math.nan])
def test_what_is_no_duration_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="is not allowed"):
        QuantileSketch().add(value)


def test_a_share_is_from_0_to_1() -> None:
    with pytest.raises(ValueError, match="share: 1.5"):
        sketch_of([1.0]).quantile(1.5)
