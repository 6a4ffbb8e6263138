"""The Proposer protocol: guesses what a sequence says next, so that one step of the target can verify several tokens.

A proposer owns what it remembers of each sequence, all of which follows from the sequence's tokens and can be rebuilt from them. It never
decides how many tokens are drafted (``control``), never verifies them (the backend does), and is never told which of them were kept: it
sees the tokens that were.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

from octavo.core.request import Request

NO_TOKEN = -1


class Proposer(Protocol):
    """Life of a sequence: ``begin`` once, ``extend`` and ``propose`` in any order, ``end`` once. Sequences know nothing of each other."""

    name: str
    looks_up: bool  # the first draft is known before ``propose``: so a draft that was not made teaches as well

    def begin(self, seq_id: int, token_ids: Seq[int], request: Request, choice: int) -> None:
        """A sequence with these first tokens; more of them (of a long prompt, or what was kept meanwhile) come with ``extend``.

        ``request`` and ``choice`` tell how the target draws, for proposers that draw likewise.
        """
        ...

    def extend(self, seq_id: int, token_ids: Seq[int]) -> None:
        """Tokens that follow those known so far. Never drafts: only what is part of the sequence."""
        ...

    def peek(self, seq_id: int) -> tuple[int, int]:
        """(evidence, first draft) of what ``propose`` would say now, in O(1).

        Evidence 0: there is nothing to propose. Else a number that orders proposals by how far they can be trusted, such as the tokens
        of context that matched; each accepted draft adds 1 to it. The first draft is NO_TOKEN unless ``looks_up``.
        """
        ...

    def propose(self, requests: Seq[tuple[int, int]]) -> list[list[int]]:
        """For each (seq_id, max_drafts) the tokens that may follow: at most max_drafts, perhaps none. Changes no answer to come."""
        ...

    def end(self, seq_id: int) -> None:
        """Forget a sequence. Nothing for one that is not known."""
        ...
