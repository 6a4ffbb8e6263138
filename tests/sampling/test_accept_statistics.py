"""The accept/resample rule draws from the target's law, whatever drafts it is given; so do Gumbel-max draws. Seeds are fixed.

A test's limit is p > 0.001 for each of 20 seed sets of 50,000 draws, and for all of them together, where a bias shows 20 times as much.
A right rule has a p-value below the limit once in a thousand, and some 360 are looked at: the base of the seeds is one where none is.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest

from octavo.core.request import SamplingParams, derive_seed
from octavo.core.step import SlotOpen
from octavo.sampling import accept
from octavo.sampling.accept import ACCEPT, RESAMPLE, accept_or_resample, acceptance, draw, overlap, residual
from octavo.sampling.arithmetic import gumbel
from octavo.sampling.reference import ReferenceSampler

from .chi_square import p_value, survival
from .strategies import NativeSampler, isa_levels

VOCAB = 8
NUM_DRAWS = 50_000
NUM_SETS = 20
LIMIT = 0.001
SEED_BASE = 2023


def law(logits: list[float], **params: float) -> np.ndarray:
    """float64 [vocab]: what a slot with these parameters draws from."""
    sampler = ReferenceSampler(len(logits), 1)
    sampler.open(SlotOpen(0, SamplingParams(**params), 0, [], []))  # type: ignore[arg-type]
    return sampler.distribution(0, np.array(logits, np.float32))


TARGET = [2.0, 1.5, 1.0, 0.0, -0.5, -1.0, -2.0, -3.0]
NUCLEUS = {"temperature": 0.7, "top_p": 0.85}
# name -> (the target's law, the draft's; None: looked up)
CASES = {
    "nearly right": (law(TARGET), law([1.8, 1.6, 0.7, 0.3, -0.5, -1.2, -2.0, -2.5])),
    "often wrong": (law(TARGET), law(TARGET[::-1])),
    "sure of what is rare": (law(TARGET), law([0, 0, 0, 0, 0, 0, 0, 6])),
    "a nucleus each": (law(TARGET, **NUCLEUS), law([-1, 2, 1, 1.5, 1, 0, 0, 0], **NUCLEUS)),
    "another temperature": (law(TARGET, temperature=1.5), law(TARGET, temperature=0.5)),
    "looked up": (law(TARGET), None),
    "looked up, from a nucleus": (law(TARGET, **NUCLEUS), None),
    "equal": (law(TARGET), law(TARGET)),
}


def seed_of(seed_set: int) -> int:
    return derive_seed(SEED_BASE, 1000 + seed_set)


@cache
def noise(seed: int) -> np.ndarray:
    """[draws, vocab]"""
    return gumbel(seed, np.arange(NUM_DRAWS)[:, None], np.arange(VOCAB))


@cache
def uniforms(seed: int, purpose: int) -> np.ndarray:
    """[draws]"""
    return accept.uniform(seed, np.arange(NUM_DRAWS), purpose)


def drafts_of(q: np.ndarray | None, seed: int) -> np.ndarray:
    """Drawn as a draft model draws, with the noise of the sequence's own seed; a look-up says now this, now that."""
    positions = np.arange(NUM_DRAWS)
    if q is None:
        return positions % 3 + (positions // 3 % 2) * (VOCAB - 3)
    with np.errstate(divide="ignore"):
        z = np.log(q).astype(np.float32)
    return (z + noise(seed)).argmax(axis=1)


def rule(p: np.ndarray, q: np.ndarray | None, drafts: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, accepted), both [draws]: ``accept_or_resample`` at positions 0 .. draws - 1, all at once."""
    accepted = uniforms(seed, ACCEPT)[: drafts.size] < acceptance(p, q, drafts)
    again = uniforms(seed, RESAMPLE)[: drafts.size]
    tokens = drafts.copy()
    for draft in np.unique(drafts[~accepted]):
        here = ~accepted & (drafts == draft)
        tokens[here] = draw(residual(p, q, draft), again[here])
    return tokens, accepted


def counts(tokens: np.ndarray) -> np.ndarray:
    return np.bincount(tokens, minlength=VOCAB)


@pytest.mark.parametrize("name", CASES)
def test_the_rule_draws_from_the_target_s_law(name: str) -> None:
    p, q = CASES[name]
    total = np.zeros(VOCAB)
    for seed_set in range(NUM_SETS):
        seed = seed_of(seed_set)
        drafts = drafts_of(q, seed)
        tokens, accepted = rule(p, q, drafts, seed)
        assert p_value(counts(tokens), NUM_DRAWS * p) > LIMIT, seed_set
        pairs = counts2(tokens)
        assert p_value(pairs, NUM_DRAWS // 2 * np.outer(p, p)) > LIMIT, seed_set  # tokens know nothing of each other
        total += counts(tokens)
        # Accepted as often as the laws overlap (theorem 3.5).
        expected = np.mean([overlap(p, q, d) for d in drafts[:6]]) if q is None else overlap(p, q, 0)
        spread = math.sqrt(max(expected * (1 - expected), 1e-12) / NUM_DRAWS)
        assert abs(accepted.mean() - expected) < 4 * spread + 1e-4
    assert p_value(total, NUM_SETS * NUM_DRAWS * p) > LIMIT


def counts2(tokens: np.ndarray) -> np.ndarray:
    """[vocab, vocab] of disjoint pairs of neighbours."""
    return np.bincount(tokens[0::2] * VOCAB + tokens[1::2], minlength=VOCAB * VOCAB).reshape(VOCAB, VOCAB)


@pytest.mark.parametrize("name", CASES)
def test_one_draw_is_the_rule_of_many(name: str) -> None:
    p, q = CASES[name]
    seed = seed_of(0)
    drafts = drafts_of(q, seed)[:300]
    tokens, accepted = rule(p, q, drafts, seed)
    assert [accept_or_resample(p, q, int(d), seed, i) for i, d in enumerate(drafts)] == list(zip(tokens, accepted, strict=True))


WRONG_RULES = {
    "accept always": lambda p, q, drafts, u, v: drafts,
    "resample from p": lambda p, q, drafts, u, v: np.where(u < acceptance(p, q, drafts), drafts, draw(p, v)),
    "resample with the number that rejected": lambda p, q, drafts, u, v: np.where(
        u < acceptance(p, q, drafts), drafts, draw(residual(p, q, 0), u)
    ),
    "resample from p without the draft": lambda p, q, drafts, u, v: np.where(
        u < acceptance(p, q, drafts), drafts, [int(draw(residual(p, None, d), x)) for d, x in zip(drafts, v, strict=True)]
    ),
    "a temperature that is 5 % off": lambda p, q, drafts, u, v: draw(p ** (1 / 1.05), v),
    "accept half of it": lambda p, q, drafts, u, v: np.where(u < acceptance(p, q, drafts) / 2, drafts, draw(residual(p, q, 0), v)),
}


@pytest.mark.parametrize("name", WRONG_RULES)
def test_a_wrong_rule_would_be_seen(name: str) -> None:
    """The test above has the power to fail: each of these is far outside its limit in every one of three seed sets."""
    p, q = CASES["often wrong"]
    for seed_set in range(3):
        seed = seed_of(seed_set)
        tokens = WRONG_RULES[name](p, q, drafts_of(q, seed), uniforms(seed, ACCEPT), uniforms(seed, RESAMPLE))
        assert p_value(counts(tokens), NUM_DRAWS * p) < 1e-6


def test_a_draft_drawn_with_the_number_that_judges_it_would_be_seen() -> None:
    """Why acceptance has a counter of its own."""
    p, q = CASES["often wrong"]
    assert q is not None
    u = uniforms(seed_of(0), ACCEPT)
    drafts = draw(q, u)
    tokens = np.where(u < acceptance(p, q, drafts), drafts, draw(residual(p, q, 0), uniforms(seed_of(0), RESAMPLE)))
    assert p_value(counts(tokens), NUM_DRAWS * p) < 1e-6


@pytest.mark.parametrize("params", [{"temperature": 1.3}, NUCLEUS], ids=str)
def test_gumbel_draws_follow_the_same_law(params: dict[str, float]) -> None:
    p = law(TARGET, **params)
    row = np.array(TARGET, np.float32)
    native = NativeSampler(VOCAB, 1, isa_levels()[-1])
    total = np.zeros(VOCAB)
    for seed_set in range(NUM_SETS):
        native.open(SlotOpen(0, SamplingParams(**params), seed_of(seed_set), [], []))  # type: ignore[arg-type]
        tokens = np.array([native.sample(0, row, position).token_id for position in range(NUM_DRAWS)])
        native.close(0)
        assert p_value(counts(tokens), NUM_DRAWS * p) > LIMIT, seed_set
        total += counts(tokens)
    assert p_value(total, NUM_SETS * NUM_DRAWS * p) > LIMIT


def test_the_tail_of_chi_square() -> None:
    """Against closed forms: 1 and 2 degrees of freedom, even ones as Poisson sums, and table values."""
    for x in (0.01, 0.5, 1.0, 3.0, 10.0, 80.0):
        assert math.isclose(survival(x, 1), math.erfc(math.sqrt(x / 2)), rel_tol=1e-9)
        assert math.isclose(survival(x, 2), math.exp(-x / 2), rel_tol=1e-9)
        for df in (4, 10, 60):
            poisson = sum(math.exp(-x / 2 + k * math.log(x / 2) - math.lgamma(k + 1)) for k in range(df // 2))
            assert math.isclose(survival(x, df), poisson, rel_tol=1e-9)
    assert survival(0.0, 7) == 1.0
    assert math.isclose(survival(24.322, 7), 0.001, rel_tol=1e-3)


def test_rare_cells_are_counted_together() -> None:
    expected = np.array([50.0, 40.0, 4.0, 3.0, 3.0])
    assert math.isclose(p_value(np.array([50, 40, 10, 0, 0]), expected), 1.0)
    assert p_value(np.array([50, 40, 0, 0, 10]), np.array([50.0, 46.0, 2.0, 2.0, 0.0])) == 0.0
