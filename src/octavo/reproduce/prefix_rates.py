"""PagedAttention (Kwon et al., SOSP 2023), figure 16: a prefix that all requests share, kept once, against reservations that copy it.

LLaMA-13B, translation with examples in the prompt. Lengths of the sentences are not published; fixed before the first run: 30 tokens in and
40 out on average, lognormal with a coefficient of variation of 0.5, from 4 to 256 tokens.
"""

from __future__ import annotations

import math

from octavo.reproduce.figure import SIMULATED, Figure, Line, Plot, Range, Row
from octavo.reproduce.serving_arms import GRID, ORACLE, PAGED, Ratio, latency_lines, limits_in_words, ratio_row, seeds_of
from octavo.reproduce.setup import Setup
from octavo.simulator.dense_models import LLAMA_13B
from octavo.simulator.serving_study import Load, Served, ServingStudy, Way, datasheet
from octavo.workload.lengths import LogNormal
from octavo.workload.requests import Independent, SharedPrefix

NUMBER = 11
NAME = "prefix-rates"
PREFIXES = ((80, 1.67), (341, 3.58))  # tokens, published ratio
CV, SHORTEST, LONGEST = 0.5, 4, 256
MEAN_SENTENCE, MEAN_TRANSLATION = 30.0, 40.0
SHARED = Way.of("paged, prefix kept", prefix_cache=True)
SHARE = 0.1  # of the published ratio that counts as agreement


def run(setup: Setup) -> Figure:
    duration_s = 5.0 if setup.quick else 20.0
    sigma = math.sqrt(math.log1p(CV * CV))
    lengths = Independent(*(LogNormal(mean, sigma, SHORTEST, LONGEST) for mean in (MEAN_SENTENCE, MEAN_TRANSLATION)))
    served = Served(LLAMA_13B, datasheet("a100-40gb"), 15_728)
    rows, ranges, lines, limits = list[Row](), list[Range](), list[Line](), ""
    for num_tokens, published in PREFIXES:
        setup.say(f"  {num_tokens} tokens")
        study = ServingStudy(served, Load(lengths, duration_s, SharedPrefix(num_tokens)), seeds_of(setup), first=8.0)
        band = (published * (1 - SHARE), published * (1 + SHARE))
        for ratio in (
            Ratio(f"prefix of {num_tokens} tokens, over Orca-like (Oracle)", SHARED, (ORACLE,), band, f"{published:g}x"),
            Ratio(f"prefix of {num_tokens} tokens, paging alone over Orca-like (Oracle)", PAGED, (ORACLE,)),
        ):
            row, found = ratio_row(study, ratio)
            rows.append(row)
            ranges.append(found)
        lines += latency_lines(study, (SHARED, PAGED, ORACLE), f"{num_tokens} tokens, ")
        limits = limits_in_words(study)
    how = (
        f"LLaMA-13B by the roofline of one A100 of 40 GB, {served.num_slots:,} KV slots; one prefix for all, behind it lognormal "
        f"lengths of {MEAN_SENTENCE:g} tokens in and {MEAN_TRANSLATION:g} out; Poisson for {duration_s:g} s, seeds "
        f"{', '.join(map(str, seeds_of(setup)))}; highest rates on a grid of {GRID} whose mean normalised latency "
        f"is at most, of {limits}. Judged in the middle, within {100 * SHARE:g} %."
    )
    marks = tuple((f"published, {num_tokens} tokens", published) for num_tokens, published in PREFIXES)
    plots = (
        Plot("Highest rates", "ratio, at the middle limit", ranges=tuple(ranges), marks=marks),
        Plot("Normalised latency", "s per token", lines=tuple(lines), x_label="requests/s"),
    )
    notes = ("The paper's engine keeps the prefix's memory once but its step is longer; here what is saved is prefill as well as memory.",)
    return Figure(NUMBER, "A shared prefix, kept once", SIMULATED, how, rows, plots, notes)
