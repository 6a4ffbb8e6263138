"""The gap that a step puts between two tokens of a running stream: what has passed already, the host's work, and the device's.

    tokens of step k ──(publish, new requests)──▶ plan ──(planning, device, text)──▶ tokens of step k + 1
                      known when planning begins        predicted, with a margin

Learns both parts from the steps that were run. Reads no clock: times are told to it.
"""

from __future__ import annotations

from collections import deque

from octavo.core.cost import StepShape
from octavo.core.step import StepPlan, StepResult
from octavo.costs.fitted import FittedCost

_MAX_MARGIN = 0.25
_FIRST_HOST_S = 0.001  # until there are enough steps to tell
_FEW = 8


class GapModel:
    """A GapCost that learns. One step at a time: ``begin``, then ``end`` unless the step failed. ``device``: a fitted cost that somebody
    else feeds; None: one of its own.

    What has passed since the last step matters only while a stream runs, and then one step follows the other; so nothing is to be
    told of failures and idle times, after which none runs.
    """

    def __init__(self, device: FittedCost | None = None) -> None:
        self._feeds = device is None
        self.device = FittedCost() if device is None else device
        self._host_times_s: deque[float] = deque(maxlen=32)  # of the last steps: their time beside the device
        self._begun_s = 0.0
        self._ended_s: float | None = None  # when the last step's tokens went out
        self._fixed_s = 0.0  # of the step being planned: passed already, and the host's work
        self._factor = 1.0

    @property
    def max_trusted_rows(self) -> int:
        return self.device.max_trusted_rows

    @property
    def host_s(self) -> float:
        """Seconds that planning and text are expected to take: nine of ten of the last 32 steps stayed below."""
        times_s = sorted(self._host_times_s)
        return times_s[len(times_s) * 9 // 10] if len(times_s) >= _FEW else max([_FIRST_HOST_S, *times_s])

    def state(self) -> list[object]:
        """What ``gap_seconds`` goes by now: factors of the device, fixed seconds, factor, trusted rows. For recordings."""
        return [list(self.device.factors), self._fixed_s, self._factor, self.max_trusted_rows]

    def begin(self, now: float) -> None:
        """See GapCost."""
        self._begun_s = now
        passed_s = 0.0 if self._ended_s is None else max(0.0, now - self._ended_s)
        self._fixed_s = passed_s + self.host_s
        self._factor = 1.0 + min(_MAX_MARGIN, self.device.overrun)

    def gap_seconds(self, shape: StepShape) -> float:
        """See GapCost."""
        return self._fixed_s + self._factor * self.device.seconds_of(shape)

    def end(self, plan: StepPlan, result: StepResult, now: float) -> None:
        """The step begun last has ended: its tokens go out at ``now``. Learn from it."""
        self._ended_s = now
        self._host_times_s.append(max(0.0, now - self._begun_s - result.seconds))
        if self._feeds:
            self.device.step_done(plan, result)
