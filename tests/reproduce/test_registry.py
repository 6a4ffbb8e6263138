"""The list of figures: complete, true to the modules, and found by name, number and kind."""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path

import pytest

import octavo.reproduce
from octavo.reproduce.figure import ARITHMETIC, MEASURED, SIMULATED
from octavo.reproduce.registry import ENTRIES, NOT_HERE, Entry, select

FOLDER = Path(inspect.getfile(octavo.reproduce)).parent
SIMULATED_ONES = {3, 4, 5, 6, 7, 8, 11, 12, 22, 25, 26, 27, 28, 29, 30, 31, 33}
ARITHMETIC_ONES = {1, 2, 15, 18, 20, 21, 23, 24}
GPU_ONLY = {14, 32}


def numbers(evidence: str) -> set[int]:
    return {entry.number for entry in ENTRIES if entry.evidence == evidence}


def test_every_figure_of_the_list_is_there_or_its_absence_explained() -> None:
    assert numbers(SIMULATED) == SIMULATED_ONES
    assert numbers(ARITHMETIC) == ARITHMETIC_ONES
    assert set(NOT_HERE) == GPU_ONLY
    assert all(NOT_HERE.values())


def test_entries_stand_in_order_under_names_of_their_own() -> None:
    assert [entry.number for entry in ENTRIES] == sorted(entry.number for entry in ENTRIES)
    for names in ([entry.name for entry in ENTRIES], [entry.module for entry in ENTRIES]):
        assert len(set(names)) == len(names)
    assert {entry.evidence for entry in ENTRIES} <= {MEASURED, SIMULATED, ARITHMETIC}
    assert not {entry.name for entry in ENTRIES} & {"all", "list", "report", "measured", "simulated", "arithmetic"}


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_an_entry_says_what_its_module_says(entry: Entry) -> None:
    module = importlib.import_module(f"octavo.reproduce.{entry.module}")
    assert (entry.number, entry.name) == (module.NUMBER, module.NAME)
    assert list(inspect.signature(module.run).parameters) == ["setup"]
    assert module.__doc__


def test_every_module_with_a_number_is_listed() -> None:
    with_number = set()
    for path in FOLDER.glob("*.py"):
        targets = [node.targets[0] for node in ast.parse(path.read_text()).body if isinstance(node, ast.Assign)]
        if any(isinstance(target, ast.Name) and target.id == "NUMBER" for target in targets):
            with_number.add(path.stem)
    assert with_number == {entry.module for entry in ENTRIES}


def test_figures_are_found() -> None:
    assert select(["all"]) == list(ENTRIES)
    assert [entry.name for entry in select(["kv-use"])] == ["kv-use"]
    assert {entry.number for entry in select(["24", "1"])} == {1, 24}
    assert [entry.number for entry in select(["24", "1"])] == sorted(entry.number for entry in select(["24", "1"]))
    assert {entry.evidence for entry in select(["arithmetic"])} == {ARITHMETIC}
    assert select(["kv-use", "kv-use", "simulated"]) == select(["simulated"])
    assert select([]) == []


@pytest.mark.parametrize("word", ["kv", "999", "", "Simulated", "²"])
def test_what_is_no_figure_is_refused(word: str) -> None:
    with pytest.raises(ValueError, match="figure: .* is not known"):
        select(["kv-use", word])


@pytest.mark.parametrize("number", sorted(GPU_ONLY))
def test_a_figure_that_is_not_made_here_says_why(number: int) -> None:
    with pytest.raises(ValueError, match=f"figure: {number} is not made here; .*{NOT_HERE[number][-20:]}"):
        select([str(number)])
