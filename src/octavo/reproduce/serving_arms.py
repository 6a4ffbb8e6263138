"""What the figures of serving systems have in common: models on their papers' machines, ways of serving, and rows of rate ratios.

Baselines are ours, not the papers' programs: the same scheduler and the same roofline, with other switches. Lengths like ShareGPT's are
those of ``bench.waste``: its published means, its shape, fixed there.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from octavo.bench.waste import CV_OUTPUT, CV_PROMPT, MEAN_OUTPUT, MEAN_PROMPT, fitted
from octavo.reproduce.figure import Line, Range, Row
from octavo.reproduce.setup import Setup
from octavo.simulator.rate_curve import RateBracket, ratio_of
from octavo.simulator.serving_study import GRID_RATIO, ServingStudy, Way
from octavo.workload.requests import Independent

PAGED = Way.of("paged")
ORACLE = Way.of("Orca-like (Oracle)", "oracle")
POW2 = Way.of("Orca-like (Pow2)", "pow2")
MAX = Way.of("Orca-like (Max)", "max")
GRID = f"{100 * (GRID_RATIO - 1):.0f} %"  # from a rate to the next
TIMES_IDLE = (2.0, 4.0, 8.0)  # limits of the normalised latency, in decode steps of one sequence alone
JUDGED = 1  # of these


def request_level(max_num_seqs: int) -> Way:
    """As front ends of FasterTransformer: a batch is filled once and runs to its end, memory is reserved for the longest sequence."""
    return Way.of(f"request-level, batch {max_num_seqs}", "max", "static", max_num_seqs, max(2048, max_num_seqs))


def sharegpt_like() -> Independent:
    return Independent(fitted(MEAN_PROMPT, CV_PROMPT), fitted(MEAN_OUTPUT, CV_OUTPUT))


def seeds_of(setup: Setup, most: int = 1) -> tuple[int, ...]:
    return tuple(setup.seed + i for i in range(1 if setup.quick else most))


@dataclass(frozen=True, slots=True)
class Ratio:
    """Paging, or whatever way is proposed, against a baseline, of which the best setting counts. ``published``: from .. to; None: nothing
    was."""

    what: str
    above: Way
    below: tuple[Way, ...]
    published: tuple[float, float] | None = None
    printed: str = ""


def ratio_row(study: ServingStudy, ratio: Ratio) -> tuple[Row, Range]:
    """A row with the ratios at all limits, judged at the middle one: hit when the brackets there allow a ratio that was published."""
    unit_s = study.served.decode_s()
    found = [_ratio_at(study, ratio, times * unit_s) for times in TIMES_IDLE]
    least, _, most = found[JUDGED]
    text = " / ".join(f"{middle:.2f}x" for _, middle, _ in found) + f" ({least:.2f} to {most:.2f} at {TIMES_IDLE[JUDGED]:g}x)"
    hit = None if ratio.published is None else least <= ratio.published[1] and most >= ratio.published[0]
    return Row(ratio.what, ratio.printed, text, hit), Range(ratio.what, least, most)


def _ratio_at(study: ServingStudy, ratio: Ratio, limit_s: float) -> tuple[float, float, float]:
    above = study.brackets(ratio.above, limit_s)
    arms = [study.brackets(way, limit_s) for way in ratio.below]
    return ratio_of(above, max(arms, key=_held))


def _held(brackets: Seq[RateBracket]) -> float:
    return sum(bracket.holds_at for bracket in brackets)


def latency_lines(study: ServingStudy, ways: Seq[Way], label: str = "") -> tuple[Line, ...]:
    """Normalised latency over rate, of the first seed, at all rates that were run and are below the worst limit twice over."""
    most = 2 * TIMES_IDLE[-1] * study.served.decode_s()
    lines = []
    for way in ways:
        curve = study.latency(way, study.seeds[0])
        lines.append(Line(f"{label}{way.name}", tuple((rate, value) for rate, value in curve.points if value <= most)))
    return tuple(lines)


def limits_in_words(study: ServingStudy) -> str:
    unit_s = study.served.decode_s()
    limits = ", ".join(f"{1000 * times * unit_s:.0f}" for times in TIMES_IDLE)
    factors = ", ".join(f"{times:g}" for times in TIMES_IDLE)
    return f"{study.served.model.name}: {limits} ms ({factors} times a decode step of one sequence alone)"
