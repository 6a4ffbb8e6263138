"""Blocks that are written: read back by the reader and by the gguf package, near to what they were made of, exact where that can be."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.models.loaded import WeightTensor
from octavo.models.model_file import BLOCK_SIZES
from octavo.models.weights import widen
from octavo.quantization.block_encoding import ENCODABLE, LIMIT, EncodeError, encode

HALF = 2.0**-11  # relative rounding of a float16
TINY = 2.0**-25  # its absolute rounding below the normal numbers


def decoded(raw: np.ndarray, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    return widen(WeightTensor("t", dtype, shape, memoryview(raw.tobytes())))


def values(seed: int, rows: int, columns: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, columns)) * 10 ** rng.uniform(-4, 3, (rows, 1)) * np.exp(rng.uniform(-1, 1, (rows, columns)))
    x[rng.random((rows, columns)) < 0.1] = 0
    return x.astype(np.float32)


def bound(x: np.ndarray, dtype: str, levels: int) -> np.ndarray:
    """Root mean squared error that no block may exceed, from the plain grid that is always tried; [blocks].

    Symmetric: half a step when the largest weight has the smaller outermost code. Affine: half a step of the span. Blocks of 256 add
    what rounding the scale (half of a 15th or 32nd of the largest, which is up to 1.25 of its plain value) does to the outermost code, and
    the same for the minimum. All add what float16 does to scale and minimum.
    """
    largest, low, high = np.abs(x).max(1), x.min(1), x.max(1)
    rounding = 3 * (largest * HALF + 16 * TINY)
    if dtype == "q4_0":
        return largest / 14 + rounding
    if dtype == "q4_1":
        return (high - low) / (2 * (levels - 1)) + 2 * rounding
    if dtype == "q3_k":
        return largest / 6 + 4 * 1.25 * largest / 3 / 32 + rounding * 3
    span = np.maximum(high, 0) - np.minimum(low, 0)
    return span / 6 + 3 * 1.25 * span / 3 / 30 + 1.25 * span / 30 + rounding * 3


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 5), blocks=st.integers(1, 3), dtype=st.sampled_from(ENCODABLE),
    levels=st.sampled_from([4, 8, 16]), importance=st.booleans(),
)  # fmt: skip
def test_the_error_is_within_its_bound(seed: int, rows: int, blocks: int, dtype: str, levels: int, importance: bool) -> None:
    size, num_bytes = BLOCK_SIZES[dtype]
    x = values(seed, rows, blocks * size)
    counts = np.exp(np.random.default_rng(seed).uniform(-1, 1, blocks * size)).astype(np.float32) if importance else None
    levels = levels if dtype == "q4_1" else 16
    raw = encode(x, dtype, levels, counts)
    assert raw.dtype == np.uint8 and raw.shape == (rows, blocks * num_bytes)
    back = decoded(raw, dtype, x.shape)
    np.testing.assert_array_equal(back, gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[dtype.upper()]))
    flat = x.reshape(-1, size)
    off = np.square(back.astype(np.float64) - x).reshape(-1, size)
    weights = np.broadcast_to(np.float32(1) if counts is None else counts, x.shape).reshape(-1, size)
    rms = np.sqrt((off * weights).sum(1) / weights.sum(1))
    # With importance, the plain grid's error is at most half a step at every weight, so its weighted mean is too.
    assert (rms <= bound(flat, dtype, levels)).all()


def test_only_so_many_levels_are_used() -> None:
    x = values(1, 8, 320)
    for levels in (4, 8, 16):
        nibbles = encode(x, "q4_1", levels).reshape(-1, 20)[:, 4:]
        assert max(nibbles.max() >> 4, (nibbles & 15).max()) == levels - 1


def lattice(dtype: str, seed: int, rows: int, blocks: int) -> np.ndarray:
    """Blocks that reach the outermost codes and integers, as bytes of the reader's layout turned into values."""
    rng = np.random.default_rng(seed)
    size = BLOCK_SIZES[dtype][0]
    d, m = 2.0 ** rng.integers(-8, 2, (rows * blocks, 1, 1)), 2.0 ** rng.integers(-8, 2, (rows * blocks, 1, 1))
    num_groups, group = (1, 32) if size == 32 else (16, 16)
    low, high = {"q4_0": (-8, 7), "q4_1": (0, 15), "q3_k": (-4, 3), "q2_k": (0, 3)}[dtype]
    codes = rng.integers(low, high + 1, (rows * blocks, num_groups, group)).astype(np.float64)
    codes[..., 0], codes[..., 1] = low, high
    scale, minimum = np.ones((rows * blocks, num_groups, 1)), np.zeros((rows * blocks, num_groups, 1))
    if dtype == "q4_1":
        minimum = -m * rng.integers(0, 8, minimum.shape)
    elif dtype == "q3_k":
        scale = rng.integers(-31, 32, scale.shape)
        scale[:, 3] = -32
    elif dtype == "q2_k":
        scale, minimum = rng.integers(1, 16, scale.shape), rng.integers(1, 16, minimum.shape)
        scale[:, 3], minimum[:, 5] = 15, 15
        minimum = -m * minimum
    return (d * scale * codes + minimum).astype(np.float32).reshape(rows, blocks * size)


