"""Ways of serving one model under one load, compared in simulation: what each latency becomes as requests come faster.

    model on a machine + way of serving + rate + seed ─▶ Simulation ─▶ normalised latency, or share within limits ─▶ RateCurve

All ways run the same scheduler with the same roofline on the same requests; they differ in the switches that a ``Way`` names. Owns no
figure of a paper. A step costs what the roofline of the model on a datasheet machine says, so times are estimates; devices that share a
step share it evenly, without what their exchange costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from itertools import islice, takewhile
from statistics import fmean, median

from octavo.config import CacheConfig, SchedulerConfig
from octavo.core.cost import StepShape
from octavo.costs.machines import Machine, find_machine
from octavo.costs.roofline import RooflineCost
from octavo.distributed.handoff import Link
from octavo.simulator.dense_models import DenseModel
from octavo.simulator.engine_spec import EngineSpec
from octavo.simulator.handing_over import HandoffOptions
from octavo.simulator.rate_curve import RateBracket, RateCurve
from octavo.simulator.records import RequestRecord, Slo
from octavo.simulator.report import SimulationReport
from octavo.simulator.scenario import MEMORY_SHARE
from octavo.simulator.simulation import Simulation, SimulationOptions
from octavo.workload.arrivals import OpenLoop
from octavo.workload.requests import LengthPairs, SharedPrefix, Workload, WorkloadRequest

BLOCK_SIZE = 16
GRID_RATIO = 1.05  # from a rate to the next
Measure = Callable[[SimulationReport], float]


@dataclass(frozen=True, slots=True)
class Served:
    """A model on a machine. ``num_slots``: tokens that its KV memory holds; ``max_model_len``: most tokens of a sequence."""

    model: DenseModel
    machine: Machine
    num_slots: int
    max_model_len: int = 2048

    @property
    def cost(self) -> RooflineCost:
        return RooflineCost(self.model.work(), self.machine)

    @classmethod
    def fitting(cls, model: DenseModel, machine: Machine, max_model_len: int = 2048, share: float = MEMORY_SHARE) -> Served:
        """With the KV memory that is left of ``share`` of the machine's, beside 16-bit weights. ValueError when there is none."""
        free_bytes = share * machine.memory_bytes * machine.devices - 2 * model.num_params
        num_slots = int(free_bytes // model.kv_bytes_per_token())
        if num_slots < 1:
            raise ValueError(f"machine: {machine.name!r} is not allowed; the weights of {model.name} leave no room on it")
        return cls(model, machine, num_slots, max_model_len)

    def decode_s(self, context: int = 512) -> float:
        """Seconds of a step in which one sequence decodes."""
        return self.cost.seconds_of(StepShape(1, 1, 1, context, context))

    def prefill_s(self, num_tokens: int, chunk: int | None = None) -> float:
        """Seconds to compute a prompt alone, in steps of ``chunk`` tokens (None: in one)."""
        step, cost, total = chunk or num_tokens, self.cost, 0.0
        for start in range(0, num_tokens, step):
            shape = StepShape()
            shape.add(start, min(step, num_tokens - start), int(start + step >= num_tokens))
            total += cost.seconds_of(shape)
        return total


@dataclass(frozen=True, slots=True)
class Way:
    """One way of serving. ``roles``: (prefill engines, decode engines), both 0 for engines that do both, of which there are
    ``num_engines``."""

    name: str
    scheduler: SchedulerConfig
    cache: CacheConfig
    num_engines: int = 1
    roles: tuple[int, int] = (0, 0)

    @classmethod
    def of(
        cls,
        name: str,
        reservation: str = "paged",
        policy: str = "fcfs",
        max_num_seqs: int = 256,
        budget: int = 2048,
        chunked: bool = True,
        prefix_cache: bool = False,
    ) -> Way:
        scheduler = SchedulerConfig(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, scheduling_policy=policy, enable_chunked_prefill=chunked
        )
        return cls(name, scheduler, CacheConfig(BLOCK_SIZE, enable_prefix_caching=prefix_cache, kv_reservation=reservation))

    def with_engines(self, num_engines: int) -> Way:
        return replace(self, num_engines=num_engines)

    def apart(self, num_prefill: int, num_decode: int) -> Way:
        return replace(self, name=f"{self.name} {num_prefill}P+{num_decode}D", roles=(num_prefill, num_decode))

    @property
    def num_devices(self) -> int:
        """Engines, each of which is a ``Served`` of its own."""
        return sum(self.roles) or self.num_engines


@dataclass(frozen=True, slots=True)
class Load:
    """Requests for ``duration_s`` of Poisson arrivals; those of a seed are the same at every rate, closer together."""

    lengths: LengthPairs
    duration_s: float
    prefix: SharedPrefix | None = None

    def requests(self, rate: float, seed: int) -> Iterator[WorkloadRequest]:
        every = Workload(OpenLoop(rate), self.lengths, prefix=self.prefix, seed=seed).requests()
        return takewhile(lambda request: request.arrival_s < self.duration_s, every)


@dataclass(slots=True)
class ServingStudy:
    """``served`` under ``load``. Rates of each way are on the grid ``first`` * engines * ``ratio``**i. ``link_bytes_per_s``: over which KV
    is handed over."""

    served: Served
    load: Load
    seeds: Seq[int] = (0,)
    first: float = 1.0
    ratio: float = GRID_RATIO
    link_bytes_per_s: float = 300e9
    num_runs: int = 0
    num_requests: int = 0
    _curves: dict[tuple[Way, int, str], RateCurve] = field(default_factory=dict)

    def run(self, way: Way, rate: float, seed: int, slo: Slo | None = None, num_requests: int | None = None) -> SimulationReport:
        """All requests, or the first ``num_requests``, until the last has ended or twice the time of the arrivals has passed: who is on
        the way by then is left behind."""
        handoff = HandoffOptions(Link(self.link_bytes_per_s, 1e-4), at_token=True)
        options = SimulationOptions(slo or Slo(), seed, until_s=2 * self.load.duration_s, keep_requests=True, handoff=handoff)
        requests = islice(self.load.requests(rate, seed), num_requests)
        report = Simulation(self._specs(way), options=options).run(requests)
        self.num_runs += 1
        self.num_requests += report.num_arrived
        return report

    def _specs(self, way: Way) -> list[EngineSpec]:
        served = self.served
        num_blocks, kv_bytes = served.num_slots // BLOCK_SIZE, served.model.kv_bytes_per_token()
        spec = EngineSpec(served.cost, num_blocks, served.max_model_len, way.scheduler, way.cache, kv_bytes_per_token=kv_bytes)
        if not sum(way.roles):
            return [spec] * way.num_engines
        return [replace(spec, role=role) for role, count in zip(("prefill", "decode"), way.roles, strict=True) for _ in range(count)]

    # --- curves -------------------------------------------------------------------------------------------------------------------------

    def latency(self, way: Way, seed: int, middle: bool = False) -> RateCurve:
        """Of the normalised latency (end-to-end seconds over output tokens): its mean over requests, or the median (``middle``).

        A request that was refused, or left behind, makes it infinite: the queue of a run that goes on for as long again as requests come
        grows without end.
        """
        average = median if middle else fmean
        return self._curve(way, seed, f"latency {middle}", lambda report: _normalised(report, average))

    def misses(self, way: Way, seed: int, slo: Slo) -> RateCurve:
        """Of the share of requests that break ``slo``."""
        return self._curve(way, seed, f"misses {slo}", lambda report: 1.0 - (report.slo_attainment or 0.0), slo)

    def _curve(self, way: Way, seed: int, what: str, figure: Measure, slo: Slo | None = None) -> RateCurve:
        key = (way, seed, what)
        if key not in self._curves:
            self._curves[key] = RateCurve(lambda rate: figure(self.run(way, rate, seed, slo)), self.first * way.num_devices, self.ratio)
        return self._curves[key]

    def brackets(self, way: Way, limit: float, middle: bool = False) -> list[RateBracket]:
        """The highest rates at which the normalised latency is at most ``limit``, one for each seed."""
        return [self.latency(way, seed, middle).bracket(limit) for seed in self.seeds]

    def goodput(self, way: Way, slo: Slo, share: float = 0.9) -> list[RateBracket]:
        """The highest rates at which ``share`` of the requests keep ``slo``, one for each seed."""
        return [self.misses(way, seed, slo).bracket(1.0 - share + 1e-9) for seed in self.seeds]


def _normalised(report: SimulationReport, average: Callable[[list[float]], float]) -> float:
    if report.num_completed < report.num_arrived or not report.records:
        return float("inf")
    return average([normalised_latency(record) for record in report.records])


def normalised_latency(record: RequestRecord) -> float:
    """End-to-end seconds over output tokens."""
    return record.e2e_s / record.num_output


def datasheet(name: str, devices: int = 1) -> Machine:
    """A machine that comes with Octavo, so many of them sharing each step."""
    return find_machine(name).times(devices)
