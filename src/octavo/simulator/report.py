"""The figures of a simulation, and the table that shows them. Made from the log and the engines; computes nothing anew.

A figure that has nothing to rest on, such as the mean of no request, is None: never 0 and never nan.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from typing import Any

from octavo.simulator.handing_over import HandoffStats
from octavo.simulator.records import RequestLog, RequestRecord
from octavo.simulator.sim_engine import SimEngine

Summary = dict[str, float | int | None]


@dataclass(frozen=True, slots=True)
class EngineReport:
    """``busy_share``: of the time that it was there, a step was in flight. ``pool_mean`` and ``pool_most``: share of the KV pool in use
    while busy."""

    name: str
    role: str
    num_requests: int
    num_steps: int
    num_jumped_steps: int
    num_preemptions: int
    busy_share: float | None
    pool_mean: float | None
    pool_most: float
    energy_j: float | None  # None where no watts are known
    cost_usd: float | None
    there_s: float  # of the run, its start included


@dataclass(frozen=True, slots=True)
class SimulationReport:
    """Times in seconds; ``itl_s`` is over the requests' means, ``gap_s`` over all gaps between tokens. ``duration_s``: from 0 to the last
    event. ``slo_attainment``: of the requests that arrived, completed within all limits."""

    num_arrived: int
    num_completed: int
    num_refused: int
    num_failed: int
    num_unfinished: int
    first_refusal: str | None
    duration_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    requests_per_s: float | None
    output_tokens_per_s: float | None
    slo_attainment: float | None
    num_broken: dict[str, int]  # completed requests that broke a limit, by its name
    ttft_s: Summary
    itl_s: Summary
    gap_s: Summary
    e2e_s: Summary
    num_handed_over: int  # requests that a decode engine took over
    num_handoffs_failed: int  # and those that ran on where they began
    num_moved: int  # times that a request went on elsewhere, its engine being gone
    energy_j: float | None  # None where a machine's watts are not known
    cost_usd: float | None  # None where a machine has no price
    num_steps: int
    num_jumped_steps: int
    num_preemptions: int
    engines: tuple[EngineReport, ...]
    records: tuple[RequestRecord, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, the records left out."""
        data = asdict(self)
        del data["records"]
        return data


def report_of(log: RequestLog, engines: Seq[SimEngine], handoffs: HandoffStats, duration_s: float) -> SimulationReport:
    """The figures of a run that has taken ``duration_s`` of virtual time."""
    reports = tuple(_engine_report(engine, duration_s) for engine in engines)
    costs, joules = [report.cost_usd for report in reports], [report.energy_j for report in reports]
    return SimulationReport(
        num_arrived=log.num_arrived,
        num_completed=log.num_completed,
        num_refused=log.num_refused,
        num_failed=log.num_failed,
        num_unfinished=len(log.live),
        first_refusal=log.first_refusal,
        duration_s=duration_s,
        prompt_tokens=log.num_prompt_tokens,
        output_tokens=log.num_output_tokens,
        cached_tokens=log.num_cached_tokens,
        requests_per_s=log.num_completed / duration_s if duration_s else None,
        output_tokens_per_s=log.num_output_tokens / duration_s if duration_s else None,
        slo_attainment=log.num_in_slo / log.num_arrived if log.num_arrived else None,
        num_broken=dict(log.num_broken),
        ttft_s=log.ttft.summary(),
        itl_s=log.itl.summary(),
        gap_s=log.gap.summary(),
        e2e_s=log.e2e.summary(),
        num_handed_over=handoffs.num_handed_over,
        num_handoffs_failed=handoffs.num_failed,
        num_moved=log.num_moved,
        energy_j=None if None in joules else sum(energy for energy in joules if energy is not None),
        cost_usd=None if None in costs else sum(cost for cost in costs if cost is not None),
        num_steps=sum(report.num_steps for report in reports),
        num_jumped_steps=sum(report.num_jumped_steps for report in reports),
        num_preemptions=sum(report.num_preemptions for report in reports),
        engines=reports,
        records=tuple(log.records),
    )


def _engine_report(engine: SimEngine, duration_s: float) -> EngineReport:
    stats, spec, power = engine.stats, engine.spec, engine.spec.power
    there_s = max(0.0, min(duration_s, engine.there_to_s) - engine.there_from_s)
    num_blocks, idle_s = engine.scheduler.num_blocks, max(0.0, there_s - stats.busy_s)
    return EngineReport(
        name=spec.name,
        role=spec.role,
        num_requests=stats.num_requests + stats.num_taken_over,
        num_steps=stats.num_steps,
        num_jumped_steps=stats.num_jumped_steps,
        num_preemptions=stats.num_preemptions + engine.scheduler.stats.num_preemptions,
        busy_share=stats.busy_s / there_s if there_s else None,
        pool_mean=stats.block_s / stats.busy_s / num_blocks if stats.busy_s else None,
        pool_most=stats.most_blocks / num_blocks,
        energy_j=power.busy_w * stats.busy_s + power.idle_w * idle_s if power.busy_w else None,
        cost_usd=None if power.usd_per_hour is None else power.usd_per_hour * there_s / 3600.0,
        there_s=there_s,
    )
