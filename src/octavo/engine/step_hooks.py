"""What may look on while an engine steps: it is told of every plan before it is executed, and when a step has failed."""

from __future__ import annotations

from typing import Protocol

from octavo.core.step import StepPlan
from octavo.engine.outputs import OutputEvent


class StepHooks(Protocol):
    """All of it on the thread that steps, and quickly: nothing is computed meanwhile."""

    def before_execute(self, plan: StepPlan) -> None:
        """``plan`` is about to be executed. Blocks that it takes from somebody still hold what they held."""
        ...

    def failed(self, message: str) -> list[OutputEvent]:
        """Every request has been ended, those that are offered or reserved among them. Returns their last events."""
        ...
