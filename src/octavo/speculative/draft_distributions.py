"""What each draft of a draft model was drawn from: the q of the accept/resample rule.

Follows the draft model's slots with slots of its own, sees its logits, and keeps a distribution per draft until it is asked for or the
sequence drafts again.
Never draws: the draft model's backend does, and ``ReferenceSampler.distribution`` is the law of its draws.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import numpy as np

from octavo.backends.base import Backend, BackendError, ShowsLogits
from octavo.core.step import SlotOpen
from octavo.sampling.reference import ReferenceSampler


@dataclass(slots=True)
class _Drafting:
    slot: int
    drawn_from: list[object] = field(default_factory=list)


class DraftDistributions:
    """``backend`` is the draft model's, and shows its logits here from now on. ``vocab_size`` is the target's."""

    def __init__(self, backend: Backend, vocab_size: int) -> None:
        if not hasattr(backend, "logits_hook"):
            raise BackendError(f"spec_rule: resample needs a draft model on a backend with a logits_hook; {backend.name} has none")
        cast(ShowsLogits, backend).logits_hook = self._see
        self._sampler = ReferenceSampler(backend.vocab_size, backend.max_num_slots)
        self._vocab_size = vocab_size
        self._rows: dict[int, np.ndarray] = {}  # the newest row of each sequence in a step
        self._drafting: dict[int, _Drafting] = {}

    def _see(self, seq_id: int, position: int, logits: np.ndarray) -> None:
        self._rows[seq_id] = logits

    def begin(self, seq_id: int, entry: SlotOpen) -> None:
        """A sequence is about to draft with a slot opened so. Whoever had the slot before is done with it."""
        if self._sampler.is_open(entry.slot):
            self._sampler.close(entry.slot)
        self._sampler.open(entry)
        self._drafting[seq_id] = _Drafting(entry.slot)

    def drew(self, seq_id: int, token_id: int | None, mask: object) -> None:
        """The sequence's next draft was drawn from the row seen last; None: it allowed no draw, and whatever is drafted is certain."""
        row, drafting = self._rows.pop(seq_id), self._drafting[seq_id]
        if token_id is None:
            drafting.drawn_from.append(None)
            return
        q = self._sampler.distribution(drafting.slot, row, mask)
        aligned = np.zeros(self._vocab_size)
        shared = min(q.size, self._vocab_size)  # what one of the two has beyond is padding, and masked
        aligned[:shared] = q[:shared]
        drafting.drawn_from.append(aligned)
        self._sampler.append(drafting.slot, token_id)

    def take(self, seq_id: int) -> list[object] | None:
        """float64 [vocab_size] for each draft drawn since ``begin``, handed over; None for a sequence that drew none."""
        drafting = self._drafting.pop(seq_id, None)
        return None if drafting is None else drafting.drawn_from
