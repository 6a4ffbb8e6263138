"""The sampling rule by closed forms, on the reference and the native sampler alike."""

from __future__ import annotations

import math

import numpy as np
import pytest

from octavo.core.request import SamplingParams, derive_seed
from octavo.core.step import SlotOpen
from octavo.sampling.arithmetic import log
from octavo.sampling.structured import mask_from_ids

VOCAB = 8
A, B = 0, 1
AFTER = {A: [5.0, 4.0] + [-10.0] * 6, B: [5.0, 0.0] + [-10.0] * 6}  # a bigram model's logits after each token
RAND = np.random.default_rng(0).normal(0, 1, (64, 50)).astype(np.float32)  # [position, vocab] of a model that says anything


def row(values) -> np.ndarray:
    return np.array(values, np.float32)


def open_one(make_sampler, params, vocab_size=VOCAB, seed=1, prompt=(), output=(), eos=()):
    sampler = make_sampler(vocab_size, 4)
    sampler.open(SlotOpen(0, params, seed, list(prompt), list(output), frozenset(eos)))
    return sampler


def greedy_walk(sampler, slot, num_tokens, start=A) -> list[int]:
    tokens = [start]
    for position in range(1, num_tokens + 1):
        tokens.append(sampler.sample(slot, row(AFTER[tokens[-1]]), position).token_id)
    return tokens[1:]


def drawn(sampler, logits, num_draws=400, mask=None) -> set[int]:
    return {sampler.sample(0, logits, position, mask).token_id for position in range(num_draws)}


# Penalties at temperature 0, worked out by hand: prompt a, logits as in AFTER.
WALKS = [
    ({}, [A, A, A, A]),
    ({"frequency_penalty": 0.6}, [A, A, B, A]),  # 5; 4.4 > 4; 3.8 < 4; 3.8 > -0.6
    ({"frequency_penalty": 2.0}, [A, B, A, B]),  # 5; 3 < 4; 3 > -2; 1 < 2
    ({"presence_penalty": 2.0}, [A, B, A, A]),  # 5; 3 < 4; 3 > -2; 3 > 2
    ({"repetition_penalty": 1.5}, [B, A, A, A]),  # 3.33 < 4, the prompt counts; 3.33 > 0; 3.33 > 2.67
    ({"logit_bias": {B: 3.0}}, [B, A, B, A]),  # 5 < 7; 5 > 3
]


@pytest.mark.parametrize(("params", "tokens"), WALKS, ids=str)
def test_penalties_and_bias_act_before_argmax(make_sampler, params, tokens):
    for greedy in ({"temperature": 0.0}, {"top_p": 0.0}):
        assert greedy_walk(open_one(make_sampler, SamplingParams(**greedy, **params), prompt=[A]), 0, 4) == tokens


def test_penalties_are_per_slot(make_sampler):
    """Slots with and without penalties, interleaved, walk as they do alone."""
    sampler = make_sampler(VOCAB, len(WALKS))
    for slot, (params, _) in enumerate(WALKS):
        sampler.open(SlotOpen(slot, SamplingParams(temperature=0.0, **params), 1, [A], []))
    walks = [[A] for _ in WALKS]
    for position in range(1, 5):
        for slot, tokens in enumerate(walks):
            tokens.append(sampler.sample(slot, row(AFTER[tokens[-1]]), position).token_id)
    assert [tokens[1:] for tokens in walks] == [tokens for _, tokens in WALKS]


def test_repetition_multiplies_negative_logits(make_sampler):
    sampler = open_one(make_sampler, SamplingParams(temperature=0.0, repetition_penalty=2.0), prompt=[2])
    assert sampler.sample(0, row([-9, -9, -4, -7, -9, -9, -9, -9]), 0).token_id == 3  # -4 * 2 < -7


def test_greedy_ties_go_to_the_lower_id(make_sampler):
    sampler = open_one(make_sampler, SamplingParams(temperature=0.0))
    assert sampler.sample(0, row([-1, -0.0, 0, 0, -1, -1, -1, -1]), 0).token_id == 1


