"""What may look on while an engine steps: it is told of every plan as soon as it is made, and when a step has failed."""

from __future__ import annotations

from typing import Protocol

from octavo.core.step import StepPlan
from octavo.engine.outputs import OutputEvent


class StepHooks(Protocol):
    """All of it on the thread that steps, and quickly: nothing is computed meanwhile."""

    def planned(self, plan: StepPlan) -> None:
        """``plan`` has been made, and nothing written for it yet, drafts included: blocks that it takes from somebody still hold what they
        held, and blocks that it moves or copies something into do not hold it yet."""
        ...

    def failed(self, message: str) -> list[OutputEvent]:
        """Every request has been ended, those that are offered or reserved among them. Returns their last events."""
        ...
