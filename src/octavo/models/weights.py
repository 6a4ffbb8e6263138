"""Widens tensors of every type to float32, exactly as GGML's reference dequantizers do. Knows the block layouts; reads no files.

Block formats follow ggml-common.h and dequantize_row_* of ggml-quants.c: the same float32 operations in the same order, so that the
values are equal bit for bit. Nothing is rounded silently: f64 and integer tensors whose values float32 cannot hold are refused by name.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from octavo.models.loaded import WeightTensor
from octavo.models.model_file import BLOCK_SIZES, ModelFileError

__all__ = ["BLOCK_SIZES", "WeightError", "check_fits", "widen", "widen_rows"]

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

_CHUNK_VALUES = 1 << 17  # widened at a time, so that temporaries stay in the cache
_MAX_EXACT_INT = 1 << 24  # float32 holds every whole number up to here
_PLAIN = {"f16": "<f2", "f32": "<f4", "f64": "<f8", "i8": "i1", "i16": "<i2", "i32": "<i4", "i64": "<i8", "u8": "u1", "bool": "u1"}


class WeightError(ModelFileError):
    """A tensor's values do not fit float32, or its bytes do not fit its shape."""


def widen(tensor: WeightTensor) -> Floats:
    """A new float32 array [tensor.shape]: the exact values, plus ``tensor.add``. Raises WeightError when they do not fit."""
    out = np.empty(tensor.shape, np.float32)
    _widen_blocks(tensor, _blocks(tensor), out.reshape(-1))
    return out


def widen_rows(tensor: WeightTensor, row_ids: Sequence[int] | npt.NDArray[np.integer]) -> Floats:
    """Rows ``row_ids`` of a matrix, float32 [len(row_ids), columns]: what ``widen(tensor)[row_ids]`` gives, at the cost of those rows."""
    ids = np.asarray(row_ids, dtype=np.int64)
    rows, columns = tensor.shape
    if ids.size and not 0 <= ids.min() <= ids.max() < rows:
        bad = ids[(ids < 0) | (ids >= rows)][0]
        raise WeightError(f"row {bad} of tensor {tensor.name!r} is out of range; it has {rows} rows")
    blocks = _blocks(tensor)
    taken = blocks.reshape(rows, -1)[ids].reshape(-1, blocks.shape[1])
    out = np.empty((len(ids), columns), np.float32)
    _widen_blocks(tensor, taken, out.reshape(-1))
    return out


def check_fits(tensor: WeightTensor) -> None:
    """Raise WeightError when float32 cannot hold the tensor. Costs a pass for f64 and integers, nothing for the other types."""
    if tensor.dtype in ("f64", "i32", "i64"):
        for start, chunk in _chunks(_blocks(tensor)):
            _narrow(tensor, chunk.view(_PLAIN[tensor.dtype]).reshape(-1), start)


def _blocks(tensor: WeightTensor) -> Bytes:
    """The tensor's bytes as [blocks, bytes per block], not copied."""
    if tensor.dtype not in BLOCK_SIZES:
        raise WeightError(f"type of tensor {tensor.name!r} is {tensor.dtype!r}; known: {', '.join(BLOCK_SIZES)}")
    values, num_bytes = BLOCK_SIZES[tensor.dtype]
    expected = math.prod(tensor.shape) // values * num_bytes
    if tensor.shape and tensor.shape[-1] % values or len(tensor.data) != expected:
        what = f"tensor {tensor.name!r} of type {tensor.dtype} and shape {tensor.shape}"
        raise WeightError(f"{what} has {len(tensor.data)} bytes; {expected} are needed, in rows of a multiple of {values} values")
    return np.frombuffer(tensor.data, np.uint8).reshape(-1, num_bytes)


