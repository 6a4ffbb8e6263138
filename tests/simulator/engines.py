"""Engines and loads for tests of the simulator: a cost that can be computed by hand, and toy sizes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from octavo.config import CacheConfig, SchedulerConfig
from octavo.core.cost import StepShape
from octavo.core.step import StepPlan
from octavo.simulator.engine_spec import EngineSpec
from octavo.simulator.report import SimulationReport
from octavo.simulator.simulation import Simulation, SimulationOptions
from octavo.workload.requests import WorkloadRequest

STEP_S, ROW_S, POSITION_S = 0.5, 0.01, 0.0001


class LinearCost:
    """Half a second for a step, a hundredth for a row, a ten-thousandth for a position read."""

    def seconds(self, plan: StepPlan) -> float:
        return self.seconds_of(StepShape.of(plan))

    def seconds_of(self, shape: StepShape) -> float:
        return STEP_S + ROW_S * shape.num_rows + POSITION_S * shape.num_context


class PlanCost:
    """As ``LinearCost``, but it wants to see plans."""

    def seconds(self, plan: StepPlan) -> float:
        return LinearCost().seconds(plan)


def engine(num_blocks: int = 64, block_size: int = 4, cache: dict[str, Any] | None = None, **options: Any) -> EngineSpec:
    """``options``: fields of EngineSpec; what it has not goes to SchedulerConfig."""
    names = set(EngineSpec.__dataclass_fields__)
    scheduler = {name: options.pop(name) for name in list(options) if name not in names}
    config = SchedulerConfig(**{"max_num_seqs": 8, "max_num_batched_tokens": 16, "admission_lookahead": 4, **scheduler})
    return EngineSpec(
        **{"cost": LinearCost(), "max_model_len": 200, **options},
        num_blocks=num_blocks,
        scheduler=config,
        cache=CacheConfig(block_size=block_size, **(cache or {})),
    )


def work(arrival_s: float, num_prompt: int, num_output: int, token: int = 1) -> WorkloadRequest:
    return WorkloadRequest(arrival_s, [token] * num_prompt, num_output)


def run(specs: Sequence[EngineSpec], load: Iterable[WorkloadRequest], **options: Any) -> SimulationReport:
    """All requests kept; the books of every engine are checked at the end."""
    simulation = Simulation(specs, options.pop("router", None), SimulationOptions(keep_requests=True, **options))
    report = simulation.run(load)
    for one in simulation.engines:
        one.scheduler.check_invariants()
    return report
