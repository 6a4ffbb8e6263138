"""Floats as GGML's quantised blocks, with little error: what ``weights`` does, the other way.

Owns the layouts of the types that can be written, and the rounding of scales into them. The scales come from ``scale_search``; codes are
chosen last, for the scales as they are stored. Deterministic: the same floats give the same bytes.

A block of 256 has a scale (and a minimum) for each group of 16, themselves whole numbers times one float16 of the block. That rounding
costs error too: some sizes of that float16 are tried, and the one with the least error is kept, as in ggml's make_qp_quants.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from octavo.models.model_file import BLOCK_SIZES, ModelFileError
from octavo.models.scale_search import Floats, affine_scales, nearest, symmetric_scales

Bytes = npt.NDArray[np.uint8]

LIMIT = 65504.0  # largest float16: what a scale must fit
WHOLE_RANGE = 16  # levels of a 4-bit code
_CHUNK_VALUES = 1 << 17  # at a time, so that temporaries stay in the cache


class EncodeError(ModelFileError):
    """Values that no block can hold; the message names the first of them and where it is."""


def encode(values: Floats, dtype: str, levels: int = WHOLE_RANGE) -> Bytes:
    """Rows as blocks of ``dtype``, one of ``ENCODABLE``: float32 [rows, columns] -> uint8 [rows, bytes of a row].

    ``levels``: of q4_1 alone, how many of its 16 codes are used, from 2. Raises EncodeError for values that are not finite or beyond
    LIMIT, and ValueError for columns that are no whole number of blocks.
    """
    rows, columns = values.shape
    block_values, block_bytes = BLOCK_SIZES[dtype]
    if columns % block_values:
        raise ValueError(f"rows of {columns} values; {dtype} needs a multiple of {block_values}")
    bad = np.flatnonzero(~(np.abs(values) <= LIMIT))  # NaN as well
    if bad.size:
        raise EncodeError(f"value {values.flat[bad[0]]} at flat index {bad[0]} cannot be quantised; the limit is {LIMIT:.0f}")
    blocks = np.ascontiguousarray(values, np.float32).reshape(-1, block_values)
    out = np.empty((len(blocks), block_bytes), np.uint8)
    step = max(1, _CHUNK_VALUES // block_values)
    for start in range(0, len(blocks), step):
        chunk = blocks[start : start + step]
        out[start : start + step] = _q4_1(chunk, levels) if dtype == "q4_1" else _ENCODERS[dtype](chunk)
    return out.reshape(rows, -1)


def _half(values: Floats) -> npt.NDArray[np.float16]:
    return values.astype("<f2")


def _raw(halves: npt.NDArray[np.float16]) -> Bytes:
    """[blocks] -> [blocks, 2]."""
    return halves.reshape(-1, 1).view(np.uint8)


def _nibble_pairs(codes: Bytes) -> Bytes:
    """[blocks, 32] -> [blocks, 16]: value i low, value i + 16 high."""
    return codes[:, :16] | codes[:, 16:] << np.uint8(4)


def _q4_0(blocks: Floats) -> Bytes:
    x = np.ascontiguousarray(blocks.T)
    d = _half(symmetric_scales(x, -8, 7))
    codes = nearest(x, d.astype(np.float32), 0.0, -8, 7) + 8
    return np.concatenate((_raw(d), _nibble_pairs(codes.T.astype(np.uint8))), axis=1)


def _q4_1(blocks: Floats, levels: int) -> Bytes:
    x = np.ascontiguousarray(blocks.T)
    scales, minima = affine_scales(x, levels - 1, below_zero=False)
    d, m = _half(scales), _half(minima)
    codes = nearest(x, d.astype(np.float32), m.astype(np.float32), 0, levels - 1)
    return np.concatenate((_raw(d), _raw(m), _nibble_pairs(codes.T.astype(np.uint8))), axis=1)


# ---- blocks of 256: arrays are [16 values, blocks, 16 groups], and [blocks, 16] or [blocks, 1] for what groups or blocks have ----

_Fitted = tuple[npt.NDArray[np.float16], npt.NDArray[np.float16], Floats, Floats]  # d, dmin [blocks]; scales, minima [blocks, 16], whole
_TRIALS = (0.90, 0.95, 1.0, 1.05)  # of the block's scale, relative to the one at which the largest group has the outermost integer


def _q2_k(blocks: Floats) -> Bytes:
    x = _grouped(blocks)
    d, dmin, scales, minima = _fit_q2_k(x)
    q = nearest(x, _times(d, scales), -_times(dmin, minima), 0, 3)
    packed_scales = scales.astype(np.uint8) | minima.astype(np.uint8) << np.uint8(4)
    return np.concatenate((packed_scales, _two_bits(_flat_codes(q)), _raw(d), _raw(dmin)), axis=1)


def _fit_q2_k(x: Floats) -> _Fitted:
    wanted, minimum = (part.reshape(x.shape[1:]) for part in affine_scales(x.reshape(16, -1), 3, below_zero=True))
    best: _Fitted | None = None
    least = np.empty(0, np.float32)
    for factor in _TRIALS:
        for min_factor in (0.95, 1.0):
            d, dmin = _half(wanted.max(1) * np.float32(factor / 15)), _half((-minimum).max(1) * np.float32(min_factor / 15))
            scales = _whole(wanted, d, 0, 15)
            # The minimum that suits the rounded scale: where the codes of the group leave the mean of what is over.
            codes = nearest(x, _times(d, scales), minimum, 0, 3)
            minima = _whole((_times(d, scales) * codes - x).mean(0), dmin, 0, 15)
            found: _Fitted = (d, dmin, scales, minima)
            error = _error(x, _times(d, scales), -_times(dmin, minima), 0, 3)
            best, least = (found, error) if best is None else _better(best, least, found, error)
    assert best is not None
    return best


def _q3_k(blocks: Floats) -> Bytes:
    x = _grouped(blocks)
    wanted = symmetric_scales(x.reshape(16, -1), -4, 3).reshape(x.shape[1:])
    largest = np.take_along_axis(wanted, np.abs(wanted).argmax(1)[:, None], 1)[:, 0]
    zero = np.zeros(len(largest), np.float16)
    best: _Fitted | None = None
    least = np.empty(0, np.float32)
    for factor in _TRIALS:
        d = _half(largest * np.float32(factor / -32))  # -32 is the integer that reaches farthest
        found: _Fitted = (d, zero, _whole(wanted, d, -32, 31), np.zeros_like(wanted))
        error = _error(x, _times(d, found[2]), 0.0, -4, 3)
        best, least = (found, error) if best is None else _better(best, least, found, error)
    assert best is not None
    d, _, scales, _ = best
    codes = _flat_codes(nearest(x, _times(d, scales), 0.0, -4, 3) + 4)
    high = np.packbits((codes >> np.uint8(2)).reshape(-1, 8, 32), axis=1, bitorder="little").reshape(-1, 32)  # bit i: of 32 values from 32 i
    six = (scales + 32).astype(np.uint8)
    low4 = (six[:, :8] & np.uint8(15)) | six[:, 8:] << np.uint8(4)
    high2 = _interleaved(six.reshape(-1, 4, 4) >> np.uint8(4))
    return np.concatenate((high, _two_bits(codes & np.uint8(3)), low4, high2, _raw(d)), axis=1)


def _grouped(blocks: Floats) -> Floats:
    return np.ascontiguousarray(blocks.reshape(-1, 16, 16).transpose(2, 0, 1))


def _flat_codes(codes: Floats) -> Bytes:
    return codes.transpose(1, 2, 0).reshape(-1, 256).astype(np.uint8)


def _interleaved(fields: Bytes) -> Bytes:
    """[..., 4, n] -> [..., n]: field i of two bits at bits 2i and 2i + 1."""
    shifts = np.array([[0], [2], [4], [6]], np.uint8)
    return np.bitwise_or.reduce(fields << shifts, axis=-2)


def _two_bits(codes: Bytes) -> Bytes:
    """[blocks, 256] -> [blocks, 64]: 32 bytes for each half, whose fields are four runs of 32 values."""
    return _interleaved(codes.reshape(-1, 2, 4, 32)).reshape(-1, 64)


def _times(d: npt.NDArray[np.float16], whole: Floats) -> Floats:
    return d.astype(np.float32)[:, None] * whole


def _whole(wanted: Floats, d: npt.NDArray[np.float16], low: int, high: int) -> Floats:
    """``wanted`` [blocks, 16] in units of d [blocks], as whole numbers in low .. high."""
    unit = d.astype(np.float32)[:, None]
    return np.clip(np.rint(wanted / np.where(unit == 0, np.float32(1), unit)), low, high)


def _error(x: Floats, scale: Floats, minimum: Floats | float, low: int, high: int) -> Floats:
    """Squared error of each block."""
    off = x - scale * nearest(x, scale, minimum, low, high) - minimum
    total: Floats = np.multiply(off, off, out=off).sum((0, 2))
    return total


def _better(best: _Fitted, least: Floats, found: _Fitted, error: Floats) -> tuple[_Fitted, Floats]:
    """Of each block the fit with the smaller error."""
    new = error < least
    d, dmin, scales, minima = (np.where(new if a.ndim == 1 else new[:, None], a, b) for a, b in zip(found, best, strict=True))
    return (d, dmin, scales, minima), np.where(new, error, least)


_ENCODERS: Mapping[str, Callable[[Floats], Bytes]] = {"q4_0": _q4_0, "q3_k": _q3_k, "q2_k": _q2_k}
ENCODABLE = ("q4_1", *_ENCODERS)
