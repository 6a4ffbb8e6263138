"""Tables of other machines: straight lines between medians, three ways to look a step up, and files that are not as they should be."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest

from octavo.core.step import SequenceSlice, StepPlan
from octavo.costs.tables import LOOKUPS, Curve, MachineTable, TableCost, TableError, TableRow, read_machine_tables
from tests.simulator.splitwise_golden import table

HEADER = "model,hardware,prompt_size,batch_size,token_size,prompt_time,token_time,tensor_parallel\n"


def test_a_curve_goes_straight_between_points_and_on_beyond() -> None:
    curve = Curve([(4, 10.0), (2, 6.0), (8, 50.0)])
    assert [curve(x) for x in (0, 2, 3, 4, 5, 8, 10)] == [2.0, 6.0, 8.0, 10.0, 20.0, 50.0, 70.0]


@pytest.mark.parametrize("points", [[], [(1, 1.0)], [(1, 1.0), (1, 2.0)]])
def test_a_curve_needs_two_points(points: list[tuple[float, float]]) -> None:
    with pytest.raises(ValueError, match="at least two, each x once"):
        Curve(points)


def rows() -> list[TableRow]:
    """A machine that decodes in 10 + sequences + context / 100 seconds and takes a second per prompt token."""
    sizes = [(256, 1, 128), (512, 1, 128), (1024, 1, 128), (512, 2, 128), (512, 4, 128), (512, 1, 512)]
    return [TableRow(p, b, o, p * b, 10 + b + p * b / 100 + noise) for p, b, o in sizes for noise in (-0.5, 0.0, 0.5)]


def test_two_variables_tell_sequences_from_context() -> None:
    table = MachineTable.of("toy", rows())
    assert table.context_slope_s == pytest.approx(0.01)
    for num, context in [(1, 512), (1, 5000), (3, 3 * 512), (4, 300), (2, 4096)]:
        assert table.decode_s(num, context) == pytest.approx(10 + num + context / 100)


def test_medians_merge_what_has_the_same_product() -> None:
    """1 x 1024 costs 21.24 a step and 2 x 512 22.24; the one axis holds the median of all six."""
    table = MachineTable.of("toy", rows())
    assert dict(table.token_s.points)[1024] == pytest.approx(21.74)
    assert dict(table.prompt_s.points) == {256: 256, 512: 512, 1024: 1024, 2048: 2048}


def test_the_three_ways() -> None:
    table = MachineTable.of("toy", rows())
    published, context, two = (TableCost(table, lookup) for lookup in LOOKUPS)
    assert published.step_s(0, 3, 900) == table.token_s(3)
    assert context.step_s(0, 3, 900) == table.token_s(900)
    assert two.step_s(0, 3, 900) == table.decode_s(3, 900)
    for cost in (published, context, two):
        assert cost.step_s(700, 0, 0) == table.prompt_s(700)
        assert cost.step_s(0, 0, 0) == 0.0
    mixed = 1.1 * table.prompt_s(703)
    assert published.step_s(700, 3, 900) == context.step_s(700, 3, 900) == mixed
    assert two.step_s(700, 3, 900) == pytest.approx(mixed + table.decode_s(3, 900) - table.decode_s(1, 512))


DECODE_MS = {  # of 1, 16, 32 and 64 sequences of 1250 tokens, computed independently from the public table
    ("a100-80gb", "published"): (47.5, 47.5, 47.5, 47.6),
    ("a100-80gb", "context"): (49.6, 72.3, 110.4, 186.5),
    ("a100-80gb", "two-variable"): (49.1, 62.3, 75.4, 116.6),
    ("h100-80gb", "published"): (35.3, 35.4, 35.4, 35.5),
    ("h100-80gb", "context"): (36.4, 49.8, 71.8, 115.7),
    ("h100-80gb", "two-variable"): (36.3, 43.1, 50.8, 73.8),
}


@pytest.mark.parametrize("hardware, lookup", DECODE_MS)
def test_decode_steps_of_the_public_table(hardware: str, lookup: str) -> None:
    cost = TableCost(table(hardware), lookup)
    found = [1000 * cost.step_s(0, num, 1250 * num) for num in (1, 16, 32, 64)]
    assert found == pytest.approx(DECODE_MS[hardware, lookup], abs=0.0501)


@pytest.mark.parametrize("lookup", LOOKUPS)
def test_a_plan_is_priced_by_its_rows_and_contexts(lookup: str) -> None:
    def piece(start: int, num_tokens: int) -> SequenceSlice:
        return SequenceSlice(start, start, [0] * num_tokens, array("i"), 1, [0])

    cost = TableCost(table("a100-80gb"), lookup)
    plan = StepPlan(0, [piece(0, 300), piece(99, 1), piece(0, 1), piece(499, 1), piece(256, 40)])
    assert cost.seconds(plan) == cost.step_s(341, 2, 600)


def test_unknown_look_up() -> None:
    with pytest.raises(ValueError, match="lookup: 'other' is not allowed; one of published, context, two-variable"):
        TableCost(table("a100-80gb"), "other")


def write(path: Path, *lines: str) -> Path:
    path.write_text(HEADER + "".join(f"{line}\n" for line in lines))
    return path


def test_a_file_is_read_by_model_and_degree(tmp_path: Path) -> None:
    lines = [f"toy,{hw},{p},{b},{o},{1000 * s * k},{1000 * t},8" for hw, k in (("a", 1), ("b", 2)) for p, b, o, s, t in rows()]
    path = write(tmp_path / "t.csv", *lines, "toy,a,1,1,1,1,1,4", "other,a,1,1,1,1,1,8")
    tables = read_machine_tables(path, "toy", 8)
    assert sorted(tables) == ["a", "b"]
    assert tables["a"].prompt_s(700) == pytest.approx(700)
    assert tables["b"].prompt_s(700) == pytest.approx(1400)
    assert dict(tables["b"].token_s.points) == pytest.approx(dict(MachineTable.of("toy", rows()).token_s.points))


@pytest.mark.parametrize(
    "line, message",
    [
        ("toy,a,128,1,128,x,1,8", r"line 2: column prompt_time: 'x' is not allowed; a number above 0"),
        ("toy,a,128,1,128,1,nan,8", r"line 2: column token_time: 'nan' is not allowed"),
        ("toy,a,0,1,128,1,1,8", r"line 2: column prompt_size: '0' is not allowed"),
        ("toy,a,128,1,128,1", r"no rows of toy on 8 devices; there are toy on None"),
        ("toy,a,128,1,128,1,1,8", r"toy on a: 1 rows are too few; needed are several prompt sizes"),
        ("toy,a,128,1,128,1,1,4", r"no rows of toy on 8 devices; there are toy on 4"),
    ],
)
def test_faults_of_a_file_are_named(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(TableError, match=message):
        read_machine_tables(write(tmp_path / "t.csv", line), "toy", 8)


def test_missing_columns_are_named(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("model,hardware\n")
    with pytest.raises(TableError, match="line 1: the columns tensor_parallel, prompt_size, .* are missing"):
        read_machine_tables(path, "toy", 8)
