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
from octavo.reproduce.files import FigureFileError, Outcome, read_outcomes, stem_of, write_outcome
from octavo.reproduce.registry import ENTRIES, Entry
from octavo.reproduce.report import html_report
from octavo.reproduce.runner import run_entries, run_entry
from octavo.reproduce.setup import DataMissing, Setup

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
    found = read_outcomes(tmp_path)
    assert [json.dumps(html_report([outcome])) for outcome in found] == [json.dumps(html_report([outcome])) for outcome in OUTCOMES]
    assert (tmp_path / "01-one.txt").read_text() == OUTCOMES[0].to_text() + "\n"
    assert "failed: OSError" in (tmp_path / "03-three.txt").read_text()
    assert not list(tmp_path.glob("*.partial"))


def test_files_come_in_the_order_of_the_registry(tmp_path: Path) -> None:
    for known in reversed(ENTRIES):
        write_outcome(Outcome(known), tmp_path)
    write_outcome(Outcome(entry(1, "another")), tmp_path)
    names = [outcome.entry.name for outcome in read_outcomes(tmp_path)]
    assert [name for name in names if name != "another"] == [known.name for known in ENTRIES]
    assert names.index("another") == sum(known.number == 1 for known in ENTRIES), "a figure of another version comes last of its number"


@pytest.mark.parametrize("text", ["{", "[]", '{"format": "other"}', '{"format": "octavo-figure"}'])
def test_a_file_that_is_no_figure_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "05-five.json").write_text(text)
    with pytest.raises(FigureFileError, match="05-five.json: "):
        read_outcomes(tmp_path)


def test_a_field_too_many_is_named(tmp_path: Path) -> None:
    write_outcome(OUTCOMES[0], tmp_path)
    path = tmp_path / f"{stem_of(OUTCOMES[0].entry)}.json"
    path.write_text(path.read_text().replace('"error"', '"errors"'))
    with pytest.raises(FigureFileError, match="01-one.json: TypeError: .*errors"):
        read_outcomes(tmp_path)


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


def test_what_an_outcome_was_made_with(monkeypatch: pytest.MonkeyPatch) -> None:
    modules(monkeypatch, good=lambda setup: replace(figure(1), evidence=setup.say("") or MEASURED))
    context = run_entry(entry(1, "one", MEASURED, "good"), Setup(model="m.gguf", seed=7, quick=True)).context
    assert (context["model"], context["seed"], context["size"]) == ("m.gguf", "7", "quick")
    modules(monkeypatch, good=lambda setup: figure(1))
    assert "model" not in run_entry(entry(1, "one", module="good"), Setup()).context, "a simulated figure runs no model"
