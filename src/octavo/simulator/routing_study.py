"""Ways of routing compared on conversations: the same requests over the same engines, with the prefix cache that each of them has.

    conversations ─▶ Simulation, once for each router and seed ─▶ what was found in caches, what was computed, how long it took

Nothing of a cache is modelled: every engine runs the real one, and a router hears of its keys what a worker would tell. Owns the load and
the sums; routers are those of ``distributed.router``, by name.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import takewhile

from octavo.backends.sim import PlaceholderText
from octavo.distributed.router import create_router
from octavo.simulator.engine_spec import EngineSpec
from octavo.simulator.front_end import FrontEndOptions
from octavo.simulator.fronted import FrontedSimulation
from octavo.simulator.report import SimulationReport
from octavo.simulator.sim_costs import SimCosts
from octavo.simulator.simulation import Simulation, SimulationOptions
from octavo.workload.arrivals import OpenLoop
from octavo.workload.conversations import Conversations
from octavo.workload.lengths import LogNormal
from octavo.workload.requests import WorkloadRequest

ANSWER_TOKEN = 99
BASELINE = "round-robin"
COMPARED = ("round-robin", "shortest-queue", "prefix-affinity", "soonest")


@dataclass(frozen=True, slots=True)
class RoutingCase:
    """``rate``: sessions per second; turns that come within ``duration_s`` are run, all of them to their end."""

    num_engines: int = 4
    rate: float = 1.0
    duration_s: float = 60.0
    mean_turns: float = 6.0
    num_system: int = 200
    num_groups: int = 4
    pause_s: float = 8.0

    def conversations(self, seed: int) -> Conversations:
        """ShareGPT-like questions and answers behind one of a few system prompts."""
        question, answer = LogNormal(161.0, 1.0, 4, 1024), LogNormal(120.0, 0.8, 4, 512)
        return Conversations(
            OpenLoop(self.rate), question, answer, self.mean_turns, num_system=self.num_system, num_groups=self.num_groups,
            pause_s=self.pause_s, answer_token=ANSWER_TOKEN, seed=seed,
        )  # fmt: skip

    def requests(self, seed: int) -> Seq[WorkloadRequest]:
        return list(takewhile(lambda request: request.arrival_s < self.duration_s, self.conversations(seed).requests()))


@dataclass(frozen=True, slots=True)
class Routed:
    """One run. ``num_computed``: prompt tokens that were not found in a cache. ``share``: of the busiest engine, of all steps' seconds."""

    router: str
    seed: int
    num_requests: int
    num_prompt: int
    num_cached: int
    ttft_p50_s: float
    ttft_p90_s: float
    itl_p50_s: float
    share: float

    @property
    def num_computed(self) -> int:
        return self.num_prompt - self.num_cached

    @property
    def hit_rate(self) -> float:
        """Of prompt tokens."""
        return self.num_cached / self.num_prompt if self.num_prompt else 0.0

    def to_dict(self) -> dict[str, object]:
        return {
            "router": self.router, "seed": self.seed, "num_requests": self.num_requests, "num_prompt": self.num_prompt,
            "num_cached": self.num_cached, "num_computed": self.num_computed, "hit_rate": self.hit_rate,
            "ttft_p50_s": self.ttft_p50_s, "ttft_p90_s": self.ttft_p90_s, "itl_p50_s": self.itl_p50_s, "busiest_share": self.share,
        }  # fmt: skip


def route_once(
    spec: EngineSpec, case: RoutingCase, router: str, seed: int, learn: bool = False, front_end: FrontEndOptions | None = None
) -> Routed:
    """One run of ``case`` over engines like ``spec``, whose text is the answers that the conversations expect. ``learn``: a router that
    wants prices learns them from what engines tell, as in a cluster; else it asks the engines' cost model. ``front_end``: requests wait
    before it while engines have enough to do, and of engines and answers no more is known than in a cluster; None: each goes at once."""
    specs = [replace(spec, name=f"engine-{i}", text=PlaceholderText(only=ANSWER_TOKEN)) for i in range(case.num_engines)]
    made = create_router(router, spec.cache.block_size, None if learn or front_end is not None else SimCosts())
    options = SimulationOptions(seed=seed)
    run = Simulation(specs, made, options) if front_end is None else FrontedSimulation(specs, made, options, front_end)
    report = run.run(case.requests(seed))
    if report.num_completed < report.num_arrived:
        raise ValueError(f"requests: {report.num_arrived - report.num_completed} did not complete: {report.first_refusal}")
    return _routed(report, router, seed)


def _routed(report: SimulationReport, router: str, seed: int) -> Routed:
    busy = [engine.busy_share or 0.0 for engine in report.engines]
    return Routed(
        router, seed, report.num_completed, report.prompt_tokens, report.cached_tokens,
        float(report.ttft_s["p50"] or 0.0), float(report.ttft_s["p90"] or 0.0), float(report.itl_s["p50"] or 0.0),
        max(busy) / sum(busy) if sum(busy) else 0.0,
    )  # fmt: skip


def computed_over(runs: Seq[Routed], router: str, baseline: str = BASELINE) -> tuple[float, float]:
    """(least, most) over seeds of the prompt tokens that ``router`` computed, over those of ``baseline``. ValueError where either lacks."""
    by_seed = {(run.router, run.seed): run.num_computed for run in runs}
    seeds = sorted({run.seed for run in runs if run.router == router} & {run.seed for run in runs if run.router == baseline})
    if not seeds:
        raise ValueError(f"runs: none of {router!r} and {baseline!r} with one seed")
    ratios = [by_seed[router, seed] / by_seed[baseline, seed] for seed in seeds]
    return min(ratios), max(ratios)
