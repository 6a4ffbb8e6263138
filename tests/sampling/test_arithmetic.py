"""The exact arithmetic is also accurate: against math, a published test vector, and sums done by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.sampling import arithmetic

FLOAT_MAX = float(np.finfo(np.float32).max)


def ulps(got: np.float32, want: float) -> float:
    return abs(float(got) - want) / float(np.spacing(np.float32(abs(want))))


@given(st.floats(-87, 0, width=32))
def test_exp_is_within_two_ulps(x):
    assert ulps(arithmetic.exp(np.float32(x)), math.exp(x)) <= 2


@given(st.floats(2.0**-149, FLOAT_MAX, width=32))
def test_log_is_within_two_ulps(x):
    assert ulps(arithmetic.log(np.float32(x)), math.log(x)) <= 2 or x == 1


def test_ends_are_exact():
    assert arithmetic.exp(np.float32(0)) == 1
    assert arithmetic.exp(np.float32(-0.0)) == 1
    assert arithmetic.exp(np.float32(-np.inf)) == 0
    assert arithmetic.exp(np.nextafter(np.float32(-87), np.float32(-100))) == 0
    assert arithmetic.exp(np.float32(-87)) >= arithmetic.SMALLEST_NORMAL
    assert arithmetic.log(np.float32(1)) == 0


@pytest.mark.parametrize("size", [1, 15, 16, 17, 1023, 1024, 1025, 5000])
def test_lane_sum_is_the_documented_order(size):
    """Against one scalar addition at a time; the values make every order give another sum."""
    x = np.random.default_rng(size).lognormal(0, 3, size).astype(np.float32)
    total = np.float32(0)
    for start in range(0, size, 1024):
        lanes = [np.float32(0)] * 16
        for i, value in enumerate(x[start : start + 1024]):
            lanes[i % 16] = lanes[i % 16] + value
        for width in (8, 4, 2, 1):
            lanes = [lanes[i] + lanes[i + width] for i in range(width)]
        total = total + lanes[0]
    assert arithmetic.lane_sum(x) == total
    assert math.isclose(total, math.fsum(x.tolist()), rel_tol=1e-6)


# Random123's known-answer file (kat_vectors, philox 4x32 10): counter, key, output.
PHILOX_VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0), (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]


@pytest.mark.parametrize(("counter", "key", "output"), PHILOX_VECTORS)
def test_philox_known_answers(counter, key, output):
    words = arithmetic.philox4x32(tuple(np.array([c], np.uint32) for c in counter), key)
    assert tuple(int(w[0]) for w in words) == output


def test_noise_of_a_token_is_one_word_of_one_counter():
    """Every (position, id) has its own (counter, word): 3,000 ids at two positions use as many words as there are pairs, none twice."""
    ids, positions = np.arange(3000), np.array([[5], [2**32 + 5]])
    bits = arithmetic.noise_bits(9, positions, ids)
    for token in (0, 255, 256, 1023, 1024, 2999):
        counter = (token // 1024 * 256 + token % 256, 5, 1, 0)
        words = arithmetic.philox4x32(tuple(np.array([c]) for c in counter), (9, 0))
        assert bits[1, token] == words[token // 256 % 4][0]
    assert len(np.unique(bits)) >= bits.size - 20  # 32-bit words of 6,000 draws collide by chance a hundredth of a time


def test_gumbel_at_the_ends_of_its_range(monkeypatch):
    """u is strictly inside (0, 1): the smallest and greatest 31-bit draws give finite noise, the closed form's."""
    bits = np.array([0, 1, 0x4AFB0CCB, 0x4AFB0CCC, 0x4AFB0CCE, 0x80000000, 0xFFFFFFFF], np.uint32)
    monkeypatch.setattr(arithmetic, "noise_bits", lambda seed, position, ids: bits)
    for got, word in zip(arithmetic.gumbel(0, 0, np.arange(7)), bits, strict=True):
        v = (int(word >> np.uint32(1)) + 0.5) / 2**31
        assert math.isclose(got, -math.log(-math.log1p(-v)), rel_tol=1e-6, abs_tol=1e-6)