def _chunks(blocks: Bytes, values_per_block: int = 1) -> Iterator[tuple[int, Bytes]]:
    """Pieces of ``blocks`` with the number of the first value in each."""
    step = max(1, _CHUNK_VALUES // values_per_block)
    for start in range(0, len(blocks), step):
        yield start * values_per_block, blocks[start : start + step]


def _widen_blocks(tensor: WeightTensor, blocks: Bytes, out: Floats) -> None:
    """Fill ``out`` [values] from ``blocks``."""
    dequantize = _DEQUANTIZE.get(tensor.dtype)
    for start, chunk in _chunks(blocks, BLOCK_SIZES[tensor.dtype][0]):
        if dequantize is not None:
            values = dequantize(chunk).reshape(-1)
        else:
            values = _narrow(tensor, chunk.view(_PLAIN[tensor.dtype]).reshape(-1), start)
        out[start : start + values.size] = values
    if tensor.add:
        out += np.float32(tensor.add)


def _narrow(tensor: WeightTensor, values: np.ndarray, first: int) -> Floats:
    """Plain numbers as float32. ``first`` is the flat index of values[0] in the tensor, for messages."""
    if tensor.dtype in ("i32", "i64"):
        bad = np.flatnonzero((values > _MAX_EXACT_INT) | (values < -_MAX_EXACT_INT))
        if bad.size:
            raise WeightError(
                f"tensor {tensor.name!r}: {tensor.dtype} value {values[bad[0]]} at flat index {first + bad[0]} "
                f"does not fit float32 exactly; the limit is {_MAX_EXACT_INT}"
            )
    if tensor.dtype != "f64":
        return values.astype(np.float32)
    with np.errstate(over="ignore", under="ignore"):
        narrowed = values.astype(np.float32)
    bad = np.flatnonzero(np.isinf(narrowed) & np.isfinite(values))
    if bad.size:
        raise WeightError(
            f"tensor {tensor.name!r}: f64 value {values[bad[0]]} at flat index {first + bad[0]} does not fit float32; "
            f"the limit is {np.finfo(np.float32).max}"
        )
    if np.any((narrowed == 0) & (values != 0)):
        warnings.warn(f"tensor {tensor.name!r}: f64 values below float32's range become 0", RuntimeWarning, stacklevel=4)
    return narrowed


def _f16(blocks: Bytes, at: int) -> Floats:
    """The f16 at byte ``at`` of each block, as float32 [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """[..., n] bytes -> [..., 2, n]: low halves, then high halves."""
    return np.stack((packed & np.uint8(15), packed >> np.uint8(4)), axis=-2)


def _fields(packed: Bytes, bits: int, count: int) -> Bytes:
    """[..., n] bytes -> [..., count, n]: the first ``count`` fields of ``bits`` bits of each byte, lowest first."""
    shifts = np.arange(0, bits * count, bits, dtype=np.uint8)[:, None]
    return (packed[..., None, :] >> shifts) & np.uint8((1 << bits) - 1)


def _bf16(blocks: Bytes) -> Floats:
    return (blocks.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)


def _q4_0(blocks: Bytes) -> Floats:
    """d, 16 bytes: d * (q - 8)."""
    q = _nibbles(blocks[:, 2:]).reshape(-1, 32).astype(np.int8) - np.int8(8)
    return q.astype(np.float32) * _f16(blocks, 0)


def _q4_1(blocks: Bytes) -> Floats:
    """d, m, 16 bytes: d * q + m."""
    q = _nibbles(blocks[:, 4:]).reshape(-1, 32).astype(np.float32)
    return q * _f16(blocks, 0) + _f16(blocks, 2)


def _fifth_bits(blocks: Bytes, at: int) -> Bytes:
    """Bit i of the 32-bit word at byte ``at`` is the fifth bit of value i: uint8 [blocks, 32], 0 or 16."""
    return np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little") << np.uint8(4)


def _q5_0(blocks: Bytes) -> Floats:
    """d, 4 bytes of fifth bits, 16 bytes: d * (q - 16)."""
    q = _nibbles(blocks[:, 6:]).reshape(-1, 32) | _fifth_bits(blocks, 2)
    return (q.astype(np.int8) - np.int8(16)).astype(np.float32) * _f16(blocks, 0)


def _q5_1(blocks: Bytes) -> Floats:
    """d, m, 4 bytes of fifth bits, 16 bytes: d * q + m."""
    q = _nibbles(blocks[:, 8:]).reshape(-1, 32) | _fifth_bits(blocks, 4)
    return q.astype(np.float32) * _f16(blocks, 0) + _f16(blocks, 2)


def _q8_0(blocks: Bytes) -> Floats:
    """d, 32 signed bytes: d * q."""
    return blocks[:, 2:].view(np.int8).astype(np.float32) * _f16(blocks, 0)


def _q2_k(blocks: Bytes) -> Floats:
    """16 bytes of 4-bit scales and mins, 64 bytes, d, dmin: d * scale * q - dmin * min, in groups of 16."""
    scales = blocks[:, :16]
    q = _fields(blocks[:, 16:80].reshape(-1, 2, 32), 2, 4).reshape(-1, 16, 16).astype(np.float32)
    d = _f16(blocks, 80) * (scales & np.uint8(15)).astype(np.float32)
    m = _f16(blocks, 82) * (scales >> np.uint8(4)).astype(np.float32)
    return d[..., None] * q - m[..., None]


def _q3_k(blocks: Bytes) -> Floats:
    """32 bytes of third bits, 64 bytes, 12 bytes of 6-bit scales, d: d * (scale - 32) * (q - 4 * (bit is 0)), in groups of 16."""
    low = _fields(blocks[:, 32:96].reshape(-1, 2, 32), 2, 4)
    high = _fields(blocks[:, :32], 1, 8).reshape(-1, 2, 4, 32) << np.uint8(2)
    q = (low | high).astype(np.int8) - np.int8(4)
    packed = blocks[:, 96:108]
    scales = _nibbles(packed[:, :8]).reshape(-1, 16) | (_fields(packed[:, 8:], 2, 4).reshape(-1, 16) << np.uint8(4))
    d = _f16(blocks, 108) * (scales.astype(np.int8) - np.int8(32)).astype(np.float32)
    return d[..., None] * q.reshape(-1, 16, 16).astype(np.float32)


def _scales_and_mins(blocks: Bytes) -> tuple[Floats, Floats]:
    """d * scale and dmin * min of the 8 groups of 32 in a q4_k or q5_k block, [blocks, 8, 1] each (get_scale_min_k4)."""
    first, second, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    six, two = np.uint8(63), np.uint8(48)
    scales = np.concatenate((first & six, (high & np.uint8(15)) | ((first >> np.uint8(2)) & two)), axis=1)
    mins = np.concatenate((second & six, (high >> np.uint8(4)) | ((second >> np.uint8(2)) & two)), axis=1)
    d = _f16(blocks, 0) * scales.astype(np.float32)
    m = _f16(blocks, 2) * mins.astype(np.float32)
    return d[..., None], m[..., None]


def _q4_k(blocks: Bytes) -> Floats:
    """d, dmin, 12 bytes of 6-bit scales and mins, 128 bytes: d * scale * q - dmin * min, in groups of 32."""
    d, m = _scales_and_mins(blocks)
    return d * _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32).astype(np.float32) - m


def _q5_k(blocks: Bytes) -> Floats:
    """As q4_k, with 32 bytes of fifth bits before the 128."""
    d, m = _scales_and_mins(blocks)
    q = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32) | (_fields(blocks[:, 16:48], 1, 8) << np.uint8(4))
    return d * q.astype(np.float32) - m


def _q6_k(blocks: Bytes) -> Floats:
    """128 bytes of low and 64 of high bits, 16 signed scales, d: d * scale * (q - 32), in groups of 16."""
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 8, 32)
    high = _fields(blocks[:, 128:192].reshape(-1, 2, 32), 2, 4).reshape(-1, 8, 32) << np.uint8(4)
    q = ((low | high).astype(np.int8) - np.int8(32)).reshape(-1, 16, 16).astype(np.float32)
    d = _f16(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return d[..., None] * q


_DEQUANTIZE: dict[str, Callable[[Bytes], Floats]] = {
    "bf16": _bf16,
    "q4_0": _q4_0,
    "q4_1": _q4_1,
    "q5_0": _q5_0,
    "q5_1": _q5_1,
    "q8_0": _q8_0,
    "q2_k": _q2_k,
    "q3_k": _q3_k,
    "q4_k": _q4_k,
    "q5_k": _q5_k,
    "q6_k": _q6_k,
}
