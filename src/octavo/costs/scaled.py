"""A cost model whose steps take a factor longer: what is asked when a cost model may be off by so much."""

from __future__ import annotations

from typing import Protocol

from octavo.core.cost import CostModel, StepShape
from octavo.core.step import StepPlan


class _ShapeCost(CostModel, Protocol):
    def seconds_of(self, shape: StepShape) -> float: ...


class _Scaled:
    def __init__(self, cost: CostModel, factor: float) -> None:
        self._cost = cost
        self._factor = factor

    def seconds(self, plan: StepPlan) -> float:
        """See CostModel."""
        return self._factor * self._cost.seconds(plan)


class _ScaledShapes(_Scaled):
    """Of a cost model that a step's shape is enough for."""

    def __init__(self, cost: _ShapeCost, factor: float) -> None:
        super().__init__(cost, factor)
        self._seconds_of = cost.seconds_of

    def seconds_of(self, shape: StepShape) -> float:
        return self._factor * self._seconds_of(shape)


def scaled(cost: CostModel, factor: float) -> CostModel:
    """``cost`` with every step ``factor`` times as long; of its own kind, so that steps are taken at once where ``cost`` allows it."""
    if not 0.0 < factor < float("inf"):
        raise ValueError(f"factor: {factor!r} is not allowed; a finite number above 0")
    return _ScaledShapes(cost, factor) if hasattr(cost, "seconds_of") else _Scaled(cost, factor)
