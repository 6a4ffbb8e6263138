"""Splitwise, figure 18a: prompt and token machines of A100s against as many A100s that do both, at equal power and cost."""

from __future__ import annotations

from octavo.reproduce.figure import Figure
from octavo.reproduce.setup import Setup
from octavo.reproduce.splitwise_rates import AA, BASELINE_A100, Comparison, compare

NUMBER = 25
NAME = "aa-a100"
NOTES = (
    "The abstract says 2.35x for the pair of which the body says 2.15x.",
    "tbt divides by output tokens, one more than there are gaps, and is a mean over a request: stalls inside it do not show.",
)


def run(setup: Setup) -> Figure:
    study = setup.study
    comparison = Comparison("equal power and cost", AA, BASELINE_A100, 2.15)
    return compare(study, NUMBER, "Splitwise-AA against Baseline-A100, conversation", [comparison], NOTES)
