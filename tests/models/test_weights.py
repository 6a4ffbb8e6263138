"""Widening to float32: bit-equal to the gguf package for every type, exact for plain numbers, refused where float32 cannot hold a value."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.models.gguf import GGML_TYPES
from octavo.models.loaded import WeightTensor
from octavo.models.weights import BLOCK_SIZES, WeightError, check_fits, widen, widen_rows

BLOCK_TYPES = ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k"]
FLOAT_TYPES = ["f32", "f16", "bf16"]


def tensor(dtype: str, data: np.ndarray, shape: tuple[int, ...] | None = None, add: float = 0.0) -> WeightTensor:
    return WeightTensor("blk.0.test", dtype, shape or data.shape, memoryview(data.tobytes()), add)


def random_tensor(dtype: str, rows: int, blocks_per_row: int, seed: int) -> tuple[WeightTensor, np.ndarray]:
    """Random bytes, every scale included (NaN, infinity, subnormals), and what the gguf package makes of them."""
    values, num_bytes = BLOCK_SIZES[dtype]
    per_row = blocks_per_row * (32 if values == 1 else 1)
    raw = np.random.default_rng(seed).integers(0, 256, (rows, per_row * num_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[dtype.upper()])
    return tensor(dtype, raw, (rows, per_row * values)), expected


def assert_same_bits(got: np.ndarray, expected: np.ndarray) -> None:
    assert got.dtype == np.float32 and got.shape == expected.shape
    nan = np.isnan(expected)  # which NaN a product of NaNs is, is the processor's choice
    np.testing.assert_array_equal(np.isnan(got), nan)
    np.testing.assert_array_equal(got.view(np.uint32)[~nan], expected.astype(np.float32).view(np.uint32)[~nan])


def test_block_sizes_are_ggmls():
    for dtype in BLOCK_TYPES + FLOAT_TYPES + ["i8", "i16", "i32", "i64", "f64"]:
        assert BLOCK_SIZES[dtype] == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[dtype.upper()]]


def test_type_numbers_are_ggmls():
    for known in gguf.GGMLQuantizationType:
        assert GGML_TYPES[known.value] == known.name.lower()


@pytest.mark.parametrize("dtype", BLOCK_TYPES + FLOAT_TYPES)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@settings(max_examples=20, deadline=None)
@given(rows=st.integers(1, 9), blocks_per_row=st.integers(1, 4), seed=st.integers(0, 2**32 - 1))
def test_widen_matches_gguf_bit_for_bit(dtype, rows, blocks_per_row, seed):
    packed, expected = random_tensor(dtype, rows, blocks_per_row, seed)
    assert_same_bits(widen(packed), expected)


@pytest.mark.parametrize("dtype", BLOCK_TYPES + FLOAT_TYPES)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_widen_matches_across_chunks(dtype):
    """More values than one internal chunk holds."""
    values = BLOCK_SIZES[dtype][0]
    blocks_per_row = 640 // (32 if values == 1 else values)
    packed, expected = random_tensor(dtype, 421, max(1, blocks_per_row), 5)
    assert_same_bits(widen(packed), expected)


@pytest.mark.parametrize("dtype", BLOCK_TYPES + FLOAT_TYPES)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_widen_rows_equals_rows_of_widen(dtype):
    packed, expected = random_tensor(dtype, 50, 3, 11)
    ids = [49, 0, 7, 7, 31]
    assert_same_bits(widen_rows(packed, ids), expected[ids])
    assert widen_rows(packed, []).shape == (0, expected.shape[1])


@pytest.mark.parametrize("row_id", [-1, 50, 2**40])
def test_widen_rows_refuses_a_row_that_is_not_there(row_id):
    packed, _ = random_tensor("q8_0", 50, 1, 0)
    with pytest.raises(WeightError, match=rf"row {row_id} .*blk\.0\.test.* 50 rows"):
        widen_rows(packed, [3, row_id])


def test_every_f16_and_bf16_value_is_exact():
    patterns = np.arange(1 << 16, dtype=np.uint16)
    half = widen(tensor("f16", patterns.view(np.float16)))
    np.testing.assert_array_equal(half, patterns.view(np.float16).astype(np.float64))
    brain = widen(tensor("bf16", patterns))
    np.testing.assert_array_equal(brain.view(np.uint32), patterns.astype(np.uint32) << 16)


@pytest.mark.parametrize("value", [1e5, 1e-8, -65505.0, 3.0e38])
def test_large_and_small_bf16_values_are_kept(value):
    bits = (np.array([value], np.float32).view(np.uint32) >> 16).astype(np.uint16)
    (widened,) = widen(tensor("bf16", bits))
    assert np.isfinite(widened) and widened != 0 and abs(widened / value - 1) < 2**-7


@pytest.mark.parametrize("dtype,numpy_type", [("i8", np.int8), ("i16", np.int16), ("i32", np.int32), ("i64", np.int64), ("u8", np.uint8)])
def test_integers_are_exact(dtype, numpy_type):
    info = np.iinfo(numpy_type)
    values = np.array([max(info.min, -(1 << 24)), 0, 1, min(info.max, 1 << 24)], numpy_type)
    np.testing.assert_array_equal(widen(tensor(dtype, values)), values.astype(np.float64))
    np.testing.assert_array_equal(widen(tensor("bool", np.array([True, False]))), [1.0, 0.0])


@pytest.mark.parametrize("dtype,numpy_type", [("i32", np.int32), ("i64", np.int64)])
@pytest.mark.parametrize("bad", [(1 << 24) + 1, -(1 << 24) - 1, -(1 << 31)])
def test_integers_that_do_not_fit_are_refused_by_name(dtype, numpy_type, bad):
    packed = tensor(dtype, np.array([0, 5, bad], numpy_type))
    for check in (widen, check_fits):
        with pytest.raises(WeightError, match=rf"blk\.0\.test.*{dtype} value {bad} at flat index 2 .*16777216"):
            check(packed)


def test_f64_that_overflows_is_refused_by_name():
    values = np.ones(300_000)
    values[250_000] = 1e39
    for check in (widen, check_fits):
        with pytest.raises(WeightError, match=r"blk\.0\.test.*1e\+39 at flat index 250000 .*3\.4028"):
            check(tensor("f64", values))


def test_f64_that_underflows_is_warned_of_by_name():
    packed = tensor("f64", np.array([1.0, 1e-60]))
    with pytest.warns(RuntimeWarning, match=r"blk\.0\.test"):
        np.testing.assert_array_equal(widen(packed), [1.0, 0.0])
    with pytest.warns(RuntimeWarning, match=r"blk\.0\.test"):
        check_fits(packed)


def test_f64_that_fits_is_rounded_once():
    values = np.random.default_rng(0).standard_normal(1000)
    np.testing.assert_array_equal(widen(tensor("f64", values)), values.astype(np.float32))
    inf = np.array([np.inf, -np.inf])
    np.testing.assert_array_equal(widen(tensor("f64", inf)), inf.astype(np.float32))


def test_add_is_added_after_widening():
    values = np.array([0.25, 1e-4, -1.0], np.float32)
    np.testing.assert_array_equal(widen(tensor("f32", values, add=1.0)), values + np.float32(1))
    table = tensor("f32", values.repeat(2).reshape(3, 2), add=1.0)
    np.testing.assert_array_equal(widen_rows(table, [2, 0]), [[0.0, 0.0], [1.25, 1.25]])


@pytest.mark.parametrize("dtype,shape,num_bytes", [("f32", (3,), 11), ("q4_0", (2, 32), 35), ("q4_0", (2, 16), 18), ("q6_k", (255,), 210)])
def test_bytes_that_do_not_fit_the_shape_are_refused(dtype, shape, num_bytes):
    with pytest.raises(WeightError, match=rf"blk\.0\.test.*{num_bytes} bytes"):
        widen(tensor(dtype, np.zeros(num_bytes, np.uint8), shape))


def test_unknown_type_is_refused_by_name():
    with pytest.raises(WeightError, match=r"blk\.0\.test.*'iq2_xxs'.*q6_k"):
        widen(tensor("iq2_xxs", np.zeros(66, np.uint8), (256,)))


def test_float32_of_a_loaded_tensor_is_widen():
    packed, expected = random_tensor("q8_0", 2, 2, 3)
    assert_same_bits(packed.float32(), expected)
