"""The native sampler gives the reference's answers bit for bit, on every ISA level that this machine has."""

from __future__ import annotations

import threading
from array import array

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.backends.cpu import _native
from octavo.core.request import SamplingParams
from octavo.core.step import SlotOpen, TokenLogprobs
from octavo.sampling import arithmetic, reference
from octavo.sampling.reference import ReferenceSampler
from octavo.sampling.structured import mask_from_ids

from .strategies import SEEDS, NativeSampler, isa_levels, logit_rows, sampling_params

LEVELS = isa_levels()


def assert_same(left: TokenLogprobs | None, right: TokenLogprobs | None) -> None:
    """Equal down to the bits of every float (repr tells -0.0 from 0.0)."""
    assert repr(left) == repr(right)


@pytest.mark.parametrize("isa", LEVELS)
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_draws_equal_the_reference(isa, data):
    """Three draws in a row from one slot, so that counts, bad-word tails and min_tokens move, then a fork and a fourth."""
    vocab_size = data.draw(st.one_of(st.integers(1, 40), st.integers(1, 1000), st.sampled_from([1023, 1024, 1025, 3000])), "vocab_size")
    token = st.integers(0, vocab_size - 1)
    entry = SlotOpen(
        0,
        data.draw(sampling_params(vocab_size), "params"),
        data.draw(SEEDS, "seed"),
        data.draw(st.lists(token, max_size=12), "prompt"),
        data.draw(st.lists(token, max_size=6), "output"),
        frozenset(data.draw(st.lists(token, max_size=2), "eos")),
    )
    samplers = ReferenceSampler(vocab_size, 2), NativeSampler(vocab_size, 2, isa)
    for sampler in samplers:
        sampler.open(entry)
    position = data.draw(st.sampled_from([1, 77, 2**20, 2**31 - 5]), "position")
    for step in range(4):
        row = data.draw(logit_rows(vocab_size), "logits")
        mask = data.draw(st.one_of(st.none(), st.lists(token, min_size=1).map(lambda ids: mask_from_ids(ids, vocab_size))), "mask")
        k = data.draw(st.one_of(st.none(), st.integers(0, 20)), "logprobs")
        if step == 3:
            for sampler in samplers:
                sampler.fork(0, 1, entry.seed ^ 1)
        want, got = (sampler.sample(step // 3, row, position + step, mask, k) for sampler in samplers)
        assert (got.token_id, got.error) == (want.token_id, want.error)
        assert_same(got.logprobs, want.logprobs)


@pytest.mark.parametrize("isa", LEVELS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_raw_logprobs_equal_the_reference(isa, data):
    vocab_size = data.draw(st.one_of(st.integers(1, 200), st.integers(900, 5000)), "vocab_size")
    row = data.draw(logit_rows(vocab_size), "logits")
    token, k = data.draw(st.integers(0, vocab_size - 1)), data.draw(st.integers(0, 20))
    try:
        want = reference.raw_logprobs(row, token, k)
    except reference.LogitsError as error:
        with pytest.raises(ValueError) as raised:
            _native.raw_logprobs(row, token, k, isa)
        assert str(raised.value) == str(error)
        return
    assert_same(TokenLogprobs(*_native.raw_logprobs(row, token, k, isa)), want)


FILTERS = [
    {}, {"top_p": 0.9}, {"top_p": 0.999}, {"top_k": 40}, {"top_k": 5000, "top_p": 0.8}, {"min_p": 1e-4},
    {"min_p": 0.02, "top_k": 1000, "top_p": 0.95},
]  # fmt: skip


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("params", FILTERS, ids=str)
@pytest.mark.parametrize("spread", [0.05, 3.0])
def test_large_vocabulary_equals_the_reference(isa, params, spread):
    """A vocabulary of a real model's size, flat and peaked; half-precision logits, so that there are ties."""
    vocab_size = 49_153
    row = np.random.default_rng(3).normal(0, spread, vocab_size).astype(np.float16).astype(np.float32)
    want, got = ReferenceSampler(vocab_size, 1), NativeSampler(vocab_size, 1, isa)
    entry = SlotOpen(0, SamplingParams(temperature=0.8, **params), 11, [], [])
    want.open(entry)
    got.open(entry)
    for position in range(3):
        a, b = want.sample(0, row, position, None, 20), got.sample(0, row, position, None, 20)
        assert a.token_id == b.token_id
        assert_same(a.logprobs, b.logprobs)


@pytest.mark.parametrize("isa", LEVELS)
def test_exp_and_log_agree_to_the_bit(isa):
    """Log-probabilities of two-token rows expose one exp and one log each; twenty thousand arguments over the whole range."""
    rng = np.random.default_rng(0)
    gaps = -np.concatenate([rng.exponential(8, 10_000), rng.uniform(0, 90, 10_000), np.exp2(rng.uniform(-130, 7, 500))]).astype(np.float32)
    for gap, want in zip(gaps, -arithmetic.log(arithmetic.exp(gaps) + np.float32(1)), strict=True):
        assert _native.raw_logprobs(np.array([0, gap], np.float32), 0, 0, isa)[1] == want


@pytest.mark.parametrize("isa", LEVELS)
def test_noise_agrees_where_it_decides(isa):
    """Near ties between the token with the greatest noise, far in its tail, and another: a few ulps of noise turn the draw."""
    vocab_size, seed = 4000, 77
    sampler = NativeSampler(vocab_size, 1, isa)
    sampler.open(SlotOpen(0, SamplingParams(), seed, [], []))
    for position in range(200):
        noise = arithmetic.gumbel(seed, position, np.arange(vocab_size))
        top, other = int(noise.argmax()), position * 19
        for margin, winner in ((-1e-5, top), (1e-5, other)):
            row = np.full(vocab_size, -60, np.float32)
            row[top], row[other] = 0, (noise[top] - noise[other]) + np.float32(margin)
            assert top == other or sampler.sample(0, row, position).token_id == winner


@pytest.mark.parametrize("isa", LEVELS)
def test_slots_draw_at_the_same_time(isa):
    """Threads on different slots of one object draw what they draw alone."""
    vocab_size, num_slots = 5000, 4
    row = np.random.default_rng(1).normal(0, 2, vocab_size).astype(np.float32)
    params = SamplingParams(top_p=0.95, frequency_penalty=0.5, repetition_penalty=1.2)

    def run(sampler: NativeSampler, slot: int, out: list[int]) -> None:
        out.extend(sampler.sample(slot, row, position).token_id for position in range(150))

    alone: list[list[int]] = [[] for _ in range(num_slots)]
    together: list[list[int]] = [[] for _ in range(num_slots)]
    one, shared = NativeSampler(vocab_size, num_slots, isa), NativeSampler(vocab_size, num_slots, isa)
    for slot in range(num_slots):
        for sampler in (one, shared):
            sampler.open(SlotOpen(slot, params, slot, [1, 2, 3], []))
        run(one, slot, alone[slot])
    threads = [threading.Thread(target=run, args=(shared, slot, together[slot])) for slot in range(num_slots)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone


def test_wrong_shapes_and_types_are_refused():
    slots = _native.SamplerSlots(100, 1, "portable")
    slots.open(SlotOpen(0, SamplingParams(), 1, [], []))
    row = np.zeros(100, np.float32)
    with pytest.raises(ValueError, match="logits: size 99 is not 100"):
        slots.sample(0, row[:99], 0)
    with pytest.raises(ValueError, match="mask: size 3 is not 4"):
        slots.sample(0, row, 0, array("I", [1, 1, 1]))
    with pytest.raises(ValueError, match="logprobs: 21 is not in 0 .. 20"):
        slots.sample(0, row, 0, None, 21)
    with pytest.raises(ValueError, match="position: -1 is negative"):
        slots.sample(0, row, -1)
    with pytest.raises(TypeError):
        slots.sample(0, row.astype(np.float64), 0)
    with pytest.raises(TypeError):
        slots.sample(0, np.zeros(200, np.float32)[::2], 0)
    with pytest.raises(ValueError, match="isa: mmx"):
        _native.SamplerSlots(100, 1, "mmx")
