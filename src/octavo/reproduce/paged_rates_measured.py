"""The request rates that paging, reservations and request-level batching sustain at similar latency, measured (Kwon et al., PagedAttention,
SOSP 2023, figure 12).

As ``kv_use_measured``, with Poisson arrivals over a grid of rates; the mean over requests of latency per output token. "FasterTransformer-
like" is request-level batching with the longest sequence reserved for each: its kernels are not rebuilt.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from octavo.bench.in_process import Engines, Options, Run, serve, token_range
from octavo.bench.waste import BLOCK_SIZE, MAX_MODEL_LEN, NUM_SLOTS
from octavo.reproduce.figure import MEASURED, Figure, Row
from octavo.reproduce.kv_use_measured import options, requests
from octavo.reproduce.measured import NOT_TRANSFERABLE, Curve, curve_plot, describe, measure_curves, milliseconds, rate_ratio
from octavo.reproduce.setup import Setup
from octavo.workload.arrivals import ClosedLoop, OpenLoop
from octavo.workload.requests import WorkloadRequest

NUMBER = 8
NAME = "paged-rates-measured"
PAGED, ORACLE, MAX, FT = "paged", "Orca (Oracle)-like", "Orca (Max)-like", "FasterTransformer-like"
PUBLISHED = {ORACLE: "1.7x to 2.7x", MAX: "2.7x to 8x", FT: "up to 22x"}
LIMITS = (2.0, 3.0, 5.0)  # times paging's latency at the lowest rate


@dataclass(frozen=True, slots=True)
class Case:
    """``divisor``: of the longest sequence and all lengths; the pool is divided by twice that, since a CPU fills no larger one.
    ``shares``: rates, of the most that paging answers."""

    num_requests: int
    divisor: int
    shares: tuple[float, ...]
    max_num_seqs: int = 64


FULL, QUICK = Case(40, 4, (0.4, 0.8, 1.1, 1.5)), Case(16, 4, (0.5, 1.5))


@dataclass(frozen=True, slots=True)
class Curves:
    capacity: float  # requests per second of paging when all are there at once
    curves: dict[str, Curve]


def arms(case: Case) -> dict[str, Options]:
    pool = {"num_kv_blocks": NUM_SLOTS // (2 * case.divisor) // BLOCK_SIZE}
    reservations = {PAGED: "paged", ORACLE: "oracle", MAX: "max"}
    ways = {name: options(way, case.divisor, case.max_num_seqs) | pool for name, way in reservations.items()}
    return ways | {FT: ways[MAX] | {"scheduling_policy": "static"}}


def run(setup: Setup) -> Figure:
    case = QUICK if setup.quick else FULL
    with Engines(setup.model, arms(case)) as engines:
        engines.warm_up()
        return shown(measure(engines, case, setup.seed), f"{describe(engines)} {told(case, setup.seed)}")


def measure(engines: Engines, case: Case, seed: int) -> Curves:
    tokens = token_range(engines.first)

    def at(rate: float) -> Iterable[WorkloadRequest]:
        return requests(OpenLoop(rate), case.num_requests, case.divisor, tokens, seed)

    at_once = requests(ClosedLoop(case.num_requests), case.num_requests, case.divisor, tokens, seed)
    capacity = serve(engines[PAGED], at_once).request_s
    return Curves(capacity, measure_curves(engines.by_name, [share * capacity for share in case.shares], at, latency))


def latency(run: Run) -> float:
    return run.mean_normalized_s


def told(case: Case, seed: int) -> str:
    shares = ", ".join(f"{share:g}" for share in case.shares)
    return (
        f"{case.num_requests} requests, ShareGPT-like lengths and longest sequence of {MAX_MODEL_LEN:,} tokens divided by {case.divisor}, "
        f"pool of {NUM_SLOTS // (2 * case.divisor):,} slots; Poisson, seed {seed}, the same for all, at {shares} of the most that paging "
        "answers; mean over requests of latency per output token with its queueing; one run a rate, the ways in turn."
    )


def shown(found: Curves, setup: str) -> Figure:
    curves, base, rows = found.curves, found.curves[PAGED][0][1], list[Row]()
    for other, published in PUBLISHED.items():
        for factor in LIMITS:
            text, higher = rate_ratio(curves[PAGED], curves[other], factor * base)
            rows.append(Row(f"rate of paging over {other}, at {factor:g}x the latency of the lowest rate", published, text, higher))
    top = {name: curve[-1][1] for name, curve in curves.items()}
    values = [top[name] for name in (PAGED, ORACLE, MAX, FT)]
    order = ", ".join(f"{name} {milliseconds(value)}" for name, value in top.items())
    rows.append(Row("latency per token at the highest rate", "paged < Oracle < Max < FasterTransformer", order, values == sorted(values)))
    plot = curve_plot("Latency by rate, ShareGPT-like lengths", curves, "mean ms per output token")
    notes = ("Judged is whether paging sustains the higher rate; the published ends depend on the latency that is taken.", NOT_TRANSFERABLE)
    return Figure(NUMBER, "Request rates at similar latency", MEASURED, setup, rows, (plot,), notes)
