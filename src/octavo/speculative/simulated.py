"""Speculation without tokens, for a simulator: a text of which each token is predictable with a given probability, and its proposer.

The text is there before anyone drafts: whether position p of a sequence is predictable follows from (seed, key, p) alone. So it is the same
with speculation and without, as real text is, and everything that decides, verifies and counts drafts runs unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from octavo.core.request import Request, derive_seed

PREDICTABLE = 0  # the token that is always proposed
SURPRISE = 1
_EVIDENCE = 4  # of every proposal: what is built in for it is near what draft models reach


@dataclass(frozen=True, slots=True)
class SimulatedText:
    """``acceptance``: the probability, from 0 to 1, that a token is predictable, independent of all others (the alpha of the papers)."""

    acceptance: float
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.acceptance <= 1.0:
            raise ValueError(f"acceptance: {self.acceptance!r} is not allowed; from 0 to 1")

    def token(self, key: int, position: int) -> int:
        """The token at ``position`` of the sequence ``key`` (an integer, such as the seed of its noise)."""
        draw = derive_seed(derive_seed(self.seed, 1) ^ key, position + 1)
        return PREDICTABLE if draw < self.acceptance * 2.0**64 else SURPRISE


class SimulatedProposer:
    """A Proposer of placeholder tokens: PREDICTABLE, as many as are wanted."""

    name = "simulated"
    looks_up = True

    def __init__(self) -> None:
        self._begun: set[int] = set()

    def begin(self, seq_id: int, token_ids: Seq[int], request: Request | None = None, choice: int = 0) -> None:
        self._begun.add(seq_id)

    def extend(self, seq_id: int, token_ids: Seq[int]) -> None:
        assert seq_id in self._begun

    def peek(self, seq_id: int) -> tuple[int, int]:
        return _EVIDENCE, PREDICTABLE

    def propose(self, requests: Seq[tuple[int, int]]) -> list[list[int]]:
        return [[PREDICTABLE] * max_drafts for _, max_drafts in requests]

    def end(self, seq_id: int) -> None:
        self._begun.discard(seq_id)
