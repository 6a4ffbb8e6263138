"""Splitwise, section VI: A100s split into prompt and token machines against H100s that do both, at equal cost and at equal power."""

from __future__ import annotations

from octavo.reproduce.figure import Figure
from octavo.reproduce.setup import Setup
from octavo.reproduce.splitwise_rates import AA, AA_ISO_COST, BASELINE_H100, Comparison, compare

NUMBER = 26
NAME = "aa-h100"


def run(setup: Setup) -> Figure:
    study = setup.study
    comparisons = [
        Comparison("equal cost", AA_ISO_COST, BASELINE_H100, 1.4),
        Comparison("equal power", AA, BASELINE_H100, 1.4),
    ]
    notes = (
        f'"1.4x at 20 % lower cost" fits only the second pair, whose cost is {AA.cost / BASELINE_H100.cost:.2f} of the baseline\'s; '
        f"the body's 1.4x is of the first, at {AA_ISO_COST.cost / BASELINE_H100.cost:.2f} of its cost and "
        f"{AA_ISO_COST.power / BASELINE_H100.power:.2f} of its power.",
    )
    return compare(study, NUMBER, "Splitwise-AA against Baseline-H100, conversation", comparisons, notes)
