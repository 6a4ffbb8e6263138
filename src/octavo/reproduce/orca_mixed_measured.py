"""Iteration-level against request-level batching on a trace of mixed lengths, measured (Yu et al., Orca, OSDI 2022, section 6.2).

Prompts U(32, 512), answers U(1, 128), Poisson arrivals, no end of text, median latency per output token. Request-level batching is the
policy ``static`` of the same engine: kernels, chunks and memory are the same, and no padding is computed, which favours it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from octavo.bench.in_process import Engines, Options, Run, serve, token_range
from octavo.reproduce.figure import MEASURED, Figure, Row
from octavo.reproduce.measured import NOT_TRANSFERABLE, Curve, curve_plot, describe, measure_curves, milliseconds, rate_ratio
from octavo.reproduce.setup import Setup
from octavo.workload.arrivals import ClosedLoop, OpenLoop
from octavo.workload.lengths import Uniform
from octavo.workload.requests import Independent, TokenRange, Workload, WorkloadRequest

NUMBER = 3
NAME = "orca-mixed-measured"
ITERATION, REQUEST, ALONE = "iteration-level", "request-level", "one at a time"
LENGTHS = Independent(Uniform(32, 512), Uniform(1, 128))
LIMITS = (2.0, 3.0, 5.0)  # times the undisturbed latency


@dataclass(frozen=True, slots=True)
class Case:
    """``shares``: rates, of the most that iteration-level batching answers. ``batches``: the settings that each way of batching is tried
    with, when all requests are there at once; the better one is taken."""

    num_requests: int = 40
    batches: tuple[int, ...] = (4, 8)
    shares: tuple[float, ...] = (0.4, 0.8, 1.2, 2.0)
    num_kv_blocks: int = 400


FULL, QUICK = Case(), Case(6, (4,), (0.5, 1.6))


@dataclass(frozen=True, slots=True)
class Curves:
    """``capacity``: requests per second when all are there at once, by way and largest batch."""

    capacity: dict[tuple[str, int], float]
    best: dict[str, int]
    curves: dict[str, Curve]


def options(way: str, batch: int, num_kv_blocks: int) -> Options:
    """Of an engine that answers at most ``batch`` requests at once. The prefix cache is off: nothing is shared in a trace like this."""
    policy = "static" if way == REQUEST else "fcfs"
    return {
        "scheduling_policy": policy, "max_num_seqs": batch, "enable_prefix_caching": False, "num_kv_blocks": num_kv_blocks,
    }  # fmt: skip


def requests(rate: float | None, num_requests: int, lengths: Independent, tokens: TokenRange, seed: int) -> Iterable[WorkloadRequest]:
    """Poisson at ``rate``; None: all at once. Prompts and lengths are the same at every rate."""
    arrivals = ClosedLoop(num_requests) if rate is None else OpenLoop(rate)
    return Workload(arrivals, lengths, num_requests, tokens=tokens, seed=seed).requests()


def run(setup: Setup) -> Figure:
    case = QUICK if setup.quick else FULL
    arms = {f"{way} {batch}": options(way, batch, case.num_kv_blocks) for way in (ITERATION, REQUEST) for batch in case.batches}
    with Engines(setup.model, arms | {ALONE: options(ALONE, 1, case.num_kv_blocks)}) as engines:
        engines.warm_up()
        return shown(measure(engines, case, setup.seed), f"{describe(engines)} {told(case, setup.seed)}")


def measure(engines: Engines, case: Case, seed: int) -> Curves:
    tokens = token_range(engines.first)

    def at(rate: float | None) -> Iterable[WorkloadRequest]:
        return requests(rate, case.num_requests, LENGTHS, tokens, seed)

    tried = [(way, batch) for batch in case.batches for way in (ITERATION, REQUEST)]
    capacity = {(way, batch): serve(engines[f"{way} {batch}"], at(None)).request_s for way, batch in tried}
    best = {way: max(case.batches, key=lambda batch: capacity[way, batch]) for way in (ITERATION, REQUEST)}
    chosen = {way: engines[f"{way} {best[way]}"] for way in best} | {ALONE: engines[ALONE]}
    rates = [share * capacity[ITERATION, best[ITERATION]] for share in case.shares]
    return Curves(capacity, best, measure_curves(chosen, rates, at, latency))


def latency(run: Run) -> float:
    return run.median_normalized_s


def told(case: Case, seed: int) -> str:
    batches = " or ".join(map(str, case.batches))
    return (
        f"{case.num_requests} requests, prompts U(32, 512) and answers U(1, 128) tokens, Poisson, seed {seed}, the same for all; "
        f"at most {batches} at once, whichever does better when all are there at once; whole answers, prefix cache off, median latency per "
        "output token with its queueing. One run a rate, the three ways in turn. Request-level: the oldest that fit make a batch, nobody "
        "joins until all have ended; no padding is computed."
    )


def shown(found: Curves, setup: str) -> Figure:
    curves, base = found.curves, found.curves[ITERATION][0][1]
    rows = []
    for factor in LIMITS:
        published = "36.9x (175B, at 190 ms)" if factor == LIMITS[0] else "higher"
        text, higher = rate_ratio(curves[ITERATION], curves[REQUEST], factor * base)
        rows.append(Row(f"rate at {factor:g}x the latency of the lowest rate, iteration- over request-level", published, text, higher))
    top = {way: curve[-1][1] for way, curve in curves.items()}
    order = ", ".join(f"{way} {milliseconds(value)}" for way, value in top.items())
    ordered = top[ITERATION] < top[REQUEST] and top[ITERATION] < top[ALONE]
    rows.append(Row("latency per token at the highest rate", "iteration-level lowest", order, ordered))
    ours, theirs = (found.capacity[way, found.best[way]] for way in (ITERATION, REQUEST))
    sizes = f"at most {found.best[ITERATION]} and {found.best[REQUEST]} at once"
    rows.append(Row(f"requests per second, all there at once ({sizes})", "higher", f"{ours:.2f} against {theirs:.2f}", ours > theirs))
    plot = curve_plot("Latency by rate, U(32, 512) and U(1, 128)", curves, "median ms per output token")
    notes = ("The published ratio is read where the baseline hardly batches: compare curves, not one point.", NOT_TRANSFERABLE)
    return Figure(NUMBER, "Iteration-level against request-level batching, mixed lengths", MEASURED, setup, rows, (plot,), notes)
