"""Orca (Yu et al., OSDI 2022), figure 11: the same with requests that are all alike, where a batch has nobody to wait for."""

from __future__ import annotations

from octavo.reproduce.figure import SIMULATED, Figure, Plot, Range, Row
from octavo.reproduce.orca_rates import (
    BATCHES,
    EQUAL,
    ITERATION,
    ITERATION_1,
    MIXED,
    NOTES,
    SHORTER,
    compared,
    curves,
    held,
    how,
    rate_plot,
    ratio_range,
    study_of,
)
from octavo.reproduce.serving_arms import request_level
from octavo.reproduce.setup import Setup
from octavo.simulator.rate_curve import ratio_of

NUMBER = 4
NAME = "orca-equal"
TIMES_IDLE = 4.0  # limit of the latency, in what one request alone has


def run(setup: Setup) -> Figure:
    duration_s = 30.0 if setup.quick else 120.0
    rows, ranges, plots = list[Row](), list[Range](), list[Plot]()
    mixed, _ = compared(study := study_of(MIXED, setup, duration_s), TIMES_IDLE * study.served.decode_s())
    for name, lengths in EQUAL.items():
        setup.say(f"  {name}")
        study = study_of(lengths, setup, duration_s / SHORTER.get(name, 1.0))
        num_prompt, num_output = (int(str(part)) for part in (lengths.prompt, lengths.output))
        alone_s = (study.served.prefill_s(num_prompt) + (num_output - 1) * study.served.decode_s()) / num_output
        limit_s = TIMES_IDLE * alone_s
        ratio, rates = compared(study, limit_s)
        text = f"{ratio[1]:.2f}x ({ratio[0]:.2f} to {ratio[2]:.2f}; {rates})"
        shrinks = ratio[2] < mixed[0]  # beyond what the brackets leave open
        rows.append(Row(f"{name}: gap to request-level batching, mixed lengths {mixed[1]:.2f}x", "shrinks", text, shrinks))
        ranges.append(ratio_range(name, ratio))
        one = ratio_of(held(study, ITERATION_1, limit_s), held(study, request_level(1), limit_s))
        no_gap = one[0] <= 1 <= one[2]
        rows.append(Row(f"{name}: gap with a batch of one", "none", f"{one[1]:.2f}x ({one[0]:.2f} to {one[2]:.2f})", no_gap))
        plots.append(rate_plot(name, curves(study, (ITERATION, *map(request_level, BATCHES))), mark=False))
    ranges.append(ratio_range("mixed lengths, for comparison", mixed))
    gaps = Plot("Highest rate over request-level batching", "ratio", ranges=tuple(ranges))
    words = f"all requests alike (of (32, 1): {SHORTER['all (32, 1)']:g} times less long); limit {TIMES_IDLE:g} times what one alone has"
    return Figure(NUMBER, "The same with requests that are all alike", SIMULATED, how(study, words), rows, (gaps, *plots), NOTES)
