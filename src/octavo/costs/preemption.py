"""What it costs to bring a preempted sequence back: computing its tokens again, or moving its blocks to host memory and back.

Learns both from the steps that were run: rows from the fitted cost of steps, moves from their measured seconds. Reads no clock.
"""

from __future__ import annotations

from octavo.core.cost import StepShape
from octavo.core.step import StepPlan, StepResult
from octavo.costs.fitted import FittedCost

_FIRST_BYTES_PER_S = 4e9  # of a copy in memory, until one has been measured
_DECODING_STEPS = 8  # one in so many is learned from
_MEMORY = 0.9  # weight of what was known of moves when a step with more of them comes


class PreemptionModel:
    """A PreemptionCost that learns. ``device``: a fitted cost that somebody else feeds; None: one of its own."""

    def __init__(self, bytes_per_block: int, device: FittedCost | None = None) -> None:
        self._feeds = device is None
        self.device = FittedCost() if device is None else device
        self._move_s = bytes_per_block / _FIRST_BYTES_PER_S
        self._num_moves = 1.0

    @property
    def seconds_per_block(self) -> float:
        """Of one move, either way."""
        return self._move_s / self._num_moves

    def state(self) -> list[object]:
        """What its prices go by now: factors of the device, seconds per block. For recordings."""
        return [list(self.device.factors), self.seconds_per_block]

    def recompute_seconds(self, num_tokens: int) -> float:
        """Rows that ride in steps which run anyway: their own work, attention to each other included, not what a step costs by itself."""
        shape = StepShape(num_sequences=1)
        return self.device.seconds_of(shape.plus(0, num_tokens, 0)) - self.device.seconds_of(StepShape(num_sequences=2))

    def swap_seconds(self, num_blocks: int) -> float:
        return num_blocks * self.seconds_per_block

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        """Learn from a step that was run."""
        if plan.num_moves and result.move_seconds > 0.0:
            self._move_s = _MEMORY * self._move_s + result.move_seconds
            self._num_moves = _MEMORY * self._num_moves + plan.num_moves
        if self._feeds:
            self.device.step_done(plan, result, _DECODING_STEPS)
