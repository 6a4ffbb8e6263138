"""What the simulator is told of workers on this host, from what was measured of their steps, and what it then says of a load.

    steps, probes ─▶ ``learned`` ─▶ Predictor ── a way, its requests ─▶ engines of the simulation ─▶ answers

Steps of two workers hold each other up: they share memory and caches. What a step takes is therefore what it takes beside idle
neighbours, times 1 + ``crowding`` x the share of it in which the others are busy; steps that decode read more and compute less than those
with prompts, and have a crowding of their own. In a simulation that share is one number for each worker: the share of the run in which the
others are busy, found by simulating until it says itself what it was told. Pure arithmetic; measures nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import NamedTuple

from octavo.bench.cluster_ways import ROUTER, Probe, Way
from octavo.bench.logged_worker import LoggedStep
from octavo.core.cost import StepShape
from octavo.core.recording import layout_of
from octavo.core.step import StepPlan
from octavo.costs.coefficients import Coefficients
from octavo.costs.fitting import MeasuredStep, fit, predicted_s
from octavo.distributed.handoff import Link
from octavo.distributed.router import create_router
from octavo.distributed.wire import WorkerLimits
from octavo.simulator.engine_spec import EngineSpec
from octavo.simulator.handing_over import HandoffOptions
from octavo.simulator.simulation import Simulation, SimulationOptions
from octavo.workload.requests import WorkloadRequest

_HELD_UP = 3.0  # times its prediction: more of a step is not looked at where neighbours are weighed
_MIN_SPREAD = 0.1  # of overlaps, in standard deviations: below, nothing can be told of neighbours
_NUM_ROUNDS = 4  # of simulations, until shares of busy neighbours are those that were assumed
_FASTEST_LINK = 1e12  # bytes per second: beyond, time does not go by bytes


class Answer(NamedTuple):
    """A request that was answered whole. Times in seconds from the start of its run; ``gaps_s`` between its tokens."""

    arrival_s: float
    first_s: float
    gaps_s: tuple[float, ...]

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.arrival_s

    @property
    def last_s(self) -> float:
        return self.first_s + sum(self.gaps_s)

    @property
    def itl_s(self) -> float:
        """Mean time between tokens; 0 with one."""
        return statistics.fmean(self.gaps_s) if self.gaps_s else 0.0


@dataclass(frozen=True, slots=True)
class KindCost:
    """A CostModel: ``base``, steps that only decode at ``decode_by`` times its price, those with prompts at ``prompt_by`` times. The system
    holds up short steps and long ones unalike, and one factor for all would carry over from one to the other."""

    base: Coefficients
    decode_by: float = 1.0
    prompt_by: float = 1.0

    @property
    def wake_s(self) -> float:
        """What a step takes more that follows on idleness."""
        return self.base.wake_s

    def seconds(self, plan: StepPlan) -> float:
        """See CostModel."""
        return self.seconds_of(StepShape.of(plan))

    def seconds_of(self, shape: StepShape) -> float:
        """As ``seconds`` of any plan of this shape."""
        return self.base.seconds_of(shape) * (self.decode_by if _only_decodes(shape) else self.prompt_by)

    def times(self, factor: float) -> KindCost:
        """All of it, idleness too, at ``factor`` times its price."""
        return replace(self, base=self.base.times(factor))


    def beside(self, crowding: Crowding, share: float) -> KindCost:
        """Beside neighbours that are busy for a ``share`` of the time. What follows on idleness is beside them as a prompt is."""
        decode_by, prompt_by = 1.0 + crowding.decode * share, 1.0 + crowding.prompt * share
        base = replace(self.base, wake_s=self.base.wake_s * prompt_by)
        return KindCost(base, self.decode_by * decode_by, self.prompt_by * prompt_by)


def _only_decodes(shape: StepShape) -> bool:
    """Prompts of one token take what a decoding sequence does."""
    return shape.num_rows == shape.num_sequences


class Crowding(NamedTuple):
    """What neighbours that are always busy add to a step, as a share: to one that only decodes, and to one with prompts."""

    decode: float = 0.0
    prompt: float = 0.0


@dataclass(frozen=True, slots=True)
class Predictor:
    """``cost``: of a step beside idle neighbours. ``crowding``: what busy ones add to it. ``link``: of hand-offs. ``in_s``: from when a
    request is sent until a worker has it, ``out_s``: from the end of a step until its tokens are read."""

    cost: KindCost
    crowding: Crowding
    link: Link
    in_s: float
    out_s: float

    def step_s(self, step: LoggedStep, overlap: float) -> float:
        """What a step beside neighbours that are busy for a share ``overlap`` of it should take."""
        wake_s = self.cost.wake_s if step.follows_idleness else 0.0
        return (self.cost.seconds_of(step.shape) + wake_s) * _beside(self.crowding, step, overlap)

    def bias(self, steps: Iterable[tuple[LoggedStep, float]]) -> float:
        """The seconds of ``steps`` as predicted over those that they took, less 1; 0 without steps."""
        pairs = [(self.step_s(step, overlap), step.total_s) for step, overlap in steps]
        took = sum(total for _, total in pairs)
        return sum(guess for guess, _ in pairs) / took - 1.0 if took else 0.0

    def at_pace(self, bias: float) -> Predictor:
        """With all steps as much slower as those were that were predicted with ``bias``."""
        return replace(self, cost=self.cost.times(1.0 / (1.0 + bias)))

    def answers(self, way: Way, limits: WorkerLimits, requests: Seq[WorkloadRequest], concurrency: int | None = None) -> list[Answer]:
        """What the simulator says of ``requests``; with ``concurrency`` in a closed loop."""
        specs = specs_of(way, limits, self.cost)
        due = [replace(request, arrival_s=request.arrival_s + self.in_s) for request in requests]
        shares = [0.5] * len(specs)
        for _ in range(_NUM_ROUNDS if any(self.crowding) else 1):
            costs = [self.cost.beside(self.crowding, share) for share in shares]
            crowded = [replace(spec, cost=cost, wake_s=cost.wake_s) for spec, cost in zip(specs, costs, strict=True)]
            handoff = HandoffOptions(replace(self.link), router=create_router(ROUTER))
            options = SimulationOptions(keep_requests=True, keep_gaps=True, concurrency=concurrency, handoff=handoff)
            simulation = Simulation(crowded, create_router(ROUTER), options)
            report = simulation.run(due)
            busy = [engine.busy_share or 0.0 for engine in report.engines]
            shares = [sum(busy) - own for own in busy]
        out = []
        for record in sorted(report.records, key=lambda record: int(record.request_id)):  # as the requests came
            assert record.ttft_s is not None, "every request of a load has output"
            gaps = tuple(simulation.log.gaps[record.request_id])
            first_s = record.arrival_s + record.ttft_s + self.out_s
            out.append(Answer(record.arrival_s - self.in_s, first_s, gaps))
        return out

    def capacity(self, way: Way, limits: WorkerLimits, requests: Seq[WorkloadRequest]) -> float:
        """The requests per second that ``way`` serves while there are always as many as its workers take at once."""
        width = way.config.scheduler.max_num_seqs * sum(way.workers.values())
        ends = sorted(one.last_s for one in self.answers(way, limits, requests, width))
        first, last = len(ends) // 8, len(ends) * 7 // 8  # neither the start nor the end, when fewer are there
        return (last - first) / (ends[last] - ends[first])


def specs_of(way: Way, limits: WorkerLimits, cost: KindCost) -> list[EngineSpec]:
    """The workers of ``way`` as the simulator has them."""
    config = way.config
    one = EngineSpec(
        cost, limits.num_kv_blocks, limits.max_model_len, config.scheduler, config.cache, kv_bytes_per_token=limits.kv_bytes_per_token,
        wake_s=cost.wake_s, layout=layout_of(limits.kv_layout),
    )  # fmt: skip
    roles = (role for role, number in way.workers.items() for _ in range(number))
    return [replace(one, name=f"{role}-{i}", role=role) for i, role in enumerate(roles)]


def measured(step: LoggedStep, factor: float = 1.0) -> MeasuredStep:
    """``factor``: times the seconds that it took."""
    return MeasuredStep(step.shape, step.kind, step.device_s * factor, step.total_s * factor, step.follows_idleness)


def _beside(crowding: Crowding, step: LoggedStep, overlap: float) -> float:
    """By how much a step is longer beside neighbours that are busy for a share ``overlap`` of it."""
    return 1.0 + (crowding.decode if _only_decodes(step.shape) else crowding.prompt) * overlap


# --- learning ---------------------------------------------------------------------------------------------------------------------------


def learned(steps: Seq[tuple[LoggedStep, float]], found: Mapping[str, Seq[Probe]], about: str = "") -> Predictor:
    """``steps``: each with the share of it in which others were busy; ``found``: probes of each way. Raises FitError for too few steps."""
    first = fit((measured(step) for step, _ in steps), about)
    kinds = [[one for one in steps if _only_decodes(one[0].shape) is decodes] for decodes in (True, False)]
    crowding = Crowding(*(crowding_of(first, some) for some in kinds))
    alone = [measured(step, 1.0 / _beside(crowding, step, overlap)) for step, overlap in steps]
    cost = to_both_means(fit(alone, about), alone)
    probes = [probe for some in found.values() for probe in some]
    in_s, out_s = (max(0.0, _median([getattr(probe, name) for probe in probes])) for name in ("in_s", "out_s"))
    return Predictor(cost, crowding, link_of(probes), in_s, out_s)


def to_both_means(cost: Coefficients, steps: Iterable[MeasuredStep]) -> KindCost:
    """``cost`` such that steps that decode, and those with prompts, both take together what it says. Those that are not there count as they
    are."""
    sums = {True: [0.0, 0.0], False: [0.0, 0.0]}  # by whether they only decode: seconds predicted, and taken
    for step in steps:
        guess = predicted_s(cost, step)
        kind = sums[_only_decodes(step.shape)]
        kind[0] += guess
        kind[1] += min(step.total_s, _HELD_UP * guess)
    decode_by, prompt_by = (took / guess if guess else 1.0 for guess, took in (sums[True], sums[False]))
    return KindCost(cost, decode_by, prompt_by)


def crowding_of(cost: Coefficients, steps: Iterable[tuple[LoggedStep, float]]) -> float:
    """By how much steps are longer that had busy neighbours all along, as a share of those that had none: a straight line through what
    steps took over ``cost``, by their overlap, each weighing what it was predicted to take. 0 where overlaps are too much alike."""
    weight = x1 = y1 = x2 = xy = 0.0
    for step, overlap in steps:
        guess = predicted_s(cost, measured(step))
        if step.follows_idleness or not guess > 0.0:
            continue
        ratio = min(_HELD_UP, step.total_s / guess)
        weight, x1, y1 = weight + guess, x1 + guess * overlap, y1 + guess * ratio
        x2, xy = x2 + guess * overlap * overlap, xy + guess * overlap * ratio
    if not weight:
        return 0.0
    mean, variance = x1 / weight, x2 / weight - (x1 / weight) ** 2
    if variance < _MIN_SPREAD**2:
        return 0.0
    slope = (xy / weight - mean * y1 / weight) / variance
    return max(0.0, slope / (y1 / weight - slope * mean))


def link_of(probes: Iterable[Probe]) -> Link:
    """The line through the seconds of hand-offs by their bytes: the middle one of the slopes between any two (Theil, 1950; Sen, 1968), and
    of what is left beside it. Without any hand-off a link that takes no time."""
    points = [(probe.num_bytes, probe.handoff_s) for probe in probes if probe.handoff_s is not None]
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for i, a in enumerate(points) for b in points[i + 1 :] if a[0] != b[0]]
    each_s = max(1.0 / _FASTEST_LINK, _median(slopes))
    return Link(1.0 / each_s, max(0.0, _median([seconds - num_bytes * each_s for num_bytes, seconds in points])))


def _median(values: Seq[float]) -> float:
    return statistics.median(values) if values else 0.0
