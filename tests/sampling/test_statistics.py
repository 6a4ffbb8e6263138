"""Draws follow softmax and are independent over tokens, positions and seeds. Seeds are fixed, so every run sees the same draws."""

from __future__ import annotations

import math

import numpy as np
import pytest

from octavo.core.request import SamplingParams, derive_seed
from octavo.core.step import SlotOpen
from octavo.sampling.arithmetic import gumbel, noise_bits
from octavo.sampling.structured import mask_from_ids

from .strategies import NativeSampler, isa_levels

BEST_LEVEL = isa_levels()[-1]


def chi_square_excess(observed: np.ndarray, expected: np.ndarray) -> float:
    """Standard deviations of the chi-square statistic above its mean (Wilson-Hilferty), degrees of freedom = cells - 1."""
    df = observed.size - 1
    statistic = float(((observed - expected) ** 2 / expected).sum())
    return ((statistic / df) ** (1 / 3) - (1 - 2 / (9 * df))) / math.sqrt(2 / (9 * df))


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max())
    return e / e.sum()


def native_draws(row: np.ndarray, params: SamplingParams, seeds: range, positions: range, mask=None) -> np.ndarray:
    """Counts [vocab_size] of draws; a slot per seed."""
    sampler = NativeSampler(row.size, 1, BEST_LEVEL)
    counts = np.zeros(row.size)
    for seed in seeds:
        sampler.open(SlotOpen(0, params, derive_seed(1234, seed), [], []))
        for position in positions:
            counts[sampler.sample(0, row, position, mask).token_id] += 1
        sampler.close(0)
    return counts


@pytest.mark.parametrize(("seeds", "positions"), [(range(1), range(40_000)), (range(1, 401), range(100)), (range(1, 40_001), range(7, 8))])
def test_draws_follow_softmax(seeds, positions):
    """Forty thousand draws: many positions of one seed, many of both, many seeds at one position."""
    row = np.linspace(0, -5, 24).astype(np.float32)
    counts = native_draws(row, SamplingParams(temperature=1.3), seeds, positions)
    assert chi_square_excess(counts, counts.sum() * softmax(row / 1.3)) < 3.5


def test_a_wrong_temperature_would_be_seen():
    """The test above has the power to fail: 10 % off in temperature is far outside its limit."""
    row = np.linspace(0, -5, 24).astype(np.float32)
    counts = native_draws(row, SamplingParams(temperature=1.3), range(1), range(40_000))
    assert chi_square_excess(counts, counts.sum() * softmax(row / 1.43)) > 6


def test_filtered_draws_follow_the_renormalised_softmax():
    row = np.random.default_rng(0).normal(0, 1.5, 2000).astype(np.float32)
    allowed = np.arange(0, 2000, 3)
    params = SamplingParams(top_k=30, temperature=0.9)
    counts = native_draws(row, params, range(1), range(20_000), mask_from_ids(allowed.tolist(), 2000))
    kept = allowed[np.argsort(-row[allowed], kind="stable")[:30]]
    assert counts.sum() == counts[kept].sum()
    assert chi_square_excess(counts[kept], 20_000 * softmax(row[kept] / np.float32(0.9))) < 3.5


def test_noise_has_the_gumbel_distribution():
    """A million values: 256 cells of equal probability, and the far tail where only the resolution of small v reaches."""
    g = gumbel(99, np.arange(500)[:, None], np.arange(2000)[None]).astype(np.float64).ravel()
    cells = np.floor(np.exp(-np.exp(-g)) * 256).clip(0, 255).astype(int)
    assert chi_square_excess(np.bincount(cells, minlength=256), np.full(256, g.size / 256)) < 3.5
    expected = g.size * -math.expm1(-math.exp(-9))
    assert abs((g > 9).sum() - expected) < 4 * math.sqrt(expected)


# Pairs that a weak generator or a reused counter would tie together: same counter, next counter, next position, next and derived seed.
PAIRS = [
    ((5, 0, 0), (5, 0, 256)), ((5, 0, 0), (5, 0, 1)), ((5, 0, 0), (5, 0, 1024)), ((5, 0, 0), (5, 1, 0)), ((5, 0, 0), (6, 0, 0)),
    ((5, 0, 0), (5 ^ 1 << 32, 0, 0)), ((5, 0, 0), (derive_seed(5, 1), 0, 0)), ((5, 0, 3), (5, 1, 2)), ((5, 0, 0), (0, 5, 0)),
]  # fmt: skip


@pytest.mark.parametrize(("left", "right"), PAIRS, ids=str)
def test_noise_is_independent(left, right):
    """Bits of two streams over 60,000 shifts: no correlation of values, and a flat joint table of their top three bits."""
    shift = np.arange(0, 120_000, 2)
    a, b = (noise_bits(seed, position + shift, np.full(shift.size, token)) for seed, position, token in (left, right))
    assert abs(np.corrcoef(a.astype(np.float64), b.astype(np.float64))[0, 1]) < 4 / math.sqrt(shift.size)
    joint = np.bincount((a >> np.uint32(29)).astype(int) * 8 + (b >> np.uint32(29)).astype(int), minlength=64)
    assert chi_square_excess(joint, np.full(64, shift.size / 64)) < 3.5


def test_consecutive_draws_are_independent():
    """The pair (draw at p, draw at p + 1) has the product distribution."""
    row = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    scores = row + gumbel(2024, np.arange(100_001)[:, None], np.arange(4)[None])
    tokens = scores.argmax(axis=1)
    joint = np.bincount(tokens[:-1] * 4 + tokens[1:], minlength=16)
    p = softmax(row)
    assert chi_square_excess(joint, 100_000 * np.outer(p, p).ravel()) < 3.5
