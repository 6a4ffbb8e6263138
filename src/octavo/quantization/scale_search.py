"""Scales of groups of weights that make the least squared error: what a quantiser has to choose before it can write codes.

Owns the search, for many groups at once. Knows no file format and no rounding of scales to fewer bits. Errors count by ``w``, a positive
number for each weight. For codes that are given, the best scale (and minimum) has a closed form, least squares; for a scale that is given,
the best codes are the nearest ones. So a grid of scales around the one that just holds the extremes is tried, each is replaced by the least
squares of the codes it leads to, and the best then goes round those two steps again. The grid is that of ggml's make_qx_quants and
make_qkx2_quants (ggml-quants.c), the alternation Lloyd's (1982, Least squares quantization in PCM, section VI).

Arrays are [values of a group, groups]: sums over a group are then sums of long rows, which is what NumPy is quick at.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

# Scales to try, relative to the one at which the extremes have the outermost codes. 1 is among them, so that no result is worse than it.
SYMMETRIC_GRID = (0.80, 0.85, 0.90, 0.95, 1.0, 1.05, 1.10, 1.15)
AFFINE_GRID = (0.60, 0.68, 0.76, 0.84, 0.92, 1.0, 1.08)
_NO_LIMIT = np.float32(1e30)
ROUNDS = 2  # of alternating steps after the grid


def symmetric_scales(x: Floats, w: Floats, low: int, high: int) -> Floats:
    """Scales s [groups], either sign, for x ~ s * q with whole numbers q in low .. high. 0 for a group of zeros."""
    search = _Symmetric(x, w, low, high)
    extreme = np.take_along_axis(x, np.abs(x).argmax(0)[None], 0)[0]  # with its sign
    for edge in (low, high):  # of unlike size: which of them the largest weight gets makes a difference
        for factor in SYMMETRIC_GRID:
            search.attempt(extreme * np.float32(factor / edge))
    for _ in range(ROUNDS):
        search.attempt(search.scale.copy())
    return search.scale


def affine_scales(x: Floats, w: Floats, top: int, below_zero: bool) -> tuple[Floats, Floats]:
    """(s, m), [groups] each, for x ~ s * q + m with whole numbers q in 0 .. top. s is at least 0; with ``below_zero``, m at most 0.

    s is 0 for a group of equal values, and m then their value, or 0 where it may not be.
    """
    centre = (x * w).sum(0) / w.sum(0)  # taken off, so that a small spread about a large mean is not lost in the sums of squares
    highest = -centre if below_zero else np.full_like(centre, _NO_LIMIT)
    search = _Affine(x - centre, w, top, highest)
    low, high = x.min(0) - centre, x.max(0) - centre
    low = np.minimum(low, highest)
    for factor in AFFINE_GRID:
        scale = (high - low) * np.float32(factor / top)
        search.attempt(scale, (low + high - scale * np.float32(top)) * np.float32(0.5))  # what is cut off, at both ends
        if below_zero and factor != 1.0:
            search.attempt(scale, low)  # or at the upper end alone
    for _ in range(ROUNDS):
        search.attempt(search.scale.copy(), search.minimum.copy())
    minimum = search.minimum + centre
    return search.scale, np.minimum(minimum, 0) if below_zero else minimum


def nearest(x: Floats, scale: Floats, minimum: Floats | float, low: int, high: int) -> Floats:
    """The codes in low .. high, as float32 [x.shape], that are nearest to (x - minimum) / scale; 0 where the scale is 0."""
    codes = (x - minimum) / np.where(scale == 0, np.float32(1), scale)
    np.rint(codes, out=codes)
    np.clip(codes, low, high, out=codes)
    return np.multiply(codes, scale != 0, out=codes)


class _Symmetric:
    """The best scale so far: that of the largest gain, by which the squared error is less than the sum of squares."""

    def __init__(self, x: Floats, w: Floats, low: int, high: int) -> None:
        self.x, self.w, self.low, self.high = x, w, low, high
        self._wx = w * x
        self.scale = np.zeros(x.shape[1], np.float32)
        self._gain = np.zeros(x.shape[1], np.float32)
        self._codes, self._product = np.empty_like(x), np.empty_like(x)

    def attempt(self, scale: Floats) -> None:
        codes, product = self._codes, self._product
        np.multiply(self.x, _inverse(scale), out=codes)
        np.rint(codes, out=codes)
        np.clip(codes, self.low, self.high, out=codes)
        along = np.multiply(codes, self._wx, out=product).sum(0)
        np.multiply(codes, codes, out=product)
        squares = np.multiply(product, self.w, out=product).sum(0)
        fitted = along / np.where(squares > 0, squares, np.float32(1))
        gain = along * fitted
        better = gain > self._gain
        np.copyto(self._gain, gain, where=better)
        np.copyto(self.scale, fitted, where=better)


class _Affine:
    """The best (scale, minimum) so far, by squared error; the sum of squares, which all have in common, is left out.

    ``highest``: [groups], what no minimum may be above. The mean of each group of ``x`` is near 0.
    """

    def __init__(self, x: Floats, w: Floats, top: int, highest: Floats) -> None:
        self.x, self.w, self.top, self.highest = x, w, top, highest
        self._wx = w * x
        self._weight, self._sum = w.sum(0), self._wx.sum(0)
        self.scale = np.zeros(x.shape[1], np.float32)
        self.minimum = np.minimum(self._sum / self._weight, highest)  # codes 0 alone
        self._error = self.minimum * (self.minimum * self._weight - 2 * self._sum)
        self._codes, self._product = np.empty_like(x), np.empty_like(x)

    def attempt(self, scale: Floats, minimum: Floats) -> None:
        codes, product, inverse = self._codes, self._product, _inverse(scale)
        np.multiply(self.x, inverse, out=codes)
        np.subtract(codes, minimum * inverse, out=codes)
        np.rint(codes, out=codes)
        np.clip(codes, 0, self.top, out=codes)
        along = np.multiply(codes, self._wx, out=product).sum(0)
        np.multiply(codes, self.w, out=product)
        total = product.sum(0)
        squares = np.multiply(product, codes, out=product).sum(0)
        scale, minimum = self._fit(total, along, squares)
        error = scale * (scale * squares + 2 * (minimum * total - along)) + minimum * (minimum * self._weight - 2 * self._sum)
        better = (error < self._error) & (scale > 0)
        np.copyto(self._error, error, where=better)
        np.copyto(self.scale, scale, where=better)
        np.copyto(self.minimum, minimum, where=better)

    def _fit(self, total: Floats, along: Floats, squares: Floats) -> tuple[Floats, Floats]:
        """Least squares of given codes; scale 0 where all are equal. A minimum that is too high is lowered, and the scale fitted to it."""
        spread = self._weight * squares - total * total
        varied = spread > 1e-6 * self._weight * squares  # else it is the rounding of equal codes
        scale = np.where(varied, self._weight * along - self._sum * total, np.float32(0)) / np.where(varied, spread, np.float32(1))
        minimum = (self._sum - scale * total) / self._weight
        lowered = (along - self.highest * total) / np.where(squares > 0, squares, np.float32(1))
        return np.where(minimum > self.highest, lowered, scale), np.minimum(minimum, self.highest)


def _inverse(scale: Floats) -> Floats:
    return np.where(scale == 0, np.float32(0), 1 / np.where(scale == 0, np.float32(1), scale))
