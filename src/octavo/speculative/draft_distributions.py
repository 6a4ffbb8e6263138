"""What each draft of a draft model was drawn from: the q of the accept/resample rule.

Follows the draft model's slots with slots of its own, sees its logits, and keeps a distribution per draft until it is asked for or the
sequence drafts again.
Never draws: the draft model's backend does, and ``ReferenceSampler.distribution`` is the law of its draws.
"""

from __future__ import annotations

from typing import cast

import numpy as np

from octavo.backends.base import Backend, ShowsLogits
from octavo.core.step import SlotOpen
from octavo.sampling.reference import ReferenceSampler


class DraftDistributions:
    """``backend`` is the draft model's, and shows its logits here from now on. ``vocab_size`` is the target's."""

    def __init__(self, backend: Backend, vocab_size: int) -> None:
        if not hasattr(backend, "logits_hook"):
            raise ValueError(f"draft_model: distributions of drafts need a backend with a logits_hook; {backend.name} has none")
        cast(ShowsLogits, backend).logits_hook = self._see
        self._sampler = ReferenceSampler(backend.vocab_size, backend.max_num_slots)
        self._vocab_size = vocab_size
        self._rows: dict[int, np.ndarray] = {}
        self._drawn_from: dict[int, list[object]] = {}

    def _see(self, seq_id: int, position: int, logits: np.ndarray) -> None:
        self._rows[seq_id] = logits  # the row that is drawn from is the sequence's last

    def begin(self, seq_id: int, entry: SlotOpen) -> None:
        """A sequence is about to draft with a slot opened so."""
        self._sampler.open(entry)
        self._drawn_from[seq_id] = []

    def drew(self, seq_id: int, slot: int, token_id: int, mask: object) -> None:
        """The sequence's next draft was drawn from the row seen last."""
        q = self._sampler.distribution(slot, self._rows.pop(seq_id), mask)
        aligned = np.zeros(self._vocab_size)
        shared = min(q.size, self._vocab_size)  # ids beyond are padding of one of the two, and masked
        aligned[:shared] = q[:shared]
        self._drawn_from[seq_id].append(aligned)
        self._sampler.append(slot, token_id)

    def close(self, slot: int) -> None:
        self._sampler.close(slot)

    def take(self, seq_id: int) -> list[object] | None:
        """float64 [vocab_size] for each draft that was drawn since ``begin``, handed over; None for a sequence that drew none."""
        return self._drawn_from.pop(seq_id, None)
