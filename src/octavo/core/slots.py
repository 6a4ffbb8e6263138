"""Sampling-state slots: which slots of the backend belong to which sequence, and which closes the next plan has to tell.

Slots are taken in the plan that first draws from a sequence and given back when the sequence finishes or is preempted.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from octavo.core.request import Sequence


class SlotTable:
    """Slots 0 .. num_slots - 1. A sequence with n choices takes n at once: its own, and those of the choices to come."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._extra: dict[int, list[int]] = {}  # seq_id -> slots of choices 1.., between the plan that draws for all and its result
        self._closes: list[int] = []  # given back, not yet told to the backend

    @property
    def num_open(self) -> int:
        return self.num_slots - len(self._free)

    def take(self, seq: Sequence) -> list[int]:
        """One slot per choice. A slot may be closed and opened again by the same plan: closes come first."""
        slots = [self._free.pop() for _ in range(seq.num_choices)]
        seq.slot = slots[0]
        if len(slots) > 1:
            self._extra[seq.seq_id] = slots[1:]
        return slots

    def slots_of(self, seq: Sequence) -> list[int]:
        """Slots that ``seq`` holds, by choice; empty when it holds none."""
        return [seq.slot, *self._extra.get(seq.seq_id, ())] if seq.slot >= 0 else []

    def split(self, seq: Sequence) -> list[int]:
        """Hand over the slots of choices 1.. to the sequences that carry them on; -1 each when none were taken."""
        return self._extra.pop(seq.seq_id, [-1] * (seq.num_choices - 1))

    def hand_over(self, old: Iterable[Sequence], new: Seq[Sequence]) -> None:
        """All slots of ``old`` go to ``new``, one each; what is left over, to the first."""
        slots = [slot for seq in old for slot in self.slots_of(seq)]
        for seq in old:
            self._extra.pop(seq.seq_id, None)
            seq.slot = -1
        for seq, slot in zip(new, slots, strict=False):
            seq.slot = slot
        if len(slots) > len(new):
            self._extra[new[0].seq_id] = slots[len(new) :]

    def give_back(self, seq: Sequence) -> None:
        """All slots of ``seq`` are free again; the next plan closes them."""
        slots = self.slots_of(seq)
        self._free += slots
        self._closes += slots
        self._extra.pop(seq.seq_id, None)
        seq.slot = -1

    @property
    def has_closes(self) -> bool:
        """Whether the next plan has slots to close."""
        return bool(self._closes)

    def close_again(self, slots: list[int]) -> None:
        """Slots that a plan told to close which failed: nobody knows whether it came that far."""
        self._closes += slots

    def drain_closes(self) -> list[int]:
        """Slots to close in the plan being made."""
        closes, self._closes = list(dict.fromkeys(self._closes)), []
        return closes
