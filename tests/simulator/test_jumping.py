"""Whether steps are taken one by one or many at a time, the plans, the times and the figures are the same."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from octavo.core.step import StepPlan, StepResult
from octavo.distributed.handoff import HandoffLimits, Link
from octavo.distributed.roles import MixedLimits
from octavo.distributed.router import PrefixAffinity, RoundRobin, Router, RouteRequest, ShortestQueue, create_router
from octavo.simulator.engine_spec import EngineSpec, Speculation
from octavo.simulator.handing_over import HandoffOptions
from octavo.simulator.report import SimulationReport
from octavo.simulator.sim_costs import SimCosts
from octavo.simulator.sim_engine import SimEngine
from octavo.simulator.simulation import Simulation, SimulationOptions
from octavo.workload.arrivals import OpenLoop
from octavo.workload.lengths import Uniform
from octavo.workload.requests import Independent, SharedPrefix, TokenRange, Workload, WorkloadRequest
from tests.simulator.engines import PlanCost, engine

PlanLog = list[tuple[int, int, tuple[tuple[int, int, int], ...]]]  # (engine, step, ((seq_id, start, rows), ...))


class FewestBlocks(Router):
    """A router that looks at the pools, so that no run of steps stays whole."""

    def choose(self, request: RouteRequest, engines: Any) -> int:
        return max(range(len(engines)), key=lambda i: (engines[i].num_available_blocks, -i))


LINK = HandoffOptions(Link(5e3, 0.01))
SPLIT = [engine(role="prefill", kv_bytes_per_token=100), engine(role="decode", num_blocks=20), engine(role="decode", num_blocks=24)]
CASES: dict[str, tuple[list[EngineSpec], dict[str, Any]]] = {
    "one engine": ([engine()], {}),
    "overloaded, preempting": ([engine(num_blocks=14, admission_lookahead=1)], {}),
    "long queue": ([engine(num_blocks=14, admission_lookahead=64)], {}),
    "plans are priced": ([engine(cost=PlanCost())], {}),
    "no prefix cache": ([engine(cache={"enable_prefix_caching": False}), engine()], {"router": RoundRobin}),
    "static batches": ([engine(scheduling_policy="static")], {}),
    "reserved": ([engine(cache={"enable_prefix_caching": False, "kv_reservation": "oracle"})], {}),
    "fair": ([engine(scheduling_policy="fair")], {}),
    "bounded gaps": ([engine(max_itl_ms=900.0)], {}),
    "router that looks at blocks": ([engine(), engine()], {"router": FewestBlocks}),
    "router of prefixes": ([engine(), engine()], {"router": lambda: PrefixAffinity(4)}),
    "closed loop": ([engine()], {"concurrency": 5}),
    "stopped": ([engine(), engine()], {"until_s": 40.0}),
    "split": (SPLIT, {"handoff": LINK}),
    "split, no room in time": ([SPLIT[0], replace(SPLIT[1], num_blocks=12)], {"handoff": HandoffOptions(Link(5e3), HandoffLimits(2.0))}),
    "split, slow link": (SPLIT, {"handoff": HandoffOptions(Link(1300.0), HandoffLimits(copy_s=2.0))}),
    "router of published keys": ([engine(), engine()], {"router": lambda: create_router("soonest", 4, SimCosts())}),
    "mixed pool": (SPLIT, {"handoff": LINK, "mixed": MixedLimits(borrow_s=1.0, return_s=0.9, hold_s=5.0)}),
    "drafts": ([engine(speculation=Speculation(3, 0.6))], {}),
}


def load() -> Iterator[WorkloadRequest]:
    """Prompts of two token ids, so that some are equal, some share beginnings and some text is the same."""
    pairs = Independent(Uniform(1, 24), Uniform(1, 30))
    return Workload(OpenLoop(0.55), pairs, 90, SharedPrefix(9, 3), TokenRange(1, 3), seed=5).requests()


def logged(one: SimEngine, log: PlanLog) -> None:
    """Write down each plan of an engine, those that are jumped over as well."""
    execute, repeat = one.backend.execute, one.loop.repeat

    def logged_execute(plan: StepPlan) -> StepResult:
        log.append((one.index, plan.step_index, tuple((piece.seq_id, piece.start, piece.num_tokens) for piece in plan.slices)))
        return execute(plan)

    def logged_repeat(num_steps: int, token_ids: list[int]) -> list[tuple[int, int]]:
        starts = [(seq.seq_id, seq.num_computed) for seq in one.scheduler.running_sequences]
        first = one.scheduler._num_plans
        for i in range(num_steps):
            log.append((one.index, first + i, tuple((seq_id, start + i, 1) for seq_id, start in starts)))
        return repeat(num_steps, token_ids)

    one.backend.execute = logged_execute  # type: ignore[method-assign]
    one.loop.repeat = logged_repeat  # type: ignore[method-assign]


def outcome(specs: list[EngineSpec], options: dict[str, Any], jump: bool) -> tuple[SimulationReport, Simulation, list[PlanLog]]:
    options = dict(options)
    make_router: Callable[[], Router] = options.pop("router", ShortestQueue)
    simulation = Simulation(specs, make_router(), SimulationOptions(jump=jump, keep_requests=True, keep_gaps=True, **options))
    logs = [PlanLog() for _ in specs]
    for one, log in zip(simulation.engines, logs, strict=True):
        logged(one, log)
    report = simulation.run(load())
    for one in simulation.engines:
        one.interrupt()
        one.scheduler.check_invariants()
    return report, simulation, logs


@pytest.mark.parametrize("name", CASES)
def test_jumping_changes_nothing(name: str) -> None:
    specs, options = CASES[name]
    stepped, by_steps, plans = outcome(specs, options, jump=False)
    jumped, by_jumps, jumped_plans = outcome(specs, options, jump=True)
    assert (stepped.num_completed == 90) == (name != "stopped")
    assert {**stepped.to_dict(), "num_jumped_steps": 0, "engines": 0} == {**jumped.to_dict(), "num_jumped_steps": 0, "engines": 0}
    assert [replace(one, num_jumped_steps=0) for one in jumped.engines] == list(stepped.engines)
    assert by_steps.log.gaps == by_jumps.log.gaps
    assert stepped.records == jumped.records
    assert plans == jumped_plans
    jumps = name not in ("drafts", "fair", "bounded gaps")
    assert (jumped.num_jumped_steps > 0.1 * jumped.num_steps) == jumps
    assert stepped.num_jumped_steps == 0


@pytest.mark.parametrize("at_token", [False, True])
def test_room_that_is_taken_as_a_run_begins_is_taken_amid_its_first_step(at_token: bool) -> None:
    """Copies take no time, so that a prompt often begins, or is done, when its receiver begins to repeat."""
    rng, now, requests = random.Random(149), 0.0, []
    num_blocks = rng.choice((18, 24, 40))
    for i in range(40):
        now += rng.expovariate(rng.choice((0.3, 1.0)))
        requests.append(WorkloadRequest(round(now, 1), [i + 1] * rng.randint(4, 30), rng.randint(2, 30)))
    options = {"handoff": HandoffOptions(Link(1e300, 0.0), at_token=at_token), "keep_requests": True}
    specs = [SPLIT[0], replace(SPLIT[1], num_blocks=num_blocks)]
    runs = [Simulation(specs, None, SimulationOptions(jump=jump, **options)).run(requests) for jump in (True, False)]  # type: ignore[arg-type]
    assert runs[0].num_jumped_steps > 0 and runs[0].records == runs[1].records


def test_cases_are_what_they_say() -> None:
    assert outcome(*CASES["overloaded, preempting"], jump=True)[0].num_preemptions > 5
    assert outcome(*CASES["one engine"], jump=True)[0].cached_tokens > 100
    assert outcome(*CASES["split"], jump=True)[0].num_handed_over > 80
    for name in ("split, no room in time", "split, slow link"):
        report = outcome(*CASES[name], jump=True)[0]
        assert report.num_handoffs_failed > 5 and report.num_handed_over > 5, name
