"""What the sampling tests draw from: rows of logits with every kind of trouble, parameters of every filter, and both samplers."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from octavo.backends.cpu import _native
from octavo.core.request import SamplingParams
from octavo.core.step import TokenLogprobs
from octavo.sampling.reference import SampleOutcome

SEEDS = st.integers(0, 2**64 - 1)


def isa_levels() -> list[str]:
    """Levels that this machine and build can run."""
    levels = []
    for level in ("portable", "avx2", "avx512_vnni"):
        try:
            _native.SamplerSlots(1, 1, level)
        except ValueError:
            continue
        levels.append(level)
    return levels


class NativeSampler:
    """The native slots behind the reference's interface, so that one test drives both."""

    def __init__(self, vocab_size: int, max_num_slots: int, isa: str) -> None:
        self._slots = _native.SamplerSlots(vocab_size, max_num_slots, isa)
        self.open, self.fork, self.close = self._slots.open, self._slots.fork, self._slots.close

    def sample(self, slot, logits, position, mask=None, logprobs=None) -> SampleOutcome:
        token, entry, error = self._slots.sample(slot, logits, position, mask, logprobs)
        return SampleOutcome(token, None if entry is None else TokenLogprobs(*entry), error)


@st.composite
def logit_rows(draw, vocab_size: int) -> np.ndarray:
    """float32 [vocab_size]: from flat to extreme, with ties, zeros of both signs, denormals, huge values and -inf mixed in."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    scale = draw(st.sampled_from([0.0, 1e-3, 1.0, 3.0, 30.0, 1e5]))
    row = rng.normal(0, 1, vocab_size) * scale
    if draw(st.booleans()):
        row = np.round(row)  # ties
    row = row.astype(np.float32)
    odd = draw(st.lists(st.sampled_from([0.0, -0.0, 1e-40, -1e-42, 3e38, -3e38, 1e30, -np.inf, -100.0, 5.0]), max_size=6))
    for value in odd:
        row[rng.random(vocab_size) < draw(st.sampled_from([0.02, 0.3]))] = np.float32(value)
    return row


@st.composite
def sampling_params(draw, vocab_size: int) -> SamplingParams:
    token = st.integers(0, vocab_size - 1)
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 1e-42, 1e-3, 0.3, 0.7, 1.0, 1.0, 1.7, 100.0])),
        top_k=draw(st.one_of(st.just(0), st.just(-1), st.integers(1, vocab_size + 5))),
        top_p=draw(st.one_of(st.just(1.0), st.floats(0.0, 1.0), st.sampled_from([1e-45, 0.5, 0.9, 0.95, 0.99999994]))),
        min_p=draw(st.one_of(st.just(0.0), st.floats(0.0, 1.0), st.sampled_from([1e-42, 1e-12, 0.05, 1.0]))),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 0.5, 1.3, 10.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.6, -2.0])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 1.1, -0.3])),
        logit_bias=draw(st.dictionaries(token, st.floats(-100, 100, width=32), max_size=4)),
        allowed_token_ids=draw(st.one_of(st.none(), st.none(), st.lists(token, min_size=1, max_size=20).map(tuple))),
        bad_words_token_ids=draw(st.lists(st.lists(token, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple)),
        stop_token_ids=draw(st.lists(token, max_size=3).map(tuple)),
        min_tokens=draw(st.integers(0, 4)),
    )
