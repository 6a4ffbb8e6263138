"""The report: well-formed, needs nothing but itself, escapes what it is given, and shows misses and failures."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

from octavo.reproduce import runner
from octavo.reproduce.figure import ARITHMETIC, MEASURED, SIMULATED, Figure, Line, Plot, Range, Row
from octavo.reproduce.files import FigureFileError, Outcome, read_outcomes, write_outcome
from octavo.reproduce.registry import ENTRIES, Entry
from octavo.reproduce.report import html_report
from octavo.reproduce.runner import run_entries, run_entry
from octavo.reproduce.setup import CODE_TRACE, CONVERSATION_TRACE, MACHINE_TABLE, DataMissing, Setup

HTML = "{http://www.w3.org/1999/xhtml}"
NASTY = "<script>alert(1)</script> & \"quoted\" 'x' ]]>"
PLOTS = (
    Plot("p", "v", ranges=(Range("r", 1.0, 2.0),), marks=(("m", 1.5),)),
    Plot("q", "v", lines=(Line("l", ((1.0, 2.0), (3.0, 4.0))),), x_marks=(("x", 2.0),), log_y=True),
)


def entry(number: int, name: str, evidence: str = SIMULATED, module: str = "kv_bytes") -> Entry:
    return Entry(number, name, evidence, module, f"Title of {name}")


def figure(number: int, evidence: str = SIMULATED, *rows: Row, title: str = "A figure", **more: Any) -> Figure:
    return Figure(number, title, evidence, "Set-up.", rows or (Row("a", "1x", "2x", False), Row("b", "3x", "3x", True)), **more)


OUTCOMES = (
    Outcome(entry(1, "one", ARITHMETIC), (figure(1, ARITHMETIC, plots=PLOTS),), None, 0.5, "2026-01-02", {"octavo": "9", "seed": "0"}),
    Outcome(
        entry(2, "two"),
        (figure(2, SIMULATED, Row(NASTY, NASTY, NASTY, False), title=NASTY, notes=(NASTY,)), figure(2, title="second")),
    ),
    Outcome(entry(3, "three", MEASURED), (), f"OSError: {NASTY}"),
)


def text_of(element: ElementTree.Element) -> str:
    return "".join(element.itertext())


def test_the_page_is_well_formed_and_links_lead_somewhere() -> None:
    root = ElementTree.fromstring(html_report(OUTCOMES))
    anchors = {element.attrib["id"] for element in root.iter() if "id" in element.attrib}
    links = [element.attrib["href"] for element in root.iter(f"{HTML}a")]
    assert len(links) == 4 and len(anchors) == 4
    assert all(link.startswith("#") and link[1:] in anchors for link in links)


def test_the_page_needs_nothing_else() -> None:
    page = html_report(OUTCOMES)
    assert re.findall(r"https?://[^\"]*", page) and set(re.findall(r"https?://[^\"]*", page)) == {
        "http://www.w3.org/1999/xhtml", "http://www.w3.org/2000/svg"
    }, "names of the two languages, which nobody fetches"
    tags = {element.tag.rpartition("}")[2] for element in ElementTree.fromstring(page).iter()}
    assert not tags & {"script", "link", "img", "iframe", "object", "embed", "image", "use"}
    assert "url(" not in page and "@import" not in page and "@font-face" not in page


def test_text_is_escaped() -> None:
    page = html_report(OUTCOMES)
    assert "<script>" not in page
    assert text_of(ElementTree.fromstring(page)).count(NASTY) >= 7


def test_the_summary_counts_and_judges() -> None:
    root = ElementTree.fromstring(html_report(OUTCOMES))
    assert "3 figures: 2 of 5 published values agree with ours; 1 could not be made." in text_of(root)
    table = next(root.iter(f"{HTML}table"))
    rows = [[text_of(cell) for cell in row] for row in table.iter(f"{HTML}tr")][1:]
    firsts = [row for row in rows if len(row) > 2]
    assert [row[0] for row in firsts] == ["1", "2", "2", "3"]
    assert [row[-1] for row in firsts] == ["1 of 2 agree", "✗ differs", "1 of 2 agree", "failed"]
    assert [row[2] for row in firsts] == [ARITHMETIC, SIMULATED, SIMULATED, MEASURED]
    assert [row for row in rows if len(row) == 2] == [["3x", "✓ 3x"]] * 2, "one line for each value, published beside ours"
    assert firsts[0][3:5] == ["1x", "✗ 2x"]


def test_plots_are_in_the_page() -> None:
    root = ElementTree.fromstring(html_report(OUTCOMES))
    assert len(list(root.iter("{http://www.w3.org/2000/svg}svg"))) == 2


def test_many_rows_are_summed_up() -> None:
    rows = [Row(f"r{i}", f"{i}x", f"{i}x", i != 7) for i in range(9)]
    root = ElementTree.fromstring(html_report([Outcome(entry(4, "four"), (figure(4, SIMULATED, *rows),))]))
    summary = text_of(next(root.iter(f"{HTML}table")))
    assert "7x✗ 7x" in summary and "4x✓ 4x" in summary and "5x" not in summary, "a miss is not left out"
    assert "and 3 more" in summary and "8 of 9 agree" in summary


# --- files ------------------------------------------------------------------------------------------------------------------------------


def test_files_are_read_as_they_were_written(tmp_path: Path) -> None:
    for outcome in reversed(OUTCOMES):
        write_outcome(outcome, tmp_path)
    found, wrong = read_outcomes(tmp_path)
    assert wrong == []
    assert [json.dumps(html_report([outcome])) for outcome in found] == [json.dumps(html_report([outcome])) for outcome in OUTCOMES]
    assert (tmp_path / "01-one.txt").read_text() == OUTCOMES[0].to_text() + "\n"
    assert "failed: OSError" in (tmp_path / "03-three.txt").read_text()
    assert not list(tmp_path.glob("*.part"))


def test_files_come_in_the_order_of_the_registry(tmp_path: Path) -> None:
    for known in reversed(ENTRIES):
        write_outcome(Outcome(known), tmp_path)
    write_outcome(Outcome(entry(1, "another")), tmp_path)
    names = [outcome.entry.name for outcome in read_outcomes(tmp_path)[0]]
    assert [name for name in names if name != "another"] == [known.name for known in ENTRIES]
    assert names.index("another") == sum(known.number == 1 for known in ENTRIES), "a figure of another version comes last of its number"


DAMAGED_FILES = {
    "no JSON": "{", "no object": "[]", "another form": '{"format": "other"}', "no fields": '{"format": "octavo-figure"}',
    "nested too deep": "[" * 100_000, "no text": "\x00", "half": None, "a field too many": ('"error"', '"errors"'),
    "a number for a text": ('"title": "A figure"', '"title": 7'), "a text for rows": ('"rows": [', '"rows": "x", "more": ['),
    "a text for a number": ('"seconds": 0.5', '"seconds": "long"'), "a list for a name": ('"name": "one"', '"name": [1]'),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGED_FILES)
def test_a_damaged_file_is_named_and_loses_no_other(tmp_path: Path, kind: str) -> None:
    for outcome in OUTCOMES:
        write_outcome(outcome, tmp_path)
    path, change = tmp_path / "01-one.json", DAMAGED_FILES[kind]
    text = path.read_text()
    if isinstance(change, tuple):
        assert change[0] in text
        path.write_text(text.replace(*change))
    else:
        path.write_text(text[: len(text) // 2] if change is None else change)
    found, wrong = read_outcomes(tmp_path, lambda outcome: html_report([outcome]))
    assert [outcome.entry.name for outcome in found] == ["two", "three"]
    assert len(wrong) == 1 and isinstance(wrong[0], FigureFileError) and str(wrong[0]).startswith(f"{path}: ")


def test_other_files_and_folders_are_not_looked_at(tmp_path: Path) -> None:
    write_outcome(OUTCOMES[0], tmp_path)
    (tmp_path / "notes.json").write_text("{")
    (tmp_path / "99-x.json").mkdir()
    (tmp_path / "plot.png").touch()
    found, wrong = read_outcomes(tmp_path)
    assert [outcome.entry.name for outcome in found] == ["one"] and wrong == []


# --- runs -------------------------------------------------------------------------------------------------------------------------------


def modules(monkeypatch: pytest.MonkeyPatch, **runs: Any) -> None:
    """``octavo.reproduce.NAME`` has ``run`` as given."""
    found = {f"octavo.reproduce.{name}": SimpleNamespace(run=run) for name, run in runs.items()}
    monkeypatch.setattr("octavo.reproduce.registry.import_module", found.__getitem__)


def fails(setup: Setup) -> Figure:
    raise ZeroDivisionError("no request came")


def test_a_figure_that_fails_loses_no_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    modules(monkeypatch, good=lambda setup: figure(1), bad=fails, late=lambda setup: [figure(3), figure(3, title="more")])
    entries = [entry(1, "one", module="good"), entry(2, "two", module="bad"), entry(3, "three", module="late")]
    said, printed = list[str](), list[str]()
    outcomes = run_entries(entries, Setup(say=said.append), tmp_path / "out", printed.append)
    assert [outcome.error for outcome in outcomes] == [None, "ZeroDivisionError: no request came", None]
    assert [len(outcome.figures) for outcome in outcomes] == [1, 0, 2]
    assert any("Traceback" in line for line in said)
    page = (tmp_path / "out" / runner.REPORT).read_text()
    assert "no request came" in page and page.count("<h2") == 4
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "01-one.json", "01-one.txt", "02-two.json", "02-two.txt", "03-three.json", "03-three.txt", "report.html"
    ]
    assert "failed: ZeroDivisionError" in printed[1]


def test_files_of_a_figure_are_there_before_the_next_begins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = list[bool]()

    def second(setup: Setup) -> Figure:
        seen.append((tmp_path / "01-one.json").exists() and (tmp_path / "report.html").exists())
        raise KeyboardInterrupt

    modules(monkeypatch, first=lambda setup: figure(1), second=second)
    with pytest.raises(KeyboardInterrupt):
        run_entries([entry(1, "one", module="first"), entry(2, "two", module="second")], Setup(), tmp_path, lambda line: None)
    assert seen == [True]


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (figure(9), "9 .simulated. was made, 1 .simulated. was expected"),
        (figure(1, ARITHMETIC), "1 .arithmetic. was made, 1 .simulated. was expected"),
        ([], "it made no figure"),
    ],
)
def test_a_figure_under_a_wrong_heading_fails(monkeypatch: pytest.MonkeyPatch, made: Any, message: str) -> None:
    modules(monkeypatch, odd=lambda setup: made)
    outcome = run_entry(entry(1, "one", module="odd"), Setup())
    assert outcome.figures == () and outcome.error is not None and re.search(message, outcome.error)


def test_missing_data_is_told_in_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said = list[str]()
    outcome = run_entry(entry(21, "t", module="splitwise_traces"), Setup(say=said.append))
    trace = "AzureLLMInferenceTrace_conv.csv (of the Azure LLM inference traces 2023)"
    assert outcome.error == f"data: {trace} is needed; --data names the folder that it is in"
    assert said == []
    with pytest.raises(DataMissing, match="AzureLLMInferenceTrace_conv.csv .* is not there"):
        _ = Setup(tmp_path).study
    with pytest.raises(DataMissing, match="data: .*other.csv is needed"):
        Setup(tmp_path).data_file("other.csv")


NO_DATA = (b"\xff\xfe", b"", b"model\n", b"TIMESTAMP,ContextTokens,GeneratedTokens\nsoon,1,1\n", b'a,"b\n', b"\x00")


@pytest.mark.parametrize("damage", NO_DATA)
@pytest.mark.parametrize("name", [MACHINE_TABLE, CODE_TRACE])
def test_damaged_data_are_told_in_one_sentence(tmp_path: Path, damage: bytes, name: str) -> None:
    trace = b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,5,6\n"
    for one in (MACHINE_TABLE, CODE_TRACE, CONVERSATION_TRACE):
        (tmp_path / one).write_bytes(damage if one == name else trace)
    said = list[str]()
    outcome = run_entry(entry(23, "t", ARITHMETIC, module="splitwise_table"), Setup(tmp_path, say=said.append))
    assert outcome.error is not None and outcome.error.startswith(str(tmp_path / name)) and said == [], outcome.error


def test_what_an_outcome_was_made_with(monkeypatch: pytest.MonkeyPatch) -> None:
    modules(monkeypatch, good=lambda setup: replace(figure(1), evidence=setup.say("") or MEASURED))
    context = run_entry(entry(1, "one", MEASURED, "good"), Setup(model="m.gguf", seed=7, quick=True)).context
    assert (context["model"], context["seed"], context["size"]) == ("m.gguf", "7", "quick")
    modules(monkeypatch, good=lambda setup: figure(1))
    assert "model" not in run_entry(entry(1, "one", module="good"), Setup()).context, "a simulated figure runs no model"
