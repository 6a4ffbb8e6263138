"""Floats as GGML's quantised blocks, with little error: what ``weights`` does, the other way.

Owns the layouts of the types that can be written, and the rounding of scales into them. The scales come from ``scale_search``; codes are
chosen last, for the scales as they are stored. Deterministic: the same floats give the same bytes.

A block of 256 has a scale (and a minimum) for each group of 16, themselves whole numbers times one float16 of the block. That rounding
costs error too: some sizes of that float16 are tried, and the one with the least error is kept, as in ggml's make_qp_quants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.models.model_file import BLOCK_SIZES, ModelFileError
from octavo.quantization.scale_search import Floats, affine_scales, nearest, symmetric_scales

Bytes = npt.NDArray[np.uint8]
Halves = npt.NDArray[np.float16]

LIMIT = 32768.0  # of a weight's size: scales and minima, which may be a little larger, then fit float16
WHOLE_RANGE = 16  # levels of a 4-bit code
_CHUNK_VALUES = 1 << 17  # at a time, so that temporaries stay in the cache


class EncodeError(ModelFileError):
    """Values that no block can hold; the message names the first of them and where it is."""


def encode(values: Floats, dtype: str, levels: int = WHOLE_RANGE, importance: Floats | None = None) -> Bytes:
    """Rows as blocks of ``dtype``, one of ``ENCODABLE``: float32 [rows, columns] -> uint8 [rows, bytes of a row].

    ``levels``: of q4_1 alone, how many of its 16 codes are used, from 4. ``importance``: positive, float32 [columns], what an error in a
    column counts; None: all alike. Raises EncodeError for values that are not finite or beyond LIMIT, and ValueError for columns that are
    no whole number of blocks.
    """
    rows, columns = values.shape
    block_values, block_bytes = BLOCK_SIZES[dtype]
    if columns % block_values:
        raise ValueError(f"rows of {columns} values; {dtype} needs a multiple of {block_values}")
    bad = np.flatnonzero(~(np.abs(values) <= LIMIT))  # NaN as well
    if bad.size:
        raise EncodeError(f"value {values.flat[bad[0]]} at flat index {bad[0]} cannot be quantised; the limit is {LIMIT:.0f}")
    blocks = np.ascontiguousarray(values, np.float32).reshape(-1, block_values)
    counts = np.ones(columns, np.float32) if importance is None else importance
    weights = np.broadcast_to(counts, values.shape).reshape(-1, block_values)
    out = np.empty((len(blocks), block_bytes), np.uint8)
    step = max(1, _CHUNK_VALUES // block_values)
    for start in range(0, len(blocks), step):
        x, w = blocks[start : start + step], weights[start : start + step]
        out[start : start + step] = _q4_1(x, w, levels) if dtype == "q4_1" else _ENCODERS[dtype](x, w)
    return out.reshape(rows, -1)


def _half(values: Floats) -> Halves:
    return values.astype("<f2")


def _raw(halves: Halves) -> Bytes:
    """[blocks] -> [blocks, 2]."""
    return halves.reshape(-1, 1).view(np.uint8)


def _nibble_pairs(codes: Bytes) -> Bytes:
    """[blocks, 32] -> [blocks, 16]: value i low, value i + 16 high."""
    return codes[:, :16] | codes[:, 16:] << np.uint8(4)


def _q4_0(blocks: Floats, weights: Floats) -> Bytes:
    x = np.ascontiguousarray(blocks.T)
    d = _half(symmetric_scales(x, np.ascontiguousarray(weights.T), -8, 7))
    codes = nearest(x, d.astype(np.float32), 0.0, -8, 7) + 8
    return np.concatenate((_raw(d), _nibble_pairs(codes.T.astype(np.uint8))), axis=1)


def _q4_1(blocks: Floats, weights: Floats, levels: int) -> Bytes:
    x = np.ascontiguousarray(blocks.T)
    scales, minima = affine_scales(x, np.ascontiguousarray(weights.T), levels - 1, below_zero=False)
    d, m = _half(scales), _half(minima)
    codes = nearest(x, d.astype(np.float32), m.astype(np.float32), 0, levels - 1)
    return np.concatenate((_raw(d), _raw(m), _nibble_pairs(codes.T.astype(np.uint8))), axis=1)


# ---- blocks of 256: arrays are [16 values, blocks, 16 groups]; what groups have is [blocks, 16] ----

_TRIALS = (0.90, 0.95, 1.0, 1.05)  # of the block's scale, relative to the one at which the largest group has the outermost integer
_MIN_TRIALS = (0.95, 1.0)


class _Fit(NamedTuple):
    """scale of a group = d * scales, minimum = -dmin * minima."""

    d: Halves  # [blocks]
    dmin: Halves
    scales: Floats  # [blocks, 16], whole numbers
    minima: Floats

    def codes(self, x: Floats, low: int, high: int) -> Floats:
        return nearest(x, _times(self.d, self.scales), -_times(self.dmin, self.minima), low, high)

    def error(self, x: Floats, w: Floats, low: int, high: int) -> Floats:
        """Squared error of each block, by importance."""
        off = x + _times(self.dmin, self.minima) - _times(self.d, self.scales) * self.codes(x, low, high)
        total: Floats = (np.square(off) * w).sum((0, 2))
        return total

    def where(self, chosen: npt.NDArray[np.bool], other: _Fit) -> _Fit:
        """This one for the ``chosen`` blocks, and the other one for the rest."""
        rows = chosen[:, None]
        d, dmin = np.where(chosen, self.d, other.d), np.where(chosen, self.dmin, other.dmin)
        return _Fit(d, dmin, np.where(rows, self.scales, other.scales), np.where(rows, self.minima, other.minima))


def _best(fits: Iterable[_Fit], x: Floats, w: Floats, low: int, high: int) -> _Fit:
    """For each block that fit of the least error."""
    first, *others = fits
    best, least = first, first.error(x, w, low, high)
    for fit in others:
        error = fit.error(x, w, low, high)
        best, least = fit.where(error < least, best), np.minimum(error, least)
    return best


def _q2_k(blocks: Floats, weights: Floats) -> Bytes:
    x, w = _grouped(blocks), _grouped(weights)
    fit = _best(_fits_q2_k(x, w), x, w, 0, 3)
    packed_scales = fit.scales.astype(np.uint8) | fit.minima.astype(np.uint8) << np.uint8(4)
    return np.concatenate((packed_scales, _two_bits(_flat_codes(fit.codes(x, 0, 3))), _raw(fit.d), _raw(fit.dmin)), axis=1)


def _fits_q2_k(x: Floats, w: Floats) -> Iterator[_Fit]:
    wanted, minimum = (part.reshape(x.shape[1:]) for part in affine_scales(x.reshape(16, -1), w.reshape(16, -1), 3, below_zero=True))
    for factor in _TRIALS:
        for min_factor in _MIN_TRIALS:
            d, dmin = _half(wanted.max(1) * np.float32(factor / 15)), _half((-minimum).max(1) * np.float32(min_factor / 15))
            scales = _whole(wanted, d, 0, 15)
            # The minimum that suits the rounded scale: what is over, on average, when the codes are taken off.
            codes = nearest(x, _times(d, scales), minimum, 0, 3)
            over = ((_times(d, scales) * codes - x) * w).sum(0) / w.sum(0)
            yield _Fit(d, dmin, scales, _whole(over, dmin, 0, 15))
            yield _Fit(d, dmin, scales, _whole(-minimum, dmin, 0, 15))


def _q3_k(blocks: Floats, weights: Floats) -> Bytes:
    x, w = _grouped(blocks), _grouped(weights)
    fit = _best(_fits_q3_k(x, w), x, w, -4, 3)
    codes = _flat_codes(fit.codes(x, -4, 3) + 4)
    high = np.packbits((codes >> np.uint8(2)).reshape(-1, 8, 32), axis=1, bitorder="little").reshape(-1, 32)
    six = (fit.scales + 32).astype(np.uint8)
    low4 = (six[:, :8] & np.uint8(15)) | six[:, 8:] << np.uint8(4)
    high2 = _interleaved(six.reshape(-1, 4, 4) >> np.uint8(4))
    return np.concatenate((high, _two_bits(codes & np.uint8(3)), low4, high2, _raw(fit.d)), axis=1)


def _fits_q3_k(x: Floats, w: Floats) -> Iterator[_Fit]:
    wanted = symmetric_scales(x.reshape(16, -1), w.reshape(16, -1), -4, 3).reshape(x.shape[1:])
    largest = np.take_along_axis(wanted, np.abs(wanted).argmax(1)[:, None], 1)[:, 0]
    none = np.zeros(len(largest), np.float16)
    for factor in _TRIALS:
        d = _half(largest * np.float32(factor / -32))  # -32 is the integer that reaches farthest
        yield _Fit(d, none, _whole(wanted, d, -32, 31), np.zeros_like(wanted))


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


def _times(d: Halves, whole: Floats) -> Floats:
    return d.astype(np.float32)[:, None] * whole


def _whole(wanted: Floats, d: Halves, low: int, high: int) -> Floats:
    """``wanted`` [blocks, 16] in units of d [blocks], as whole numbers in low .. high."""
    unit = d.astype(np.float32)[:, None]
    return np.clip(np.rint(wanted / np.where(unit == 0, np.float32(1), unit)), low, high)


_ENCODERS: Mapping[str, Callable[[Floats, Floats], Bytes]] = {"q4_0": _q4_0, "q3_k": _q3_k, "q2_k": _q2_k}
ENCODABLE = ("q4_1", *_ENCODERS)
