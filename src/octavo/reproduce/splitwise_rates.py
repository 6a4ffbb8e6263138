"""What the cluster figures of Splitwise have in common: designs compared by their highest rates, under two look-ups of decode time.

The published headline rests on a look-up by the number of sequences on an axis of context tokens, under which decoding is nearly free to
batch. So each comparison is made twice, as published and in two variables (``costs.tables``), with the published split and with the best.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from octavo.reproduce.figure import SIMULATED, Figure, Plot, Range, Row, within
from octavo.simulator.rate_curve import ratio_of
from octavo.simulator.splitwise_study import A100, H100, H100_CAPPED, BestSplit, Bracket, Design, Study

LOOKUPS = ("published", "two-variable")
BASELINE_A100 = Design("Baseline-A100", A100, 70)
BASELINE_H100 = Design("Baseline-H100", H100, 40)
AA = Design("AA", A100, 25, A100, 45)
AA_ISO_COST = Design("AA", A100, 35, A100, 51)
HH = Design("HH", H100, 15, H100, 25)
HA = Design("HA", A100, 26, H100, 25)
HHCAP = Design("HHcap", H100_CAPPED, 21, H100, 25)


@dataclass(frozen=True, slots=True)
class Comparison:
    """``above`` against ``below``, whose ratio of highest rates was published; None: it was not. ``power``, ``cost``: what the best split
    of ``above`` may use; with neither, as many machines as the published one has."""

    what: str
    above: Design
    below: Design
    published: float | None
    power: float | None = None
    cost: float | None = None


def setup_of(study: Study, workload: str = "conversation") -> str:
    """How the runs of a figure are made, in words."""
    options = study.options
    seeds = ", ".join(map(str, options.seeds))
    return (
        f"BLOOM-176B on machines of 8 GPUs by a published table of measurements; {workload} lengths of the Azure traces 2023, prompt and "
        f"output drawn independently, Poisson, {options.duration_s:g} s, seeds {seeds}, run to the end; highest rate with all nine "
        f"objectives kept, holds / fails on a grid of {options.step:g} requests/s."
    )


def compare(study: Study, number: int, title: str, comparisons: Seq[Comparison], notes: Seq[str] = ()) -> Figure:
    """A figure of ratios. A published ratio is hit when the brackets of the published split, under the published look-up, allow it."""
    rows, ranges = list[Row](), list[Range]()
    for lookup in LOOKUPS:
        seen: set[Design] = set()
        for comparison in comparisons:
            below = study.brackets(comparison.below, lookup)
            splits: list[tuple[str, Design]] = [("published split", comparison.above)]
            best = study.best_split(comparison.above, lookup, comparison.power, comparison.cost)
            if best.design != comparison.above:
                splits.append(("best split found", best.design))
            if comparison.below not in seen:
                rows.append(Row(f"{comparison.below}, {lookup}", "", _rates(below)))
            seen.add(comparison.below)
            for kind, design in splits:
                above = study.brackets(design, lookup)
                rows.append(Row(f"{design} ({kind}), {lookup}", "", _rates(above)))
                rows.append(_ratio(comparison, lookup, design, above, below))
                least, _, most = ratio_of(above, below)
                ranges.append(Range(f"{comparison.what}: {design}, {lookup}", least, most))
            rows.append(_searched(best, lookup))
    marks = tuple((comparison.what, comparison.published) for comparison in comparisons if comparison.published is not None)
    plot = Plot(title, "ratio of highest rates", ranges=tuple(ranges), marks=marks)
    return Figure(number, title, SIMULATED, setup_of(study), rows, (plot,), notes)


def _rates(brackets: Seq[Bracket]) -> str:
    first = next((bracket for bracket in brackets if bracket.broken), None)
    broken = f"; first to break: {', '.join(first.broken)}" if first else ""
    return f"{', '.join(map(str, brackets))} requests/s{broken}"


def _ratio(comparison: Comparison, lookup: str, design: Design, above: Seq[Bracket], below: Seq[Bracket]) -> Row:
    least, middle, most = ratio_of(above, below)
    published = "" if comparison.published is None else f"{comparison.published:g}x"
    is_judged = design == comparison.above and lookup == "published" and comparison.published is not None
    hit = within(comparison.published or 0.0, least, most) if is_judged else None
    return Row(f"{comparison.what}: {design} / {comparison.below}, {lookup}", published, f"{middle:.2f}x ({least:.2f} to {most:.2f})", hit)


def _searched(best: BestSplit, lookup: str) -> Row:
    tried = ", ".join(f"{design.num_prompt}P+{design.num_token}T" for design, _ in best.tried)
    return Row(f"splits tried, {lookup}", "", tried)
