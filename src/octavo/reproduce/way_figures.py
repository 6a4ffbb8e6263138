"""Figures of ways of serving: of one run and of several, and beside those that the simulator says. What counts as agreement is here."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, NamedTuple

from octavo.bench.latency import percentile
from octavo.reproduce.cluster_prediction import Answer
from octavo.reproduce.compared import Compared, Limits, digits

TOLERANCE = 0.15


class WayFigures(NamedTuple):
    """Of one run. ``itl_s``, ``itl_p99_s``: over all gaps between tokens. ``output_per_s``: tokens, ``good_per_s``: requests within the
    limits; from the first arrival to the last token."""

    ttft_p50_s: float
    ttft_p99_s: float
    itl_s: float
    itl_p99_s: float
    output_per_s: float
    good_per_s: float

    @classmethod
    def of(cls, answers: Seq[Answer], limits: Limits) -> WayFigures:
        """``answers``: at least one."""
        ttfts = sorted(one.ttft_s for one in answers)
        gaps = sorted(gap for one in answers for gap in one.gaps_s) or [0.0]
        wall_s = max(one.last_s for one in answers) - min(one.arrival_s for one in answers)
        good = sum(one.ttft_s <= limits.ttft_s and one.itl_s <= limits.itl_s for one in answers)
        num_output = sum(1 + len(one.gaps_s) for one in answers)
        return cls(
            percentile(ttfts, 50), percentile(ttfts, 99), math.fsum(gaps) / len(gaps), percentile(gaps, 99), num_output / wall_s,
            good / wall_s,
        )  # fmt: skip

    @classmethod
    def of_runs(cls, runs: Seq[Seq[Answer]], limits: Limits) -> WayFigures:
        """Of several runs of a load, each with an answer: the middle ones, and the 99th percentiles over all of them together."""
        whole = cls.of([answer for run in runs for answer in run], limits)
        return cls.middle([cls.of(run, limits) for run in runs])._replace(ttft_p99_s=whole.ttft_p99_s, itl_p99_s=whole.itl_p99_s)

    @classmethod
    def middle(cls, figures: Iterable[WayFigures]) -> WayFigures:
        """The median of each."""
        return cls(*(statistics.median(values) for values in zip(*figures, strict=True)))


@dataclass(frozen=True, slots=True)
class WayComparison(Compared):
    """One figure of one way under one load. ``real``: of each run; ``measured``: of all (``WayFigures.of_runs``). ``simulated``: told
    nothing of the runs; ``at_pace``: with all steps at the mean pace of those of the real runs, which tells what is left when the cost of
    steps is right, and is no part of a verdict. ``num_values``: that ``measured`` is taken over, of a 99th percentile (0: another
    figure)."""

    load: str
    way: str
    figure: str
    real: tuple[float, ...]
    measured: float
    simulated: float
    at_pace: float
    num_values: int = 0

    @property
    def median(self) -> float:
        """What the others are compared with."""
        return self.measured

    @property
    def is_close(self) -> bool:
        return abs(self.difference) <= TOLERANCE + 1e-12

    @property
    def agrees(self) -> bool:
        """Within 15 %; latencies also within the spread of the real runs."""
        return self.is_close or (self.in_spread and not self.figure.endswith("per_s"))

    def record(self) -> dict[str, Any]:
        numbers = {"measured": self.measured, "simulated": self.simulated, "difference": self.difference, "at_pace": self.at_pace}
        rounded = {name: digits(value) for name, value in numbers.items()} | {"difference_at_pace": digits(self.difference_at_pace)}
        verdicts = {"in_spread": self.in_spread, "is_close": self.is_close, "agrees": self.agrees}
        real = [digits(value) for value in self.real]
        values = {"num_values": self.num_values} if self.num_values else {}
        return {"load": self.load, "way": self.way, "figure": self.figure, **values, "real": real, **rounded, **verdicts}


def compared(
    load: str, way: str, runs: Seq[Seq[Answer]], limits: Limits, simulated: WayFigures, at_pace: WayFigures
) -> list[WayComparison]:
    """Figure by figure, in their order. ``runs``: the real ones."""
    numbers = {"ttft_p99_s": sum(map(len, runs)), "itl_p99_s": sum(len(one.gaps_s) for run in runs for one in run)}
    real, measured = [WayFigures.of(run, limits) for run in runs], WayFigures.of_runs(runs, limits)
    columns = zip(WayFigures._fields, zip(*real, strict=True), measured, simulated, at_pace, strict=True)
    return [
        WayComparison(load, way, name, each, value, guess, paced, numbers.get(name, 0)) for name, each, value, guess, paced in columns
    ]
