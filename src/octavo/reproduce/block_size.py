"""Throughput by the size of KV blocks, where memory limits how many requests run, measured (Kwon et al., PagedAttention, SOSP 2023, figure
18).

Small blocks waste less, so more requests run at once; large ones are walked faster. Lengths are those of ShareGPT, halved, and of Alpaca.
The cpu backend's blocks are multiples of 16 tokens.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from octavo.bench.in_process import Engines, Options, in_turn, serve, token_range
from octavo.bench.sharing import DATASETS
from octavo.reproduce.figure import MEASURED, Figure, Line, Plot, Row
from octavo.reproduce.measured import NOT_TRANSFERABLE, describe
from octavo.reproduce.setup import Setup
from octavo.workload.arrivals import ClosedLoop
from octavo.workload.requests import Independent, TokenRange, Workload, WorkloadRequest

NUMBER = 13
NAME = "block-size"
BEST = {"sharegpt": (16, 128), "alpaca": (16, 32)}  # published: where throughput is best
DEFAULT = 16


@dataclass(frozen=True, slots=True)
class Load:
    """Requests at once, whose lengths are divided by ``divisor``, in a pool of ``num_slots`` tokens."""

    num_requests: int
    divisor: int
    num_slots: int


@dataclass(frozen=True, slots=True)
class Case:
    loads: dict[str, Load]
    repeat: int
    sizes: tuple[int, ...] = (16, 32, 64, 128, 256)


FULL = Case({"sharegpt": Load(20, 2, 2048), "alpaca": Load(32, 1, 1024)}, 2)
QUICK = Case({"sharegpt": Load(8, 4, 1024), "alpaca": Load(12, 1, 512)}, 1, (16, 64, 256))

Speeds = dict[str, dict[int, list[float]]]
"""Load -> block size -> output tokens per second [rounds]."""


def run(setup: Setup) -> Figure:
    case, speeds, model = (QUICK if setup.quick else FULL), Speeds(), ""
    for name, load in case.loads.items():
        with Engines(setup.model, arms(load, case.sizes)) as engines:
            engines.warm_up(16, 4)
            speeds[name], model = measure(engines, name, load, case, setup.seed), describe(engines)
    return shown(speeds, f"{model} {told(case, setup.seed)}")


def arms(load: Load, sizes: Iterable[int]) -> dict[str, Options]:
    shared: Options = {"enable_prefix_caching": False, "admission_lookahead": 16}
    return {str(size): shared | {"block_size": size, "num_kv_blocks": load.num_slots // size} for size in sizes}


def requests(name: str, load: Load, tokens: TokenRange, seed: int) -> Iterable[WorkloadRequest]:
    """As many as fit: a request that the pool could not hold whole is shortened to what it can."""
    lengths = Independent(DATASETS[name].prompt, DATASETS[name].output)
    most = load.num_slots // 2
    for one in Workload(ClosedLoop(load.num_requests), lengths, load.num_requests, tokens=tokens, seed=seed).requests():
        num_prompt, num_output = (min(max(1, n // load.divisor), most) for n in (len(one.prompt_token_ids), one.num_output))
        yield WorkloadRequest(0.0, one.prompt_token_ids[:num_prompt], num_output)


def measure(engines: Engines, name: str, load: Load, case: Case, seed: int) -> dict[int, list[float]]:
    tokens, speeds = token_range(engines.first), {size: list[float]() for size in case.sizes}
    for i in range(case.repeat):
        answers = None
        for size in in_turn(case.sizes, i):
            run = serve(engines[str(size)], requests(name, load, tokens, seed))
            if answers not in (None, run.outputs):
                raise RuntimeError(f"{name}, blocks of {size} tokens: the answers depend on the size of blocks")
            answers = run.outputs
            speeds[size].append(sum(map(len, run.outputs)) / run.seconds)
    return speeds


def told(case: Case, seed: int) -> str:
    loads = "; ".join(
        f"{name}: {load.num_requests} requests, lengths divided by {load.divisor}, a pool of {load.num_slots:,} tokens"
        for name, load in case.loads.items()
    )
    return (
        f"All requests at once, log-normal lengths with the published means ({loads}), seed {seed}, {case.repeat} rounds, the sizes in "
        "turn; medians. Prefix cache off; preempted sequences are computed again. Answers are equal for all sizes."
    )


def shown(speeds: Speeds, setup: str) -> Figure:
    medians = {name: {size: statistics.median(found) for size, found in by_size.items()} for name, by_size in speeds.items()}
    rows = list[Row]()
    for name, by_size in medians.items():
        low, high = BEST[name]
        best = max(by_size, key=lambda size: by_size[size])
        rows.append(Row(f"best size, lengths of {name}", f"{low} to {high}", str(best), low <= best <= high))
        last = max(by_size)
        ratio = by_size[last] / by_size[best]
        rows.append(Row(f"{name}: blocks of {last} against the best", "slower", f"{ratio:.2f} of its throughput", ratio < 1))
        told_default = f"{by_size[DEFAULT] / by_size[best]:.2f} of the best throughput"
        rows.append(Row(f"{name}: blocks of {DEFAULT}, the default", "near the best", told_default))
    lines = tuple(Line(name, tuple((float(size), speed) for size, speed in by_size.items())) for name, by_size in medians.items())
    plot = Plot("Throughput by block size", "output tokens per second", lines=lines, x_label="tokens of a block")
    return Figure(NUMBER, "The size of KV blocks", MEASURED, setup, rows, (plot,), (NOT_TRANSFERABLE,))
