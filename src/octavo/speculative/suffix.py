"""Suffix drafts: the longest end of a text that occurred in it before, and what followed there.

The index is a suffix automaton (Blumer et al., "The smallest automaton recognizing the subwords of a text", 1985), built online over prompt
and own output: O(1) amortised per token, whatever the length of the match. After each token the suffix link of the newest state is the
longest suffix that occurs earlier; each state remembers where it ended most recently.

Memory of a text of n tokens: at most 2n states and 3n transitions (Blumer et al.). A state takes 20 bytes with its first transition in
place; only a state with several has a dict. Measured, all in all: 130 bytes per token of prose, 290 of random bits.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq

from octavo.core.request import Request
from octavo.speculative.proposer import NO_TOKEN

MAX_LINKS = 16
_ROOT = 0
_NONE = -1


class SuffixAutomaton:
    """All substrings of ``text``. ``max_links``: how many suffixes of each new token's match learn that they ended here.

    Every suffix would make ``match_end`` exact at O(n) per token on a text like "1 1 1 1". With the bound, an end is one of the earlier
    ones, and the most recent unless that one lay in a match whose suffix links led here only after ``max_links`` others.
    """

    __slots__ = (
        "_end", "_first_state", "_first_token", "_last", "_length", "_link", "_max_links", "_more", "match_end", "match_length", "text",
    )  # fmt: skip

    def __init__(self, max_links: int = MAX_LINKS) -> None:
        self.text = array("i")
        self.match_length = 0  # of the longest suffix of the text that ended before its last token too
        self.match_end = 0  # tokens up to the end of that earlier occurrence; the next token there is text[match_end]
        self._max_links = max_links
        self._last = _ROOT
        self._length = array("i", [0])  # [states] of a state's longest string
        self._link = array("i", [_NONE])  # [states]
        self._end = array("i", [0])  # [states] tokens up to its most recent end
        self._first_token = array("i", [_NONE])  # [states] a state's first transition: token and target
        self._first_state = array("i", [_NONE])
        self._more: dict[int, dict[int, int]] = {}  # state -> its further transitions

    @property
    def num_states(self) -> int:
        return len(self._length)

    @property
    def num_transitions(self) -> int:
        return sum(1 for token in self._first_token if token != _NONE) + sum(map(len, self._more.values()))

    def append(self, token: int) -> None:
        link, first_token, first_state, more = self._link, self._first_token, self._first_state, self._more
        self.text.append(token)
        new = self._add_state(len(self.text), _NONE, _NONE, _NONE)
        state = self._last
        target = _NONE
        while state != _NONE:
            if first_token[state] == token:
                target = first_state[state]
                break
            if first_token[state] == _NONE:
                first_token[state], first_state[state] = token, new
            else:
                others = more.get(state)
                if others is None:
                    more[state] = {token: new}
                elif (target := others.get(token, _NONE)) != _NONE:
                    break
                else:
                    others[token] = new
            state = link[state]
        if target == _NONE:
            link[new] = _ROOT
        elif self._length[target] == self._length[state] + 1:
            link[new] = target
        else:
            link[new] = self._split(state, token, target)
        self._last = new
        self._note_match(link[new])

    def _add_state(self, length: int, link: int, first_token: int, first_state: int) -> int:
        self._length.append(length)
        self._link.append(link)
        self._end.append(len(self.text))
        self._first_token.append(first_token)
        self._first_state.append(first_state)
        return len(self._length) - 1

    def _split(self, state: int, token: int, target: int) -> int:
        """The strings of ``target`` up to one longer than those of ``state`` get a state of their own: they end at more places now."""
        clone = self._add_state(self._length[state] + 1, self._link[target], self._first_token[target], self._first_state[target])
        self._end[clone] = self._end[target]
        others = self._more.get(target)
        if others is not None:
            self._more[clone] = dict(others)
        self._link[target] = clone
        while state != _NONE:
            if self._first_token[state] == token:
                if self._first_state[state] != target:
                    break
                self._first_state[state] = clone
            else:
                others = self._more.get(state)
                if others is None or others.get(token) != target:
                    break
                others[token] = clone
            state = self._link[state]
        return clone

    def _note_match(self, state: int) -> None:
        ends, link, now = self._end, self._link, len(self.text)
        self.match_length, self.match_end = self._length[state], ends[state]
        for _ in range(self._max_links):
            if state == _ROOT:
                break
            ends[state] = now
            state = link[state]

    def continuation(self, num_tokens: int) -> list[int]:
        """What followed the match, at most ``num_tokens``; where that runs into the end of the text, its period goes on."""
        start, known = self.match_end, len(self.text)
        tokens = self.text[start : start + num_tokens].tolist()
        period = known - start
        while len(tokens) < num_tokens:
            tokens.append(tokens[-period])
        return tokens


class SuffixProposer:
    """A Proposer over one automaton per sequence. Matches shorter than ``min_match`` tokens propose nothing."""

    name = "suffix"
    looks_up = True

    def __init__(self, min_match: int = 1, max_links: int = MAX_LINKS) -> None:
        self._min_match = min_match
        self._max_links = max_links
        self._texts: dict[int, SuffixAutomaton] = {}

    def begin(self, seq_id: int, token_ids: Seq[int], request: Request | None = None, choice: int = 0) -> None:
        self._texts[seq_id] = SuffixAutomaton(self._max_links)
        self.extend(seq_id, token_ids)

    def extend(self, seq_id: int, token_ids: Seq[int]) -> None:
        append = self._texts[seq_id].append
        for token in token_ids:
            append(token)

    def peek(self, seq_id: int) -> tuple[int, int]:
        text = self._texts[seq_id]
        if text.match_length < self._min_match:
            return 0, NO_TOKEN
        return text.match_length, text.text[text.match_end]

    def propose(self, requests: Seq[tuple[int, int]]) -> list[list[int]]:
        out = []
        for seq_id, max_drafts in requests:
            text = self._texts[seq_id]
            out.append(text.continuation(max_drafts) if text.match_length >= self._min_match else [])
        return out

    def end(self, seq_id: int) -> None:
        self._texts.pop(seq_id, None)
