"""What the Speculator keeps of one sequence: how far it is indexed, what was proposed last, how that turned out, and when to try again."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from octavo.core.request import Sequence
from octavo.core.speculative_params import SpeculativeParams
from octavo.speculative.acceptance import SequenceRates
from octavo.speculative.proposer import NO_TOKEN, Proposer

_MAX_WAIT = 256  # steps that a sequence whose drafts fail sits out
_FIRST_TRIAL = 16  # steps without drafts until a proposer that does not look up is tried again
_MAX_TRIAL = 1024


@dataclass(slots=True)
class DraftedSequence:
    """``num_indexed`` tokens are known to the proposer. ``evidence`` and ``guess`` are of its last proposal, made behind all of them."""

    seq: Sequence
    params: SpeculativeParams
    method: str
    proposer: Proposer
    rates: SequenceRates
    max_tokens: float = math.inf
    stop_ids: frozenset[int] = frozenset()  # nothing comes after these
    allowed_ids: frozenset[int] | None = None  # nothing else can come
    num_indexed: int = 0
    evidence: int = 0
    guess: list[int] = field(default_factory=list)  # the drafts, or what the first one would have been
    num_drafts: int = 0  # offered, of ``guess``; 0: none were
    num_misses: int = 0  # times in a row that no draft was right
    wait: int = 0  # steps to sit out
    trial_after: int = _FIRST_TRIAL
    num_idle: int = 0  # steps with a proposal but no drafts, where only drafts teach
    is_started: bool = False  # the proposer has made a draft, and so has read the text

    @classmethod
    def of(cls, seq: Sequence, params: SpeculativeParams, method: str, proposer: Proposer, rates: SequenceRates) -> DraftedSequence:
        request, sampling = seq.request, seq.request.params
        drafted = cls(seq, params, method, proposer, rates)
        if sampling.max_tokens is not None:
            drafted.max_tokens = sampling.max_tokens
        drafted.stop_ids = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else request.eos_token_ids)
        if sampling.allowed_token_ids is not None:
            drafted.allowed_ids = frozenset(sampling.allowed_token_ids)
        return drafted

    def room(self, max_total_tokens: int) -> int:
        """Most drafts that can count: a step yields one token more than it accepts."""
        num_tokens = len(self.seq.token_ids)
        left = min(self.max_tokens - (num_tokens - self.seq.num_prompt_tokens), max_total_tokens - num_tokens)
        return int(left) - 1

    def catch_up(self, max_tokens: int) -> int:
        """Learn how the last proposal turned out, and have the proposer index at most ``max_tokens``. Returns how many it indexed."""
        start = self.num_indexed
        fresh = self.seq.token_ids[start : start + max_tokens]
        if not fresh:
            return 0
        if self.guess:
            self._learn(fresh)
        self.proposer.extend(self.seq.seq_id, fresh)
        self.num_indexed = start + len(fresh)
        return len(fresh)

    def _learn(self, fresh: list[int]) -> None:
        evidence, guess, was_drafted = self.evidence, self.guess, self.num_drafts > 0
        first_hit = fresh[0] == guess[0]
        for token, drafted in zip(fresh, guess, strict=False):
            self.rates.add(evidence, token == drafted)
            if token != drafted:
                break
            evidence += 1
        if first_hit:
            self.num_misses = self.wait = 0
            self.trial_after = _FIRST_TRIAL
        elif was_drafted and not self.proposer.looks_up:  # what looks up learns from every token, drafted or not
            self.num_misses += 1
            self.wait = min(_MAX_WAIT, (1 << self.num_misses) - 2)  # none after one failure, then 2, 6, 14, ...
            self.trial_after = min(_MAX_TRIAL, 2 * self.trial_after)
        self.guess, self.num_drafts = [], 0

    def has_proposal(self) -> bool:
        """Whether the proposer has drafts for the text as it is now. Notes what the first one would be."""
        self.evidence, first = self.proposer.peek(self.seq.seq_id)
        self.guess = [] if first == NO_TOKEN else [first]
        return self.evidence > 0

    def chances(self, max_drafts: int) -> list[float]:
        """[drafts] the chance that the first j of the proposal are all accepted; empty while the sequence sits out."""
        if self.wait > 0:
            self.wait -= 1
            return []
        if not self.proposer.looks_up:
            self.num_idle += 1
            if self.num_idle > self.trial_after:
                return [1.0]  # a trial: only drafts tell whether the next ones are right
        return self.rates.chances(self.evidence, max_drafts)

    def usable(self, drafts: list[int]) -> list[int]:
        """Drafts up to one that would end the sequence, or that cannot come."""
        stop_ids, allowed_ids = self.stop_ids, self.allowed_ids
        for i, token in enumerate(drafts):
            if allowed_ids is not None and token not in allowed_ids:
                return drafts[:i]
            if token in stop_ids:
                return drafts[: i + 1]
        return drafts

    def offer(self, drafts: list[int]) -> None:
        """Note the drafts that go into the next plan."""
        self.guess, self.num_drafts, self.num_idle = drafts, len(drafts), 0
