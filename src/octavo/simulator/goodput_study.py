"""Clusters of Splitwise's machines under the engine's own scheduler: prompts first, whole, in chunks, or on machines of their own.

    design + way + rate + seed ─▶ Simulation of all its machines ─▶ share of requests within both limits ─▶ RateCurve ─▶ bracket
                                                                              best split: who holds longest, of all that were tried

Goodput is the highest rate at which a share of the requests keeps a limit on the time to the first token and one on the mean time between
tokens; it comes as a bracket (holds at, fails at). ``splitwise_study`` runs the published program's rules on the same table and designs;
here every machine runs the scheduler, the KV blocks, the hand-off and the router of this engine, and prompts can be chunked. Owns no figure
of the paper but ``PUBLISHED``, which compare other limits and another scheduler: they stand beside ours, not against them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from itertools import takewhile

from octavo.config import CacheConfig, SchedulerConfig
from octavo.costs.tables import MachineTable, TableCost
from octavo.distributed.handoff import Link
from octavo.distributed.roles import MixedLimits
from octavo.distributed.router import ShortestQueue
from octavo.simulator.engine_spec import EngineSpec
from octavo.simulator.handing_over import HandoffOptions
from octavo.simulator.rate_curve import RateBracket, RateCurve
from octavo.simulator.records import RequestRecord, Slo
from octavo.simulator.report import SimulationReport
from octavo.simulator.simulation import Simulation, SimulationOptions
from octavo.simulator.split_search import SplitSearch
from octavo.simulator.splitwise_study import (
    A100,
    H100,
    H100_CAPPED,
    KV_BYTES_PER_TOKEN,
    NUM_KV_TOKENS,
    TRANSFER_S_PER_TOKEN,
    Design,
)
from octavo.workload.arrivals import OpenLoop
from octavo.workload.requests import WorkloadRequest
from octavo.workload.traces import Resampled, Trace

BLOCK_SIZE = 16
NUM_LAYERS = 70  # of BLOOM-176B: what goes over layer by layer
BUDGET = 2048  # tokens of a step, beyond which prompts are computed no faster (Splitwise, section III)
DRAIN_S = 30.0  # after the last arrival, before who is on the way counts as late
PROMPTS_FIRST, PROMPTS_WHOLE, CHUNKED, APART, MIXED = "first", "whole", "chunked", "apart", "mixed"
WAYS = (PROMPTS_FIRST, PROMPTS_WHOLE, CHUNKED, APART, MIXED)
_IN_WORDS = {
    PROMPTS_FIRST: "prompts first and alone",
    PROMPTS_WHOLE: "prompts whole, beside answers",
    CHUNKED: "chunked prefill",
    APART: "prefill apart",
    MIXED: "prefill apart, mixed pool",
}

DESIGNS = {
    "Baseline-A100": Design("Baseline-A100", A100, 70),
    "Baseline-H100": Design("Baseline-H100", H100, 40),
    "AA": Design("AA", A100, 25, A100, 45),
    "HH": Design("HH", H100, 15, H100, 25),
    "HA": Design("HA", A100, 26, H100, 25),
    "HHcap": Design("HHcap", H100_CAPPED, 21, H100, 25),
}
"""At equal power (40 DGX-H100, 70 DGX-A100), with the splits published for conversation."""

PUBLISHED = {
    ("AA", "Baseline-A100"): 2.15,
    ("AA", "Baseline-H100"): 1.4,
    ("HA", "Baseline-H100"): 1.18,
}
"""Ratios of throughput in the paper, conversation, at equal power; by nine limits on slowdown, with the published look-up."""


@dataclass(frozen=True, slots=True)
class Arm:
    """A design served in one of ``WAYS``."""

    design: Design
    way: str

    def __post_init__(self) -> None:
        if self.way not in WAYS:
            raise ValueError(f"way: {self.way!r} is not allowed; one of {', '.join(WAYS)}")
        if (self.way in (APART, MIXED)) != (self.design.num_prompt > 0):
            raise ValueError(f"way: {self.way!r} is not allowed for {self.design}; machines of their own for prompts, or none")

    def __str__(self) -> str:
        return f"{self.design}, {_IN_WORDS[self.way]}"


@dataclass(frozen=True, slots=True)
class Slowdowns:
    """Limits by request: times what an idle A100 machine takes for the first token of its prompt, and between tokens behind it. Prompts
    differ by a factor of a thousand, and so do their times: one limit in seconds is too loose for some and out of reach for others.

    The defaults are the paper's limits on its 90th percentiles (section V).
    """

    ttft: float = 3.0
    itl: float = 1.5

    def __post_init__(self) -> None:
        for name in ("ttft", "itl"):
            if not 1.0 <= getattr(self, name) < math.inf:
                raise ValueError(f"slowdown {name}: {getattr(self, name)!r} is not allowed; a finite number from 1")

    def __str__(self) -> str:
        return f"{self.ttft:g} times the TTFT and {self.itl:g} times the mean time between tokens of an idle A100 machine"

    def keeps(self, record: RequestRecord, reference: MachineTable) -> bool:
        itl_s = record.itl_s or 0.0
        ttft_s = math.inf if record.ttft_s is None else record.ttft_s
        return ttft_s <= self.ttft * reference.prompt_s(record.num_prompt) and itl_s <= self.itl * reference.token_s(record.num_prompt)


@dataclass(frozen=True, slots=True)
class GoodputOptions:
    """``share`` of the requests are to keep ``limits``, both of them. ``scale``: all numbers of machines times this, for a first look;
    ``first``: rate at which searches begin, of a whole cluster. ``chunk``: tokens of a step with chunked prefill. ``layerwise``: KV goes
    over layer by layer beside the last step of the prompt. ``num_splits``: of the coarse search for the best one."""

    limits: Slo | Slowdowns = Slowdowns()
    share: float = 0.9
    duration_s: float = 60.0
    seeds: Seq[int] = (0,)
    lookup: str = "two-variable"
    scale: float = 1.0
    first: float = 40.0
    ratio: float = 1.1
    chunk: int = 512
    num_splits: int = 5
    layerwise: bool = True
    mixed: MixedLimits = MixedLimits()

    def __post_init__(self) -> None:
        if isinstance(self.limits, Slo) and (self.limits.ttft_s is None or self.limits.itl_s is None):
            raise ValueError(f"slo: {self.limits!r} is not allowed; goodput needs both limits, ttft and itl")
        if not 0.0 < self.share < 1.0:
            raise ValueError(f"share: {self.share!r} is not allowed; above 0 and below 1")
        for name in ("duration_s", "scale", "first"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}: {getattr(self, name)!r} is not allowed; a finite number above 0")
        if not self.ratio > 1.0:
            raise ValueError(f"ratio: {self.ratio!r} is not allowed; above 1")

    @property
    def in_words(self) -> str:
        limits = self.limits
        if isinstance(limits, Slowdowns):
            return str(limits)
        return f"TTFT {limits.ttft_s:g} s and {limits.itl_s:g} s between tokens on average"

    def scaled(self, design: Design) -> Design:
        """With as many machines as ``scale`` leaves, at least one of each kind that there is."""
        num_prompt = max(1, round(self.scale * design.num_prompt)) if design.num_prompt else 0
        return replace(design, num_token=max(1, round(self.scale * design.num_token)), num_prompt=num_prompt)


@dataclass(frozen=True, slots=True)
class BestArm:
    """``brackets``: one for each seed, in requests per second. ``tried``: each split, with the lowest rate at which it was seen to fail
    with the first seed."""

    arm: Arm
    brackets: tuple[RateBracket, ...]
    tried: tuple[tuple[Design, float], ...] = ()


@dataclass(slots=True)
class GoodputStudy:
    """``tables`` by hardware; ``traces`` by workload, whose lengths are drawn in pairs. Each rate of an arm is run once."""

    tables: Mapping[str, MachineTable]
    traces: Mapping[str, Trace]
    options: GoodputOptions = field(default_factory=GoodputOptions)
    num_runs: int = 0
    num_requests: int = 0
    _curves: dict[tuple[Arm, str, int], RateCurve] = field(default_factory=dict)

    # --- runs ---------------------------------------------------------------------------------------------------------------------------

    def requests(self, workload: str, rate: float, seed: int) -> Iterator[WorkloadRequest]:
        """Poisson arrivals; those of a seed are the same at every rate, closer together. There is no prefix cache."""
        times = OpenLoop(rate).times(random.Random(f"{seed}:arrivals"))
        lengths = Resampled(self.traces[workload]).lengths(random.Random(f"{seed}:lengths"))
        arrivals = takewhile(lambda time_s: time_s < self.options.duration_s, times)
        for arrival_s, (num_prompt, num_output) in zip(arrivals, lengths, strict=False):
            yield WorkloadRequest(arrival_s, [0] * num_prompt, num_output)

    def run(self, arm: Arm, workload: str, rate: float, seed: int) -> SimulationReport:
        """All machines of an arm; who is on the way ``DRAIN_S`` after the last arrival is left behind, and late."""
        options = self.options
        link = Link(KV_BYTES_PER_TOKEN / TRANSFER_S_PER_TOKEN, 1e-4, NUM_LAYERS if options.layerwise else 0)
        slo = options.limits if isinstance(options.limits, Slo) else Slo()
        run_options = SimulationOptions(
            slo, seed, until_s=options.duration_s + DRAIN_S, keep_requests=True, handoff=HandoffOptions(link, at_token=True),
            mixed=options.mixed if arm.way == MIXED else None,
        )  # fmt: skip
        by_seconds = arm.way == MIXED
        report = Simulation(self.specs(arm), ShortestQueue(by_seconds), run_options).run(self.requests(workload, rate, seed))
        self.num_runs += 1
        self.num_requests += report.num_arrived
        return report

    def specs(self, arm: Arm) -> list[EngineSpec]:
        """The machines of an arm, those for prompts first."""
        budget = self.options.chunk if arm.way == CHUNKED else BUDGET
        policy = "prefill_first" if arm.way == PROMPTS_FIRST else "fcfs"
        scheduler = SchedulerConfig(
            max_num_seqs=min(512, budget), max_num_batched_tokens=budget, enable_chunked_prefill=arm.way == CHUNKED,
            scheduling_policy=policy,
        )  # fmt: skip
        cache, num_blocks, design = CacheConfig(BLOCK_SIZE, enable_prefix_caching=False), int(NUM_KV_TOKENS) // BLOCK_SIZE, arm.design

        def spec(hardware: str, role: str) -> EngineSpec:
            cost, name = TableCost(self.tables[hardware], self.options.lookup), f"{hardware}, {role}"
            return EngineSpec(
                cost, num_blocks, scheduler=scheduler, cache=cache, role=role, name=name, kv_bytes_per_token=KV_BYTES_PER_TOKEN
            )

        if not design.num_prompt:
            return [spec(design.token_hardware, "both")] * design.num_token
        return [spec(design.prompt_hardware, "prefill")] * design.num_prompt + [spec(design.token_hardware, "decode")] * design.num_token

    def attained(self, report: SimulationReport) -> float:
        """Share of the requests that came which keep both limits; 0 of none."""
        limits = self.options.limits
        if isinstance(limits, Slo) or not report.num_arrived:
            return report.slo_attainment or 0.0
        reference = self.tables[A100]
        return sum(limits.keeps(record, reference) for record in report.records) / report.num_arrived

    # --- goodput ------------------------------------------------------------------------------------------------------------------------

    def curve(self, arm: Arm, workload: str, seed: int) -> RateCurve:
        """Of the share of requests that do not keep the limits."""
        key = arm, workload, seed
        if key not in self._curves:
            self._curves[key] = RateCurve(
                lambda rate: 1.0 - self.attained(self.run(arm, workload, rate, seed)),
                self.options.first * self.options.scale,
                self.options.ratio,
            )
        return self._curves[key]

    @property
    def most_missed(self) -> float:
        return 1.0 - self.options.share + 1e-9

    def goodput(self, arm: Arm, workload: str, guess: float | None = None) -> tuple[RateBracket, ...]:
        """The highest rate at which enough requests keep the limits, one for each seed. ``guess``: where to begin."""
        found = list[RateBracket]()
        for seed in self.options.seeds:
            curve = self.curve(arm, workload, seed)
            begin = found[-1].holds_at if found else guess
            if begin:
                curve.at(_place(curve, begin))
            found.append(curve.bracket(self.most_missed))
        return tuple(found)

    def best_split(self, design: Design, workload: str, power: float | None = None, way: str = APART) -> BestArm:
        """Of all numbers of prompt machines within ``power`` (None: with as many machines as ``design`` has), the one that holds at the
        highest rate with the first seed; of equals the first that was found: the given one, then ``num_splits`` evenly, then halving the
        distance to the best. A worse split costs one run, at the next rate above the best one so far."""
        def rates(num_prompt: int, best: float) -> tuple[float, float]:
            curve = self.curve(Arm(design.split(num_prompt, power), way), workload, self.options.seeds[0])
            if best:
                place = _place(curve, best) + 1
                if curve.at(place) > self.most_missed:
                    return best, curve.rate(place)
            bracket = curve.bracket(self.most_missed)
            return bracket.holds_at, bracket.fails_at

        search = SplitSearch(lambda num_prompt: design.split(num_prompt, power).num_token, rates)
        search.run(design.num_prompt, self.options.num_splits)
        if not search.best:
            raise ValueError(f"power: {power!r} is not allowed; it leaves {design} no machine for prompts or none for tokens")
        arm = Arm(design.split(search.best, power), way)
        tried = tuple((design.split(num_prompt, power), rate) for num_prompt, rate in search.tried.items())
        return BestArm(arm, self.goodput(arm, workload, search.holds_at), tried)


def _place(curve: RateCurve, rate: float) -> int:
    """The place on the grid nearest to a rate."""
    return round(math.log(rate / curve.first) / math.log(curve.ratio))
