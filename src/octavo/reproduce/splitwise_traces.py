"""Splitwise, figure 3: the median lengths of its two production traces, as published with the paper, and as the public files have them."""

from __future__ import annotations

from statistics import median

from octavo.reproduce.figure import ARITHMETIC, Figure, Row
from octavo.reproduce.setup import Setup

NUMBER = 21
NAME = "trace-lengths"
PUBLISHED = {"code": (1500, 13), "conversation": (1020, 129)}


def run(setup: Setup) -> Figure:
    study = setup.study
    rows = []
    for workload, medians in PUBLISHED.items():
        for what, published, lengths in zip(("prompt", "output"), medians, study.data.lengths[workload], strict=True):
            ours = median(lengths.values)
            rows.append(Row(f"{workload}, median {what} tokens", f"{published}", f"{ours:g}", ours == published))
    how = "Azure LLM inference traces 2023, all rows with a prompt and an output."
    return Figure(NUMBER, "Lengths of the production traces", ARITHMETIC, how, rows)