P = np.log(row([0.1, 0.4, 0.2, 0.3]))  # order of tokens: 1, 3, 2, 0
KEPT = [
    ({"top_k": 1}, {1}),
    ({"top_k": 3}, {1, 3, 2}),
    ({"top_k": 4}, {0, 1, 2, 3}),
    ({"top_k": -1}, {0, 1, 2, 3}),
    ({"top_p": 1e-9}, {1}),  # the best always remains,
    ({"top_p": 1e-12}, {1}),  # even when the share is less than one unit of mass
    ({"top_p": 0.39}, {1}),
    ({"top_p": 0.41}, {1, 3}),  # the token that crosses is kept
    ({"top_p": 0.89}, {1, 3, 2}),
    ({"top_p": 0.91}, {0, 1, 2, 3}),
    ({"top_p": 0.5, "temperature": 0.5}, {1}),  # 0.16 / 0.3: temperature comes before top_p
    ({"top_p": 0.5, "temperature": 2.0}, {1, 3}),
    ({"min_p": 0.6}, {1, 3}),
    ({"min_p": 0.6, "temperature": 0.5}, {1}),  # 0.09 / 0.16 < 0.6: temperature comes before min_p
    ({"min_p": 1.0}, {1}),
    ({"top_k": 3, "top_p": 0.75}, {1, 3}),  # 0.7 of what top_k leaves is 0.78 of its mass
    ({"min_p": 0.4, "top_p": 0.75}, {1, 3}),  # and of what min_p leaves
    ({"top_k": 2, "min_p": 0.4}, {1, 3}),
]


@pytest.mark.parametrize(("params", "tokens"), KEPT, ids=str)
def test_filters_keep_the_closed_form_set(make_sampler, params, tokens):
    assert drawn(open_one(make_sampler, SamplingParams(**params), vocab_size=4), P) == tokens


def test_ties_at_the_edge_of_a_filter_keep_the_lower_id(make_sampler):
    tied = row([1, 2, 1, 1, 2, 1, 0, 0])
    assert drawn(open_one(make_sampler, SamplingParams(top_k=4)), tied) == {0, 1, 2, 4}
    assert drawn(open_one(make_sampler, SamplingParams(top_p=0.3)), tied) == {1, 4}
    assert drawn(open_one(make_sampler, SamplingParams(top_k=5)), row([3] * 8)) == {0, 1, 2, 3, 4}
    assert drawn(open_one(make_sampler, SamplingParams(top_p=0.5)), row([3] * 8)) == {0, 1, 2, 3}  # exactly half is enough


def test_min_p_keeps_a_token_exactly_at_its_floor(make_sampler):
    floor = log(np.float32(0.5))
    below = np.nextafter(floor, np.float32(-1))
    assert drawn(open_one(make_sampler, SamplingParams(min_p=0.5), vocab_size=4), row([below, floor, 0, floor])) == {1, 2, 3}


@pytest.mark.parametrize(("depth", "count"), [(-3, 20), (-7, 900), (-12, 20_000), (-18, 20_000)])
def test_the_tail_counts_in_the_mass_of_top_p(make_sampler, depth, count):
    """Two likely tokens and a flat tail; whether the second one is kept hangs on a fifth of the tail's mass."""
    logits = np.full(count, depth, np.float32)
    logits[[7, count - 9]] = 0, -1
    tail = (count - 2) * math.exp(depth)  # the best token has a mass of 1
    for share, kept in ((-0.1, {7}), (0.1, {7, count - 9})):
        params = SamplingParams(top_p=(1 + share * tail) / (1 + math.exp(-1) + tail))
        assert drawn(open_one(make_sampler, params, vocab_size=count), logits, 40) == kept


def test_masks_allowed_ids_and_bias_combine(make_sampler):
    flat = row([0] * VOCAB)
    mask = mask_from_ids([1, 2, 3], VOCAB)
    assert drawn(open_one(make_sampler, SamplingParams()), flat, mask=mask) == {1, 2, 3}
    assert drawn(open_one(make_sampler, SamplingParams(allowed_token_ids=(2, 3, 5))), flat, mask=mask) == {2, 3}
    biased = SamplingParams(allowed_token_ids=(2, 3), logit_bias={7: 100.0, 3: -100.0})
    assert drawn(open_one(make_sampler, biased), flat) == {2}  # bias does not bring back what a mask forbids


def test_bad_words_forbid_the_last_token_after_the_others(make_sampler):
    params = SamplingParams(temperature=0.0, bad_words_token_ids=((6,), (2, 3, 4), (1, 0)))
    down = row([3, 2, 1, 0, 4, -1, 9, -2])
    assert open_one(make_sampler, params).sample(0, down, 0).token_id == 4
    assert open_one(make_sampler, params, output=[2, 3]).sample(0, down, 2).token_id == 0  # 2, 3 forbids 4
    assert open_one(make_sampler, params, output=[3]).sample(0, down, 1).token_id == 4  # half of it does not
    assert open_one(make_sampler, params, prompt=[2, 3]).sample(0, down, 2).token_id == 4  # nor does the prompt
    assert open_one(make_sampler, params, prompt=[2], output=[3]).sample(0, down, 2).token_id == 4
    sampler = open_one(make_sampler, params, output=[5, 2])
    assert sampler.sample(0, row([0, 0, 0, 9, 0, 0, 0, 0]), 2).token_id == 3  # drawn tokens extend the tail
    assert sampler.sample(0, down, 3).token_id == 0


