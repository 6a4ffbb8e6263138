"""What KV memory is used for under paging and under reservations: the set-up of Figures 2 and 13 of the PagedAttention paper, simulated.

The real scheduler with the real block tables runs a model that computes nothing: an answer is as long as the workload says, and a step
takes what a roofline of OPT-13B on one A100 says. Waste is sampled in every step, each step counting once, with the KV that it writes.
Nothing here is a measurement of a device. The paper's engine took longer for a step than this roofline, so that at its rate of 2 requests
per second its memory was full; here paging needs a higher rate for that, and steps in which a request waits are reported apart.

All of the set-up is fixed in this file, so that no figure can be tuned by it:
- Pool: 15,728 slots (12 GB of 800 KiB), in blocks of 16. Longest sequence 2,048 tokens. Prefix cache off in all arms.
- Lengths: the paper's means of ShareGPT, 161.31 tokens in and 337.99 out. Their distribution is not published with it; taken are lognormals
  with the coefficients of variation of the public Azure LLM inference trace 2023 of conversations (prompts 0.960, answers 0.771; Patel et
  al., Splitwise, ISCA 2024), limited to 4 .. 1,024 tokens, with the means fitted after that limit.
- Admission: as the paper's, whoever has room now comes in; how much running sequences may still grow is not looked at, beyond a block each.
- Arrivals: Poisson. The run ends with them; requests that are still under way then are not finished.
- A step: max(weights / memory bandwidth, arithmetic / peak) + KV read / memory bandwidth. No overhead of a host.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from octavo.bench.tables import table
from octavo.config import KV_RESERVATIONS, CacheConfig, SchedulerConfig
from octavo.core.cost import StepShape
from octavo.core.occupancy import KVOccupancy
from octavo.core.request import Request, SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.core.step import SliceResult, StepPlan, StepResult
from octavo.workload.arrivals import OpenLoop
from octavo.workload.lengths import LogNormal
from octavo.workload.requests import Independent, Workload, WorkloadRequest

NUM_SLOTS, BLOCK_SIZE, MAX_MODEL_LEN = 15_728, 16, 2048
LOOKAHEAD = 1  # tokens that admission leaves room for; the paper's engine looks no further, ours does by default
SCHEDULER = SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=2048, admission_lookahead=LOOKAHEAD)
MEAN_PROMPT, MEAN_OUTPUT = 161.31, 337.99
CV_PROMPT, CV_OUTPUT = 0.960, 0.771
SHORTEST, LONGEST = 4, 1024
PAPER = {  # (token states, reservation, internal, external and others) in % of the pool, mean batched requests
    "paged": ((96.3, None, None, None), 30.42),
    "max": ((20.4, 13.3, 57.3, 8.9), 7.00),
    "pow2": ((26.8, 17.9, 13.6, 41.6), 9.81),
    "oracle": ((38.2, 25.2, None, 36.6), 13.62),
}


@dataclass(frozen=True, slots=True)
class WasteCase:
    rate: float = 2.0  # requests per second
    duration_s: float = 600.0  # of simulated time
    seed: int = 0
    mean_prompt: float = MEAN_PROMPT  # tokens, after the limits; the shape is the same for all means
    mean_output: float = MEAN_OUTPUT


@dataclass(frozen=True, slots=True)
class Roofline:
    """OPT-13B in 16 bit on one A100 of 40 GB. ``slowness``: steps take so many times as long, as those of another engine may."""

    weight_bytes: float = 26e9
    kv_bytes_per_token: float = 2 * 5120 * 40 * 2
    flops_per_token: float = 2 * 13e9
    bytes_per_s: float = 1555e9
    flops_per_s: float = 312e12
    slowness: float = 1.0

    def seconds(self, plan: StepPlan) -> float:
        shape = StepShape.of(plan)
        products_s = max(self.weight_bytes / self.bytes_per_s, shape.num_rows * self.flops_per_token / self.flops_per_s)
        return self.slowness * (products_s + shape.num_context * self.kv_bytes_per_token / self.bytes_per_s)


@dataclass(slots=True)
class Shares:
    """Sums over samples."""

    num_samples: int = 0
    num_slots: list[int] = field(default_factory=lambda: [0, 0, 0, 0])  # token states, to come, never, external
    fill_ratio: float = 0.0
    num_batched: int = 0
    num_waiting: int = 0

    def add(self, found: KVOccupancy, num_batched: int, num_waiting: int) -> None:
        self.num_samples += 1
        for i, slots in enumerate((found.num_token_states, found.num_to_come, found.num_never, found.num_external)):
            self.num_slots[i] += slots
        self.fill_ratio += found.fill_ratio
        self.num_batched += num_batched
        self.num_waiting += num_waiting

    def record(self) -> dict[str, float] | None:
        """Means; None without a sample."""
        n = self.num_samples
        if n == 0:
            return None
        names = ("token_states_pct", "reservation_pct", "internal_pct", "external_pct")
        parts = {name: round(100 * slots / (n * NUM_SLOTS), 2) for name, slots in zip(names, self.num_slots, strict=True)}
        others = {"filled_pct": round(100 * self.fill_ratio / n, 2), "batched": round(self.num_batched / n, 2)}
        return parts | others | {"waiting": round(self.num_waiting / n, 2), "steps": n}


@dataclass(slots=True)
class WasteRun:
    every_step: Shares = field(default_factory=Shares)
    with_queue: Shares = field(default_factory=Shares)  # steps while a request waits: memory is what limits
    simulated_s: float = 0.0
    num_finished: int = 0
    num_preemptions: int = 0


def fitted(mean: float, cv: float) -> LogNormal:
    """The lognormal of coefficient of variation ``cv`` whose draws, limited to SHORTEST .. LONGEST, have ``mean``."""
    sigma = math.sqrt(math.log1p(cv * cv))
    low, high = mean, 2.0 * mean
    for _ in range(60):  # the limited mean grows with the unlimited one
        middle = (low + high) / 2
        low, high = (middle, high) if limited_mean(middle, sigma) < mean else (low, middle)
    return LogNormal(high, sigma, SHORTEST, LONGEST)


def limited_mean(mean: float, sigma: float) -> float:
    """Of a lognormal whose values beyond SHORTEST and LONGEST count as these (the partial expectation of a lognormal, in closed form)."""
    mu = math.log(mean) - sigma * sigma / 2

    def below(limit: float) -> tuple[float, float]:
        """(probability, expectation) of what is below."""
        z = (math.log(limit) - mu) / sigma
        return _normal_cdf(z), mean * _normal_cdf(z - sigma)

    (p_low, e_low), (p_high, e_high) = below(SHORTEST), below(LONGEST)
    return SHORTEST * p_low + (e_high - e_low) + LONGEST * (1 - p_high)


def _normal_cdf(z: float) -> float:
    return (1 + math.erf(z / math.sqrt(2))) / 2


def workload(case: WasteCase) -> Workload:
    lengths = Independent(fitted(case.mean_prompt, CV_PROMPT), fitted(case.mean_output, CV_OUTPUT))
    return Workload(OpenLoop(case.rate), lengths, seed=case.seed)


def simulate(reservation: str, case: WasteCase, slowness: float = 1.0, lookahead: int = LOOKAHEAD) -> WasteRun:
    """``case`` with the KV memory kept by ``reservation``, until its time is over. ``slowness``: of ``Roofline``; ``lookahead``: tokens
    of each running sequence that admission leaves room for."""
    cache = CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=False, kv_reservation=reservation)
    scheduler = Scheduler(replace(SCHEDULER, admission_lookahead=lookahead), cache, NUM_SLOTS // BLOCK_SIZE, MAX_MODEL_LEN)
    run, cost, now = WasteRun(), Roofline(slowness=slowness), 0.0
    requests = workload(case).requests()
    coming = next(requests)
    while now < case.duration_s:
        coming = _add_arrived(scheduler, coming, requests, now)
        plan = scheduler.plan(now)
        if plan is None:
            now = coming.arrival_s
            continue
        sample = scheduler.kv_occupancy(), scheduler.num_running, scheduler.num_waiting
        run.every_step.add(*sample)
        if scheduler.num_waiting:
            run.with_queue.add(*sample)
        now += cost.seconds(plan)
        scheduler.apply(StepResult(plan.step_index, [SliceResult([0] * piece.num_samples) for piece in plan.slices]))
    run.simulated_s = now
    run.num_finished, run.num_preemptions = scheduler.stats.num_finished, scheduler.stats.num_preemptions
    return run


def _add_arrived(scheduler: Scheduler, coming: WorkloadRequest, requests: Iterator[WorkloadRequest], now: float) -> WorkloadRequest:
    """Queue all that have arrived by ``now``, ``coming`` first; returns the next one to come."""
    while coming.arrival_s <= now:
        params = SamplingParams(temperature=0.0, max_tokens=coming.num_output, ignore_eos=True)
        request_id = str(scheduler.stats.num_requests)
        scheduler.add(Request(request_id, coming.prompt_token_ids, params, seed=0, arrival_s=coming.arrival_s))
        coming = next(requests)
    return coming


def run_waste(case: WasteCase, echo: Callable[[str], None], as_json: bool) -> None:
    """`octavo bench waste`: the last line given to ``echo`` is the JSON record."""
    runs = {reservation: simulate(reservation, case) for reservation in KV_RESERVATIONS}
    if not as_json:
        lengths = f"ShareGPT-like lengths (means {MEAN_PROMPT} in, {MEAN_OUTPUT} out)"
        echo(f"Simulated: OPT-13B on one A100 by its roofline, {lengths}, {case.rate:g} requests/s for {case.duration_s:g} s.")
        echo(f"Use of {NUM_SLOTS:,} KV slots in %, mean of all steps; in brackets the paper's figures.\n")
        echo(_table({name: run.every_step for name, run in runs.items()}))
        echo("\nFilled of allocated: token states in % of the slots that blocks or reservations take; the rest of the pool is free.")
        echo("\nOnly steps while a request waits, so that memory is what limits:\n")
        echo(_table({name: run.with_queue for name, run in runs.items()}))
        idle = [name for name, run in runs.items() if run.with_queue.num_samples == 0]
        if idle:
            echo(f"\nNo request ever waited with {', '.join(idle)}: only a higher --rate shows what that does when memory is full.")
    echo(json.dumps(_record(case, runs)))


def _table(arms: dict[str, Shares]) -> str:
    head = ["reservation", "token states", "to come", "never used", "external, others", "filled of allocated", "batched", "waiting"]
    rows = [head]
    for name, shares in arms.items():
        found, (published, batched) = shares.record(), PAPER[name]
        if found is None:
            rows.append([name, *("-" for _ in head[1:])])
            continue
        names = ("token_states_pct", "reservation_pct", "internal_pct", "external_pct")
        parts = [_beside(f"{found[key]:.1f}", value) for key, value in zip(names, published, strict=True)]
        counts = [_beside(f"{found['batched']:.2f}", batched), f"{found['waiting']:.1f}"]
        rows.append([name, *parts, f"{found['filled_pct']:.1f}", *counts])
    return table(rows, right=" >>>>>>>")


def _beside(ours: str, published: float | None) -> str:
    return ours if published is None else f"{ours} ({published:g})"


def _record(case: WasteCase, runs: dict[str, WasteRun]) -> dict[str, object]:
    arms = {
        name: {
            "every_step": run.every_step.record(),
            "with_queue": run.with_queue.record(),
            "simulated_s": round(run.simulated_s, 3),
            "finished": run.num_finished,
            "preemptions": run.num_preemptions,
            "paper": {"parts_pct": PAPER[name][0], "batched": PAPER[name][1]},
        }
        for name, run in runs.items()
    }
    case_record = {"rate": case.rate, "duration_s": case.duration_s, "seed": case.seed, "num_slots": NUM_SLOTS, "block_size": BLOCK_SIZE}
    lengths = {"prompt": str(fitted(MEAN_PROMPT, CV_PROMPT)), "output": str(fitted(MEAN_OUTPUT, CV_OUTPUT))}
    return {"bench": "waste", "kind": "simulated"} | case_record | lengths | {"arms": arms, "date": time.strftime("%Y-%m-%d")}
