"""`octavo reproduce`: the list, figures by name and number, what is missing, and the report made anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.reproduce.registry import ENTRIES, NOT_HERE
from tests.cli.conftest import Octavo


def test_the_list(octavo: Octavo) -> None:
    shown = octavo("reproduce", "list")
    assert shown.code == 0
    numbers = [int(line.split()[0]) for line in shown.out.splitlines()[1:]]
    assert numbers == sorted([*(entry.number for entry in ENTRIES), *NOT_HERE])
    assert all(entry.name in shown.out and entry.title in shown.out for entry in ENTRIES)
    assert all(reason in shown.out for reason in NOT_HERE.values())


def test_figures_by_name_and_number(octavo: Octavo, tmp_path: Path) -> None:
    out = tmp_path / "made" / "here"
    ended = octavo("reproduce", "bigram-formula", "kv-bytes", "--out", out)
    assert ended.code == 0, ended.err
    assert ended.out.index("1. KV cache of Llama-2-7B") < ended.out.index("18. A bigram model as a draft")
    assert "1.25x (1.2480)" in ended.out and f"{out / 'report.html'}: 2 of 2 made" in ended.out
    assert "18 bigram-formula: made in" in ended.err
    assert sorted(path.name for path in out.iterdir()) == [
        "01-kv-bytes.json", "01-kv-bytes.txt", "18-bigram-formula.json", "18-bigram-formula.txt", "report.html"
    ]
    assert (out / "18-bigram-formula.txt").read_text().strip() in ended.out


def test_a_figure_without_its_data_fails_and_loses_no_other(octavo: Octavo, tmp_path: Path) -> None:
    ended = octavo("reproduce", "machine-table", "kv-slots", "--out", tmp_path / "out", "--data", tmp_path)
    assert ended.code == 1
    assert "is needed and is not there" in ended.out and "KV slots of OPT models" in ended.out
    assert "1 of 2 made, failed: machine-table" in ended.out and "Traceback" not in ended.err
    assert "is not there" in (tmp_path / "out" / "report.html").read_text()


def test_the_report_is_made_of_all_files(octavo: Octavo, tmp_path: Path) -> None:
    for name in ("kv-slots", "kv-bytes"):
        assert octavo("reproduce", name, "--out", tmp_path).code == 0
    page = tmp_path / "report.html"
    assert "KV cache of Llama-2-7B" in page.read_text() and "KV slots" not in page.read_text(), "a call writes its own"
    ended = octavo("reproduce", "report", "--out", tmp_path)
    assert ended.code == 0 and ended.out == f"{page}: 2 figures\n"
    assert "KV cache of Llama-2-7B" in page.read_text() and "KV slots" in page.read_text()


def test_a_figure_measured_on_a_model(octavo: Octavo, tmp_path: Path, tiny: Path) -> None:
    ended = octavo("reproduce", "kv-bytes-engine", "--out", tmp_path, "--model", tiny)
    assert ended.code == 0, ended.out
    rows = {line.split()[4]: line.split() for line in ended.out.splitlines() if line.startswith("KV of one token, ")}
    assert {dtype: row[-1] for dtype, row in rows.items() if dtype != "int8"} == {"f16": "agrees", "bf16": "agrees", "f32": "agrees"}
    assert int(rows["f32"][5].replace(",", "")) == 2 * int(rows["bf16"][5].replace(",", ""))
    assert f"model {tiny}" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        ((), 2, "Missing argument"),
        (("kv-bytes",), 2, "--out: a folder is needed"),
        (("nothing", "--out", "x"), 2, "figure: 'nothing' is not known"),
        (("14", "--out", "x"), 2, "figure: 14 is not made here"),
        (("list", "1", "--out", "x"), 2, "list goes alone"),
        (("report", "1", "--out", "x"), 2, "report goes alone"),
        (("1", "--out", "x", "--data", "/nowhere"), 2, "/nowhere"),
        (("1", "--out", "x", "--seed", "-1"), 2, "--seed"),
    ],
)
def test_wrong_calls(octavo: Octavo, tmp_path: Path, argv: tuple[str, ...], code: int, message: str) -> None:
    ended = octavo("reproduce", *(tmp_path / "x" if word == "x" else word for word in argv))
    assert (ended.code, message in ended.err) == (code, True), ended
    assert not (tmp_path / "x").exists()


def test_a_folder_without_figures(octavo: Octavo, tmp_path: Path) -> None:
    ended = octavo("reproduce", "report", "--out", tmp_path)
    assert ended.code == 1 and "no figure is there" in ended.err
    (tmp_path / "other.json").write_text("{}")
    assert "no figure is there" in octavo("reproduce", "report", "--out", tmp_path).err, "it has no figure's name"


def test_a_report_leaves_out_what_is_damaged_and_says_so(octavo: Octavo, tmp_path: Path) -> None:
    assert octavo("reproduce", "kv-slots", "kv-bytes", "--out", tmp_path).code == 0
    (tmp_path / "02-kv-slots.json").write_text("{")
    ended = octavo("reproduce", "report", "--out", tmp_path)
    assert ended.code == 1 and ended.out == f"{tmp_path / 'report.html'}: 1 figure; left out, damaged: 1\n"
    assert ended.err.startswith(f"octavo: {tmp_path / '02-kv-slots.json'}: ") and len(ended.err.splitlines()) == 1
    assert "KV cache of Llama-2-7B" in (tmp_path / "report.html").read_text()
