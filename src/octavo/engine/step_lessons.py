"""What the timeline learns from steps: the price that it splits them by, and a sample of each size for who fits prices himself.

Bounded: the last steps of each size class (tokens, to a power of two). However long streams decode undisturbed, the sample keeps the steps
that computed prompts. Decides nothing.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from octavo.core.cost import StepShape
from octavo.core.step import StepPlan
from octavo.costs.fitted import FittedCost
from octavo.engine.step_split import StepPrice

_PER_SIZE = 96  # steps of a size class that are kept
_LEARN_FIRST, _LEARN_EVERY = 16, 16  # steps of a size that the price is learned from: the first, then every so many


class SampledStep(NamedTuple):
    """What a step held, and its seconds from the end of the step before (from its planning, if nobody waited) to its own end."""

    num_rows: int
    num_sequences: int
    num_logit_rows: int
    num_context: int
    num_pairs: int
    seconds: float


class StepLessons:
    """``price``: None: one that is learned here, from few of the steps, since fitting takes longer than a step may."""

    def __init__(self, price: StepPrice | None) -> None:
        self._learner = FittedCost() if price is None else None
        self.price: StepPrice = price or self._learner  # type: ignore[assignment]
        self._num_learned: dict[int, int] = {}  # steps, by the bits of their number of tokens
        self._samples: dict[int, deque[SampledStep]] = {}

    def samples(self) -> list[SampledStep]:
        """Of every size, the oldest of each first."""
        return [sample for size in sorted(self._samples) for sample in self._samples[size]]

    def decoding(self, plan: StepPlan, num_positions: int, device_s: float, seconds: float) -> None:
        """A step of nothing but single tokens, behind ``num_positions`` computed ones in all."""
        num = len(plan.slices)
        sample = SampledStep(num, num, num, num_positions + num, num_positions + num, seconds)
        size = self._keep(num, sample)
        if self._learner is not None and self._is_worth_learning(size, plan.step_index):
            self._learner.observe(StepShape(num, num, num, sample.num_context, sample.num_pairs), device_s)

    def mixed(self, plan: StepPlan, device_s: float, seconds: float) -> None:
        """Any other step."""
        shape = StepShape.of(plan)
        sample = SampledStep(shape.num_rows, shape.num_sequences, shape.num_logit_rows, shape.num_context, shape.num_pairs, seconds)
        size = self._keep(shape.num_rows, sample)
        if self._learner is not None and self._is_worth_learning(size, plan.step_index):
            self._learner.observe(shape, device_s)

    def _keep(self, num_rows: int, sample: SampledStep) -> int:
        size = num_rows.bit_length()
        kept = self._samples.get(size)
        if kept is None:
            kept = self._samples[size] = deque(maxlen=_PER_SIZE)
        kept.append(sample)
        return size

    def _is_worth_learning(self, size: int, step_index: int) -> bool:
        seen = self._num_learned.get(size, 0)
        if seen >= _LEARN_FIRST and step_index % _LEARN_EVERY:
            return False
        self._num_learned[size] = seen + 1
        return True
