"""Beam search: which hypotheses go on, which are finished, and when the search is over. Pure selection by log-probabilities.

The rule (that of transformers, with vLLM's length):

- Each step ranks all continuations of the running hypotheses by (sum of log-probabilities descending, token ids lexicographically). Sums
  are of the raw log-softmax, added in the order of the tokens.
- A continuation that ends (end of text, a stop token) becomes a finished hypothesis if it is among the best ``width``, else it is dropped.
  Of those that do not end the best ``width`` run on. So of each hypothesis the best 2 * width tokens are looked at (``num_candidates``).
- The ``width`` best finished ones are kept, by (score descending, token ids). score = sum / length ** length_penalty. **The token that ends
  a hypothesis counts in the sum and not in the length** (as in vLLM; a length of 0 counts as 1); the prompt counts in neither.
- The search is over when ``width`` are finished and ``early_stopping`` is True; or False, and no running one would score above the worst
  of them at its present length; or "never", and none can at any length up to max_tokens. A sum can only fall, so the last is exact. At
  max_tokens the running ones are finished as they are (reason: length), and compete with the others.

Owns sums, scores and order. Knows no sequences, blocks or text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from octavo.core.limits import StopEnd, StopRule
from octavo.core.request import BeamParams, FinishReason, Request
from octavo.core.step import TokenLogprobs


@dataclass(slots=True)
class Beam:
    """A hypothesis that runs on: output tokens, the sum of their log-probabilities, and (when asked) an entry for each."""

    token_ids: list[int] = field(default_factory=list)
    sum_logprob: float = 0.0
    entries: list[TokenLogprobs] = field(default_factory=list)


@dataclass(slots=True)
class Hypothesis:
    """A finished one. ``token_ids`` has the token that ended it, if one did."""

    token_ids: list[int]
    sum_logprob: float
    entries: list[TokenLogprobs]
    score: float
    end: StopEnd


@dataclass(slots=True)
class _Candidate:
    parent: int  # index of the running hypothesis that it continues
    place: int  # in that one's row of best tokens
    token_id: int
    sum_logprob: float


class BeamSearch:
    """One search. ``advance`` takes the best tokens of each running hypothesis; ``beams`` are then those that run on.

    ``num_logprobs``: entries of so many alternatives are kept for each token (None: none are).
    """

    def __init__(
        self, params: BeamParams, rule: StopRule, barred_token_ids: frozenset[int] = frozenset(), num_logprobs: int | None = None
    ) -> None:
        """``rule``: what ends a hypothesis. ``barred_token_ids`` cannot be taken before ``rule.min_tokens`` tokens are out."""
        self.params = params
        self.done = False
        self.beams = [Beam()]
        self.hypotheses: list[Hypothesis] = []  # finished, best first
        self._rule = rule
        self._barred_token_ids = barred_token_ids if rule.min_tokens else frozenset()
        self._num_logprobs = num_logprobs

    @classmethod
    def of(cls, request: Request, rule: StopRule) -> BeamSearch:
        assert request.params.beam is not None
        return cls(request.params.beam, rule, request.eos_token_ids | rule.stop_token_ids, request.params.logprobs)

    @property
    def num_candidates(self) -> int:
        """Best tokens that a row has to name for ``advance`` to be exact (all of the vocabulary, when that is smaller)."""
        ends = self._rule.eos_token_ids | self._rule.stop_token_ids | self._barred_token_ids
        return self.params.num_candidates(len(ends))

    def advance(self, rows: Sequence[TokenLogprobs]) -> list[int]:
        """One step. ``rows``: the best tokens after each of ``beams``, in their order. Returns, for each of the new ``beams``, the index
        of the old one that it continues; nothing when the search is over.

        Without a candidate that may be taken (every token barred) the search is over as well, perhaps with fewer hypotheses than asked.
        """
        old, length = self.beams, len(self.beams[0].token_ids) + 1
        running: list[_Candidate] = []
        for rank, candidate in enumerate(self._ranked(rows, length)):
            if rank >= self.params.width and len(running) == self.params.width:
                break
            end = self._rule.test(candidate.token_id, length)
            if end is not None and end[0] is FinishReason.STOP:
                if rank < self.params.width:
                    self._finish(self._extended(old, rows, candidate), length - 1, end)
            elif len(running) < self.params.width:
                running.append(candidate)
        self.beams = [self._extended(old, rows, candidate) for candidate in running]
        if not self._goes_on(length):
            self.done, self.beams = True, []
            return []
        return [candidate.parent for candidate in running]

    def _ranked(self, rows: Sequence[TokenLogprobs], length: int) -> list[_Candidate]:
        """All continuations that may be taken, best first. Running ones are all as long as each other and differ, so their order as
        lists and then the new token give the order of the continuations."""
        order = sorted(range(len(self.beams)), key=lambda i: self.beams[i].token_ids)
        lexical = {beam: place for place, beam in enumerate(order)}
        barred = self._barred_token_ids if length <= self._rule.min_tokens else frozenset[int]()
        keyed = []
        for parent, (beam, row) in enumerate(zip(self.beams, rows, strict=True)):
            for place, (token_id, logprob) in enumerate(zip(row.top_ids, row.top_logprobs, strict=True)):
                if token_id not in barred:
                    total = beam.sum_logprob + logprob
                    keyed.append((-total, lexical[parent], token_id, _Candidate(parent, place, token_id, total)))
        keyed.sort(key=lambda entry: entry[:3])
        return [entry[3] for entry in keyed]

    def _extended(self, beams: Sequence[Beam], rows: Sequence[TokenLogprobs], candidate: _Candidate) -> Beam:
        beam, row = beams[candidate.parent], rows[candidate.parent]
        entries, k = beam.entries, self._num_logprobs
        if k is not None:
            own = row.top_logprobs[candidate.place]
            entry = TokenLogprobs(candidate.token_id, own, candidate.place + 1, row.top_ids[:k], row.top_logprobs[:k])
            entries = [*entries, entry]
        return Beam([*beam.token_ids, candidate.token_id], candidate.sum_logprob, entries)

    def _finish(self, beam: Beam, length: int, end: StopEnd) -> None:
        score = self._score(beam.sum_logprob, length)
        self.hypotheses.append(Hypothesis(beam.token_ids, beam.sum_logprob, beam.entries, score, end))
        self.hypotheses.sort(key=lambda h: (-h.score, h.token_ids))
        del self.hypotheses[self.params.width :]

    def _score(self, sum_logprob: float, length: int) -> float:
        return float(sum_logprob / max(length, 1) ** self.params.length_penalty)

    def _goes_on(self, length: int) -> bool:
        """Whether the ``beams`` of ``length`` tokens are followed further. At the length limit they are finished."""
        if not self.beams or self._is_settled(length):
            return False
        if length < self._rule.max_tokens:
            return True
        for beam in self.beams:
            self._finish(beam, length, (FinishReason.LENGTH, None))
        return False

    def _is_settled(self, length: int) -> bool:
        """Whether ``width`` are finished and ``early_stopping`` asks for no more."""
        how = self.params.early_stopping
        if len(self.hypotheses) < self.params.width:
            return False
        if how is True:
            return True
        # With a positive penalty a longer text makes the same sum a better score.
        longest = self._rule.max_tokens if how == "never" and self.params.length_penalty > 0 else length
        return self.hypotheses[-1].score >= self._score(self.beams[0].sum_logprob, longest)
