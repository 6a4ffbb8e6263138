"""Orca (Yu et al., OSDI 2022), figure 10: iteration-level against request-level batching when lengths differ."""

from __future__ import annotations

from octavo.reproduce.figure import SIMULATED, Figure, Plot, Range, Row, within
from octavo.reproduce.orca_rates import BATCHES, ITERATION, LIMIT_S, MIXED, NOTES, compared, curves, how, rate_plot, ratio_range, study_of
from octavo.reproduce.serving_arms import request_level
from octavo.reproduce.setup import Setup

NUMBER = 3
NAME = "orca-mixed"
PUBLISHED = 36.9


def run(setup: Setup) -> Figure:
    study = study_of(MIXED, setup, 30.0 if setup.quick else 120.0)
    rows, ranges = list[Row](), list[Range]()
    unit_s = study.served.decode_s()
    for limit_s, what in ((LIMIT_S, "at the paper's 190 ms"), (2 * unit_s, f"at twice a decode step alone, {2000 * unit_s:.0f} ms")):
        setup.say(f"  {what}")
        ratio, rates = compared(study, limit_s)
        is_papers = limit_s == LIMIT_S
        hit = within(PUBLISHED, ratio[0], ratio[2], 0.1) if is_papers else None
        published = f"{PUBLISHED:g}x (6.81 against 0.185)" if is_papers else ""
        text = f"{ratio[1]:.2f}x ({ratio[0]:.2f} to {ratio[2]:.2f}; {rates})"
        rows.append(Row(f"rate over request-level batching {what}", published, text, hit))
        rows.append(Row(f"iteration-level batching is ahead {what}", "yes", "yes" if ratio[0] > 1 else "no", ratio[0] > 1))
        ranges.append(ratio_range(what, ratio))
    lines = curves(study, (ITERATION, *map(request_level, BATCHES)))
    plots = (rate_plot("Mixed lengths", lines), Plot("Highest rate over request-level batching", "ratio", ranges=tuple(ranges)))
    words = how(study, "prompts U(32, 512), answers U(1, 128)")
    return Figure(NUMBER, "Iteration-level against request-level batching", SIMULATED, words, rows, plots, NOTES)
