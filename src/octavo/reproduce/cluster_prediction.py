"""What the simulator is told of workers on this host, from what was measured of their steps, and what it then says of a load.

    steps, probes ─▶ ``learned`` ─▶ Predictor ── a way, its requests ─▶ engines of the simulation ─▶ answers

Steps of two workers hold each other up: they share memory and caches, and the cores with all else that runs. So ``cost`` is of a step
beside idle neighbours, and the simulation's workers share a host (``simulator.shared_host``): ``crowding`` and ``spread`` are what it is
told of that (``reproduce.crowding``). Pure arithmetic; measures nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import NamedTuple

from octavo.bench.cluster_ways import MIN_LAYERWISE, ROUTER, Delivered, Overlap, Probe, Way
from octavo.bench.latency import percentile
from octavo.bench.logged_worker import LoggedStep
from octavo.core.cost import StepShape
from octavo.core.recording import layout_of
from octavo.core.step import StepPlan
from octavo.costs.coefficients import Coefficients
from octavo.costs.fitting import MeasuredStep, fit, predicted_s
from octavo.distributed.handoff import Link
from octavo.distributed.router import create_router
from octavo.distributed.wire import WorkerLimits
from octavo.reproduce.crowding import HELD_UP, Predicted, crowding_of, pace_of, spread_of
from octavo.simulator.delivery import Delivery
from octavo.simulator.engine_spec import EngineSpec
from octavo.simulator.handing_over import HandoffOptions
from octavo.simulator.records import RequestRecord
from octavo.simulator.shared_host import Crowding, HostSharing, Spread, StepKind
from octavo.simulator.simulation import Simulation, SimulationOptions
from octavo.workload.requests import WorkloadRequest

_NUM_ROUNDS = 6  # of fits, until what steps take alone and what neighbours add go together
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
        return self.base.seconds_of(shape) * (self.decode_by if shape.only_decodes else self.prompt_by)

    def times(self, factor: float) -> KindCost:
        """All of it, idleness too, at ``factor`` times its price."""
        return replace(self, base=self.base.times(factor))


@dataclass(frozen=True, slots=True)
class Predictor:
    """``cost``: of a step beside idle neighbours. ``crowding``: what busy ones add to it; ``spread``: how much steps differ beside that.
    ``link``: of hand-offs. ``in_s``: from when a request is sent until a worker has it, ``out_s``: from the end of a step until its tokens
    are read, where no ``delivery`` says so of each."""

    cost: KindCost
    crowding: Crowding
    link: Link
    in_s: float
    out_s: float
    spread: Spread | None = None
    delivery: Delivery[StepKind | None] | None = None

    @property
    def draws(self) -> bool:
        """Whether what the simulator says goes by the seed."""
        return bool(self.spread or self.delivery)

    @property
    def back_s(self) -> tuple[float, float]:
        """The middle, and the 99th percentile, of what tokens take from the end of their step until they are read."""
        delays = sorted(self.delivery.all_s) if self.delivery else [self.out_s]
        return percentile(delays, 50), percentile(delays, 99)

    def step_s(self, step: LoggedStep, overlap: Overlap) -> float:
        """What a step beside these neighbours should take."""
        return self.alone_s(step) / pace_of(self.crowding, step.shape, overlap)

    def alone_s(self, step: LoggedStep) -> float:
        """What it should take beside idle ones."""
        return self.cost.seconds_of(step.shape) + (self.cost.wake_s if step.follows_idleness else 0.0)

    def bias(self, steps: Iterable[tuple[LoggedStep, Overlap]]) -> float:
        """The seconds of ``steps`` as predicted over those that they took, less 1; 0 without steps."""
        pairs = [(self.step_s(step, overlap), step.total_s) for step, overlap in steps]
        took = sum(total for _, total in pairs)
        return sum(guess for guess, _ in pairs) / took - 1.0 if took else 0.0

    def at_pace(self, bias: float) -> Predictor:
        """With all steps as much slower as those were that were predicted with ``bias``."""
        return replace(self, cost=self.cost.times(1.0 / (1.0 + bias)))

    def answers(
        self, way: Way, limits: WorkerLimits, requests: Seq[WorkloadRequest], concurrency: int | None = None, seed: int = 0
    ) -> list[Answer]:
        """What the simulator says of ``requests``; with ``concurrency`` in a closed loop. ``seed``: of what is drawn."""
        specs = specs_of(way, limits, self.cost)
        due = [replace(request, arrival_s=request.arrival_s + self.in_s) for request in requests]
        holds_up = any(self.crowding) or self.draws
        host = HostSharing(tuple(range(len(specs))), self.crowding, self.spread, self.delivery)
        layers = layout_of(limits.kv_layout)
        link = replace(self.link, num_layers=len(layers.layers) if layers else 0)
        options = SimulationOptions(
            seed=seed, keep_requests=True, keep_gaps=True, concurrency=concurrency, hosts=[host] if holds_up else [],
            handoff=HandoffOptions(link, router=create_router(ROUTER), min_layerwise=MIN_LAYERWISE),
        )  # fmt: skip
        simulation = Simulation(specs, create_router(ROUTER), options)
        report = simulation.run(due)
        return [self._answer(record, simulation) for record in sorted(report.records, key=lambda record: int(record.request_id))]

    def _answer(self, record: RequestRecord, simulation: Simulation) -> Answer:
        assert record.ttft_s is not None, "every request of a load has output"
        first_s = record.arrival_s + record.ttft_s + (0.0 if self.delivery else self.out_s)
        return Answer(record.arrival_s - self.in_s, first_s, tuple(simulation.log.gaps[record.request_id]))

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


# --- learning ---------------------------------------------------------------------------------------------------------------------------


def learned(
    steps: Seq[tuple[LoggedStep, Overlap]], found: Mapping[str, Seq[Probe]], delivered: Iterable[Delivered] = (), about: str = ""
) -> Predictor:
    """``steps``: each with what its neighbours did; ``found``: probes of each way; ``delivered``: tokens in their order. Raises FitError
    for too few steps."""
    crowding, alone = Crowding(), [measured(step) for step, _ in steps]
    for _ in range(_NUM_ROUNDS):
        base = fit(alone, about)
        crowding = crowding_of(Predicted(step, predicted_s(base, measured(step)), overlap) for step, overlap in steps)
        alone = [measured(step, pace_of(crowding, step.shape, overlap)) for step, overlap in steps]
    cost = to_both_means(fit(alone, about), alone)
    probes = [probe for some in found.values() for probe in some]
    in_s, out_s = (max(0.0, _median([getattr(probe, name) for probe in probes])) for name in ("in_s", "out_s"))
    predictor = Predictor(cost, crowding, link_of(probes), in_s, out_s)
    spread = spread_of(crowding, [Predicted(step, predictor.alone_s(step), overlap) for step, overlap in steps])
    return replace(predictor, spread=spread, delivery=delivery_of(delivered))


def delivery_of(delivered: Iterable[Delivered]) -> Delivery[StepKind | None] | None:
    """None: nothing is known. What was read before the next step could begin, which is where a measured one ends, was read at once."""
    delays = dict[StepKind | None, list[float]]()
    for one in delivered:
        delays.setdefault(None if one.beside is None else StepKind.of(one.beside), []).append(max(0.0, one.delay_s))
    return Delivery(delays) if delays else None


def to_both_means(cost: Coefficients, steps: Iterable[MeasuredStep]) -> KindCost:
    """``cost`` such that steps that decode, and those with prompts, both take together what it says. Those that are not there count as they
    are."""
    sums = {True: [0.0, 0.0], False: [0.0, 0.0]}  # by whether they only decode: seconds predicted, and taken
    for step in steps:
        guess = predicted_s(cost, step)
        kind = sums[step.shape.only_decodes]
        kind[0] += guess
        kind[1] += min(step.total_s, HELD_UP * guess)
    decode_by, prompt_by = (took / guess if guess else 1.0 for guess, took in (sums[True], sums[False]))
    return KindCost(cost, decode_by, prompt_by)


def link_of(probes: Iterable[Probe]) -> Link:
    """The line through the seconds of hand-offs by their bytes: the middle one of the slopes between any two (Theil, 1950; Sen, 1968), and
    of what is left beside it. Without any hand-off a link that takes no time."""
    points = [(probe.num_bytes, probe.handoff_s) for probe in probes if probe.handoff_s is not None]
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for i, a in enumerate(points) for b in points[i + 1 :] if a[0] != b[0]]
    each_s = max(1.0 / _FASTEST_LINK, _median(slopes))
    return Link(1.0 / each_s, max(0.0, _median([seconds - num_bytes * each_s for num_bytes, seconds in points])))


def _median(values: Seq[float]) -> float:
    return statistics.median(values) if values else 0.0
