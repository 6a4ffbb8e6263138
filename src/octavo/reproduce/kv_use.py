"""PagedAttention (Kwon et al., SOSP 2023), figure 2: what KV memory is used for under paging and under three reservations.

The scheduler and its block tables are the engine's; lengths, pool and roofline are fixed in ``bench.waste``, and were before the first run.
Compared is the mean of all steps in which a request waits, so that memory is what limits: the paper does not say when its figure was taken,
and its external fragmentation of Orca (Max), 1,392 of 15,728 slots, is that of a full pool.
"""

from __future__ import annotations

from statistics import fmean

from octavo.bench.waste import CV_OUTPUT, CV_PROMPT, MEAN_OUTPUT, MEAN_PROMPT, NUM_SLOTS, PAPER, WasteCase, fitted, simulate
from octavo.config import SchedulerConfig
from octavo.reproduce.figure import SIMULATED, Figure, Plot, Range, Row
from octavo.reproduce.setup import Setup

NUMBER = 5
NAME = "kv-use"
NAMES = {"max": "Orca (Max)", "pow2": "Orca (Pow2)", "oracle": "Orca (Oracle)", "paged": "paged"}
FULL_RATE, PAPER_RATE = 6.0, 2.0
POINTS = 3.0  # percent of the pool that count as agreement
AHEAD = SchedulerConfig().admission_lookahead  # this engine's default
_PARTS = ("token_states_pct", "reservation_pct", "internal_pct", "external_pct")


def run(setup: Setup) -> Figure:
    seeds = [setup.seed] if setup.quick else [setup.seed, setup.seed + 1, setup.seed + 2]
    duration_s = 120.0 if setup.quick else 600.0
    rows, ranges = list[Row](), list[Range]()
    for reservation, name in NAMES.items():
        setup.say(f"  {name}")
        runs = [simulate(reservation, WasteCase(FULL_RATE, duration_s, seed)).with_queue.record() for seed in seeds]
        found = [record for record in runs if record is not None]
        published = PAPER[reservation][0]
        rows.append(_states(name, published[0], [record[_PARTS[0]] for record in found]))
        parts = [f"{fmean(record[key] for record in found):.1f}" for key in _PARTS[1:]]
        others = ["-" if value is None else f"{value:g}" for value in published[1:]]
        rows.append(Row(f"{name}: to come / never used / external and others", " / ".join(others), " / ".join(parts) + " %"))
        shares = [record[_PARTS[0]] for record in found]
        ranges.append(Range(f"{name}, published {published[0]:g}", min(shares), max(shares)))
        if reservation == "paged":
            setup.say("  paged, this engine's look-ahead")
            ahead = [simulate(reservation, WasteCase(FULL_RATE, duration_s, seed), lookahead=AHEAD).with_queue.record() for seed in seeds]
            ours = [record[_PARTS[0]] for record in ahead if record is not None]
            rows.append(_states(f"paged, admission looks {AHEAD} tokens ahead", published[0], ours))
            ranges.append(Range(f"paged, admission looks {AHEAD} tokens ahead", min(ours), max(ours)))
        at_paper_rate = simulate(reservation, WasteCase(PAPER_RATE, duration_s, setup.seed)).every_step.record()
        if at_paper_rate is not None:
            rows.append(Row(f"{name}: token states at {PAPER_RATE:g} requests/s, all steps", "", f"{at_paper_rate[_PARTS[0]]:.1f} %"))
    marks = tuple((NAMES[reservation], parts[0]) for reservation, (parts, _) in PAPER.items() if parts[0] is not None)
    plot = Plot("KV slots that hold a token's state", "% of the pool, over seeds", ranges=tuple(ranges), marks=marks)
    notes = (
        "At the paper's 2 requests per second the roofline, faster than the paper's engine, keeps no queue with paging, so its pool is not "
        "full: those rows are shown and not judged.",
        f"By default this engine admits a request only if each running sequence has room for {AHEAD} more tokens, so that fewer are "
        "preempted, and "
        "leaves that memory free; the paper's engine does not look ahead. Both rows are judged. The first run had only this engine's "
        "default.",
    )
    return Figure(NUMBER, "What KV memory is used for", SIMULATED, _how(duration_s, seeds), rows, (plot,), notes)


def _how(duration_s: float, seeds: list[int]) -> str:
    return (
        f"OPT-13B on one A100 of 40 GB by its roofline, {NUM_SLOTS:,} slots in blocks of 16, sequences of at most 2,048 tokens; lengths "
        f"lognormal to the published means ({MEAN_PROMPT:g} in, {fitted(MEAN_PROMPT, CV_PROMPT)}; {MEAN_OUTPUT:g} out, "
        f"{fitted(MEAN_OUTPUT, CV_OUTPUT)}), Poisson, {FULL_RATE:g} requests/s for {duration_s:g} s, seeds "
        f"{', '.join(map(str, seeds))}; mean of the steps in which a request waits; agrees: within {POINTS:g} points."
    )


def _states(name: str, published: float | None, shares: list[float]) -> Row:
    assert published is not None, "token states are published of all four"
    ours = f"{fmean(shares):.1f} % ({min(shares):.1f} to {max(shares):.1f})"
    return Row(f"{name}: token states", f"{published:g} %", ours, abs(fmean(shares) - published) <= POINTS)
