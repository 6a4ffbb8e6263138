"""Drafts from the target itself, cut short: its first layers, with the final norm and the output matrix behind them.

Owns the shallow backend (``Backend.first_layers``), which shares weights and KV pages with the target. Drafting happens after the plan is
made, when every block that the drafts need is in the sequence's table: the shallow rows write the very keys and values that verifying them
writes again. Drafts are drawn by the target's rule with the target's noise, as those of a draft model.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from octavo.backends.base import Backend
from octavo.core.request import Request, Sequence
from octavo.core.step import SequenceSlice, SlotOpen, StepPlan
from octavo.speculative.proposer import NO_TOKEN

if TYPE_CHECKING:
    from octavo.speculative.draft_distributions import DraftDistributions


class SelfDraft:
    """A Proposer whose drafts are places to be filled. ``backend``: the first layers of the one that verifies.

    ``keep_distributions``: slices are told what their drafts were drawn from, for the accept/resample rule.
    """

    name = "self"
    looks_up = False

    def __init__(self, backend: Backend, keep_distributions: bool = False) -> None:
        self._backend = backend
        self._distributions: DraftDistributions | None = None
        if keep_distributions:
            from octavo.speculative.draft_distributions import DraftDistributions

            self._distributions = DraftDistributions(backend, backend.vocab_size)
        self._num_steps = 0
        self._closes: list[int] = []

    def begin(self, seq_id: int, token_ids: Seq[int], request: Request, choice: int) -> None:
        """Nothing is kept of a sequence but its KV, which is the target's."""

    def extend(self, seq_id: int, token_ids: Seq[int]) -> None:
        """As ``begin``."""

    def end(self, seq_id: int) -> None:
        """As ``begin``."""

    def peek(self, seq_id: int) -> tuple[int, int]:
        return 1, NO_TOKEN

    def propose(self, requests: Seq[tuple[int, int]]) -> list[list[int]]:
        """Places for drafts: token 0 in each, until ``fill``."""
        return [[0] * most for _, most in requests]

    def fill(self, plan: StepPlan, sequences: list[Sequence]) -> int:
        """Draft the last ``num_drafts`` tokens of each slice of ``plan`` that belongs to one of ``sequences``.

        Nothing in a plan that moves blocks first: the pages are then not yet what they will be. Such drafts stay as they are, and will
        hardly come true. Returns the number of drafts made.
        """
        wanted = {seq.seq_id: seq for seq in sequences}
        drafting = [piece for piece in plan.slices if piece.num_drafts and piece.seq_id in wanted]
        if plan.block_copies or plan.num_moves or not drafting:
            return 0
        slots = {piece.seq_id: slot for slot, piece in enumerate(drafting)}
        owners = [wanted[piece.seq_id] for piece in drafting]
        opens = [SlotOpen.of(slots[seq.seq_id], seq.request, seq.choice, list(seq.output_token_ids)) for seq in owners]
        if self._distributions is not None:
            for piece, entry in zip(drafting, opens, strict=True):
                self._distributions.begin(piece.seq_id, entry)
        for i in range(max(piece.num_drafts for piece in drafting)):
            now = [piece for piece in drafting if piece.num_drafts > i]
            rows = [_row(piece, i, slots[piece.seq_id]) for piece in now]
            result = self._backend.execute(StepPlan(self._num_steps, rows, slot_opens=opens, slot_closes=self._closes, pages=plan.pages))
            opens, self._closes = [], []
            self._num_steps += 1
            for piece, outcome in zip(now, result.slices, strict=True):
                token = None if outcome.error is not None else outcome.token_ids[0]
                if token is not None:
                    piece.token_ids[_first_draft(piece) + i] = token
                if self._distributions is not None:
                    self._distributions.drew(piece.seq_id, token, piece.mask)
        self._closes = list(slots.values())
        if self._distributions is not None:
            for piece in drafting:
                piece.draft_distributions = self._distributions.take(piece.seq_id)
        return sum(piece.num_drafts for piece in drafting)

    def close(self) -> None:
        self._backend.close()


def _first_draft(piece: SequenceSlice) -> int:
    return piece.num_tokens - piece.num_drafts


def _row(piece: SequenceSlice, i: int, slot: int) -> SequenceSlice:
    """The row that draft ``i`` is drawn from; the first one runs all that is not computed yet."""
    first = _first_draft(piece)
    start, tokens = (0, piece.token_ids[:first]) if i == 0 else (first + i - 1, piece.token_ids[first + i - 1 : first + i])
    return SequenceSlice(piece.seq_id, piece.start + start, tokens, piece.block_table, 1, [slot], mask=piece.mask)
