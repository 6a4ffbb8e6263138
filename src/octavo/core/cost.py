"""The CostModel protocol: what a step costs, told from its plan alone.

Implementations (counted from the program, fitted on this machine, tables of other machines) live in ``costs/``.
"""

from __future__ import annotations

from typing import Protocol

from octavo.core.step import StepPlan


class CostModel(Protocol):
    def seconds(self, plan: StepPlan) -> float:
        """Seconds that executing ``plan`` takes on the modelled device. Reads the plan and changes nothing."""
        ...
