"""A cost model whose steps take a factor longer: what is asked when a cost model may be off by so much."""

from __future__ import annotations

from collections.abc import Callable

from octavo.core.cost import CostModel, StepShape
from octavo.core.step import StepPlan


class _Scaled:
    def __init__(self, cost: CostModel, factor: float) -> None:
        self._cost = cost
        self._factor = factor

    def seconds(self, plan: StepPlan) -> float:
        """See CostModel."""
        return self._factor * self._cost.seconds(plan)


class _ScaledShapes(_Scaled):
    """Of a cost model that a step's shape is enough for."""

    def __init__(self, cost: CostModel, factor: float, seconds_of: Callable[[StepShape], float]) -> None:
        super().__init__(cost, factor)
        self._seconds_of = seconds_of

    def seconds_of(self, shape: StepShape) -> float:
        return self._factor * self._seconds_of(shape)


def scaled(cost: CostModel, factor: float) -> CostModel:
    """``cost`` with every step ``factor`` times as long; of its own kind, so that steps are taken at once where ``cost`` allows it."""
    if not 0.0 < factor < float("inf"):
        raise ValueError(f"factor: {factor!r} is not allowed; a finite number above 0")
    seconds_of = getattr(cost, "seconds_of", None)
    return _Scaled(cost, factor) if seconds_of is None else _ScaledShapes(cost, factor, seconds_of)
