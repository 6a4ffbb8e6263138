"""Orca (Yu et al., OSDI 2022), figures 10 and 11: iteration-level against request-level batching, on mixed and on equal lengths.

GPT-3 175B on 16 A100, the paper's lengths: prompts U(32, 512) and answers U(1, 128), Poisson; the paper's controls have all requests alike.
Its metric is the median over requests of latency over output tokens.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from octavo.reproduce.figure import Line, Plot, Range
from octavo.reproduce.serving_arms import GRID, request_level, seeds_of
from octavo.reproduce.setup import Setup
from octavo.simulator.dense_models import GPT_175B
from octavo.simulator.rate_curve import RateBracket, ratio_of
from octavo.simulator.serving_study import Load, Served, ServingStudy, Way, datasheet
from octavo.workload.lengths import Fixed, Uniform
from octavo.workload.requests import Independent, LengthPairs

MIXED = Independent(Uniform(32, 512), Uniform(1, 128))
EQUAL = {"all (32, 1)": Independent(Fixed(32), Fixed(1)), "all (256, 256)": Independent(Fixed(256), Fixed(256))}
SHORTER = {"all (32, 1)": 60.0}  # a load of requests that take a step each lasts so many times less: thousands come each second
ITERATION = Way.of("iteration-level (Orca-like)", "oracle")
ITERATION_1 = Way.of("iteration-level, batch 1", "oracle", max_num_seqs=1)
BATCHES = (1, 8, 32)
LIMIT_S = 0.190  # the paper's


def study_of(lengths: LengthPairs, setup: Setup, duration_s: float) -> ServingStudy:
    return ServingStudy(Served.fitting(GPT_175B, datasheet("a100-40gb", 16)), Load(lengths, duration_s), seeds_of(setup))


def held(study: ServingStudy, way: Way, limit_s: float) -> list[RateBracket]:
    """Highest rates by the paper's metric."""
    return study.brackets(way, limit_s, middle=True)


def best_request_level(study: ServingStudy, limit_s: float) -> tuple[int, list[RateBracket]]:
    """The batch of request-level batching that holds the highest rate, and its rates."""
    found = {batch: held(study, request_level(batch), limit_s) for batch in BATCHES}
    return max(found.items(), key=lambda item: sum(bracket.holds_at for bracket in item[1]))


def compared(study: ServingStudy, limit_s: float) -> tuple[tuple[float, float, float], str]:
    """(least, middle, most) of the ratio, and the rates in words."""
    batch, below = best_request_level(study, limit_s)
    above = held(study, ITERATION, limit_s)
    return ratio_of(above, below), f"{_rates(above)} against {_rates(below)} requests/s, batch {batch}"


def _rates(brackets: Seq[RateBracket]) -> str:
    return ", ".join(map(str, brackets))


def curves(study: ServingStudy, ways: Seq[Way]) -> tuple[Line, ...]:
    """Median normalised latency over rate, where it is at most four times the paper's limit."""
    found = ((way.name, study.latency(way, study.seeds[0], middle=True).points) for way in ways)
    return tuple(Line(name, tuple(point for point in points if point[1] <= 4 * LIMIT_S)) for name, points in found)


def how(study: ServingStudy, lengths: str) -> str:
    served = study.served
    return (
        f"GPT-3 175B by the roofline of {served.machine.devices} A100 of 40 GB, {served.num_slots:,} KV slots; {lengths}, Poisson for "
        f"{study.load.duration_s:g} s, seeds {', '.join(map(str, study.seeds))}; median of latency over output tokens, highest rates "
        "(holds / fails) "
        f"on a grid of {GRID}. Iteration-level batching reserves each request's own length, as Orca does, "
        f"request-level batching 2,048 tokens; of its batches {', '.join(map(str, BATCHES))} the best counts."
    )


NOTES = (
    "Neither program was rebuilt: both ways are ours, on one roofline without the cost of exchange between GPUs, which is several "
    "times faster than the paper's engines. So the order and the trend are compared, not the rates.",
)


def ratio_range(name: str, found: tuple[float, float, float]) -> Range:
    return Range(name, found[0], found[2])


def rate_plot(title: str, lines: tuple[Line, ...], mark: bool = True) -> Plot:
    marks = (("the paper's limit", LIMIT_S),) if mark else ()
    return Plot(title, "median normalised latency, s per token", lines=lines, x_label="requests/s", marks=marks)
