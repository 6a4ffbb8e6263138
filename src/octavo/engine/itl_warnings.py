"""Says in the log when the bound on the gaps between a stream's tokens was broken, and what the step held. At most once in a while.

Counting is ``metrics``' business; keeping the bound is the scheduler's.
"""

from __future__ import annotations

import logging

from octavo.core.step import StepPlan
from octavo.engine.causes import Cause
from octavo.engine.request_record import RequestRecord

logger = logging.getLogger("octavo.engine")

QUIET_S = 10.0  # between two warnings
_ROUNDING_S = 1e-6


class ItlWarnings:
    """``bound_s``: the bound on the gap, in seconds. All times are on the engine's clock."""

    def __init__(self, bound_s: float) -> None:
        self.bound_s = bound_s
        self._last_s: float | None = None
        self._num_unsaid = 0  # steps over the bound since the last warning
        self._worst_unsaid_s = 0.0  # the longest gap that they ended

    def broken(self, plan: StepPlan, seconds: float, gap_s: float, now_s: float, record: RequestRecord | None = None) -> None:
        """A stream got a token of this step ``gap_s`` after its last one; the step itself took its device ``seconds``.

        ``record``: of the stream's request, which tells what of the gap it had no part in steps.
        """
        if self._last_s is not None and now_s - self._last_s < QUIET_S:
            self._num_unsaid += 1
            self._worst_unsaid_s = max(self._worst_unsaid_s, gap_s)
            return
        num_decoding = sum(1 for piece in plan.slices if len(piece.token_ids) == 1)
        num_prompt_tokens = plan.num_tokens - num_decoding
        message = "max_itl_ms %g was broken: %.1f ms between two tokens of a stream; step %d took %.1f ms on the device for %d decoding "
        message += "sequences and %d prompt tokens in %d pieces%s"
        more = "" if record is None else _absence(record, now_s - gap_s)
        if self._num_unsaid:
            worst_ms = 1000 * self._worst_unsaid_s
            more += f"; {self._num_unsaid} more steps broke it since the last warning, the worst by a gap of {worst_ms:.1f} ms"
        bound_ms, gap_ms, device_ms = 1000 * self.bound_s, 1000 * gap_s, 1000 * seconds
        num_pieces = len(plan.slices) - num_decoding
        logger.warning(message, bound_ms, gap_ms, plan.step_index, device_ms, num_decoding, num_prompt_tokens, num_pieces, more)
        self._last_s, self._num_unsaid, self._worst_unsaid_s = now_s, 0, 0.0


def _absence(record: RequestRecord, since_s: float) -> str:
    """What of the gap since ``since_s`` no step explains."""
    out_s = record.out_since(since_s - _ROUNDING_S)
    if not out_s:
        return ""
    what = "was preempted" if record.out_cause is Cause.PREEMPTED else "waited outside the steps"
    return f"; the stream {what} for {1000 * out_s:.1f} ms of the gap"
