"""Cosines and sines of a rotary embedding of a range of positions, as the native kernels read them."""

from __future__ import annotations

import numpy as np

from octavo.models.program import Rope
from octavo.models.rope import inverse_frequencies


def cos_sin(rope: Rope, start: int, stop: int) -> np.ndarray:
    """float32 [stop - start, rotary_dim / 2, 2] for positions start .. stop - 1; angles in float64, rounded once."""
    angles = np.arange(start, stop, dtype=np.float64)[:, None] * np.array(inverse_frequencies(rope), np.float64)[None, :]
    return np.ascontiguousarray(np.stack([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32))
