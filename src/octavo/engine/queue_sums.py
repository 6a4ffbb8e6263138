"""What the queue's time is charged to, summed for everybody in it: who waits takes over the difference between two moments.

While something keeps the head of the queue out, everybody behind it waits for that. What has piled up behind something worse (a long
prompt, a full pool, prompts that missed the cache) since the queue was last empty is charged to that, until the pile's own length has kept
the head out for as long.
"""

from __future__ import annotations

from octavo.engine.causes import NUM_CAUSES, Cause

QUEUE_CAUSES = (
    Cause.QUEUED_TOKENS, Cause.QUEUED_PROMPT, Cause.QUEUED_KV, Cause.QUEUED_BATCH, Cause.QUEUED_POLICY, Cause.CACHE_MISS, Cause.RECOMPUTED,
)  # fmt: skip
_BY_LENGTH = (Cause.QUEUED_TOKENS, Cause.QUEUED_BATCH)  # a queue keeps itself waiting


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