def test_min_tokens_forbids_end_and_stop_tokens(make_sampler):
    params = SamplingParams(temperature=0.0, min_tokens=3, stop_token_ids=(5,), ignore_eos=True)
    sampler = open_one(make_sampler, params, output=[1], eos=[6])
    tokens = [sampler.sample(0, row([0, 0, 7, 0, 0, 8, 9, 0]), position).token_id for position in (1, 2, 3, 4)]
    assert tokens == [2, 2, 6, 6]


def test_logprobs_are_of_the_raw_logits(make_sampler):
    """Neither bias, masks, penalties nor temperature change them; ranks and ties follow (logit descending, id ascending)."""
    logits = row([0.5, 2.0, -1.0, 2.0, 0.5, -np.inf, 1.0, -3.0])
    params = SamplingParams(temperature=0.3, logit_bias={4: 90.0}, repetition_penalty=1.7, top_k=2, min_p=0.5)
    outcome = open_one(make_sampler, params, prompt=[4, 1]).sample(0, logits, 2, None, 20)
    total = math.log(math.fsum(math.exp(x) for x in logits.tolist()))
    entry = outcome.logprobs
    assert (outcome.token_id, entry.token_id, entry.rank) == (4, 4, 5)
    assert entry.logprob == pytest.approx(0.5 - total, abs=2e-6)
    assert entry.top_ids == [1, 3, 6, 0, 4, 2, 7, 5]
    assert entry.top_logprobs == pytest.approx([float(logits[t]) - total for t in entry.top_ids], abs=2e-6)
    assert entry.logprob == entry.top_logprobs[4]


@pytest.mark.parametrize("k", [None, 0, 3])
def test_as_many_logprobs_as_asked(make_sampler, k):
    entry = open_one(make_sampler, SamplingParams(temperature=0.0)).sample(0, row(range(8)), 0, None, k).logprobs
    assert entry is None if k is None else len(entry.top_ids) == len(entry.top_logprobs) == k


BROKEN = [
    ([0, np.nan, np.inf, 0], {}, "logit of token 1 is nan"),
    ([0, 0, np.inf, np.nan], {}, "logit of token 2 is inf"),
    ([-np.inf] * 4, {}, "every token is forbidden"),
    ([1, 2, 3, 4], {"allowed_token_ids": (1,), "bad_words_token_ids": ((1,),)}, "every token is forbidden"),
    ([0, 1, 3e38, 2], {"repetition_penalty": 0.1}, "logit of token 2 is inf after bias and penalties"),
]