@pytest.mark.parametrize("dtype", ENCODABLE)
def test_what_fits_the_blocks_is_kept_to_the_bit(dtype: str) -> None:
    for seed in range(5):
        x = lattice(dtype, seed, 7, 3)
        np.testing.assert_array_equal(decoded(encode(x, dtype), dtype, x.shape), x)


@pytest.mark.parametrize("dtype", ENCODABLE)
def test_zeros_stay_zeros(dtype: str) -> None:
    x = np.zeros((3, 512), np.float32)
    np.testing.assert_array_equal(decoded(encode(x, dtype), dtype, x.shape), x)


@pytest.mark.parametrize("dtype", ENCODABLE)
def test_more_than_one_chunk_is_what_its_rows_are(dtype: str) -> None:
    x = values(2, 600, 512)
    importance = np.linspace(0.1, 2, 512, dtype=np.float32)
    whole = encode(x, dtype, importance=importance)
    for rows in (slice(0, 1), slice(250, 263), slice(599, 600)):
        np.testing.assert_array_equal(encode(x[rows], dtype, importance=importance), whole[rows])


@pytest.mark.parametrize("dtype", ENCODABLE)
def test_importance_moves_the_error_to_where_it_counts_less(dtype: str) -> None:
    x = np.random.default_rng(6).standard_normal((64, 512)).astype(np.float32)
    importance = np.where(np.arange(512) % 5 == 0, np.float32(30), np.float32(0.1))

    def error(raw: np.ndarray) -> float:
        return float((np.square(decoded(raw, dtype, x.shape) - x) * importance).sum())

    assert error(encode(x, dtype, importance=importance)) < 0.8 * error(encode(x, dtype))


@pytest.mark.parametrize("dtype", ENCODABLE)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 32769.0, -1e30])
def test_values_that_no_block_can_hold_are_named(dtype: str, bad: float) -> None:
    x = np.zeros((2, 256), np.float32)
    x[1, 7] = bad
    with pytest.raises(EncodeError, match=r"value \S+ at flat index 263 .*limit is 32768"):
        encode(x, dtype)
    x[1, 7] = np.copysign(LIMIT, bad)
    back = decoded(encode(x, dtype), dtype, x.shape)
    assert np.isfinite(back).all() and np.abs(back[1, 7] / x[1, 7] - 1) < 0.2


@pytest.mark.parametrize("dtype,columns", [("q4_0", 48), ("q4_1", 16), ("q2_k", 128), ("q3_k", 576)])
def test_rows_that_are_no_whole_blocks_are_refused(dtype: str, columns: int) -> None:
    with pytest.raises(ValueError, match=f"rows of {columns} values; {dtype} needs a multiple of {BLOCK_SIZES[dtype][0]}"):
        encode(np.zeros((1, columns), np.float32), dtype)
