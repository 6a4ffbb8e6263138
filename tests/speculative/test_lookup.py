"""n-gram and suffix drafts against a search by brute force, over texts that repeat themselves in every way."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.speculative.ngram import NgramProposer
from octavo.speculative.proposer import NO_TOKEN, Proposer
from octavo.speculative.suffix import SuffixAutomaton, SuffixProposer

UNBOUNDED = 10**9
TEXTS = st.integers(1, 4).flatmap(lambda size: st.lists(st.integers(0, size - 1), max_size=60))
MAKERS: list[Callable[[], Proposer]] = [lambda: NgramProposer(1, 3), lambda: NgramProposer(2, 4), lambda: SuffixProposer(1), SuffixProposer]


def longest_match(text: list[int]) -> tuple[int, int]:
    """(length, most recent earlier end) of the longest suffix that ends before the last token too; length 0: no match."""
    best = (0, 0)
    for end in range(1, len(text)):
        length = 0
        while length < end and text[end - 1 - length] == text[-1 - length]:
            length += 1
        if length and length >= best[0]:
            best = (length, end)
    return best


def earlier_ends(text: list[int], length: int) -> set[int]:
    """Where the last ``length`` tokens ended before."""
    return {end for end in range(length, len(text)) if text[end - length : end] == text[len(text) - length :]}


def copied(text: list[int], end: int, num_tokens: int) -> list[int]:
    """What a copy from ``end`` on yields, one token after the other, its own output included."""
    out = list(text)
    for i in range(num_tokens):
        out.append(out[end + i])
    return out[len(text) :]


def proposal(proposer: Proposer, num_drafts: int) -> list[int]:
    return proposer.propose([(1, num_drafts)])[0]


@settings(max_examples=300, deadline=None)
@given(TEXTS, st.integers(1, 3), st.integers(0, 3), st.integers(1, 9))
def test_ngram_takes_the_longest_and_of_these_the_most_recent(text: list[int], min_n: int, more: int, num_drafts: int) -> None:
    proposer = NgramProposer(min_n, min_n + more)
    proposer.begin(1, text)
    for n in range(min_n + more, min_n - 1, -1):
        ends = earlier_ends(text, n)
        if ends and n <= len(text):
            evidence, first = proposer.peek(1)
            drafts = copied(text, max(ends), num_drafts)
            assert proposal(proposer, num_drafts) == drafts
            assert evidence >= n and first == drafts[0]
            return
    assert proposer.peek(1) == (0, NO_TOKEN) and proposal(proposer, num_drafts) == []


@settings(max_examples=300, deadline=None)
@given(TEXTS, st.integers(1, 4), st.integers(1, 9))
def test_suffix_takes_the_longest_and_of_these_the_most_recent(text: list[int], min_match: int, num_drafts: int) -> None:
    proposer = SuffixProposer(min_match, max_links=UNBOUNDED)
    proposer.begin(1, text)
    length, end = longest_match(text)
    if length < min_match:
        assert proposer.peek(1) == (0, NO_TOKEN) and proposal(proposer, num_drafts) == []
    else:
        drafts = copied(text, end, num_drafts)
        assert proposal(proposer, num_drafts) == drafts
        assert proposer.peek(1) == (length, drafts[0])


@settings(max_examples=200, deadline=None)
@given(TEXTS, st.integers(1, 3))
def test_with_few_links_the_match_is_the_longest_still(text: list[int], max_links: int) -> None:
    automaton = SuffixAutomaton(max_links)
    for i, token in enumerate(text, 1):
        automaton.append(token)
        length, _ = longest_match(text[:i])
        assert automaton.match_length == length
        assert length == 0 or automaton.match_end in earlier_ends(text[:i], length)


@settings(max_examples=100, deadline=None)
@given(TEXTS, st.lists(st.integers(0, 60), max_size=4), st.sampled_from(MAKERS))
def test_pieces_and_questions_make_no_difference(text: list[int], cuts: list[int], make: Callable[[], Proposer]) -> None:
    """A text in any pieces, asked about in between, ends like the text at once: so it can be rebuilt after a preemption."""
    pieces, whole = make(), make()
    whole.begin(1, text)
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces.begin(1, [])
    for start, end in zip(bounds, bounds[1:], strict=False):
        pieces.propose([(1, 5)])
        pieces.extend(1, text[start:end])
    assert pieces.peek(1) == whole.peek(1)
    assert pieces.propose([(1, 7)]) == whole.propose([(1, 7)])


@settings(max_examples=100, deadline=None)
@given(TEXTS, TEXTS, st.integers(0, 9), st.integers(0, 9), st.sampled_from(MAKERS))
def test_sequences_are_apart_and_drafts_bounded(a: list[int], b: list[int], j: int, k: int, make: Callable[[], Proposer]) -> None:
    together, alone = make(), make()
    together.begin(1, a)
    together.begin(2, b)
    alone.begin(2, b)
    first, second = together.propose([(1, j), (2, k)])
    assert len(first) <= j and len(second) <= k and set(first) <= set(a) and set(second) <= set(b)
    assert alone.propose([(2, k)]) == [second]
    together.end(1)
    together.end(1)
    assert together.propose([(2, k)]) == [second]


def test_the_maximum_and_the_minimum_count() -> None:
    """"7 8 9" was followed by 1 first and "8 9" by 2 since, "9" by 3: each maximum and minimum finds its own."""
    text = [7, 8, 9, 1, 5, 8, 9, 2, 9, 3, 6, 7, 8, 9]
    for min_n, max_n, first in [(1, 3, 1), (1, 2, 2), (2, 2, 2), (1, 1, 3), (3, 3, 1)]:
        proposer = NgramProposer(min_n, max_n)
        proposer.begin(1, text)
        assert proposal(proposer, 1) == [first]
    for min_match, evidence in [(1, 3), (3, 3), (4, 0)]:
        suffix = SuffixProposer(min_match)
        suffix.begin(1, text)
        assert suffix.peek(1)[0] == evidence
    with pytest.raises(ValueError, match="3, 2"):
        NgramProposer(3, 2)


@pytest.mark.parametrize("text", [[5] * 3000, [1, 2] * 1500, list(range(3000)), [i * i % 97 for i in range(3000)]])
def test_the_automaton_keeps_its_bounds(text: list[int]) -> None:
    """At most 2n - 1 states and 3n - 4 transitions (Blumer et al., theorems 1.4 and 1.8)."""
    automaton = SuffixAutomaton()
    for token in text:
        automaton.append(token)
    assert automaton.num_states <= 2 * len(text) - 1
    assert automaton.num_transitions <= 3 * len(text) - 4


def test_the_automaton_has_exactly_the_substrings() -> None:
    """The number of distinct substrings is the sum over states of (own length - length of the suffix link)."""
    rng = random.Random(3)
    for size in (1, 2, 3, 5):
        text = [rng.randrange(size) for _ in range(70)]
        automaton = SuffixAutomaton()
        for token in text:
            automaton.append(token)
        distinct = {tuple(text[i:j]) for i in range(len(text)) for j in range(i + 1, len(text) + 1)}
        lengths, links = automaton._length, automaton._link
        assert sum(lengths[s] - lengths[links[s]] for s in range(1, automaton.num_states)) == len(distinct)
