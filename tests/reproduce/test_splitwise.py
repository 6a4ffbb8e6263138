"""Splitwise's figures: arithmetic to the printed digit; simulated ones on loads so small that only their make-up is tested."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from functools import cached_property
from types import ModuleType
from typing import Any

import pytest

from octavo.reproduce import splitwise_least, splitwise_table, splitwise_traces, splitwise_transfer
from octavo.reproduce.figure import ARITHMETIC, SIMULATED, Figure, Row
from octavo.reproduce.setup import Setup
from octavo.simulator.splitwise_study import A100, H100, H100_CAPPED, Design, Study, StudyData, StudyOptions
from octavo.workload.lengths import Recorded
from tests.simulator.splitwise_golden import table

SIMULATED_ONES = ("aa_a100", "aa_h100", "ha", "active_tokens", "hhcap", "hh_code", "robustness")


class SmallSetup(Setup):
    """Whose study is small and needs no file."""

    @cached_property
    def study(self) -> Study:
        tables = {hardware: table(hardware) for hardware in (A100, H100, H100_CAPPED)}
        pair = (Recorded((300, 900, 1500)), Recorded((5, 13, 30)))
        return Study(StudyData(tables, {"conversation": pair, "code": pair}), StudyOptions(2.0, 80.0, (0,), 2))


def ours(figure: Figure) -> list[str]:
    return [row.ours for row in figure.rows]


def test_what_the_table_says() -> None:
    figure = splitwise_table.run(SmallSetup())
    assert ours(figure) == ["2048 (3,821 tokens/s)", "1.98x", "8.1", "2048 (8,128 tokens/s)", "1.77x", "5.1", "0.47", "0.73"]
    assert [row.hit for row in figure.rows] == [True, True, False, True, True, False, False, True]
    assert figure.evidence == ARITHMETIC


def test_what_sending_kv_costs() -> None:
    figure = splitwise_transfer.run(SmallSetup())
    assert ours(figure) == ["60.5 %", "3.0 %", "16.1 %", "0.8 %"]
    assert figure.num_misses == 0


def test_medians_of_traces() -> None:
    figure = splitwise_traces.run(SmallSetup())
    assert ours(figure) == ["900", "13", "900", "13"]
    assert [row.hit for row in figure.rows] == [False, True, False, False]


@pytest.fixture(scope="module")
def shared() -> Setup:
    return SmallSetup()


@pytest.mark.parametrize("name", SIMULATED_ONES)
def test_simulated_figures_say_what_they_are(shared: Setup, name: str) -> None:
    module: Any = importlib.import_module(f"octavo.reproduce.splitwise_{name}")
    assert isinstance(module, ModuleType)
    figure: Figure = module.run(shared)
    assert figure.number == module.NUMBER
    assert figure.evidence == SIMULATED
    assert "seeds 0" in figure.setup
    judged = [row for row in figure.rows if row.hit is not None]
    assert judged, "a figure compares with something published"
    assert all(row.published for row in judged)
    assert all(row.what in figure.to_text() for row in figure.rows)


def test_a_comparison_names_splits_and_look_ups(shared: Setup) -> None:
    figure = importlib.import_module("octavo.reproduce.splitwise_aa_a100").run(shared)
    names = [row.what for row in figure.rows]
    assert {"Baseline-A100 70, published", "Baseline-A100 70, two-variable", "AA 45P+25T (published split), published"} <= set(names)
    assert sum(name.startswith("splits tried") for name in names) == 2
    assert len(figure.plots[0].ranges) >= 2
    assert figure.plots[0].marks == (("equal power and cost", 2.15),)


class HoldsFrom:
    """A study in which a design holds from some number of machines on, if half of them, rounded down, are for prompts."""

    def __init__(self, least: int) -> None:
        self.options = StudyOptions(seeds=(0, 1))
        self.least = least
        self.asked: set[Design] = set()

    def holds(self, design: Design, lookup: str, rate: float, seed: int, workload: str) -> bool:
        self.asked.add(design)
        return design.num_machines >= self.least and design.num_prompt == design.num_machines // 2


def every_split(size: float) -> Iterable[Design]:
    return [Design("d", A100, int(size) - n, A100, n) for n in range(1, int(size))]


@pytest.mark.parametrize("least", [2, 7, 8, 19, 20])
def test_the_least_budget(least: int) -> None:
    study: Any = HoldsFrom(least)
    found = splitwise_least.least_budget(study, range(2, 21), every_split, "published", 5.0, "code")
    assert found.budget == least
    assert found.design is not None
    assert (found.design.num_machines, found.design.num_prompt) == (least, least // 2)


def test_no_budget_is_enough() -> None:
    study: Any = HoldsFrom(30)
    found = splitwise_least.least_budget(study, range(2, 21), every_split, "published", 5.0, "code")
    assert (found.budget, found.design) == (None, None)
    assert Design("d", A100, 10, A100, 10) in study.asked


def test_splits_are_even_and_within_the_budget() -> None:
    found = splitwise_least.splits(Design("d", A100, 1, H100, 1), 3, power=44.0 * 9 + 24.8)
    assert [(design.num_prompt, design.num_token) for design in found] == [(3, 11), (6, 6), (9, 1)]


def test_text_shows_misses_beside_hits() -> None:
    rows = [Row("a", "1x", "2x", False), Row("longer", "", "3x"), Row("c", "4x", "4x", True)]
    figure = Figure(99, "Title", SIMULATED, "Set-up.", rows, notes=("Note.",))
    assert figure.to_text().splitlines() == [
        "99. Title",
        "Set-up.",
        "        published  ours (simulated)",
        "a       1x         2x                differs",
        "longer             3x",
        "c       4x         4x                agrees",
        "Note.",
    ]
    assert figure.num_misses == 1
