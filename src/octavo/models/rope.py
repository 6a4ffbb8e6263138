"""Inverse frequencies of a rotary embedding, with each kind of scaling: the one place that knows the formulas.

Plain Python floats (64 bit); backends make their own tables of cosines and sines from them. Never touches an activation.
"""

from __future__ import annotations

import math

from octavo.models.program import Rope, RopeScaling


def inverse_frequencies(op: Rope) -> list[float]:
    """Radians per position of each rotated pair, [rotary_dim / 2]: base ** (-2i / rotary_dim) (Su et al., 2021), scaled."""
    plain = [op.base ** (-2.0 * i / op.rotary_dim) for i in range(op.rotary_dim // 2)]
    scaling = op.scaling
    if scaling.kind == "none":
        return plain
    if scaling.kind == "linear":
        return [f / scaling.factor for f in plain]
    if scaling.kind == "factors":
        return [f / divisor for f, divisor in zip(plain, scaling.factors, strict=True)]
    if scaling.kind == "llama3":
        return [_llama3(f, scaling) for f in plain]
    raise ValueError(f"rope scaling {scaling.kind!r} is unknown; known: none, linear, factors, llama3")


def _llama3(frequency: float, s: RopeScaling) -> float:
    """Llama 3.1: long wavelengths are stretched by ``factor``, short ones stay, those between are blended (Grattafiori et al., 2024)."""
    turns = s.original_context * frequency / (2.0 * math.pi)  # wavelengths that fit the context the model was first trained for
    if turns > s.high_freq_factor:
        return frequency
    if turns < s.low_freq_factor:
        return frequency / s.factor
    blend = (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    return (1.0 - blend) * frequency / s.factor + blend * frequency
