"""A sample of the steps that were run, some of each size, for who fits prices on them.

Bounded: the last steps of each size class (tokens, to a power of two). However long streams decode undisturbed, the sample keeps the steps
that computed prompts. Decides nothing.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from octavo.core.cost import StepShape
from octavo.core.step import StepPlan

_PER_SIZE = 96  # steps of a size class that are kept


class SampledStep(NamedTuple):
    """What a step held, and its seconds from the end of the step before (from its planning, if nobody waited) to its own end, swaps left
    out: they have a price of their own."""

    num_rows: int
    num_sequences: int
    num_logit_rows: int
    num_context: int
    num_pairs: int
    seconds: float


class StepSamples:
    def __init__(self) -> None:
        self._samples: dict[int, deque[SampledStep]] = {}  # by the bits of their number of tokens

    def all(self) -> list[SampledStep]:
        """Of every size, the oldest of each first."""
        return [sample for size in sorted(self._samples) for sample in self._samples[size]]

    def decoding(self, plan: StepPlan, num_positions: int, seconds: float) -> None:
        """A step of nothing but single tokens, behind ``num_positions`` computed ones in all."""
        num = len(plan.slices)
        self._keep(SampledStep(num, num, num, num_positions + num, num_positions + num, seconds))

    def mixed(self, shape: StepShape, seconds: float) -> None:
        """Any other step."""
        self._keep(SampledStep(shape.num_rows, shape.num_sequences, shape.num_logit_rows, shape.num_context, shape.num_pairs, seconds))

    def _keep(self, sample: SampledStep) -> None:
        size = sample.num_rows.bit_length()
        kept = self._samples.get(size)
        if kept is None:
            kept = self._samples[size] = deque(maxlen=_PER_SIZE)
        kept.append(sample)
