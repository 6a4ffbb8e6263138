"""The last steps, and the gaps between tokens that they made: what a summary over a window is computed from.

Gaps are counted in classes of 5 % width, second by second, with what they consisted of; so memory is bounded however many tokens are
made, and a percentile is exact to the width of its class. Knows no request.
"""

from __future__ import annotations

import math
import statistics
from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from octavo.engine.causes import Bottleneck

MAX_WINDOW_S = 600
_MAX_STEPS = 1024
_WIDTH = math.log(1.05)
_LEAST_S = 1e-6
_END_S, _SINCE_S = attrgetter("end_s"), attrgetter("since_s")
_PLACES = {bottleneck: i for i, bottleneck in enumerate(Bottleneck)}

Parts = Sequence[float]
"""Seconds in the order of ``Bottleneck``."""


GapClasses = dict[int, "array[float]"]
"""Gaps by the place of their class: how many, then seconds in the order of ``Bottleneck``."""


def in_order(parts: Mapping[Bottleneck, float]) -> list[float]:
    return [parts.get(bottleneck, 0.0) for bottleneck in Bottleneck]


class StepParts(NamedTuple):
    """One step: from ``since_s``, the end of the step before if somebody waited for it, over ``begin_s``, when it was planned, to its end.

    ``prefill_s`` and ``decode_s``: the device's seconds for prompts and for tokens, what is fixed with these; ``kv_s``: for block moves.
    """

    step_index: int
    since_s: float
    begin_s: float
    end_s: float
    prefill_s: float
    decode_s: float
    kv_s: float
    num_prompt_tokens: int
    num_tokens: int
    num_sequences: int
    fixed_s: float = 0.0  # of decode_s, what the step would have taken whatever it held
    again_s: float = 0.0  # of prefill_s, for what preemptions had lost
    missed_s: float = 0.0  # of prefill_s, for what the prefix cache would have had

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s

    def parts(self) -> Parts:
        """What a gap that is this step consists of."""
        host_s = max(0.0, self.end_s - self.since_s - self.prefill_s - self.decode_s - self.kv_s)
        return (self.prefill_s, self.decode_s, self.kv_s, 0.0, 0.0, host_s, 0.0)


@dataclass(frozen=True, slots=True)
class Held:
    """A percentile, and the shares of its time by what is short, the largest first."""

    seconds: float
    shares: tuple[tuple[Bottleneck, float], ...]

    @property
    def bottleneck(self) -> Bottleneck:
        return self.shares[0][0]


def held_by(seconds: float, sums: list[float]) -> Held:
    """``sums``: seconds in the order of ``Bottleneck``."""
    total = sum(sums) or 1.0
    shares = sorted(((bottleneck, sums[i] / total) for bottleneck, i in _PLACES.items()), key=lambda pair: -pair[1])
    return Held(seconds, tuple((bottleneck, share) for bottleneck, share in shares if share > 0.0) or ((Bottleneck.HOST, 1.0),))


def _no_gaps() -> array[float]:
    """A class of gaps: their number, then seconds in the order of ``Bottleneck``."""
    return array("d", [0.0] * (1 + len(_PLACES)))


class LastSteps:
    """The last steps as they were at one moment, for a reader that looks more than once while others are made. The oldest first."""

    def __init__(self, steps: Sequence[StepParts]) -> None:
        self._steps = steps
        usual = [step.seconds for step in steps if not step.num_prompt_tokens]
        self.usual_s = statistics.median(usual) if usual else None  # of a step without prompts; None: there was none

    def between(self, begin_s: float, end_s: float | None) -> Sequence[StepParts]:
        """Steps that overlap with this time; ``end_s`` None: up to the last."""
        first = bisect_right(self._steps, begin_s, key=_END_S)
        last = len(self._steps) if end_s is None else bisect_left(self._steps, end_s, key=_SINCE_S)
        return self._steps[first:last]


class StepWindow:
    def __init__(self) -> None:
        self.steps: deque[StepParts] = deque(maxlen=_MAX_STEPS)
        self._seconds: deque[tuple[int, dict[int, array[float]]]] = deque(maxlen=MAX_WINDOW_S)  # (second, gaps that ended in it)

    @property
    def last(self) -> StepParts | None:
        return self.steps[-1] if self.steps else None

    def add_step(self, step: StepParts, num_whole: int, others: Sequence[tuple[float, Mapping[Bottleneck, float]]]) -> None:
        """A step, and the gaps that have ended with it: ``num_whole`` are the step itself. ``others``: when they began, and what is known
        of them; the rest consists of what the step does."""
        self.steps.append(step)
        if not num_whole and not others:
            return
        own = step.parts()
        if num_whole:
            self.add_gap(step.end_s, step.end_s - step.since_s, own, num_whole)
        for since_s, known in others:
            gap_s, parts = step.end_s - since_s, in_order(known)
            scale = max(0.0, gap_s - sum(parts)) / (sum(own) or 1.0)
            self.add_gap(step.end_s, gap_s, [part + scale * more for part, more in zip(parts, own, strict=True)])

    def add_gap(self, now_s: float, gap_s: float, parts: Parts, count: int = 1) -> None:
        """``count`` gaps of ``gap_s`` that consisted of ``parts`` ended at ``now_s``."""
        second = int(now_s)
        if not self._seconds or self._seconds[-1][0] < second:
            self._seconds.append((second, {}))
        gaps = self._seconds[-1][1]
        place = math.ceil(math.log(max(gap_s, _LEAST_S)) / _WIDTH)
        found = gaps.get(place)
        if found is None:
            found = gaps[place] = _no_gaps()
        found[0] += count
        for i, seconds in enumerate(parts, 1):
            if seconds:
                found[i] += count * seconds

    def gaps(self, since_s: float, quantiles: tuple[float, ...]) -> tuple[int, list[Held]]:
        """(number of gaps that ended since then, each quantile of them). What holds the median is told by the gaps of its class, what
        holds a higher quantile by all gaps from there on. No gaps: an empty list."""
        return gap_quantiles(self.gap_classes(since_s), quantiles)

    def gap_classes(self, since_s: float) -> GapClasses:
        """The gaps that ended since then."""
        merged: GapClasses = {}
        for second, gaps in self._seconds:
            if second + 1 <= since_s:
                continue
            for place, found in gaps.items():
                add_gaps(merged, place, found)
        return merged


def add_gaps(into: GapClasses, place: int, found: Sequence[float]) -> None:
    """Add the gaps of a class to those that are there."""
    there = into.setdefault(place, _no_gaps())
    there[:] = array("d", map(sum, zip(there, found, strict=True)))


def gap_quantiles(classes: GapClasses, quantiles: tuple[float, ...]) -> tuple[int, list[Held]]:
    """See ``StepWindow.gaps``."""
    total = round(sum(found[0] for found in classes.values()))
    return total, [_quantile(classes, total, q) for q in quantiles] if total else []


def _quantile(merged: GapClasses, total: int, q: float) -> Held:
    left = math.ceil(q * total)
    for place in sorted(merged):
        left -= round(merged[place][0])
        if left <= 0:
            break
    above = [merged[other][1:] for other in merged if other == place or (other > place and q > 0.5)]
    return held_by(math.exp((place - 0.5) * _WIDTH), [sum(column) for column in zip(*above, strict=True)])
