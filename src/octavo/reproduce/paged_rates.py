"""PagedAttention (Kwon et al., SOSP 2023), figure 12: rates at equal latency, paging against reservations and whole batches."""

from __future__ import annotations

from octavo.reproduce.figure import SIMULATED, Figure, Plot, Range, Row
from octavo.reproduce.serving_arms import (
    GRID,
    MAX,
    ORACLE,
    PAGED,
    POW2,
    Ratio,
    latency_lines,
    limits_in_words,
    ratio_row,
    request_level,
    seeds_of,
    sharegpt_like,
)
from octavo.reproduce.setup import Setup
from octavo.simulator.dense_models import OPT_13B, OPT_66B, OPT_175B
from octavo.simulator.serving_study import Load, Served, ServingStudy, datasheet

NUMBER = 8
NAME = "paged-rates"
SERVED = (
    Served(OPT_13B, datasheet("a100-40gb"), 15_728),
    Served(OPT_66B, datasheet("a100-40gb", 4), 9_557),
    Served(OPT_175B, datasheet("a100-80gb", 8), 60_075),
)
REQUEST_LEVEL = (request_level(1), request_level(8), request_level(32))


def run(setup: Setup) -> Figure:
    duration_s = 60.0 if setup.quick else 240.0
    rows, ranges, limits, plots = list[Row](), list[Range](), list[str](), list[Plot]()
    for served in SERVED[:1] if setup.quick else SERVED:
        setup.say(f"  {served.model.name}")
        study = ServingStudy(served, Load(sharegpt_like(), duration_s), seeds_of(setup))
        for ratio in _ratios(served.model.name):
            row, found = ratio_row(study, ratio)
            rows.append(row)
            ranges.append(found)
        limits.append(limits_in_words(study))
        lines = latency_lines(study, (PAGED, ORACLE, POW2, MAX, *REQUEST_LEVEL))
        title = f"{served.model.name}, ShareGPT-like lengths"
        plots.append(Plot(title, "mean normalised latency, s per token", lines=lines, x_label="requests/s"))
    how = (
        "OPT by rooflines of 1 and 4 A100 of 40 GB and 8 of 80 GB, KV slots as published; ShareGPT-like lengths, Poisson for "
        f"{duration_s:g} s, "
        f"seeds {', '.join(map(str, seeds_of(setup)))}; highest rates on a grid of {GRID} whose mean normalised "
        f"latency is at most, of {'; '.join(limits)}. Judged in the middle."
    )
    notes = (
        "All ways are ours: one scheduler, one roofline. FasterTransformer's and Orca's own kernels and pipelines were not rebuilt. Of "
        "request-level batching the best of batches of up to 1, 8 and 32 counts.",
        'The published ranges are over models and data sets; the far ends ("8x", "22x") are read where the baseline\'s queue is '
        'about to grow.',
    )
    ratios = Plot("Highest rate of paging over that of", "ratio, at the middle limit", ranges=tuple(ranges))
    return Figure(NUMBER, "Rates at equal latency, paging against reservations", SIMULATED, how, rows, (ratios, *plots), notes)


def _ratios(model: str) -> tuple[Ratio, ...]:
    return (
        Ratio(f"{model}, over Orca-like (Oracle)", PAGED, (ORACLE,), (1.7, 2.7), "1.7x to 2.7x"),
        Ratio(f"{model}, over Orca-like (Pow2)", PAGED, (POW2,)),
        Ratio(f"{model}, over Orca-like (Max)", PAGED, (MAX,), (2.7, 8.0), "2.7x to 8x"),
        Ratio(f"{model}, over request-level batching", PAGED, REQUEST_LEVEL, (1.0, 22.0), "up to 22x"),
    )
