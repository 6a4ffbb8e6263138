"""What is left of iteration-level batching's lead when all requests are alike, and when only one runs at a time (Yu et al., Orca, OSDI
2022, section 6.2, homogeneous trace), measured.

Requests of 256 + 256 tokens and of 32 + 1 beside the mixed ones. A full batch is there when a run begins; the others come a little faster
than iteration-level batching can answer them. All at once, equal requests would be answered alike by construction.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from octavo.bench.in_process import Engines, in_turn, serve, token_range
from octavo.reproduce.figure import MEASURED, Figure, Plot, Range, Row
from octavo.reproduce.measured import NOT_TRANSFERABLE, describe, times
from octavo.reproduce.orca_mixed_measured import ITERATION, LENGTHS, REQUEST, options, requests
from octavo.reproduce.setup import Setup
from octavo.workload.lengths import Fixed
from octavo.workload.requests import Independent, WorkloadRequest

NUMBER = 4
NAME = "orca-equal-measured"
MIXED, LONG, SHORT = "mixed lengths", "all 256 + 256", "all 32 + 1"
TRACES = {MIXED: LENGTHS, LONG: Independent(Fixed(256), Fixed(256)), SHORT: Independent(Fixed(32), Fixed(1))}
SAME = 0.05  # of a ratio: two ways that do the same differ by less


@dataclass(frozen=True, slots=True)
class Case:
    """``num_requests``: by largest batch, those of each trace."""

    num_requests: dict[int, dict[str, int]]
    repeat: int
    num_kv_blocks: int = 400


FULL = Case({1: {MIXED: 6, LONG: 2, SHORT: 16}, 8: {MIXED: 24, LONG: 16, SHORT: 32}}, 2)
QUICK = Case({1: {MIXED: 2, LONG: 1, SHORT: 4}, 4: {MIXED: 8, LONG: 8, SHORT: 8}}, 1)
LOAD = 1.25  # rate, of what iteration-level batching answers


@dataclass(frozen=True, slots=True)
class Gap:
    """``ratio``: requests answered per second, iteration- over request-level; median of the rounds. ``steps``: of one round each."""

    ratio: float
    lowest: float
    highest: float
    steps: tuple[int, int]


def run(setup: Setup) -> Figure:
    case = QUICK if setup.quick else FULL
    arms = {f"{way} {batch}": options(way, batch, case.num_kv_blocks) for batch in case.num_requests for way in (ITERATION, REQUEST)}
    with Engines(setup.model, arms) as engines:
        engines.warm_up()
        return shown(measure(engines, case, setup.seed), f"{describe(engines)} {told(case, setup.seed)}")


def measure(engines: Engines, case: Case, seed: int) -> dict[tuple[int, str], Gap]:
    return {
        (batch, trace): _gap(engines, batch, trace, num, case.repeat, seed)
        for batch, numbers in case.num_requests.items()
        for trace, num in numbers.items()
    }


def _gap(engines: Engines, batch: int, trace: str, num_requests: int, repeat: int, seed: int) -> Gap:
    lengths, tokens = TRACES[trace], token_range(engines.first)
    pair = [f"{way} {batch}" for way in (ITERATION, REQUEST)]
    rate = LOAD * serve(engines[pair[0]], requests(None, num_requests, lengths, tokens, seed)).request_s
    ratios, steps = list[float](), (0, 0)
    for i in range(repeat):
        load = begun(list(requests(rate, num_requests, lengths, tokens, seed + i)), batch)
        runs = {name: serve(engines[name], load) for name in in_turn(pair, i)}
        ratios.append(runs[pair[0]].request_s / runs[pair[1]].request_s)
        steps = runs[pair[0]].num_steps, runs[pair[1]].num_steps
    return Gap(statistics.median(ratios), min(ratios), max(ratios), steps)


def begun(load: list[WorkloadRequest], batch: int) -> list[WorkloadRequest]:
    """The load from the moment when ``batch`` of it are there: these are due at once, the others by so much earlier."""
    start_s = load[min(batch, len(load)) - 1].arrival_s
    return [WorkloadRequest(max(0.0, one.arrival_s - start_s), one.prompt_token_ids, one.num_output) for one in load]


def told(case: Case, seed: int) -> str:
    return (
        f"A full batch at the start, then Poisson at {LOAD:g} of what iteration-level batching answers when all are there at once; "
        f"{case.repeat} rounds, both ways in turn on the same requests, seeds from {seed}, medians of the ratio of requests per second; "
        "whole answers, prefix cache off."
    )


def shown(gaps: dict[tuple[int, str], Gap], setup: str) -> Figure:
    most = max(batch for batch, _ in gaps)
    mixed = gaps[most, MIXED].ratio
    rows = [Row(f"{MIXED}, at most {most} at once: iteration- over request-level", "-", _text(gaps[most, MIXED]))]
    for trace in (LONG, SHORT):
        gap = gaps[most, trace]
        rows.append(Row(f"{trace}, at most {most} at once", "a smaller gap (about 1.25x to 2x)", _text(gap), gap.ratio < mixed))
    for trace in (MIXED, LONG, SHORT):
        gap = gaps[1, trace]
        same = gap.steps[0] == gap.steps[1] and abs(gap.ratio - 1) <= SAME
        rows.append(Row(f"{trace}, one at a time", "no gap", f"{_text(gap)}, {gap.steps[0]} and {gap.steps[1]} steps", same))
    ranges = tuple(Range(f"{trace}, at most {batch}", gap.lowest, gap.highest) for (batch, trace), gap in gaps.items())
    plot = Plot("Lead of iteration-level batching", "requests per second, ratio", ranges, marks=(("no lead", 1.0),))
    notes = (f"No gap: the same number of steps, and a ratio within {SAME:g} of 1.", NOT_TRANSFERABLE)
    return Figure(NUMBER, "Iteration-level against request-level batching, equal requests", MEASURED, setup, rows, (plot,), notes)


def _text(gap: Gap) -> str:
    return times(gap.ratio) if gap.lowest == gap.highest else f"{times(gap.ratio)} ({gap.lowest:.2f} to {gap.highest:.2f})"
