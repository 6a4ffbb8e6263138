"""PagedAttention (Kwon et al., SOSP 2023), figure 17: a chatbot that sends the conversation so far, cut to its last 1,024 tokens.

How many rounds a conversation has is not published with it. Fixed before the first run: a request is the last of k rounds, k geometric
with a mean of 3.5 and at most 20, each with ShareGPT-like lengths; nothing is kept between rounds.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

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
    seeds_of,
    sharegpt_like,
)
from octavo.reproduce.setup import Setup
from octavo.simulator.dense_models import OPT_13B
from octavo.simulator.serving_study import Load, Served, ServingStudy, datasheet

NUMBER = 12
NAME = "chat-rates"
MEAN_ROUNDS, MOST_ROUNDS, LONGEST = 3.5, 20, 1024
PUBLISHED, SHARE = 2.0, 0.1


@dataclass(frozen=True, slots=True)
class Conversations:
    """Lengths of requests that carry their history."""

    def lengths(self, rng: random.Random) -> Iterator[tuple[int, int]]:
        rounds = sharegpt_like().lengths(rng)
        while True:
            num_before = 0
            while num_before < MOST_ROUNDS - 1 and rng.random() > 1 / MEAN_ROUNDS:
                num_before += 1
            history = sum(sum(next(rounds)) for _ in range(num_before))
            question, answer = next(rounds)
            yield min(history + question, LONGEST), min(answer, LONGEST)


def run(setup: Setup) -> Figure:
    duration_s = 60.0 if setup.quick else 300.0
    served = Served(OPT_13B, datasheet("a100-40gb"), 15_728)
    study = ServingStudy(served, Load(Conversations(), duration_s), seeds_of(setup))
    rows, ranges = list[Row](), list[Range]()
    band = (PUBLISHED * (1 - SHARE), PUBLISHED * (1 + SHARE))
    for way in (ORACLE, POW2, MAX):
        setup.say(f"  {way.name}")
        row, found = ratio_row(study, Ratio(f"over {way.name}", PAGED, (way,), band, f"{PUBLISHED:g}x"))
        rows.append(row)
        ranges.append(found)
    how = (
        f"OPT-13B by the roofline of one A100 of 40 GB, {served.num_slots:,} KV slots; the last of {MEAN_ROUNDS:g} rounds on average with "
        f"ShareGPT-like lengths, prompts cut to {LONGEST:,} tokens; Poisson for {duration_s:g} s, seeds "
        f"{', '.join(map(str, seeds_of(setup)))}; "
        f"highest rates on a grid of {GRID} whose mean normalised latency is at most, of {limits_in_words(study)}. "
        f"Judged in the middle, within {100 * SHARE:g} %."
    )
    plots = (
        Plot("Highest rate of paging over that of", "ratio, at the middle limit", ranges=tuple(ranges), marks=(("published", PUBLISHED),)),
        Plot("Normalised latency", "s per token", lines=latency_lines(study, (PAGED, ORACLE, POW2, MAX)), x_label="requests/s"),
    )
    notes = ("The published 2x is disputed: a redrawing of its figure's data does not show it. The three reservations coincide there.",)
    return Figure(NUMBER, "A chatbot with its history", SIMULATED, how, rows, plots, notes)
