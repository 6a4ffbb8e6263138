"""The search for scales against brute force, and what it promises for every group: never worse than the plain grid."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.quantization.scale_search import affine_scales, nearest, symmetric_scales


def groups(seed: int, size: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Values of several spreads and shifts, some with an outlier, and weights that differ by a factor of up to 50."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((size, count)) * 10 ** rng.uniform(-3, 2, count) + rng.choice([0, 0, 1.5], count)
    x[0, ::7] *= 20
    return x.astype(np.float32), np.exp(rng.uniform(-2, 2, (size, count))).astype(np.float32)


def error(x: np.ndarray, w: np.ndarray, scale: np.ndarray, minimum: np.ndarray | float, low: int, high: int) -> np.ndarray:
    off = x.astype(np.float64) - scale * nearest(x, scale, minimum, low, high) - minimum
    return (off**2 * w).sum(0)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), size=st.sampled_from([16, 32]), bits=st.integers(2, 4))
def test_symmetric_is_never_worse_than_the_plain_grid(seed: int, size: int, bits: int) -> None:
    x, w = groups(seed, size, 40)
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    found = error(x, w, symmetric_scales(x, w, low, high), 0.0, low, high)
    extreme = np.take_along_axis(x, np.abs(x).argmax(0)[None], 0)[0]
    for edge in (low, high):
        assert (found <= error(x, w, extreme / np.float32(edge), 0.0, low, high) * (1 + 1e-4)).all()


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), size=st.sampled_from([16, 32]), top=st.sampled_from([3, 7, 15]), below_zero=st.booleans())
def test_affine_is_never_worse_than_the_plain_grid(seed: int, size: int, top: int, below_zero: bool) -> None:
    x, w = groups(seed, size, 40)
    scale, minimum = affine_scales(x, w, top, below_zero)
    assert (scale >= 0).all() and (not below_zero or (minimum <= 0).all())
    low = np.minimum(x.min(0), 0) if below_zero else x.min(0)
    plain = error(x, w, (x.max(0) - low) / np.float32(top), low, 0, top)
    assert (error(x, w, scale, minimum, 0, top) <= plain * (1 + 1e-3) + 1e-12 * (x.astype(np.float64) ** 2 * w).sum(0)).all()


@pytest.mark.parametrize("low,high", [(-4, 3), (-8, 7)])
def test_symmetric_is_near_the_best_scale_there_is(low: int, high: int) -> None:
    x, w = groups(3, 16, 60)
    found = error(x, w, symmetric_scales(x, w, low, high), 0.0, low, high)
    extreme = np.abs(x).max(0)
    tried = np.concatenate([sign * np.linspace(0.3, 1.5, 1200) / high for sign in (-1, 1)]).astype(np.float32)
    best = np.min([error(x, w, extreme * factor, 0.0, low, high) for factor in tried], axis=0)
    assert np.median(found / best) < 1.01 and np.mean(found / best) < 1.05


@pytest.mark.parametrize("top", [3, 15])
def test_affine_is_near_the_best_scale_there_is(top: int) -> None:
    x, w = groups(4, 16, 40)
    x[0, ::7] /= 20  # outliers would need a finer brute force
    scale, minimum = affine_scales(x, w, top, below_zero=False)
    span, low = x.max(0) - x.min(0), x.min(0)
    best = np.full(x.shape[1], np.inf)
    for factor in np.linspace(0.4, 1.1, 71, dtype=np.float32):
        for shift in np.linspace(-0.1, 0.5, 61, dtype=np.float32):
            best = np.minimum(best, error(x, w, span * factor / top, low + shift * span, 0, top))
    found = error(x, w, scale, minimum, 0, top)
    assert np.median(found / best) < 1.1 and np.mean(found / best) < 1.25


def test_values_on_a_grid_cost_nothing() -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16, (32, 50)).astype(np.float32)
    codes[0], codes[1] = 0, 15
    w = np.ones_like(codes)
    scale, minimum = affine_scales(codes * 0.25 - 3, w, 15, below_zero=False)
    np.testing.assert_allclose(scale, 0.25, rtol=1e-5)
    np.testing.assert_allclose(minimum, -3, rtol=1e-5)
    np.testing.assert_allclose(np.abs(symmetric_scales((codes - 8) * 0.25, w, -8, 7)), 0.25, rtol=1e-6)


@pytest.mark.parametrize("value", [0.0, 2.5, -2.5, 1e-30])
def test_groups_of_equal_values(value: float) -> None:
    x, w = np.full((16, 3), value, np.float32), np.ones((16, 3), np.float32)
    scale, minimum = affine_scales(x, w, 15, below_zero=False)
    assert (scale == 0).all() and (minimum == np.float32(value)).all()
    scale = symmetric_scales(x, w, -8, 7)
    np.testing.assert_allclose(scale * nearest(x, scale, 0.0, -8, 7), x, rtol=1e-6, atol=1e-20)
    scale, minimum = affine_scales(x, w, 3, below_zero=True)
    np.testing.assert_allclose(scale * nearest(x, scale, minimum, 0, 3) + minimum, x, rtol=1e-6, atol=1e-20)


def test_a_small_spread_about_a_large_mean_is_found() -> None:
    x = (1000 + np.random.default_rng(1).uniform(-0.01, 0.01, (32, 20))).astype(np.float32)
    scale, minimum = affine_scales(x, np.ones_like(x), 15, below_zero=False)
    assert np.abs(x - scale * nearest(x, scale, minimum, 0, 15) - minimum).max() < 0.002
