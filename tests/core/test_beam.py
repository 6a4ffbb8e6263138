"""Beam selection against a second, slow writing of its rule and against the enumeration of every sequence."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.beam import BeamSearch, Hypothesis
from octavo.core.limits import StopRule
from octavo.core.request import BeamParams, FinishReason, ParameterError, SamplingParams
from octavo.core.step import TokenLogprobs
from tests.core.beam_twin import Ends, Found, Row, enumerate_all, slow_search

EARLY: list[Any] = [True, False, "never"]


def top(values: dict[int, float], k: int) -> TokenLogprobs:
    order = sorted(values, key=lambda t: (-values[t], t))[:k]
    return TokenLogprobs(order[0], values[order[0]], 1, order, [values[t] for t in order])


def search(row: Row, params: BeamParams, ends: Ends, num_logprobs: int | None = None) -> list[Hypothesis]:
    """As the scheduler drives it: only the best candidates of each row are seen."""
    eos = frozenset[int]() if ends.ignore_eos else ends.eos
    rule = StopRule(eos, ends.stops, ends.min_tokens, ends.max_tokens)
    beams = BeamSearch(params, rule, ends.eos | ends.stops, num_logprobs)
    while not beams.done:
        before = [beam.token_ids for beam in beams.beams]
        parents = beams.advance([top(row(tuple(tokens)), beams.num_candidates) for tokens in before])
        assert [before[parent] for parent in parents] == [beam.token_ids[:-1] for beam in beams.beams]
    return beams.hypotheses


def shown(hypotheses: list[Hypothesis]) -> list[Found]:
    return [Found(h.token_ids, h.sum_logprob, h.score, h.end[0], h.end[1]) for h in hypotheses]  # type: ignore[arg-type]


def random_row(seed: int, vocab_size: int, exact: bool) -> Row:
    """A table that depends on all tokens. ``exact``: few values, so that there are many ties."""

    def row(tokens: tuple[int, ...]) -> dict[int, float]:
        rng = random.Random(f"{seed}:{tokens}")
        if exact:
            return {t: -rng.choice([0.0, 0.5, 0.5, 1.0, 2.0, 40.0]) for t in range(vocab_size)}
        weights = [rng.expovariate(1.0) + 1e-6 for _ in range(vocab_size)]
        return {t: math.log(w / sum(weights)) for t, w in enumerate(weights)}

    return row


@st.composite
def endings(draw: st.DrawFn, vocab_size: int) -> Ends:
    tokens = st.frozensets(st.integers(0, vocab_size - 1), max_size=vocab_size - 2)
    eos = draw(tokens)
    stops = draw(tokens) if len(eos) < 2 else frozenset[int]()
    max_tokens = draw(st.integers(1, 5))
    least = draw(st.integers(0, max_tokens)) if len(eos | stops) < vocab_size else 0
    return Ends(eos, stops, least, max_tokens, draw(st.booleans()))


@settings(max_examples=300, deadline=None)
@given(st.data(), st.integers(0, 10**6), st.integers(1, 6), st.sampled_from([0.0, 0.5, 1.0, 2.0, -1.0]), st.sampled_from(EARLY))
def test_the_rule_step_by_step(data: st.DataObject, seed: int, width: int, penalty: float, early: Any) -> None:
    vocab_size = data.draw(st.integers(3, 6))
    ends, row = data.draw(endings(vocab_size)), random_row(seed, vocab_size, data.draw(st.booleans()))
    params = BeamParams(width, penalty, early)
    assert shown(search(row, params, ends)) == slow_search(row, params, ends)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(0, 10**6), st.sampled_from([0.0, 0.5, 1.0, 2.0, -1.0]), st.sampled_from([False, "never"]))
def test_a_beam_wide_enough_finds_the_best_of_all_sequences(data: st.DataObject, seed: int, penalty: float, early: Any) -> None:
    ends, row = data.draw(endings(3)), random_row(seed, 3, data.draw(st.booleans()))
    every = enumerate_all(row, ends, penalty, 3)
    assert shown(search(row, BeamParams(3**5 + 1, penalty, early), ends)) == every


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5), st.sampled_from([0.0, 0.7, 1.0, 3.0, -1.0]))
def test_never_stops_only_when_nothing_can_change(seed: int, width: int, penalty: float) -> None:
    """Its bound is exact: the same hypotheses as when the search goes on to max_tokens. (No ties, so that the worst one is one.)"""
    ends, row = Ends(frozenset([0]), max_tokens=6), random_row(seed, 4, exact=False)
    params = BeamParams(width, penalty, "never")
    assert shown(search(row, params, ends)) == slow_search(row, params, ends, to_the_end=True)


def a14(penalty: float, early: Any = False) -> list[Hypothesis]:
    """Tokens: 0 ends, 1 is s and 2 l; 10.. and 20.. go on from them with certainty."""
    chains = {1: [1, 11, 12, 0], 2: [2, *range(21, 29), 0]}

    def row(tokens: tuple[int, ...]) -> dict[int, float]:
        rare = {t: -100.0 - t for t in range(30)}
        if not tokens:
            return rare | {1: math.log(0.55), 2: math.log(0.45)}
        chain = chains.get(tokens[0], [tokens[0], 0])
        return rare | {chain[min(len(tokens), len(chain) - 1)]: 0.0}

    return search(row, BeamParams(2, penalty, early), Ends(frozenset([0]), max_tokens=20))


@pytest.mark.parametrize("early", [False, "never"])
@pytest.mark.parametrize(("penalty", "order"), [(0.0, "sl"), (1.0, "ls"), (2.0, "ls")])
def test_length_penalty_and_order(penalty: float, order: str, early: Any) -> None:
    hypotheses = a14(penalty, early)
    scores = {"s": math.log(0.55) / 3**penalty, "l": math.log(0.45) / 9**penalty}
    assert [h.score for h in hypotheses] == pytest.approx([scores[name] for name in order], abs=1e-12)
    assert [len(h.token_ids) for h in hypotheses] == [{"s": 4, "l": 10}[name] for name in order]
    assert len({tuple(h.token_ids) for h in hypotheses}) == 2


def test_an_end_as_the_first_token_counts_as_length_one() -> None:
    (best,) = search(lambda _: {0: -0.25, 1: -5.0}, BeamParams(1, 1.0, True), Ends(frozenset([0]), max_tokens=3))
    assert (best.token_ids, best.score) == ([0], -0.25)


def test_entries_are_of_the_tokens_taken() -> None:
    row = random_row(5, 6, exact=False)
    for h in search(row, BeamParams(3, 1.0, False), Ends(frozenset([0]), max_tokens=5), num_logprobs=2):
        assert [entry.token_id for entry in h.entries] == h.token_ids
        assert math.fsum(entry.logprob for entry in h.entries) == pytest.approx(h.sum_logprob, abs=1e-12)
        for i, entry in enumerate(h.entries):
            want = top(row(tuple(h.token_ids[:i])), 6)
            assert entry.rank == want.top_ids.index(entry.token_id) + 1
            assert (entry.top_ids, entry.top_logprobs) == (want.top_ids[:2], want.top_logprobs[:2])


def test_what_cannot_be_comes_last() -> None:
    """Probability 0 is no error: such hypotheses fill the width when there are no others."""
    values = {0: -math.inf, 1: -1.0, 2: -math.inf, 3: -math.inf}
    hypotheses = search(lambda _: values, BeamParams(3), Ends(frozenset([0]), max_tokens=2))
    assert [(h.token_ids, h.score) for h in hypotheses] == [([1, 1], -1.0), ([0], -math.inf), ([1, 0], -math.inf)]


def test_every_token_barred_ends_the_search_with_nothing() -> None:
    ends = Ends(frozenset([0, 1]), min_tokens=1, max_tokens=3)
    assert search(lambda _: {0: -1.0, 1: -1.0}, BeamParams(2), ends) == []


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"beam": BeamParams(0)}, "beam_width"),
        ({"beam": BeamParams(11)}, "beam_width"),
        ({"beam": BeamParams(True)}, "beam_width"),
        ({"beam": BeamParams(2, math.nan)}, "length_penalty"),
        ({"beam": BeamParams(2, 10.5)}, "length_penalty"),
        ({"beam": BeamParams(2, 1.0, "ever")}, "early_stopping"),
        ({"beam": BeamParams(2, 1.0, 1)}, "early_stopping"),  # type: ignore[arg-type]
        ({"beam": BeamParams(2), "n": 3}, "n"),
        ({"beam": BeamParams(2), "max_tokens": 0}, "max_tokens"),
        ({"beam": BeamParams(2), "temperature": 0.5}, "temperature"),
        ({"beam": BeamParams(2), "top_k": 5}, "top_k"),
        ({"beam": BeamParams(2), "top_p": 0.5}, "top_p"),
        ({"beam": BeamParams(2), "min_p": 0.5}, "min_p"),
        ({"beam": BeamParams(2), "presence_penalty": 0.5}, "presence_penalty"),
        ({"beam": BeamParams(2), "frequency_penalty": 0.5}, "frequency_penalty"),
        ({"beam": BeamParams(2), "repetition_penalty": 1.5}, "repetition_penalty"),
        ({"beam": BeamParams(2), "logit_bias": {1: 1.0}}, "logit_bias"),
        ({"beam": BeamParams(2), "allowed_token_ids": [1]}, "allowed_token_ids"),
        ({"beam": BeamParams(2), "bad_words": ["a"]}, "bad_words"),
        ({"beam": BeamParams(2), "stop": ["a"]}, "stop"),
        ({"beam": BeamParams(2), "prompt_logprobs": 0}, "prompt_logprobs"),
    ],
)
def test_what_beams_cannot_do_is_refused_by_name(params: dict[str, Any], param: str) -> None:
    with pytest.raises(ParameterError) as raised:
        SamplingParams(**params).validate(100)
    assert raised.value.param == param


@pytest.mark.parametrize("temperature", [0, 0.0, 1, 1.0])
def test_what_changes_nothing_is_taken(temperature: float) -> None:
    SamplingParams(n=2, beam=BeamParams(2), temperature=temperature, top_k=-1, top_p=1, seed=3, min_tokens=2).validate(100)


def test_reasons() -> None:
    ends = Ends(frozenset([0]), frozenset([1]), max_tokens=1)
    hypotheses = search(lambda _: {0: -1.0, 1: -2.0, 2: -3.0}, BeamParams(3), ends)
    assert [h.end for h in hypotheses] == [(FinishReason.STOP, None), (FinishReason.STOP, 1), (FinishReason.LENGTH, None)]
