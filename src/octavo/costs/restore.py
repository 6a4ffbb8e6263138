"""What restoring KV costs, and what computing it again: both learned from what was done, in seconds per block and by the fitted step cost.

Reads no clock: times are told to it.
"""

from __future__ import annotations

from octavo.core.cost import StepShape
from octavo.core.step import StepPlan, StepResult
from octavo.costs.fitted import FittedCost

FIRST_WAIT_S = 5.0  # what computing is taken to cost until a step has been seen
_FEW_STEPS = 4
_MEMORY = 0.8  # weight of what was known when a new measurement comes


class RestoreModel:
    """A RestoreCost that learns. ``device``: the step cost that it shares with others, who then tell it of the steps; None: its own.

    Until a way has been measured it is taken to be free, so that it is tried.
    """

    def __init__(self, device: FittedCost | None = None) -> None:
        self.device = device or FittedCost()
        self._owns_device = device is None
        self.move_s: float | None = None  # per block, between pool and host memory
        self.read_s: float | None = None  # per block, from the disk

    def recompute_s(self, start: int, num_tokens: int) -> float:
        """See RestoreCost."""
        if self.device.num_observations < _FEW_STEPS:  # those of a calibration count
            return FIRST_WAIT_S
        shape = StepShape()
        shape.add(start, num_tokens, 0)
        return self.device.seconds_of(shape)

    def load_s(self, num_blocks: int) -> float:
        """See RestoreCost."""
        return num_blocks * (self.move_s or 0.0)

    def restore_s(self, num_host_blocks: int, num_disk_blocks: int) -> float:
        """Seconds until these blocks are in the pool."""
        return (num_host_blocks + num_disk_blocks) * (self.move_s or 0.0) + num_disk_blocks * (self.read_s or 0.0)

    def restoring_pays(self, start: int, num_tokens: int, num_host_blocks: int, num_disk_blocks: int) -> bool:
        """See RestoreCost."""
        return self.restore_s(num_host_blocks, num_disk_blocks) < self.recompute_s(start, num_tokens)

    def step_done(self, plan: StepPlan, result: StepResult) -> None:
        """Learn from a step that was run."""
        if plan.num_moves:
            self.move_s = _mixed(self.move_s, result.move_seconds / plan.num_moves)
        if self._owns_device:
            self.device.step_done(plan, result)

    def blocks_read(self, num_blocks: int, seconds: float) -> None:
        """Learn from a number of blocks that the disk took ``seconds`` to read."""
        if num_blocks:
            self.read_s = _mixed(self.read_s, seconds / num_blocks)


def _mixed(known: float | None, new: float) -> float:
    return new if known is None else _MEMORY * known + (1.0 - _MEMORY) * new
