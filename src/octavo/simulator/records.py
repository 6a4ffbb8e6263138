"""What a simulation writes down of its requests: a short record of each while it lives, sums and sketches when it has ended.

Memory does not grow with the number of requests, unless all records or all gaps are asked for.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from octavo.simulator.sketch import QuantileSketch


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits that a request is to keep, in seconds; None: no limit. ``itl_s``: of its mean time between tokens, ``gap_s``: of the worst."""

    ttft_s: float | None = None
    itl_s: float | None = None
    e2e_s: float | None = None
    gap_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("ttft_s", "itl_s", "e2e_s", "gap_s"):
            limit = getattr(self, name)
            if limit is not None and not limit > 0.0:
                raise ValueError(f"slo {name}: {limit!r} is not allowed; above 0 seconds")

    def keeps(self, record: RequestRecord) -> bool:
        """Whether a completed request kept all limits."""
        return not self.broken(record)

    def broken(self, record: RequestRecord) -> list[str]:
        """Names of the limits that a completed request broke: ttft, itl, e2e, gap."""
        limits = (
            ("ttft", self.ttft_s, record.ttft_s), ("itl", self.itl_s, record.itl_s), ("e2e", self.e2e_s, record.e2e_s),
            ("gap", self.gap_s, record.worst_gap_s),
        )  # fmt: skip
        return [name for name, limit, value in limits if limit is not None and value is not None and value > limit]


class RequestRecord(NamedTuple):
    """A completed request. Times in seconds; ``itl_s`` (mean time between tokens) and ``worst_gap_s`` are None with a single token, and
    ``ttft_s`` with none."""

    request_id: str
    engine: int  # index of the engine that finished it
    arrival_s: float
    num_prompt: int
    num_output: int
    num_cached: int
    ttft_s: float | None
    e2e_s: float
    itl_s: float | None
    worst_gap_s: float | None


@dataclass(slots=True)
class LiveRequest:
    """A request on its way."""

    request_id: str
    arrival_s: float
    num_prompt: int
    first_s: float = 0.0
    last_s: float = 0.0  # of its last tokens
    worst_gap_s: float = 0.0
    num_output: int = 0
    num_cached: int = 0
    gaps: array[float] | None = None  # all of them, where asked for

    def record(self, engine: int) -> RequestRecord:
        """It has just ended, at ``last_s``."""
        num_gaps = max(0, self.num_output - 1)
        itl_s = (self.last_s - self.first_s) / num_gaps if num_gaps else None
        ttft_s = self.first_s - self.arrival_s if self.num_output else None
        e2e_s, worst_gap_s = self.last_s - self.arrival_s, self.worst_gap_s if num_gaps else None
        return RequestRecord(
            self.request_id, engine, self.arrival_s, self.num_prompt, self.num_output, self.num_cached, ttft_s, e2e_s, itl_s, worst_gap_s
        )


@dataclass(slots=True)
class RequestLog:
    """All requests of a run. ``keep_requests``: every record is kept in ``records``; ``keep_gaps``: every gap between the tokens of each
    request, by its id, in ``gaps``."""

    slo: Slo = field(default_factory=Slo)
    keep_requests: bool = False
    keep_gaps: bool = False
    num_arrived: int = 0
    num_completed: int = 0
    num_refused: int = 0
    num_failed: int = 0
    num_moved: int = 0
    num_in_slo: int = 0
    num_broken: dict[str, int] = field(default_factory=dict)  # completed requests that broke a limit, by its name
    num_prompt_tokens: int = 0  # of completed requests
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    first_refusal: str | None = None
    ttft: QuantileSketch = field(default_factory=QuantileSketch)
    itl: QuantileSketch = field(default_factory=QuantileSketch)
    e2e: QuantileSketch = field(default_factory=QuantileSketch)
    gap: QuantileSketch = field(default_factory=QuantileSketch)  # of all tokens of all requests
    live: dict[str, LiveRequest] = field(default_factory=dict)
    records: list[RequestRecord] = field(default_factory=list)
    gaps: dict[str, array[float]] = field(default_factory=dict)

    @property
    def num_missed(self) -> int:
        """Requests that have ended and are not within the limits."""
        return self.num_completed - self.num_in_slo + self.num_refused + self.num_failed

    def arrived(self, request_id: str, arrival_s: float, num_prompt: int) -> None:
        self.num_arrived += 1
        self.live[request_id] = live = LiveRequest(request_id, arrival_s, num_prompt)
        if self.keep_gaps:
            live.gaps = array("d")

    def refused(self, request_id: str, reason: str) -> None:
        """It can never run."""
        del self.live[request_id]
        self.num_refused += 1
        self.first_refusal = self.first_refusal or reason

    def failed(self, request_id: str) -> None:
        """It ended without being complete."""
        del self.live[request_id]
        self.num_failed += 1

    def got_tokens(self, request_id: str, num_tokens: int, now: float) -> LiveRequest:
        """A step gave it tokens, all at once."""
        live = self.live[request_id]
        if live.num_output:
            self._got_gap(live, now - live.last_s)
        else:
            live.first_s = now
        live.num_output += num_tokens
        live.last_s = now
        return live

    def got_repeats(self, request_ids: Seq[str], ends_s: Seq[float]) -> None:
        """Steps that ended at ``ends_s`` gave each of these requests a token; each had one before."""
        gaps = [end_s - begin_s for begin_s, end_s in pairwise(ends_s)]
        worst_gap_s, num_steps = max(gaps, default=0.0), len(ends_s)
        for request_id in request_ids:
            live = self.live[request_id]
            self._got_gap(live, ends_s[0] - live.last_s)
            live.worst_gap_s = max(live.worst_gap_s, worst_gap_s)
            live.num_output += num_steps
            live.last_s = ends_s[-1]
            if live.gaps is not None:
                live.gaps.extend(gaps)
        for gap_s in gaps:
            self.gap.add(gap_s, len(request_ids))

    def _got_gap(self, live: LiveRequest, gap_s: float) -> None:
        self.gap.add(gap_s)
        if gap_s > live.worst_gap_s:
            live.worst_gap_s = gap_s
        if live.gaps is not None:
            live.gaps.append(gap_s)

    def completed(self, request_id: str, engine: int, now: float) -> RequestRecord:
        """It has all its tokens, which may be none."""
        live = self.live.pop(request_id)
        live.last_s = now
        record = live.record(engine)
        self.num_completed += 1
        self.num_prompt_tokens += record.num_prompt
        self.num_output_tokens += record.num_output
        self.num_cached_tokens += record.num_cached
        if record.ttft_s is not None:
            self.ttft.add(record.ttft_s)
        self.e2e.add(record.e2e_s)
        if record.itl_s is not None:
            self.itl.add(record.itl_s)
        broken = self.slo.broken(record)
        self.num_in_slo += not broken
        for name in broken:
            self.num_broken[name] = self.num_broken.get(name, 0) + 1
        if self.keep_requests:
            self.records.append(record)
        if live.gaps is not None:
            self.gaps[request_id] = live.gaps
        return record
