"""What the steps of an engine were and what they took, host time included: what a cost model is fitted on, and judged by.

Owns the times between steps: while there is work one step follows the other, and a step's time is that from its beginning to the
beginning of the next, so that everything the loop does is in it. Nobody is to abort requests meanwhile: an engine that runs out of work
that way would count its idleness. Plain records; fits nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from octavo.core.step import StepPlan, StepResult
from octavo.costs.coefficients import Coefficients
from octavo.costs.fitting import MeasuredStep, measured_step


@dataclass(slots=True)
class StepLog:
    """``steps``: all that are complete; the last one is when the next has begun, or the engine has run out of work."""

    steps: list[MeasuredStep] = field(default_factory=list)
    _pending: MeasuredStep | None = None
    _pending_started_s: float = 0.0

    def add(self, plan: StepPlan, result: StepResult, started_s: float, ended_s: float, goes_on: bool) -> None:
        """A step from ``started_s`` to ``ended_s``. ``goes_on``: there is work for another one."""
        if self._pending is not None:
            self.steps.append(self._pending._replace(total_s=started_s - self._pending_started_s))
        step = measured_step(plan, result, ended_s - started_s, follows_idleness=self._pending is None)
        self._pending, self._pending_started_s = step, started_s
        if not goes_on:
            self.steps.append(step)
            self._pending = None

    def take(self) -> list[MeasuredStep]:
        """The steps so far, which the log forgets."""
        steps, self.steps = self.steps, []
        return steps


def bias(cost: Coefficients, steps: Sequence[MeasuredStep]) -> float:
    """The seconds of ``steps`` by ``cost`` over those that they took, less 1; 0 without steps. What follows on idleness is left out: of
    that the price has more in it than the step."""
    kept = [step for step in steps if not step.follows_idleness]
    took = math.fsum(step.total_s for step in kept)
    return math.fsum(cost.seconds_of(step.shape) for step in kept) / took - 1.0 if took else 0.0
