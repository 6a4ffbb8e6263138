"""The simulator against the engine itself: the same arrivals and lengths through both, and how far apart the figures are.

    scenes (calibration) ─▶ cost of steps ─▶ rates of the loads ─▶ real runs, in turn with more scenes ─▶ simulated runs ─▶ comparison

The loads are held out from the calibration: its scenes have other lengths and no arrivals. Scenes and runs take turns, so that a machine
which changes its pace in these minutes does so for both. What is compared is the engine without HTTP, which the simulator does not charge
for.

Owns the loads and the order of a measurement. What counts as agreement is ``engine_figures``' to say, and how requests are sent
``bench.engine_load``'s.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import statistics
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from octavo.bench.engine_load import run_engine_load
from octavo.bench.tables import table
from octavo.config import ConfigError, EngineConfig
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.calibrate import Calibrator, Progress
from octavo.engine.engine import Engine
from octavo.engine.step_costs import fitted_for
from octavo.engine.step_log import StepLog, bias
from octavo.reproduce.compared import Limits, digits
from octavo.reproduce.engine_figures import Comparison, Figures, Served, compare
from octavo.simulator.engine_spec import EngineSpec
from octavo.simulator.scenario import fitted_engine
from octavo.simulator.simulation import Simulation, SimulationOptions
from octavo.workload.arrivals import OpenLoop
from octavo.workload.lengths import LogNormal
from octavo.workload.requests import Independent, TokenRange, Workload, WorkloadRequest

LOADS = (("idle", 0.08), ("light", 0.3), ("half", 0.55), ("busy", 0.8), ("overload", 1.25))
"""Names, and arrivals as shares of the highest rate that the simulated engine serves."""
TTFT_SLO, ITL_SLO = 5.0, 4.0  # limits, in multiples of what the simulated idle load has in the middle
_WINDOW = 0.9  # of a run's seconds in which requests come; the rest is for the last ones to end
_FIRST_SHARE = 0.25  # of the calibration's time, before the rates of the loads are set


@dataclass(frozen=True, slots=True)
class AccuracyCase:
    """``load_s``: seconds of one run. ``calibrate_s``: of all scenes together; with a cost that is given there are none."""

    repeat: int = 3
    load_s: float = 25.0
    calibrate_s: float = 60.0
    loads: tuple[tuple[str, float], ...] = LOADS
    prompt: LogNormal = LogNormal(140.0, 0.9, 4, 900)
    output: LogNormal = LogNormal(60.0, 0.7, 2, 300)
    seed: int = 0


# --- loads ------------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fitting:
    """As ``LengthPairs``: lengths of a case, cut to what a sequence of the engine may have."""

    case: AccuracyCase
    max_tokens: int

    def lengths(self, rng: random.Random) -> Iterator[tuple[int, int]]:
        for num_prompt, num_output in Independent(self.case.prompt, self.case.output).lengths(rng):
            num_output = min(num_output, max(1, self.max_tokens // 4))
            yield min(num_prompt, self.max_tokens - num_output), num_output


def load_requests(case: AccuracyCase, name: str, rate: float, share: float, max_tokens: int) -> list[WorkloadRequest]:
    """The requests of a load: Poisson arrivals for as long as they can be answered in ``case.load_s``; at least one."""
    end_s = _WINDOW * case.load_s / max(1.0, share)
    work = Workload(OpenLoop(rate), Fitting(case, max_tokens), seed=f"{case.seed}:{name}")
    found = list(itertools.takewhile(lambda request: request.arrival_s < end_s, work.requests()))
    return found or list(itertools.islice(work.requests(), 1))


def with_other_tokens(requests: Seq[WorkloadRequest], tokens: TokenRange, seed: str) -> list[WorkloadRequest]:
    """The same arrivals and lengths with prompts that no cache knows."""
    rng = random.Random(seed)
    return [replace(request, prompt_token_ids=tokens.draw(rng, len(request.prompt_token_ids))) for request in requests]


def simulate(spec: EngineSpec, requests: Seq[WorkloadRequest], concurrency: int | None = None) -> list[Served]:
    """What the simulator says of them. With ``concurrency`` a closed loop."""
    options = SimulationOptions(keep_requests=True, concurrency=concurrency)
    return [Served.simulated(record) for record in Simulation([spec], None, options).run(requests).records]


def capacity(spec: EngineSpec, case: AccuracyCase) -> float:
    """The requests per second that the simulated engine serves with as many at once as it takes."""
    width = spec.scheduler.max_num_seqs
    work = Workload(OpenLoop(1.0), Fitting(case, spec.max_model_len), 8 * width, seed=f"{case.seed}:capacity")
    ends = sorted(one.last_s for one in simulate(spec, list(work.requests()), width))
    first, last = len(ends) // 8, len(ends) * 7 // 8  # neither the start nor the end, when fewer are there
    return (last - first) / (ends[last] - ends[first])


# --- the measurement --------------------------------------------------------------------------------------------------------------------


class LoadRuns(NamedTuple):
    """Real runs of one load, with the steps of each."""

    name: str
    rate: float
    requests: list[WorkloadRequest]
    runs: list[list[Served]]
    logs: list[StepLog]
    num_failed: int


@dataclass(frozen=True, slots=True)
class Accuracy:
    """``loads``: name, requests per second, number of requests, and of each real run the bias of its steps: their seconds by the cost model
    over those that they took, less 1."""

    model: str
    comparisons: tuple[Comparison, ...]
    loads: tuple[tuple[str, float, int, tuple[float, ...]], ...]
    limits: Limits
    errors: dict[str, Any]
    num_failed: int

    @property
    def agrees(self) -> bool:
        return not self.num_failed and all(one.agrees for one in self.comparisons)

    def record(self) -> dict[str, Any]:
        loads = [
            {"load": name, "rate": digits(rate), "num_requests": number, "step_bias": [digits(one) for one in biases]}
            for name, rate, number, biases in self.loads
        ]
        limits = {"ttft_s": digits(self.limits.ttft_s), "itl_s": digits(self.limits.itl_s)}
        compared = [one.record() for one in self.comparisons]
        return {
            "bench": "simulator", "model": self.model, "agrees": self.agrees, "num_failed": self.num_failed, "slo": limits, "loads": loads,
            "held_out_errors": self.errors, "figures": compared,
        }  # fmt: skip

    def text(self) -> str:
        """A table of all figures, and of the loads what may explain them."""
        rows = [["load", "figure", "real (median)", "spread", "simulated", "difference", "at their pace", ""]]
        for one in self.comparisons:
            shown = _SHOWN[one.figure]
            spread = f"{shown(min(one.real))} to {shown(max(one.real))}"
            points = "points" if one.figure == "slo_share" else "%"
            verdict = "agrees" if one.agrees else "is off"
            verdict += ", within the spread" if one.in_spread and len(one.real) > 1 else ""
            differences = [f"{100 * off:+.1f} {points}" for off in (one.difference, one.difference_at_pace)]
            rows.append([one.load, _NAMES[one.figure], shown(one.median), spread, shown(one.simulated), *differences, verdict])
        loads = [["load", "requests/s", "requests", "seconds of steps, predicted over taken, by run"]]
        for name, rate, number, biases in self.loads:
            loads.append([name, f"{rate:.3g}", str(number), ", ".join(f"{100 * one:+.1f} %" for one in biases)])
        kept = sum(one.agrees for one in self.comparisons)
        limits = f"limits: TTFT {1000 * self.limits.ttft_s:.0f} ms, ITL {1000 * self.limits.itl_s:.1f} ms"
        failed = f"; {self.num_failed} requests failed" if self.num_failed else ""
        end = f"{kept} of {len(self.comparisons)} figures agree{failed}; {limits}"
        return f"{table(rows, '  >>>>>')}\n\n{table(loads, ' >>')}\n\n{end}"


_NAMES = {
    "ttft_p50_s": "TTFT p50, ms", "ttft_p99_s": "TTFT p99, ms", "itl_s": "ITL mean, ms", "output_per_s": "output token/s",
    "slo_share": "in the limits, %",
}  # fmt: skip
_SHOWN: dict[str, Callable[[float], str]] = {
    "ttft_p50_s": lambda value: f"{1000 * value:.1f}",
    "ttft_p99_s": lambda value: f"{1000 * value:.1f}",
    "itl_s": lambda value: f"{1000 * value:.2f}",
    "output_per_s": lambda value: f"{value:.1f}",
    "slo_share": lambda value: f"{100 * value:.1f}",
}


def measure_accuracy(config: EngineConfig, case: AccuracyCase, cost: Any = None, progress: Progress | None = None) -> Accuracy:
    """Real and simulated runs of all loads. ``cost``: Coefficients of this engine's steps; None: they are measured, in turn with the runs.

    Raises ConfigError for a cost that holds for something else, RuntimeError when no request of a run is answered.
    """
    engine = Engine.load(config)
    key = fitted_for(engine.backend)
    if cost is not None and cost.fitted_for is not None and (key is None or not cost.fitted_for.same_as(key)):
        engine.close()
        held = cost.fitted_for
        raise ConfigError(f"fitted: it holds for {held.fingerprint} on {held.threads} threads of {held.machine}, not for this engine")

    async def measured() -> Accuracy:
        running = AsyncEngine(engine)
        running.start()
        try:
            return await _measure(running, case, cost, progress or (lambda text: None))
        finally:
            await running.stop()

    return asyncio.run(measured())


async def _measure(running: AsyncEngine, case: AccuracyCase, cost: Any, progress: Progress) -> Accuracy:
    engine = running.engine
    calibrator = None if cost is not None else Calibrator(running, case.seed)
    if calibrator is not None:
        await calibrator.run(_FIRST_SHARE * case.calibrate_s, progress)
    pass_s = (1.0 - _FIRST_SHARE) * case.calibrate_s / (case.repeat * len(case.loads))
    first = cost if calibrator is None else calibrator.calibration.cost(engine)
    most = capacity(spec_of(engine, first), case)
    longest = engine.scheduler.limits.max_total_tokens
    loads = [LoadRuns(name, share * most, load_requests(case, name, share * most, share, longest), [], [], 0) for name, share in case.loads]
    tokens = TokenRange(min(100, engine.backend.vocab_size // 2), engine.backend.vocab_size)
    for number in range(case.repeat):
        for i, load in enumerate(loads):
            progress(f"run {number + 1} of {case.repeat}, {load.name}: {len(load.requests)} requests")
            if calibrator is not None:
                await calibrator.run(pass_s)
            requests = with_other_tokens(load.requests, tokens, f"{case.seed}:{load.name}:{number}")
            loads[i] = await _run(running, load, requests)
    final = cost if calibrator is None else calibrator.calibration.cost(engine)
    return _compared(engine, final, loads)


async def _run(running: AsyncEngine, load: LoadRuns, requests: Seq[WorkloadRequest]) -> LoadRuns:
    """One real run, its step log kept."""
    log = running.engine.step_log = StepLog()
    try:
        records = await run_engine_load(running, requests)
    finally:
        running.engine.step_log = None
    whole = [record for record in records if record.error_kind is None and record.event_times]
    if not whole:
        raise RuntimeError(f"no request of the load {load.name!r} was answered: {records[0].error_message}")
    started_s = records[0].due_s - requests[0].arrival_s
    served = [Served.of_record(record, started_s) for record in whole]
    num_failed = load.num_failed + len(records) - len(whole)
    return load._replace(runs=[*load.runs, served], logs=[*load.logs, log], num_failed=num_failed)


def spec_of(engine: Engine, cost: Any) -> EngineSpec:
    """``engine`` as the simulator has it."""
    config, layout = engine.config, engine.backend.kv_capacity(0).layout
    return replace(fitted_engine(cost, engine.num_kv_blocks, engine.max_model_len, config.scheduler, config.cache), layout=layout)


def _compared(engine: Engine, cost: Any, loads: Seq[LoadRuns]) -> Accuracy:
    spec = spec_of(engine, cost)
    simulated = [simulate(spec, load.requests) for load in loads]
    idle = Figures.of(simulated[0], len(simulated[0]), Limits(math.inf, math.inf))
    limits = Limits(TTFT_SLO * idle.ttft_p50_s, ITL_SLO * idle.itl_s)
    comparisons, about = list[Comparison](), list[tuple[str, float, int, tuple[float, ...]]]()
    for load, guess in zip(loads, simulated, strict=True):
        number, biases = len(load.requests), tuple(bias(cost, log.steps) for log in load.logs)
        paced = simulate(spec_of(engine, cost.times(1.0 / (1.0 + statistics.fmean(biases)))), load.requests)
        real = [Figures.of(served, number, limits) for served in load.runs]
        comparisons += compare(load.name, real, Figures.of(guess, number, limits), Figures.of(paced, number, limits))
        about.append((load.name, load.rate, number, biases))
    errors = {kind: {name: digits(value) for name, value in one.items()} for kind, one in _errors(cost).items()}
    return Accuracy(engine.model.name, tuple(comparisons), tuple(about), limits, errors, sum(load.num_failed for load in loads))


def _errors(cost: Any) -> dict[str, dict[str, float]]:
    return {kind: asdict(one) for kind, one in cost.errors.items()}
