"""The gap that a step puts between two tokens of a running stream: what has passed already, the host's work, and the device's.

    tokens of step k ──(publish, new requests)──▶ plan ──(planning, device, text)──▶ tokens of step k + 1
                      known when planning begins        predicted, with a margin

Learns both parts from the steps that were run. Reads no clock: times are told to it.
"""

from __future__ import annotations

from octavo.core.cost import StepShape
from octavo.core.step import StepPlan, StepResult
from octavo.costs.fitted import FittedCost

_MARGIN_SPREADS = 2.0  # of the mean absolute error; for normal errors 19 of 20 steps stay below
_MAX_MARGIN = 0.25
_HOST_GAIN = 0.125
_FIRST_HOST_S = 0.001
_MAX_JUMP = 4.0


class GapModel:
    """A GapCost that learns. One step at a time: ``begin``, then ``end`` or ``forget``."""

    def __init__(self) -> None:
        self.device = FittedCost()
        self._host_s = _FIRST_HOST_S  # running mean of a step's time beside the device
        self._host_deviation_s = _FIRST_HOST_S
        self._begun_s = 0.0
        self._ended_s: float | None = None  # when the last step's tokens went out
        self._fixed_s = 0.0  # of the step being planned: passed already, and the host's work
        self._factor = 1.0

    @property
    def max_trusted_rows(self) -> int:
        return self.device.max_trusted_rows

    def begin(self, now: float) -> None:
        """See GapCost."""
        self._begun_s = now
        passed_s = 0.0 if self._ended_s is None else max(0.0, now - self._ended_s)
        self._fixed_s = passed_s + self._host_s + 2.0 * self._host_deviation_s
        self._factor = 1.0 + min(_MAX_MARGIN, _MARGIN_SPREADS * self.device.spread)

    def gap_seconds(self, shape: StepShape) -> float:
        """See GapCost."""
        return self._fixed_s + self._factor * self.device.seconds_of(shape)

    def end(self, plan: StepPlan, result: StepResult, now: float) -> None:
        """The step begun last has ended: its tokens go out at ``now``. Learn from it."""
        self._ended_s = now
        host_s = max(0.0, now - self._begun_s - result.seconds)
        # Jacobson & Karels (1988): running mean and mean deviation; a jump counts for at most a few times what was expected.
        error_s = min(host_s, _MAX_JUMP * (self._host_s + self._host_deviation_s)) - self._host_s
        self._host_s += _HOST_GAIN * error_s
        self._host_deviation_s += _HOST_GAIN * (abs(error_s) - self._host_deviation_s)
        self.device.observe(StepShape.of(plan), result.seconds)

    def forget(self) -> None:
        """The step begun last failed, or nothing is left to run: the next gap does not reach back."""
        self._ended_s = None
