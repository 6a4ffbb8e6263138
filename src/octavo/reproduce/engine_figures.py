"""Figures of one engine under a load: of a run, and beside those that the simulator says. What counts as agreement is here."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, NamedTuple

from octavo.bench.latency import percentile
from octavo.bench.stream_record import StreamRecord
from octavo.reproduce.compared import Compared, Limits, digits
from octavo.simulator.records import RequestRecord

_TOLERANCE, _THROUGHPUT_TOLERANCE, _SLO_POINTS = 0.10, 0.05, 0.03


class Served(NamedTuple):
    """A request that was answered whole. Times in seconds from the start of its run."""

    arrival_s: float
    first_s: float
    last_s: float
    num_output: int

    @classmethod
    def of_record(cls, record: StreamRecord, started_s: float) -> Served:
        """Of a real run."""
        times = record.event_times
        return cls(record.due_s - started_s, times[0] - started_s, times[-1] - started_s, len(times))

    @classmethod
    def simulated(cls, record: RequestRecord) -> Served:
        assert record.ttft_s is not None, "every request of a load has output"
        return cls(record.arrival_s, record.arrival_s + record.ttft_s, record.arrival_s + record.e2e_s, record.num_output)

    @property
    def itl_s(self) -> float | None:
        """Mean time between tokens; None with one."""
        return (self.last_s - self.first_s) / (self.num_output - 1) if self.num_output > 1 else None


class Figures(NamedTuple):
    """Of one run. ``itl_s``: mean over all gaps between tokens. ``output_per_s``: tokens, from the first arrival to the last token."""

    ttft_p50_s: float
    ttft_p99_s: float
    itl_s: float
    output_per_s: float
    slo_share: float

    @classmethod
    def of(cls, served: Seq[Served], num_arrived: int, limits: Limits) -> Figures:
        """``served``: at least one. Requests that were not answered whole are outside the limits."""
        ttfts = sorted(one.first_s - one.arrival_s for one in served)
        num_gaps = sum(one.num_output - 1 for one in served)
        itl_s = math.fsum(one.last_s - one.first_s for one in served) / num_gaps if num_gaps else 0.0
        wall_s = max(one.last_s for one in served) - min(one.arrival_s for one in served)
        kept = sum(one.first_s - one.arrival_s <= limits.ttft_s and (one.itl_s or 0.0) <= limits.itl_s for one in served)
        num_output = sum(one.num_output for one in served)
        return cls(percentile(ttfts, 50), percentile(ttfts, 99), itl_s, num_output / wall_s, kept / num_arrived)


@dataclass(frozen=True, slots=True)
class Comparison(Compared):
    """One figure of one load. ``difference``: of the simulated to the median of the real runs, as a share of it (of the simulated where the
    median is 0, as a time between tokens is that were read together); of ``slo_share`` in points / 100. ``at_pace``: simulated with all
    steps at the mean pace of those of the real runs. It tells what is left when the cost of steps is right, and is no part of a verdict."""

    load: str
    figure: str
    real: tuple[float, ...]
    simulated: float
    at_pace: float

    def _off(self, value: float) -> float:
        return value - self.median if self.figure == "slo_share" else Compared._off(self, value)

    @property
    def agrees(self) -> bool:
        """Latencies within 10 % or within the spread of the real runs, throughput within 5 %, attainment within 3 points."""
        off = abs(self.difference)
        if self.figure == "output_per_s":
            return off <= _THROUGHPUT_TOLERANCE
        if self.figure == "slo_share":
            return off <= _SLO_POINTS + 1e-12
        return off <= _TOLERANCE or self.in_spread

    def record(self) -> dict[str, Any]:
        real = [digits(value) for value in self.real]
        verdicts = {"difference": digits(self.difference), "in_spread": self.in_spread, "agrees": self.agrees}
        paced = {"at_pace": digits(self.at_pace), "difference_at_pace": digits(self.difference_at_pace)}
        return {"load": self.load, "figure": self.figure, "real": real, "simulated": digits(self.simulated), **verdicts, **paced}


def compare(load: str, real: Seq[Figures], simulated: Figures, at_pace: Figures) -> list[Comparison]:
    """Figure by figure, in their order."""
    columns = zip(Figures._fields, zip(*real, strict=True), simulated, at_pace, strict=True)
    return [Comparison(load, name, values, guess, paced) for name, values, guess, paced in columns]
