"""The accept/resample rule by arithmetic: what it draws has exactly the target's law, for any two laws. The draws themselves are tested by
statistics elsewhere."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.request import SamplingParams
from octavo.core.step import SlotOpen
from octavo.sampling.accept import ACCEPT, RESAMPLE, accept_or_resample, acceptance, draw, overlap, residual, uniform
from octavo.sampling.arithmetic import noise_bits
from octavo.sampling.reference import ReferenceSampler

from .strategies import logit_rows, sampling_params


@st.composite
def laws(draw_from, vocab_size: int) -> np.ndarray:
    """float64 [vocab_size]: from flat to certain, with zeros."""
    rng = np.random.default_rng(draw_from(st.integers(0, 2**32)))
    weights = rng.random(vocab_size) ** draw_from(st.sampled_from([0.0, 1.0, 5.0, 60.0]))
    weights[rng.random(vocab_size) < draw_from(st.sampled_from([0.0, 0.5]))] = 0.0
    weights[rng.integers(vocab_size)] += 1e-3
    return weights / weights.sum()


@given(laws(9), laws(9))
def test_what_is_kept_and_what_is_drawn_anew_make_the_target_s_law(p: np.ndarray, q: np.ndarray) -> None:
    """For each token y: P(draft y, kept) + P(not kept) P(y drawn anew) = p(y), whatever the draft's law is."""
    drafts = np.flatnonzero(q)
    kept = np.zeros(p.size)
    kept[drafts] = q[drafts] * acceptance(p, q, drafts)
    assert kept.sum() == pytest.approx(overlap(p, q, 0), abs=1e-12)
    assert np.allclose(kept + (1 - kept.sum()) * residual(p, q, int(drafts[0])), p, atol=1e-12)


@given(laws(9), st.integers(0, 8))
def test_a_draft_that_is_certain_of_itself(p: np.ndarray, draft: int) -> None:
    """As with a law that is 1 at the draft."""
    certain = np.eye(9)[draft]
    assert acceptance(p, None, draft) == acceptance(p, certain, draft) == overlap(p, None, draft)
    assert overlap(p, None, draft) == pytest.approx(overlap(p, certain, draft))
    assert np.allclose(residual(p, None, draft), residual(p, certain, draft), atol=1e-15)
    kept = np.where(np.arange(9) == draft, p, 0)
    assert np.allclose(kept + (1 - p[draft]) * residual(p, None, draft), p, atol=1e-12)


@given(laws(9), laws(9))
def test_float32_laws(p: np.ndarray, q: np.ndarray) -> None:
    p32, q32 = p.astype(np.float32), q.astype(np.float32)
    draft = int(q32.argmax())
    assert overlap(p32, q32, draft) == pytest.approx(overlap(p, q, draft), abs=1e-5)
    assert np.allclose(acceptance(p32, q32, draft), acceptance(p, q, draft), atol=1e-5)


def test_lenience() -> None:
    p, q = np.array([0.1, 0.3, 0.6]), np.array([0.5, 0.3, 0.2])
    assert overlap(p, q, 0) == pytest.approx(0.6)
    assert overlap(p, q, 0, 0.5) == pytest.approx(0.2 + 0.3 + 0.2)
    assert overlap(p, q, 0, 0.1) == pytest.approx(1.0)


def test_a_draft_that_its_law_cannot_draw() -> None:
    with pytest.raises(ValueError, match="drafts: 1 includes a token whose probability in the draft's distribution is 0"):
        acceptance(np.array([0.5, 0.5]), np.array([1.0, 0.0]), 1)


def test_equal_laws_reject_nothing() -> None:
    p = np.array([0.3, 0.7])
    assert np.array_equal(residual(p, p.copy(), 0), p)  # nothing is left: by rounding alone could it be asked for
    assert all(accept_or_resample(p, p, 1, 3, position) == (1, True) for position in range(200))


@given(laws(9), st.floats(0, 1, exclude_min=True, exclude_max=True))
def test_draw_is_the_inverse_of_the_cumulative_law(p: np.ndarray, u: float) -> None:
    token = int(draw(p, u))
    assert p[token] > 0
    assert p[:token].sum() <= u * p.sum() + 1e-12 and u * p.sum() - 1e-12 <= p[: token + 1].sum()


def test_draw_at_the_ends() -> None:
    p = np.array([0.0, 0.25, 0.0, 0.75, 0.0])
    assert draw(p, np.array([2.0**-53, 0.2499, 0.2501, 1 - 2.0**-53])).tolist() == [1, 1, 3, 3]
    assert draw(3 * p, np.array([0.2499, 0.2501])).tolist() == [1, 3]  # of any sum
    assert draw(np.full(10, 0.1), 1 - 2.0**-53) == 9  # though the sum rounds


def test_uniform_numbers() -> None:
    """Inside (0, 1), of the seed's low and high words, of high positions, and apart from each other and from the noise of draws."""
    positions = np.arange(4000)
    keys = [(5, ACCEPT), (5, RESAMPLE), (6, ACCEPT), (5 + 2**40, ACCEPT)]
    streams = [uniform(seed, positions, purpose) for seed, purpose in keys]
    streams.append(uniform(5, positions + 2**32, ACCEPT))
    streams.append(noise_bits(5, positions, np.zeros(4000, np.int64)) / 2**32)
    for i, a in enumerate(streams):
        assert 0 < a.min() < 0.01 and 0.99 < a.max() < 1 and len(set(a.tolist())) == a.size
        for b in streams[:i]:
            assert abs(np.corrcoef(a, b)[0, 1]) < 4 / np.sqrt(a.size)
    assert uniform(5, 17, ACCEPT) == streams[0][17]


@given(logit_rows(40), sampling_params(40), st.integers(0, 2**63))
def test_the_law_has_what_can_be_drawn(row: np.ndarray, params: SamplingParams, seed: int) -> None:
    """A distribution of sum 1; what ``sample`` draws has a share in it; where one refuses so does the other; the slot stays as it is."""
    sampler = ReferenceSampler(40, 1)
    sampler.open(SlotOpen(0, params, seed, [1, 2, 3], [4, 5], frozenset([7])))
    try:
        p = sampler.distribution(0, row)
    except ValueError as error:
        assert sampler.sample(0, row, 5).error == str(error)
        return
    assert np.array_equal(p, sampler.distribution(0, row)) and sampler.output_token_ids(0) == [4, 5]
    assert p.sum() == pytest.approx(1.0) and p.min() >= 0
    outcome = sampler.sample(0, row, 5)
    assert p[outcome.token_id] > 0 and sampler.output_token_ids(0) == [4, 5, outcome.token_id]
    if params.greedy:
        assert p[outcome.token_id] == 1.0
