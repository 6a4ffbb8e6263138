"""What the queue's time is charged to, summed for everybody in it: who waits takes over the difference between two moments.

While something keeps the head of the queue out, everybody behind it waits for that. What has piled up behind something worse (a long
prompt, a full pool, prompts that missed the cache) since the queue was last empty is charged to that, until the pile's own length has kept
the head out for as long.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from octavo.core.step import StepPlan
from octavo.engine.causes import NUM_CAUSES, Cause

if TYPE_CHECKING:
    from octavo.core.scheduler import Scheduler

QUEUE_CAUSES = (
    Cause.QUEUED_TOKENS, Cause.QUEUED_PROMPT, Cause.QUEUED_KV, Cause.QUEUED_BATCH, Cause.QUEUED_POLICY, Cause.CACHE_MISS, Cause.RECOMPUTED,
)  # fmt: skip
_CAUSE_OF = {
    None: None, "policy": Cause.QUEUED_POLICY, "places": Cause.QUEUED_BATCH, "blocks": Cause.QUEUED_KV, "tokens": Cause.QUEUED_TOKENS,
}  # fmt: skip
_BY_LENGTH = (Cause.QUEUED_TOKENS, Cause.QUEUED_BATCH)  # a queue keeps itself waiting


def why_queued(scheduler: Scheduler, plan: StepPlan | None, prompts: Seq[tuple[int, int, int]], has_preempted: bool) -> Cause | None:
    """What keeps the head of the queue, and so everybody behind it, out of a plan just made; None: nobody waits.

    ``prompts``: of the plan's slices those of prompts, as (place, rows computed before, rows that might have been cached).
    ``has_preempted``: whether somebody was put out for it.
    """
    if not scheduler.num_waiting:
        return None
    cause = _CAUSE_OF[scheduler.admission_block(0 if plan is None else plan.num_tokens, has_preempted)]
    if cause is not Cause.QUEUED_TOKENS or plan is None or not prompts:
        return cause
    half = plan.num_tokens / 2  # what most of the step is for is what the queue waits for
    if sum(num_recomputed for _, num_recomputed, _ in prompts) >= half:
        return Cause.RECOMPUTED
    if sum(num_missed for _, _, num_missed in prompts) >= half:
        return Cause.CACHE_MISS
    longest = max((plan.slices[place] for place, _, _ in prompts), key=lambda piece: len(piece.token_ids))
    is_piece = not longest.num_samples  # of more than a step holds
    return Cause.QUEUED_PROMPT if is_piece and len(longest.token_ids) >= half else cause


class QueueSums:
    """``seconds`` [NUM_CAUSES] up to the last ``advance``; ``cause``: what time is charged to since, None while nobody waits."""

    def __init__(self) -> None:
        self.seconds = [0.0] * NUM_CAUSES
        self.cause: Cause | None = None
        self.since_s = 0.0
        self._fault: Cause | None = None  # what keeps the head out now
        self._faults_s = [0.0] * NUM_CAUSES  # and how long what did, since the queue was empty

    def advance(self, now_s: float) -> None:
        if self.cause is not None and self._fault is not None:
            self.seconds[self.cause] += now_s - self.since_s
            self._faults_s[self._fault] += now_s - self.since_s
        self.since_s = now_s

    def blocked_by(self, fault: Cause | None) -> None:
        """From the last ``advance`` on the head is kept out by ``fault``; None: nobody waits."""
        if fault is None and self._fault is None:
            return
        self.cause = self._fault = fault
        if fault is None:
            self._faults_s[:] = [0.0] * NUM_CAUSES
        elif fault in _BY_LENGTH:
            self.cause = max(QUEUE_CAUSES, key=lambda cause: (self._faults_s[cause], cause is fault))
