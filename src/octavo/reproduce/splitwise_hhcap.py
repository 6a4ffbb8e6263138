"""Splitwise, section VI: the same throughput with less power (token machines of capped H100s) or at less cost (A100s)."""

from __future__ import annotations

from functools import partial

from octavo.reproduce.figure import SIMULATED, Figure, Plot, Range, Row, within
from octavo.reproduce.setup import Setup
from octavo.reproduce.splitwise_least import least_budget, splits
from octavo.reproduce.splitwise_rates import AA, BASELINE_H100, HHCAP, LOOKUPS, setup_of
from octavo.simulator.splitwise_study import Design

NUMBER = 28
NAME = "hhcap-power"
GRID = 0.05  # of the shares that are tried
SHARES = tuple(round(GRID * i, 2) for i in range(8, 37))
PUBLISHED = 0.75


def run(setup: Setup) -> Figure:
    study = setup.study
    rows, ranges = list[Row](), list[Range]()
    for lookup in LOOKUPS:
        rate = min(bracket.holds_at for bracket in study.brackets(BASELINE_H100, lookup))
        for design, what, whole in ((HHCAP, "power", BASELINE_H100.power), (AA, "cost", BASELINE_H100.cost)):
            budgets = [share * whole for share in SHARES]
            designs = partial(_splits, design, what, 2 * study.options.num_splits)
            least = least_budget(study, budgets, designs, lookup, rate, "conversation")
            name = f"{design.name}, {what} for the {rate:g} requests/s of {BASELINE_H100}, {lookup}"
            published = f"{PUBLISHED:g}x" if lookup == "published" else ""
            if least.budget is None or least.design is None:
                rows.append(Row(name, published, f"above {SHARES[-1]:g}x", False if published else None))
                continue
            share = least.budget / whole
            hit = within(PUBLISHED, share - GRID, share) if published else None
            rows.append(Row(name, published, f"{share - GRID:.2f}x / {share:.2f}x with {least.design} ({least.num_tried} tried)", hit))
            ranges.append(Range(name, share - GRID, share))
    plot = Plot("Equal throughput", "share of Baseline-H100's power or cost", ranges=tuple(ranges), marks=(("published", PUBLISHED),))
    share_of = "The smallest share of Baseline-H100's power (HHcap) or cost (AA) that holds its rate for all seeds: fails / holds."
    how = f"{setup_of(study)} {share_of}"
    notes = ("The capped machines of the table are an assumption: 1.30 times the prompt time of H100 and the same token time.",)
    title = "Power of HHcap and cost of AA at the throughput of Baseline-H100, conversation"
    return Figure(NUMBER, title, SIMULATED, how, rows, (plot,), notes)


def _splits(design: Design, what: str, num_splits: int, budget: float) -> list[Design]:
    return splits(design, num_splits, power=budget) if what == "power" else splits(design, num_splits, cost=budget)
