"""The public simulator's rules in the engine's own loop: the golden runs whose machines do both phases, stepped and jumped."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any, cast

import pytest

from octavo.core.policies.splitwise_scheduler import SplitwiseScheduler
from octavo.core.scheduler import Scheduler
from octavo.costs.tables import TableCost
from octavo.distributed.router import Router, RouteRequest
from octavo.simulator.engine_spec import EngineSpec
from octavo.simulator.simulation import Simulation, SimulationOptions
from octavo.workload.requests import WorkloadRequest
from tests.simulator.splitwise_golden import NUM_KV_TOKENS, RUNS, per_request, table, trace

BASELINES = [run for run in RUNS if run["name"] == "baseline-a100-4"]


class FewestPending(Router):
    """``token_jsq`` over the schedulers' own count."""

    def choose(self, request: RouteRequest, engines: Seq[Any]) -> int:
        return min(range(len(engines)), key=lambda place: engines[place].scheduler.num_pending_tokens)


@pytest.mark.parametrize("run", BASELINES, ids=lambda run: run["trace"])
def test_a_golden_run_in_the_loop(run: dict[str, Any]) -> None:
    num_kv_tokens = int(NUM_KV_TOKENS)
    make = cast("Callable[[], Scheduler]", lambda: SplitwiseScheduler(num_kv_tokens))
    spec = EngineSpec(TableCost(table("a100-80gb")), num_kv_tokens, make_scheduler=make)
    simulation = Simulation([spec] * 4, FewestPending(), SimulationOptions(keep_requests=True))
    report = simulation.run(WorkloadRequest(at_s, [0] * num_prompt, num_output) for at_s, num_prompt, num_output in trace(run["trace"]))
    golden = per_request(run["per_request"])
    assert report.num_completed == len(golden) == len(report.records)
    assert report.num_jumped_steps > report.num_steps / 2
    for record in report.records:
        expected = golden[int(record.request_id)]
        assert record.engine == expected["decode_machine"], record
        assert record.ttft_s == pytest.approx(expected["ttft_s"], abs=1e-8, rel=0), record
        assert record.e2e_s == pytest.approx(expected["e2e_s"], abs=1e-8, rel=0), record
