"""Splitwise, figure 12: the fewest H100 machines, split into prompt and token machines, that hold 70 code requests per second."""

from __future__ import annotations

from octavo.reproduce.figure import SIMULATED, Figure, Row
from octavo.reproduce.setup import Setup
from octavo.reproduce.splitwise_least import least_budget
from octavo.reproduce.splitwise_rates import HH, LOOKUPS, setup_of
from octavo.simulator.splitwise_study import Design

NUMBER = 29
NAME = "hh-code"
RATE = 70.0
PUBLISHED = (27, 3)
MOST_TOKEN_MACHINES = 12
SIZES = range(20, 61)


def run(setup: Setup) -> Figure:
    study = setup.study
    rows = []
    for lookup in LOOKUPS:
        least = least_budget(study, SIZES, lambda size: list(_designs(int(size))), lookup, RATE, "code")
        ours = f"none up to {SIZES[-1]}"
        if least.design is not None:
            ours = f"{least.design.num_machines} ({least.design}; {least.num_tried} tried)"
        hit = least.design is not None and least.design.num_machines == sum(PUBLISHED)
        what = f"fewest H100 machines, {lookup}"
        rows.append(Row(what, "30 (27P+3T)" if lookup == "published" else "", ours, hit if lookup == "published" else None))
        published = Design(HH.name, HH.token_hardware, PUBLISHED[1], HH.prompt_hardware, PUBLISHED[0])
        broken = [name for seed in study.options.seeds for name in study.slowdown(published, lookup, RATE, seed, "code").broken]
        verdict = f"breaks {', '.join(dict.fromkeys(broken))}" if broken else "holds"
        rows.append(Row(f"{published} at {RATE:g} requests/s, {lookup}", "", verdict))
    how = f"{setup_of(study, 'code')} Sizes from {SIZES[0]} to {SIZES[-1]} machines, 1 to {MOST_TOKEN_MACHINES} of them for tokens."
    return Figure(NUMBER, "Fewest machines of Splitwise-HH for 70 code requests per second", SIMULATED, how, rows)


def _designs(size: int) -> list[Design]:
    sizes = range(1, MOST_TOKEN_MACHINES + 1)
    return [Design(HH.name, HH.token_hardware, num_token, HH.prompt_hardware, size - num_token) for num_token in sizes]
