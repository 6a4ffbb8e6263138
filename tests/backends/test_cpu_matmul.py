"""The native weights and products: file blocks widened bit for bit as ``gguf`` does, and x W^T on every kernel path within its rounding.

Each kernel's order of operations is held bit for bit by native/tests/test_matmul.cc; here the oracles are another project's
dequantisation and a product in float64.
"""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

native = pytest.importorskip("octavo.backends.cpu._native")

FLOAT_TYPES = ("f32", "f16", "bf16")
QUANT_TYPES = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k")
LARGEST_HALF = 0.125
# Offsets of a block's float16 fields, and what |weight| <= LARGEST_HALF * (scale part + minimum part) can reach.
HALF_FIELDS = {
    "q4_0": (0,), "q4_1": (0, 2), "q5_0": (0,), "q5_1": (0, 2), "q8_0": (0,),
    "q2_k": (80, 82), "q3_k": (108,), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,),
}  # fmt: skip
REACH = {
    "q4_0": 8, "q4_1": 15 + 1, "q5_0": 16, "q5_1": 31 + 1, "q8_0": 128,
    "q2_k": 15 * 3 + 15, "q3_k": 32 * 4, "q4_k": 63 * 15 + 63, "q5_k": 63 * 31 + 63, "q6_k": 128 * 32,
}  # fmt: skip


def random_rows(dtype: str, n: int, k: int, rng: np.random.Generator) -> np.ndarray:
    """[n, bytes per row]: any bytes are valid codes; the float fields are finite and at most LARGEST_HALF in magnitude."""
    if dtype in FLOAT_TYPES:
        values = rng.uniform(-1, 1, (n, k)).astype(np.float32)
        if dtype == "bf16":
            return np.ascontiguousarray((values.view(np.uint32) >> 16).astype(np.uint16)).view(np.uint8)
        return values.astype(np.float16 if dtype == "f16" else np.float32).view(np.uint8)
    block_values, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[dtype.upper()]]
    blocks = rng.integers(0, 256, (n * k // block_values, block_bytes), dtype=np.uint8)
    for at in HALF_FIELDS[dtype]:
        halves = rng.uniform(-LARGEST_HALF, LARGEST_HALF, len(blocks)).astype(np.float16)
        halves[rng.random(len(blocks)) < 0.1] = 0
        halves[rng.random(len(blocks)) < 0.1] *= np.float16(2**-12)  # many of them subnormal
        blocks[:, at : at + 2] = halves.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(n, -1)


def widened(dtype: str, raw: np.ndarray) -> np.ndarray:
    """[n, k] float32 by the gguf package."""
    return np.asarray(dequantize(raw, GGMLQuantizationType[dtype.upper()]), dtype=np.float32).reshape(len(raw), -1)


def product(isa: str, dtype: str, raw: np.ndarray, k: int, x: np.ndarray, widen: bool = False) -> np.ndarray:
    out = np.full((len(x), len(raw)), np.nan, dtype=np.float32)
    native.matmul_test(isa, dtype, raw.reshape(-1), len(raw), k, np.ascontiguousarray(x), widen, out)
    return out


def rounded_activations(x: np.ndarray) -> np.ndarray:
    """x as the quantised kernels see it: groups of 32, scale max / 127, codes rounded half to even; float32 arithmetic."""
    groups = x.reshape(len(x), -1, 32)
    largest = np.abs(groups).max(axis=-1, keepdims=True)
    codes = np.rint(groups * (np.float32(127) / largest))
    return ((largest / np.float32(127)).astype(np.float64) * codes).reshape(x.shape)


@pytest.mark.parametrize("dtype", FLOAT_TYPES + QUANT_TYPES)
def test_dequantize_is_bit_equal_to_gguf(dtype: str) -> None:
    n, k = 40, 512
    raw = random_rows(dtype, n, k, np.random.default_rng(1))
    out = np.empty((n, k), dtype=np.float32)
    native.dequantize(dtype, raw.reshape(-1), n, k, out)
    np.testing.assert_array_equal(out.view(np.uint32), widened(dtype, raw).view(np.uint32))


@pytest.mark.parametrize("isa", native.isa_levels())
@pytest.mark.parametrize("dtype", QUANT_TYPES)
@pytest.mark.parametrize(("n", "rows"), [(1, 1), (37, 3), (64, 29)])
def test_packed_product_is_that_of_rounded_activations(isa: str, dtype: str, n: int, rows: int) -> None:
    k = 512
    rng = np.random.default_rng(n)
    raw = random_rows(dtype, n, k, rng)
    x = rng.normal(size=(rows, k)).astype(np.float32)
    a = rounded_activations(x)
    # Each of the k / 16 groups at most rounds its two scales' product, its two fused steps and the activations' sum; + the value itself.
    roundings = k // 16 * 5 + 3
    bound = roundings * 2.0**-24 * LARGEST_HALF * REACH[dtype] * np.abs(a).sum(axis=1, keepdims=True)
    actual = product(isa, dtype, raw, k, x)
    assert (np.abs(actual - a @ widened(dtype, raw).astype(np.float64).T) <= bound).all()


@pytest.mark.parametrize("isa", native.isa_levels())
@pytest.mark.parametrize(("dtype", "k"), [("f32", 77), ("f16", 77), ("bf16", 77), ("q4_1", 96), ("q8_0", 96), ("q4_k", 512), ("q6_k", 512)])
def test_float_product_takes_activations_as_they_are(isa: str, dtype: str, k: int) -> None:
    """Float files, and any file with ``widen`` (--compute f32)."""
    rng = np.random.default_rng(k)
    raw, x = random_rows(dtype, 35, k, rng), rng.normal(size=(14, k)).astype(np.float32)
    w = widened(dtype, raw).astype(np.float64)
    bound = (2 * k + 2) * 2.0**-24 * (np.abs(x).astype(np.float64) @ np.abs(w).T)
    assert (np.abs(product(isa, dtype, raw, k, x, widen=dtype not in FLOAT_TYPES) - x.astype(np.float64) @ w.T) <= bound).all()


@pytest.mark.parametrize("isa", native.isa_levels())
@pytest.mark.parametrize("dtype", ("bf16", "q4_1", "q5_k", "q6_k", "q8_0"))
def test_a_row_does_not_depend_on_its_batch(isa: str, dtype: str) -> None:
    rng = np.random.default_rng(5)
    raw, x = random_rows(dtype, 50, 256, rng), rng.normal(size=(27, 256)).astype(np.float32)
    together = product(isa, dtype, raw, 256, x)
    apart = np.concatenate([product(isa, dtype, raw, 256, row[None]) for row in x])
    np.testing.assert_array_equal(together.view(np.uint32), apart.view(np.uint32))


@pytest.mark.parametrize("isa", native.isa_levels())
def test_a_group_of_zeros_gives_zero(isa: str) -> None:
    raw = random_rows("q4_1", 20, 64, np.random.default_rng(6))
    np.testing.assert_array_equal(product(isa, "q4_1", raw, 64, np.zeros((3, 64), dtype=np.float32)), np.zeros((3, 20), dtype=np.float32))
