"""The accept/resample rule of speculative sampling: keep a draft with probability min(1, p/q), else draw from what p has above q.

Leviathan, Kalman and Matias, "Fast inference from transformers via speculative decoding" (ICML 2023), algorithm 1, and Chen et al.,
"Accelerating large language model decoding with speculative sampling" (2023), algorithm 2: p is the law of the target, q that which the
draft was drawn from, both after temperature, filters, penalties and masks; whatever q is, what comes out has the law p. A draft that was
looked up and not drawn is certain of itself: its q is 1 at the draft, and is written None.

Pure functions of distributions (float64 or float32 [vocab_size], >= 0, sum 1 up to rounding) and of random numbers that follow from
(seed, position, purpose) alone, so that a run can be replayed. Knows nothing of slots, parameters or models. By default drafts are
verified by Gumbel coupling instead (``sampling.reference``), under which no text depends on its drafts; here its law alone does not.
"""

from __future__ import annotations

import numpy as np

from octavo.sampling.arithmetic import philox4x32

ACCEPT, RESAMPLE = 1, 2  # purposes of a random number: the fourth word of its counter, which is 0 in the noise of draws

_HALF_BITS = np.uint32(6)  # 26 bits of each of two words: with the 1/2 behind them exact in float64


def uniform(seed: int, position: np.ndarray | int, purpose: int) -> np.ndarray:
    """float64 strictly inside (0, 1), shaped as ``position``: 52 bits of Philox4x32-10 at the counter (0, position, purpose).

    ``position``: index of the token in its sequence. Independent of the noise of draws under the same seed: no counter serves both.
    """
    position = np.asarray(position, np.uint64)
    zero = np.zeros_like(position)
    counter = (zero, position & np.uint64(0xFFFFFFFF), position >> np.uint64(32), zero + np.uint64(purpose))
    high, low, _, _ = philox4x32(counter, (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF))
    whole = (high >> _HALF_BITS).astype(np.float64) * 2.0**26 + (low >> _HALF_BITS)
    return np.asarray((whole + 0.5) * 2.0**-52)


def acceptance(p: np.ndarray, q: np.ndarray | None, drafts: np.ndarray | int) -> np.ndarray:
    """min(1, p(x) / q(x)) of each draft x, shaped as ``drafts``. Raises ValueError for a draft that q cannot draw."""
    if q is None:
        return np.minimum(1.0, np.asarray(p[drafts], np.float64))
    drawn = np.asarray(q[drafts], np.float64)
    if not np.all(drawn > 0):
        raise ValueError(f"drafts: {drafts} includes a token whose probability in the draft's distribution is 0")
    return np.minimum(1.0, np.asarray(p[drafts], np.float64) / drawn)


def residual(p: np.ndarray, q: np.ndarray | None, draft: int) -> np.ndarray:
    """norm(max(0, p - q)), float64 [vocab_size]: what a token is drawn from where ``draft`` is rejected.

    p itself where nothing is left above q, which happens by rounding alone: exactly equal laws reject nothing.
    """
    if q is None:
        above = np.array(p, np.float64)
        above[draft] = 0.0
    else:
        above = np.maximum(0.0, np.subtract(p, q, dtype=np.float64))
    mass = above.sum()
    return above / mass if mass > 0 else np.array(p, np.float64)


def draw(p: np.ndarray, u: np.ndarray | float) -> np.ndarray:
    """Token ids, shaped as ``u``: the inverse of the cumulative p [vocab_size] (by id, of any positive sum) at uniform numbers u."""
    cumulative = np.cumsum(p, dtype=np.float64)
    found = np.searchsorted(cumulative, np.asarray(u) * cumulative[-1], side="right")
    return np.minimum(found, np.searchsorted(cumulative, cumulative[-1]))  # a product that rounds up to the whole sum is the last token's


def accept_or_resample(p: np.ndarray, q: np.ndarray | None, draft: int, seed: int, position: int) -> tuple[int, bool]:
    """(token at ``position``, whether it is the accepted draft). ``seed``: of the sequence, as its draws use it."""
    if uniform(seed, position, ACCEPT) < acceptance(p, q, draft):
        return draft, True
    return int(draw(residual(p, q, draft), uniform(seed, position, RESAMPLE))), False


def overlap(p: np.ndarray, q: np.ndarray | None, draft: int, lenience: float = 1.0) -> float:
    """sum over x of min(p(x) / lenience, q(x)): the probability that a draft drawn from q is accepted.

    The paper's beta, whose mean over positions is alpha (Leviathan et al., 2023, definition 3.1 and theorem 3.5). A lenience in (0, 1)
    is what it would be if q were multiplied by it before the comparison (appendix A.5), which would change the law; nothing here draws so.
    """
    if q is None:
        return float(min(1.0, p[draft] / lenience))
    return float(np.minimum(np.asarray(p, np.float64) / lenience, q).sum())
