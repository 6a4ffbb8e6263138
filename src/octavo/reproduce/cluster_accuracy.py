"""Ways of serving with two workers, measured under the same loads, and what the simulator says of them.

    scenes, probes ─▶ Predictor ─▶ rates of the loads ─▶ real runs, ways in turn, with more scenes between ─▶ simulated runs ─▶ comparison

Prefill and decode apart, two replicas that compute prompts in chunks, and two whose prompts are whole and go first, each worker on threads
of its own. Loads have lengths of recorded traces, scaled down to what a small machine serves; their rates are shares of what the weakest
way serves as simulated, so that all ways answer the same requests. They are held out from what the predictor is learned from. Percentiles
at the end of a distribution are taken over all runs of a load together: over one they would hang on a request or two.

Owns the loads and the order of a measurement. Requests do not go through HTTP.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import statistics
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any

from octavo.bench.cluster_ways import (
    WORKER,
    Delivered,
    Overlap,
    Probe,
    RunningWay,
    SceneRounds,
    Way,
    WayRun,
    deliveries,
    overlaps,
    probes,
    running_ways,
)
from octavo.bench.logged_worker import LoggedStep
from octavo.bench.stream_record import StreamRecord
from octavo.bench.tables import table
from octavo.config import EngineConfig
from octavo.costs.fitting import MIN_STEPS
from octavo.distributed.wire import WorkerLimits
from octavo.engine.calibrate import Progress
from octavo.reproduce.cluster_prediction import Answer, Predictor, learned
from octavo.reproduce.compared import Limits, digits
from octavo.reproduce.simulator_accuracy import with_other_tokens
from octavo.reproduce.way_figures import TOLERANCE, WayComparison, WayFigures, compared
from octavo.workload.arrivals import OpenLoop
from octavo.workload.requests import LengthPairs, TokenRange, Workload, WorkloadRequest
from octavo.workload.traces import Trace

SHARES = (0.3, 0.6, 0.9)
TTFT_SLO, ITL_SLO = 4.0, 2.0  # limits, in multiples of what the simulated first way has in the middle, one request at a time
_FIRST_SHARE = 0.5  # of the calibration's time, before the rates of the loads are set
_CAPACITY_REQUESTS = 6  # for each sequence that runs at once
_PROBE_REPEATS, _STREAM_REPEATS = 3, 2
_NUM_DRAWS = 3  # of all simulated runs of a load, in which steps differ as those that were measured


@dataclass(frozen=True, slots=True)
class WaysCase:
    """``loads``: lengths by name. ``num_requests``: of a run; ``calibrate_s``: seconds of all scenes together."""

    loads: Mapping[str, LengthPairs]
    repeat: int = 2
    num_requests: int = 35
    calibrate_s: float = 60.0
    shares: tuple[float, ...] = SHARES
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Scaled:
    """As ``LengthPairs``: those of a trace over ``prompt_by`` and ``output_by``, drawn with replacement, cut to ``max_tokens`` together."""

    trace: Trace
    prompt_by: float
    output_by: float
    max_tokens: int = 1 << 24

    def lengths(self, rng: random.Random) -> Iterator[tuple[int, int]]:
        rows = self.trace.rows
        while True:
            row = rng.choice(rows)
            num_output = min(max(1, round(row.num_output / self.output_by)), max(1, self.max_tokens // 2))
            yield min(max(1, round(row.num_prompt / self.prompt_by)), self.max_tokens - num_output), num_output


def two_workers(config: EngineConfig, chunk: int) -> list[Way]:
    """The ways that are compared. ``config``: what they have in common; ``chunk``: tokens of a step of the replicas in chunks."""

    def scheduled(**settings: Any) -> EngineConfig:
        return replace(config, scheduler=replace(config.scheduler, **settings)).validate()

    whole = max(config.scheduler.max_num_batched_tokens, config.model.max_model_len or 2048)
    first = scheduled(enable_chunked_prefill=False, max_num_batched_tokens=whole, scheduling_policy="prefill_first")
    return [
        Way("apart", {"prefill": 1, "decode": 1}, config),
        Way("chunks", {"both": 2}, scheduled(max_num_batched_tokens=chunk)),
        Way("prompts first", {"both": 2}, first),
    ]


def answers_of(run: WayRun, requests: Seq[WorkloadRequest]) -> list[Answer]:
    """Those that were answered whole."""
    if not run.records:
        return []
    started_s = run.records[0].due_s - requests[0].arrival_s
    return [_answer(record, started_s) for record in run.records if record.error_kind is None and record.event_times]


def _answer(record: StreamRecord, started_s: float) -> Answer:
    times = record.event_times
    gaps = tuple(later - earlier for earlier, later in itertools.pairwise(times))
    return Answer(record.due_s - started_s, times[0] - started_s, gaps)


# --- the measurement --------------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class WayLoad:
    """A load for all ways. ``kind``: whose lengths it has. ``runs``, ``steps``: of each repetition, by way; each step with what others did
    meanwhile."""

    name: str
    kind: str
    rate: float
    requests: list[WorkloadRequest]
    runs: dict[str, list[list[Answer]]] = field(default_factory=dict)
    steps: dict[str, list[list[tuple[LoggedStep, Overlap]]]] = field(default_factory=dict)
    num_failed: int = 0


@dataclass(frozen=True, slots=True)
class WaysAccuracy:
    """``loads``: name, requests per second, number of requests; ``biases`` by load and way, of each run."""

    model: str
    comparisons: tuple[WayComparison, ...]
    loads: tuple[tuple[str, float, int], ...]
    biases: Mapping[tuple[str, str], tuple[float, ...]]
    limits: Mapping[str, Limits]
    predictor: Predictor
    num_failed: int

    @property
    def agrees(self) -> bool:
        return not self.num_failed and all(one.agrees for one in self.comparisons)

    def record(self) -> dict[str, Any]:
        predictor, link = self.predictor, self.predictor.link
        told = {
            **{f"crowding_{name}": more for name, more in predictor.crowding._asdict().items()}, "in_s": predictor.in_s,
            "out_s": predictor.back_s[0], "out_p99_s": predictor.back_s[1], "link_bytes_per_s": link.bytes_per_s,
            "link_latency_s": link.latency_s, "wake_s": predictor.cost.wake_s,
        }  # fmt: skip
        loads = [{"load": name, "rate": digits(rate), "num_requests": number} for name, rate, number in self.loads]
        biases = [{"load": load, "way": way, "step_bias": [digits(one) for one in some]} for (load, way), some in self.biases.items()]
        limits = {name: {"ttft_s": digits(one.ttft_s), "itl_s": digits(one.itl_s)} for name, one in self.limits.items()}
        return {
            "bench": "cluster-ways", "model": self.model, "agrees": self.agrees, "num_agree": sum(one.agrees for one in self.comparisons),
            "num_close": sum(one.is_close for one in self.comparisons), "num_figures": len(self.comparisons),
            "num_failed": self.num_failed, "learned": {name: digits(value) for name, value in told.items()},
            "slo": limits, "loads": loads, "steps": biases, "figures": [one.record() for one in self.comparisons],
        }  # fmt: skip

    def text(self) -> str:
        """Every figure, and what may explain it."""
        rows = [["load", "way", "figure", "over", "real", "of each run", "simulated", "difference", "at their pace", ""]]
        for one in self.comparisons:
            scale, places = (1.0, 2) if one.figure.endswith("per_s") else (1e3, 1)
            spread = f"{scale * min(one.real):.{places}f} to {scale * max(one.real):.{places}f}"
            differences = [f"{100 * off:+.1f} %" for off in (one.difference, one.difference_at_pace)]
            verdict = "agrees" if one.agrees else "is off"
            verdict += ", within the spread" if one.in_spread and not one.is_close else ""
            numbers = [f"{scale * one.measured:.{places}f}", spread, f"{scale * one.simulated:.{places}f}"]
            over = str(one.num_values) if one.num_values else ""
            rows.append([one.load, one.way, _NAMES[one.figure], over, *numbers, *differences, verdict])
        loads = [["load", "requests/s", "requests", "seconds of steps, predicted over taken, by run"]]
        for name, rate, number in self.loads:
            ways = [(way, biases) for (load, way), biases in self.biases.items() if load == name]
            shown = "; ".join(f"{way} {', '.join(f'{100 * one:+.1f} %' for one in biases)}" for way, biases in ways)
            loads.append([name, f"{rate:.3g}", str(number), shown])
        return f"{table(rows, '   >>>>>>')}\n\n{table(loads, ' >>')}\n\n{self._told()}\n\n{self._end()}"

    def _told(self) -> str:
        predictor, link = self.predictor, self.predictor.link
        back_s, late_s = predictor.back_s
        decode_decode, decode_prompt, prompt_decode, prompt_prompt = (f"{100 * more:.1f} %" for more in predictor.crowding)
        return (
            f"to a worker {1e3 * predictor.in_s:.2f} ms, back {1e3 * back_s:.2f} ms (p99 {1e3 * late_s:.2f}); a hand-off "
            f"{1e3 * link.latency_s:.2f} ms and {link.bytes_per_s / 1e9:.2f} GB/s; after idleness {1e3 * predictor.cost.wake_s:.2f} ms "
            f"more; beside a neighbour that decodes, steps that decode take {decode_decode} more, those with prompts {prompt_decode}, "
            f"beside one that computes prompts {decode_prompt} and {prompt_prompt}"
        )

    def _end(self) -> str:
        limits = "; ".join(f"{name}: TTFT {1e3 * one.ttft_s:.0f} ms, ITL {1e3 * one.itl_s:.1f} ms" for name, one in self.limits.items())
        num_agree, num_close = sum(one.agrees for one in self.comparisons), sum(one.is_close for one in self.comparisons)
        failed = f"; {self.num_failed} requests failed" if self.num_failed else ""
        most = f"{100 * TOLERANCE:.0f} %"
        return f"{num_agree} of {len(self.comparisons)} figures agree, {num_close} within {most}{failed}; limits of goodput, {limits}"


_NAMES = {
    "ttft_p50_s": "TTFT p50, ms", "ttft_p99_s": "TTFT p99, ms", "itl_s": "ITL mean, ms", "itl_p99_s": "ITL p99, ms",
    "output_per_s": "output token/s", "good_per_s": "goodput, requests/s",
}  # fmt: skip


def measure_ways(
    ways: Seq[Way], path: str, case: WaysCase, progress: Progress | None = None, command: Seq[str] = WORKER
) -> WaysAccuracy:
    """Real and simulated runs of all loads by all ways. ``path``, ``command``: see ``running_ways``. Raises RuntimeError when no request of
    a run is answered, and EngineUnavailable when workers cannot be started."""

    async def measure() -> WaysAccuracy:
        async with running_ways(ways, path, command) as running:
            return await _Measurement(running, case, progress or (lambda text: None)).run()

    return asyncio.run(measure())


class _Measurement:
    def __init__(self, running: Seq[RunningWay], case: WaysCase, progress: Progress) -> None:
        self._running, self._case, self._progress = running, case, progress
        self._rounds = SceneRounds(running, case.seed)
        self._probes = dict[str, list[Probe]]()
        self._delivered = list[Delivered]()

    async def run(self) -> WaysAccuracy:
        case = self._case
        await self._calibrate()
        loads = await asyncio.to_thread(lambda: self._loads(self._learned()))  # workers that hear nothing for long take themselves for lost
        num_runs = case.repeat * len(loads)
        ways = itertools.cycle(self._running)
        for number, load in itertools.product(range(case.repeat), loads):
            await self._rounds.run((1.0 - _FIRST_SHARE) * case.calibrate_s / num_runs)
            self._delivered += await deliveries(next(ways), 1)
            for running in self._running if number % 2 == 0 else reversed(self._running):
                self._progress(f"run {number + 1} of {case.repeat}, {load.name}, {running.way.name}: {len(load.requests)} requests")
                await self._answer(load, running, number)
        self._progress("simulated runs")
        return await asyncio.to_thread(self._compared, loads)

    async def _calibrate(self) -> None:
        self._progress("scenes and probes")
        for running in self._running:
            await probes(running, 1, (16,))  # what is done first takes longer
            self._probes[running.way.name] = await probes(running, _PROBE_REPEATS)
            self._delivered += await deliveries(running, _STREAM_REPEATS)
        await self._rounds.run(_FIRST_SHARE * self._case.calibrate_s, 2 * MIN_STEPS)

    def _learned(self) -> Predictor:
        return learned(self._rounds.steps, self._probes, self._delivered, f"{self._rounds.num_rounds} rounds of scenes")

    def _loads(self, predictor: Predictor) -> list[WayLoad]:
        case, found = self._case, list[WayLoad]()
        for name, lengths in case.loads.items():
            rate = min(self._capacity(predictor, running, name, lengths) for running in self._running)
            for share in case.shares:
                work = Workload(OpenLoop(share * rate), lengths, case.num_requests, seed=f"{case.seed}:{name}")
                found.append(WayLoad(f"{name} {100 * share:.0f} %", name, share * rate, list(work.requests())))
        return found

    def _capacity(self, predictor: Predictor, running: RunningWay, name: str, lengths: LengthPairs) -> float:
        way = running.way
        number = _CAPACITY_REQUESTS * way.config.scheduler.max_num_seqs * sum(way.workers.values())
        work = Workload(OpenLoop(1.0), lengths, number, seed=f"{self._case.seed}:{name}:capacity")
        return predictor.capacity(way, running.engine.limits, list(work.requests()))

    async def _answer(self, load: WayLoad, running: RunningWay, number: int) -> None:
        vocab_size, name = running.engine.model.program.vocab_size, running.way.name
        tokens = TokenRange(min(100, vocab_size // 2), vocab_size)
        requests = with_other_tokens(load.requests, tokens, f"{self._case.seed}:{load.name}:{number}")
        run = await running.run(requests)
        answers = answers_of(run, requests)
        if not answers:
            raise RuntimeError(f"no request of the load {load.name!r} was answered by {name}: {run.records[0].error_message}")
        load.num_failed += len(requests) - len(answers)
        load.runs.setdefault(name, []).append(answers)
        load.steps.setdefault(name, []).append(overlaps(run.steps))

    def _compared(self, loads: Seq[WayLoad]) -> WaysAccuracy:
        predictor, comparisons = self._learned(), list[WayComparison]()
        biases, limits = dict[tuple[str, str], tuple[float, ...]](), dict[str, Limits]()
        for name, lengths in self._case.loads.items():
            limits[name] = self._limits(predictor, lengths)
        for load, running in itertools.product(loads, self._running):
            way, worker = running.way, running.engine.limits
            limit = limits[load.kind]
            found = biases[load.name, way.name] = tuple(predictor.bias(steps) for steps in load.steps[way.name])
            paced = predictor.at_pace(statistics.fmean(found))
            guesses = [self._simulated(one, way, worker, load, limit) for one in (predictor, paced)]
            comparisons += compared(load.name, way.name, load.runs[way.name], limit, *guesses)
        about = tuple((load.name, load.rate, len(load.requests)) for load in loads)
        model, num_failed = self._running[0].engine.model.name, sum(load.num_failed for load in loads)
        return WaysAccuracy(model, tuple(comparisons), about, biases, limits, predictor, num_failed)

    def _simulated(self, predictor: Predictor, way: Way, worker: WorkerLimits, load: WayLoad, limits: Limits) -> WayFigures:
        """As many runs as real ones, so that percentiles are over as many values; the middle of several times that."""
        repeat, draws = self._case.repeat, list[WayFigures]()
        for first in range(0, repeat * (_NUM_DRAWS if predictor.draws else 1), repeat):
            seeds = (self._case.seed + first + i for i in range(repeat))
            runs = [predictor.answers(way, worker, load.requests, seed=seed) for seed in seeds]
            draws.append(WayFigures.of_runs(runs, limits))
        return WayFigures.middle(draws)

    def _limits(self, predictor: Predictor, lengths: LengthPairs) -> Limits:
        """By what the first way takes for one request at a time."""
        first = self._running[0]
        work = Workload(OpenLoop(1.0), lengths, 64, seed=f"{self._case.seed}:limits")
        alone = predictor.answers(first.way, first.engine.limits, list(work.requests()), concurrency=1)
        middle = [statistics.median(values) for values in ([a.ttft_s for a in alone], [a.itl_s for a in alone if a.gaps_s] or [math.inf])]
        return Limits(TTFT_SLO * middle[0], ITL_SLO * middle[1])
