"""The ops of the reference backend against scalar loops in float64, with tolerances of a few float32 roundings."""

from __future__ import annotations

import math

import numpy as np
import pytest

from octavo.backends.reference import ops
from octavo.models.program import Attention, Rope, RopeScaling
from octavo.models.rope import inverse_frequencies


def draw(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def rope_op(interleaved: bool, rotary_dim: int = 8, scaling: RopeScaling | None = None, base: float = 10000.0) -> Rope:
    return Rope("out", "x", 3, 8, rotary_dim, base, interleaved, scaling or RopeScaling())


def test_rms_norm_is_taken_over_each_group() -> None:
    x, weight = draw(0, 24), draw(1, 8)
    out = ops.rms_norm(x, weight, 1e-5, groups=3)
    assert out.dtype == np.float32
    for group in range(3):
        part = x[group * 8 : group * 8 + 8].astype(np.float64)
        expected = part / math.sqrt(sum(part**2) / 8 + 1e-5) * weight
        np.testing.assert_allclose(out[group * 8 : group * 8 + 8], expected, rtol=1e-6)


def test_linear_adds_its_bias() -> None:
    x, weight, bias = draw(0, 5), draw(1, 3, 5), draw(2, 3)
    out = ops.linear(x, weight, bias)
    assert out.dtype == np.float32
    np.testing.assert_allclose(out, [sum(weight[o] * x) + bias[o] for o in range(3)], rtol=1e-5)
    np.testing.assert_array_equal(ops.linear(x, weight, None) + bias, out)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("rotary_dim", [4, 8])
def test_rope_turns_pairs_and_leaves_the_rest(interleaved: bool, rotary_dim: int) -> None:
    op, x, position = rope_op(interleaved, rotary_dim), draw(3, 24), 1234567
    out = ops.rope(x, op, *ops.RopeTable(op).at(position)).reshape(3, 8)
    assert out.dtype == np.float32
    half = rotary_dim // 2
    for head in range(3):
        expected = x.reshape(3, 8)[head].astype(np.float64)
        for i in range(half):
            a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
            angle = position * 10000.0 ** (-2 * i / rotary_dim)
            first, second = expected[a], expected[b]
            expected[a] = first * math.cos(angle) - second * math.sin(angle)
            expected[b] = second * math.cos(angle) + first * math.sin(angle)
        np.testing.assert_allclose(out[head], expected, atol=1e-6)


def test_position_zero_changes_nothing() -> None:
    op, x = rope_op(True), draw(3, 24)
    np.testing.assert_array_equal(ops.rope(x, op, *ops.RopeTable(op).at(0)), x)


def test_linear_scaling_divides_positions() -> None:
    plain, scaled = rope_op(False), rope_op(False, scaling=RopeScaling("linear", factor=8.0))
    for a, b in zip(ops.RopeTable(plain).at(5), ops.RopeTable(scaled).at(40), strict=True):
        np.testing.assert_array_equal(a, b)


def test_llama3_scaling_of_llama_3_1() -> None:
    """The published settings: short wavelengths stay, long ones are stretched 8 times, those between lie between, in order."""
    scaling = RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
    op = Rope("out", "x", 1, 128, 128, 500000.0, False, scaling)
    plain = inverse_frequencies(Rope("out", "x", 1, 128, 128, 500000.0, False))
    scaled = inverse_frequencies(op)
    for before, after in zip(plain, scaled, strict=True):
        wavelength = 2 * math.pi / before
        if wavelength < 8192 / 4:
            assert after == before
        elif wavelength > 8192:
            assert after == before / 8
        else:
            assert before / 8 < after < before
    assert sorted(scaled, reverse=True) == scaled
    assert len({after / before for before, after in zip(plain, scaled, strict=True)}) > 3
    factors = tuple(before / after for before, after in zip(plain, scaled, strict=True))
    as_factors = inverse_frequencies(Rope("out", "x", 1, 128, 128, 500000.0, False, RopeScaling("factors", factors=factors)))
    np.testing.assert_allclose(as_factors, scaled, rtol=1e-14)


def test_an_unknown_scaling_is_refused() -> None:
    with pytest.raises(ValueError, match="'yarn' is unknown"):
        inverse_frequencies(rope_op(False, scaling=RopeScaling("yarn")))


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_attention_is_softmax_over_what_is_seen(softcap: float | None) -> None:
    op = Attention("out", "q", "k", "v", 0, heads=4, kv_heads=2, head_dim=6, scale=0.7, softcap=softcap)
    q, keys, values = draw(0, 24), draw(1, 9, 2, 6), draw(2, 9, 2, 6)
    out = ops.attention(q, keys, values, op).reshape(4, 6)
    assert out.dtype == np.float32
    for head in range(4):
        scores = [sum(q[head * 6 : head * 6 + 6].astype(np.float64) * keys[n, head // 2]) * 0.7 for n in range(9)]
        scores = scores if softcap is None else [softcap * math.tanh(s / softcap) for s in scores]
        weights = [math.exp(s) / sum(math.exp(t) for t in scores) for s in scores]
        np.testing.assert_allclose(out[head], sum(w * values[n, head // 2] for n, w in enumerate(weights)), rtol=1e-5, atol=1e-6)


def test_activations() -> None:
    x = np.array([-200.0, -20.0, -1.5, -0.0, 0.0, 0.3, 4.0, 200.0], np.float32)
    wide = x.astype(np.float64)
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(ops.silu(x), wide / (1 + np.exp(-wide)), rtol=1e-6, atol=1e-30)
    inner = np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)
    np.testing.assert_allclose(ops.gelu_tanh(x), 0.5 * wide * (1 + np.tanh(inner)), rtol=1e-5, atol=1e-7)
    assert ops.silu(x).dtype == ops.gelu_tanh(x).dtype == np.float32


def test_softcap_bounds_and_keeps_small_values() -> None:
    x = np.array([-1e6, -0.01, 0.0, 0.01, 1e6], np.float32)
    np.testing.assert_allclose(ops.softcap(x, 30.0), [-30, -0.01, 0, 0.01, 30], rtol=1e-6)
