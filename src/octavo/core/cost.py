"""What a step costs, told from its plan alone: the shape of a step, and the protocols that price one.

Implementations (counted from the program, fitted on this machine, tables of other machines) live in ``costs/``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from octavo.core.step import StepPlan


@dataclass(slots=True)
class StepShape:
    """How much of each kind of work a step holds. Adding a slice takes O(1), so that a planner can try sizes without making plans.

    ``num_pairs``: (row, position it sees) pairs, the arithmetic of attention; ``num_context``: positions whose KV is read, once per
    sequence, the memory traffic of attention.
    """

    num_rows: int = 0
    num_sequences: int = 0
    num_logit_rows: int = 0
    num_context: int = 0
    num_pairs: int = 0

    def add(self, start: int, num_tokens: int, num_logit_rows: int) -> None:
        """Add a slice of ``num_tokens`` rows at positions ``start`` and on."""
        self.num_rows += num_tokens
        self.num_sequences += 1
        self.num_logit_rows += num_logit_rows
        self.num_context += start + num_tokens
        self.num_pairs += num_tokens * start + num_tokens * (num_tokens + 1) // 2

    @property
    def only_decodes(self) -> bool:
        """Whether every slice has one row. Prompts of one token take what a decoding sequence does."""
        return self.num_rows == self.num_sequences

    def plus(self, start: int, num_tokens: int, num_logit_rows: int) -> StepShape:
        """A copy with one more slice."""
        shape = StepShape(self.num_rows, self.num_sequences, self.num_logit_rows, self.num_context, self.num_pairs)
        shape.add(start, num_tokens, num_logit_rows)
        return shape

    @classmethod
    def of(cls, plan: StepPlan) -> StepShape:
        shape = cls()
        for piece in plan.slices:
            num_logit_rows = 1 + piece.num_drafts if piece.num_samples else 0
            if piece.prompt_logprobs is not None:
                num_logit_rows = max(num_logit_rows, len(piece.next_token_ids))
            shape.add(piece.start, len(piece.token_ids), num_logit_rows)
        return shape


class CostModel(Protocol):
    def seconds(self, plan: StepPlan) -> float:
        """Seconds that executing ``plan`` takes on the modelled device. Reads the plan and changes nothing."""
        ...


class PreemptionCost(Protocol):
    """Prices the two ways of bringing a preempted sequence back, in seconds that the steps of the others get longer by."""

    def recompute_seconds(self, num_tokens: int) -> float:
        """To compute the KV of ``num_tokens`` tokens again."""
        ...

    def swap_seconds(self, num_blocks: int) -> float:
        """To move ``num_blocks`` blocks to or from host memory; each way counts."""
        ...


class GapCost(Protocol):
    """Prices the gap that a step puts between two tokens of a running stream: device and host, with a margin for what is not known."""

    @property
    def max_trusted_rows(self) -> int:
        """Rows up to which a prediction rests on steps that were seen; larger steps are to be approached in stages."""
        ...

    def begin(self, now: float) -> None:
        """A step is being planned at ``now``: what has passed since the last step's tokens went out is part of the gap."""
        ...

    def gap_seconds(self, shape: StepShape) -> float:
        """Seconds from the last step's tokens to those of a step of this shape, if it is planned now. Grows with every field."""
        ...


class RestoreCost(Protocol):
    """Prices the KV of known tokens: computed again, or restored from another tier."""

    def recompute_s(self, start: int, num_tokens: int) -> float:
        """Seconds to compute ``num_tokens`` after ``start``."""
        ...

    def load_s(self, num_blocks: int) -> float:
        """Seconds that a step gets longer by when it loads so many blocks from host memory."""
        ...

    def restoring_pays(self, start: int, num_tokens: int, num_host_blocks: int, num_disk_blocks: int) -> bool:
        """Whether the blocks of these tokens are had sooner by loading than by computing. Without blocks: no matter."""
        ...
