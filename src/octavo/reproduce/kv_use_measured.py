"""What the live KV pool is used for under reservations and under paging, measured (Kwon et al., PagedAttention, SOSP 2023, figures 2 and
13).

The published pool of 15,728 slots and longest sequence of 2,048 tokens, and lengths of ShareGPT's means, all divided by one number, so that
the shares stay what they are but for the rounding to blocks. All requests are there at once; samples are of the steps in which one waits,
so that memory is what limits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from octavo.bench.in_process import Engines, Options, serve, token_range
from octavo.bench.waste import BLOCK_SIZE, CV_OUTPUT, CV_PROMPT, MAX_MODEL_LEN, MEAN_OUTPUT, MEAN_PROMPT, NUM_SLOTS, PAPER, fitted
from octavo.engine.engine import Engine
from octavo.reproduce.figure import MEASURED, Figure, Plot, Range, Row
from octavo.reproduce.measured import describe
from octavo.reproduce.setup import Setup
from octavo.workload.arrivals import Arrivals, ClosedLoop
from octavo.workload.requests import Independent, TokenRange, Workload, WorkloadRequest

NUMBER = 5
NAME = "kv-use-measured"
NAMES = {"max": "Orca (Max)-like", "pow2": "Orca (Pow2)-like", "oracle": "Orca (Oracle)-like", "paged": "paged"}
POINTS = 3.0  # percentage points within which a share agrees
LOOKAHEAD = 64  # tokens that admission leaves room for, at full size


@dataclass(frozen=True, slots=True)
class Case:
    """``divisor``: of pool, longest sequence and lengths."""

    num_requests: int
    divisor: int
    max_num_seqs: int = 64


FULL, QUICK = Case(60, 2), Case(60, 8)


@dataclass(frozen=True, slots=True)
class Use:
    """Mean shares of the pool in percent, and requests at once, over ``num_samples`` steps."""

    num_samples: int
    token_states: float
    to_come: float
    never: float
    external: float
    batched: float


def run(setup: Setup) -> Figure:
    case = QUICK if setup.quick else FULL
    with Engines(setup.model, {way: options(way, case.divisor, case.max_num_seqs) for way in NAMES}) as engines:
        engines.warm_up(8, 4)
        return shown(measure(engines, case, setup.seed), f"{describe(engines)} {told(case, setup.seed)}")


def options(reservation: str, divisor: int, max_num_seqs: int) -> Options:
    return {
        "kv_reservation": reservation, "enable_prefix_caching": False, "num_kv_blocks": NUM_SLOTS // divisor // BLOCK_SIZE,
        "block_size": BLOCK_SIZE, "max_model_len": MAX_MODEL_LEN // divisor, "max_num_seqs": max_num_seqs,
        "admission_lookahead": max(1, LOOKAHEAD // divisor),
    }  # fmt: skip


def requests(arrivals: Arrivals, num_requests: int, divisor: int, tokens: TokenRange, seed: int) -> Iterable[WorkloadRequest]:
    """ShareGPT-like (``bench.waste`` says how), with each length divided; at least one token."""
    lengths = Independent(fitted(MEAN_PROMPT, CV_PROMPT), fitted(MEAN_OUTPUT, CV_OUTPUT))
    for one in Workload(arrivals, lengths, num_requests, tokens=tokens, seed=seed).requests():
        num_prompt, num_output = (max(1, n // divisor) for n in (len(one.prompt_token_ids), one.num_output))
        yield WorkloadRequest(one.arrival_s, one.prompt_token_ids[:num_prompt], num_output)


def measure(engines: Engines, case: Case, seed: int) -> dict[str, Use]:
    tokens = token_range(engines.first)
    return {
        way: use_of(engine, requests(ClosedLoop(case.num_requests), case.num_requests, case.divisor, tokens, seed))
        for way, engine in engines.by_name.items()
    }


def use_of(engine: Engine, load: Iterable[WorkloadRequest]) -> Use:
    """Sampled in each step in which a request waits, with the KV that the step writes. ValueError when none ever does."""
    scheduler, samples = engine.scheduler, list[tuple[float, ...]]()

    def watch() -> None:
        if scheduler.num_waiting:
            found = scheduler.kv_occupancy()
            parts = (found.num_token_states, found.num_to_come, found.num_never, found.num_external)
            samples.append((*(100 * slots / found.num_slots for slots in parts), scheduler.num_running))

    serve(engine, load, watch=watch)
    if not samples:
        raise ValueError("num_requests: no request ever waited, so memory was not what limited")
    return Use(len(samples), *(sum(column) / len(samples) for column in zip(*samples, strict=True)))


def told(case: Case, seed: int) -> str:
    return (
        f"{case.num_requests} requests at once, ShareGPT-like lengths (lognormal to the published means {MEAN_PROMPT} and {MEAN_OUTPUT}, "
        f"coefficients of variation {CV_PROMPT:g} and {CV_OUTPUT:g}, 4 to 1,024 tokens), seed {seed}; pool of {NUM_SLOTS:,} slots, longest "
        f"sequence of {MAX_MODEL_LEN:,} tokens and all lengths divided by {case.divisor}; blocks of {BLOCK_SIZE} tokens; mean of the steps "
        f"in which a request waits. Reservations by a buddy allocator, output lengths known to pow2 and oracle. Agrees: within {POINTS:g} "
        "percentage points."
    )


def shown(found: dict[str, Use], setup: str) -> Figure:
    rows, ranges, marks = list[Row](), list[Range](), list[tuple[str, float]]()
    for way, name in NAMES.items():
        use, (parts, batched) = found[way], PAPER[way]
        ours = (use.token_states, use.to_come, use.never, use.external)
        for what, published, value in zip(("token states", "reservation", "internal", "external and others"), parts, ours, strict=True):
            if published is not None:
                hit = abs(value - published) <= POINTS
                rows.append(Row(f"{name}: {what}", f"{published:g} %", f"{value:.1f} %", hit))
        rows.append(Row(f"{name}: requests at once", f"{batched:.2f} (at 2 requests/s)", f"{use.batched:.2f}"))
        ranges.append(Range(name, 0.0, use.token_states))
        marks.append((name, float(parts[0] or 0.0)))
    used = [found[way].token_states for way in NAMES]
    rows.append(Row("order", "Max < Pow2 < Oracle < paged", ", ".join(f"{share:.1f}" for share in used), used == sorted(used)))
    plot = Plot("KV memory that holds token states", "% of the pool", tuple(ranges), marks=tuple(marks))
    notes = ("The published engine ran at 2 requests per second, where its memory was full; here a queue keeps it full.",)
    return Figure(NUMBER, "What KV memory is used for, under reservations and paging", MEASURED, setup, rows, (plot,), notes)