@pytest.mark.parametrize(("logits", "params", "message"), BROKEN, ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_an_answer_are_error_results(make_sampler, logits, params, message, temperature):
    """The error names the token; the slot is unchanged and goes on as if the row had not been."""
    params = SamplingParams(temperature=temperature, frequency_penalty=1.0, **params)
    sampler, twin = (open_one(make_sampler, params, vocab_size=4, prompt=[2]) for _ in range(2))
    outcome = sampler.sample(0, row(logits), 0, None, 2)
    assert outcome.token_id == -1
    assert outcome.logprobs is None
    assert outcome.error.startswith(message)
    good = row([1, 1.5, 1.2, 1])
    assert [repr(sampler.sample(0, good, p, None, 1)) for p in range(3)] == [repr(twin.sample(0, good, p, None, 1)) for p in range(3)]


def walk(sampler, slot, start, end) -> list[str]:
    return [repr(sampler.sample(slot, RAND[p], p, None, 2)) for p in range(start, end)]


STATEFUL = SamplingParams(
    temperature=0.9, frequency_penalty=0.8, repetition_penalty=1.2, presence_penalty=0.1, min_tokens=20, stop_token_ids=(3, 4, 5, 6, 7, 8),
    bad_words_token_ids=((9, 10), (11, 12, 13)),
)  # fmt: skip


@pytest.mark.parametrize("cut", [1, 7, 23])
def test_a_slot_rebuilt_from_its_tokens_goes_on_the_same(make_sampler, cut):
    """Preemption: generated tokens stay output, so counts, tails and min_tokens continue, and so does the noise."""
    sampler = open_one(make_sampler, STATEFUL, 50, seed=5, prompt=[1, 2, 3], eos=[0])
    tokens = [sampler.sample(0, RAND[p], p).token_id for p in range(3, 3 + cut)]
    rebuilt = open_one(make_sampler, STATEFUL, 50, seed=5, prompt=[1, 2, 3], output=tokens, eos=[0])
    assert walk(rebuilt, 0, 3 + cut, 40) == walk(sampler, 0, 3 + cut, 40)


def test_choices_differ_and_each_equals_a_request_of_its_own(make_sampler):
    """n = 4: forks of one slot with derived seeds; closing one leaves the others as they were."""
    sampler = open_one(make_sampler, STATEFUL, 50, seed=7, prompt=[1, 2])
    for choice in (1, 2, 3):
        sampler.fork(0, choice, derive_seed(7, choice))
    first = [walk(sampler, choice, 2, 10) for choice in range(4)]
    sampler.close(1)
    rest = [walk(sampler, choice, 10, 40) for choice in (0, 2, 3)]
    for choice, outcomes in zip((0, 2, 3), rest, strict=True):
        alone = open_one(make_sampler, STATEFUL, 50, seed=derive_seed(7, choice), prompt=[1, 2])
        assert walk(alone, 0, 2, 40) == first[choice] + outcomes
    assert len({tuple(outcomes) for outcomes in first}) == 4


def test_fork_in_the_middle_copies_the_state(make_sampler):
    sampler = open_one(make_sampler, STATEFUL, 50, seed=7, prompt=[1, 2])
    walk(sampler, 0, 2, 12)
    sampler.fork(0, 3, 7)
    assert walk(sampler, 3, 12, 40) == walk(sampler, 0, 12, 40)


WRONG_OPENS = [
    ({"prompt": [VOCAB]}, "prompt_token_ids"),
    ({"output": [-1]}, "output_token_ids"),
    ({"eos": [99]}, "eos_token_ids"),
    ({"params": SamplingParams(stop_token_ids=(8,))}, "stop_token_ids"),
    ({"params": SamplingParams(logit_bias={8: 1.0})}, "logit_bias"),
    ({"params": SamplingParams(bad_words_token_ids=((1, 8),))}, "bad_words_token_ids"),
    ({"params": SamplingParams(bad_words_token_ids=((),))}, "bad_words_token_ids"),
    ({"params": SamplingParams(allowed_token_ids=(8,))}, "allowed_token_ids"),
    ({"params": SamplingParams(top_p=-0.1)}, "top_p"),
    ({"params": SamplingParams(temperature=math.nan)}, "temperature"),
    ({"params": SamplingParams(min_p=1.5)}, "min_p"),
    ({"params": SamplingParams(repetition_penalty=1e-50)}, "repetition_penalty"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG_OPENS, ids=str)
def test_a_slot_that_cannot_be_is_refused(make_sampler, wrong, message):
    with pytest.raises(ValueError, match=message):
        open_one(make_sampler, **{"params": SamplingParams(), **wrong})


def test_slots_are_opened_once_and_closed_once(make_sampler):
    sampler = open_one(make_sampler, SamplingParams())
    entry = SlotOpen(0, SamplingParams(), 1, [], [])
    for wrong, message in [
        (lambda: sampler.open(entry), "slot: 0 is already open"),
        (lambda: sampler.fork(0, 0, 1), "slot: 0 is already open"),
        (lambda: sampler.fork(0, 4, 1), r"slot: 4 is not in 0 \.\. 3"),
        (lambda: sampler.fork(1, 2, 1), "slot: 1 is not open"),
        (lambda: sampler.close(2), "slot: 2 is not open"),
        (lambda: sampler.sample(1, row([0] * VOCAB), 0), "slot: 1 is not open"),
    ]:
        with pytest.raises(ValueError, match=message):
            wrong()
    sampler.close(0)
    sampler.open(entry)


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 100])
def test_masks_are_packed_bits(vocab_size):
    ids = sorted({0, vocab_size - 1, vocab_size // 2})
    mask = mask_from_ids(ids + ids, vocab_size)
    assert mask.itemsize == 4
    assert len(mask) == -(-vocab_size // 32)
    assert [t for t in range(32 * len(mask)) if mask[t // 32] >> t % 32 & 1] == ids
    with pytest.raises(ValueError, match=f"mask: token id {vocab_size} is not in"):
        mask_from_ids([vocab_size], vocab_size)
