"""The ops of a Program on one row, in NumPy float32: the definition that faster kernels are tested against.

Every function takes one token's vector and makes one vector. It is called with the same shapes whatever else is in the step, so
a row's bits depend on the tokens before it and on nothing else. Knows nothing of blocks, plans or models.
"""

from __future__ import annotations

from typing import cast

import numpy as np
import numpy.typing as npt

from octavo.models.program import Attention, Rope
from octavo.models.rope import inverse_frequencies

Floats = npt.NDArray[np.float32]


def rms_norm(x: Floats, weight: Floats, eps: float, groups: int) -> Floats:
    """x[groups * dim] -> each group divided by its root mean square, times weight[dim] (Zhang & Sennrich, 2019)."""
    grouped = x.reshape(groups, -1)
    mean_square = np.mean(np.square(grouped), axis=1, keepdims=True, dtype=np.float32)
    return cast(Floats, grouped / np.sqrt(mean_square + np.float32(eps)) * weight).reshape(-1)


def linear(x: Floats, weight: Floats, bias: Floats | None) -> Floats:
    """x[in_features], weight[out_features, in_features] -> [out_features]; each element is one dot product of its own."""
    out: Floats = np.vecdot(weight, x)
    return out if bias is None else out + bias


class RopeTable:
    """Cosines and sines of one rotary embedding: angles in float64, rounded once to float32."""

    def __init__(self, op: Rope) -> None:
        self._frequencies = np.array(inverse_frequencies(op), np.float64)

    def at(self, position: int) -> tuple[Floats, Floats]:
        """(cosines, sines), each [rotary_dim / 2]."""
        angles = self._frequencies * position
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def rope(x: Floats, op: Rope, cos: Floats, sin: Floats) -> Floats:
    """x[heads * head_dim] with each head's pairs of the first rotary_dim values turned by their angles."""
    out = x.reshape(op.heads, op.head_dim).copy()
    half = op.rotary_dim // 2
    first = slice(0, op.rotary_dim, 2) if op.interleaved else slice(0, half)
    second = slice(1, op.rotary_dim, 2) if op.interleaved else slice(half, op.rotary_dim)
    a, b = out[:, first].copy(), out[:, second].copy()
    out[:, first] = a * cos - b * sin
    out[:, second] = b * cos + a * sin
    return out.reshape(-1)


def attention(q: Floats, keys: Floats, values: Floats, op: Attention) -> Floats:
    """q[heads * head_dim], keys and values [n, kv_heads, head_dim] of the n positions the row sees -> [heads * head_dim]."""
    out = np.empty((op.heads, op.head_dim), np.float32)
    heads_per_kv = op.heads // op.kv_heads
    for head, query in enumerate(q.reshape(op.heads, op.head_dim)):
        kv_head = head // heads_per_kv
        scores = np.vecdot(keys[:, kv_head], query) * np.float32(op.scale)
        if op.softcap is not None:
            scores = softcap(scores, op.softcap)
        weights = np.exp(scores - scores.max())
        out[head] = np.vecdot(values[:, kv_head].T, weights) / weights.sum()
    return out.reshape(-1)


def softcap(x: Floats, cap: float) -> Floats:
    """cap * tanh(x / cap)."""
    return np.tanh(x / np.float32(cap)) * np.float32(cap)


def silu(x: Floats) -> Floats:
    """x * sigmoid(x); exp overflows to infinity for very negative x, and the quotient is then the right limit, 0."""
    with np.errstate(over="ignore"):
        return cast(Floats, x / (np.float32(1) + np.exp(-x)))


def gelu_tanh(x: Floats) -> Floats:
    """GELU by its tanh approximation (Hendrycks & Gimpel, 2016)."""
    inner = np.float32(np.sqrt(2.0 / np.pi)) * (x + np.float32(0.044715) * x * x * x)
    return cast(Floats, np.float32(0.5) * x * (np.float32(1) + np.tanh(inner)))


ACTIVATIONS = {"silu": silu, "gelu_tanh": gelu_tanh}
