"""The report of figures: one HTML page that needs nothing else, neither network nor script nor font.

A summary of all on top, a section for each below. Kinds of evidence are named with every figure; misses stand beside hits. Owns how it
looks; computes nothing. The page is well-formed XML as well, so that whatever reads XML can read it.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from html import escape

from octavo.core.words import counted
from octavo.reproduce.figure import ARITHMETIC, MEASURED, SIMULATED, Figure, Row
from octavo.reproduce.files import Outcome, stem_of
from octavo.reproduce.registry import NOT_HERE
from octavo.reproduce.svg import all_svgs

TITLE = "Published figures, made again"
_MOST_SUMMED_UP = 6  # rows of a figure in the summary
_KINDS = {MEASURED: "measured", SIMULATED: "simulated", ARITHMETIC: "arithmetic"}
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 1080px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.7rem; margin-bottom: .2rem; }
h2 { font-size: 1.2rem; margin: 2.6rem 0 .3rem; border-top: 1px solid #ddd; padding-top: 1.2rem; }
a { color: #0057a8; } p { margin: .4rem 0; max-width: 60rem; } .quiet { color: #555; font-size: .9rem; }
table { border-collapse: collapse; margin: .8rem 0; width: 100%; font-size: .92rem; }
th, td { text-align: left; vertical-align: top; padding: .3rem .7rem .3rem 0; border-bottom: 1px solid #e4e4e4; }
th { border-bottom: 2px solid #bbb; } td.verdict { white-space: nowrap; }
.hit { color: #05652f; } .mixed { color: #855000; font-weight: 600; } .miss { color: #a00020; font-weight: 600; }
.failed { color: #a00020; }
.kind { white-space: nowrap; border-radius: .6rem; padding: .05rem .55rem; font-size: .82rem; font-weight: 400; }
.measured { background: #dff1e4; color: #05481f; } .simulated { background: #e2ecfa; color: #123c73; }
.arithmetic { background: #efe9dc; color: #54430f; }
svg { max-width: 100%; height: auto; margin: .6rem 0; border: 1px solid #e4e4e4; border-radius: 4px; }
ul { margin: .4rem 0; padding-left: 1.2rem; }
table.summary td { border-bottom: 0; padding-top: .12rem; padding-bottom: .12rem; }
table.summary tr.first td { border-top: 1px solid #e4e4e4; }
"""


def html_report(outcomes: Seq[Outcome]) -> str:
    """The page of all ``outcomes``, in their order."""
    parts = [*_head(outcomes), *_summary(outcomes)]
    for outcome in outcomes:
        parts += _failure(outcome) if outcome.error is not None else _sections(outcome)
    parts += ["</body>", "</html>"]
    return "\n".join(parts) + "\n"


def _head(outcomes: Seq[Outcome]) -> Iterator[str]:
    yield "<!DOCTYPE html>"
    yield '<html xmlns="http://www.w3.org/1999/xhtml" lang="en">'
    yield f'<head><meta charset="utf-8"/><meta name="viewport" content="width=device-width"/><title>Octavo: {escape(TITLE)}</title>'
    yield f"<style>{_STYLE}</style></head>"
    yield f"<body><h1>{escape(TITLE)}</h1>"
    figures = [figure for outcome in outcomes for figure in outcome.figures]
    judged = [row for figure in figures for row in figure.rows if row.hit is not None]
    num_hits, num_failed = sum(bool(row.hit) for row in judged), sum(outcome.error is not None for outcome in outcomes)
    failed = f"; {num_failed} could not be made" if num_failed else ""
    yield f"<p>{counted(len(figures), 'figure')}: {num_hits} of {len(judged)} published values agree with ours{failed}.</p>"
    yield f"<p class=\"quiet\">{_badge(MEASURED)} ran on this machine's CPU; {_badge(SIMULATED)} ran in virtual time with a model of"
    yield f"another machine, and is no measurement; {_badge(ARITHMETIC)} follows from published numbers alone. No figure mixes them.</p>"


def _badge(evidence: str) -> str:
    return f'<span class="kind {_KINDS[evidence]}">{escape(evidence)}</span>'


# --- summary ----------------------------------------------------------------------------------------------------------------------------


def _summary(outcomes: Seq[Outcome]) -> Iterator[str]:
    head = "".join(f"<th>{name}</th>" for name in ("", "figure", "kind", "published", "ours", ""))
    yield f'<table class="summary"><thead><tr>{head}</tr></thead><tbody>'
    for outcome in outcomes:
        entry = outcome.entry
        if outcome.error is not None:
            link = f'<a href="#{_anchor(outcome, 0)}">{escape(entry.title)}</a>'
            cells = "".join(f"<td>{cell}</td>" for cell in (entry.number, link, _badge(entry.evidence)))
            yield f'<tr class="first">{cells}<td colspan="3" class="failed">failed</td></tr>'
        for i, figure in enumerate(outcome.figures):
            yield from _summary_rows(figure, _anchor(outcome, i))
    yield "</tbody></table>"
    reasons = "; ".join(f"{number}: {reason}" for number, reason in NOT_HERE.items())
    yield f'<p class="quiet">Not made here: {escape(reasons)}.</p>'


def _summary_rows(figure: Figure, anchor: str) -> Iterator[str]:
    """Rows that were judged, the misses among them first of all, or else those with something published; each tells what it is of when
    pointed at."""
    judged = [row for row in figure.rows if row.hit is not None]
    found = judged or [row for row in figure.rows if row.published]
    chosen = sorted(range(len(found)), key=lambda i: found[i].hit is not False)[:_MOST_SUMMED_UP]
    rows = [found[i] for i in sorted(chosen)] or [Row("", "", "")]
    more = len(found) - len(rows)
    num_lines = len(rows) + (more > 0)
    title = f'<a href="#{anchor}">{escape(figure.title)}</a>'
    before = "".join(_spanning(num_lines, cell) for cell in (str(figure.number), title, _badge(figure.evidence)))
    after = _spanning(num_lines, _overall(judged), ' class="verdict"')
    for i, row in enumerate(rows):
        mark = {True: '<span class="hit">✓</span> ', False: '<span class="miss">✗</span> ', None: ""}[row.hit]
        cells = f'<td title="{escape(row.what)}">{escape(row.published)}</td><td title="{escape(row.what)}">{mark}{escape(row.ours)}</td>'
        yield f'<tr class="first">{before}{cells}{after}</tr>' if i == 0 else f"<tr>{cells}</tr>"
    if more > 0:
        yield f'<tr><td colspan="2" class="quiet">and {more} more</td></tr>'


def _spanning(num_lines: int, cell: str, more: str = "") -> str:
    return f'<td rowspan="{num_lines}"{more}>{cell}</td>'


def _overall(judged: Seq[Row]) -> str:
    num_hits = sum(bool(row.hit) for row in judged)
    if not judged:
        return ""
    if num_hits == len(judged):
        return '<span class="hit">✓ agrees</span>'
    if not num_hits:
        return '<span class="miss">✗ differs</span>'
    return f'<span class="mixed">{num_hits} of {len(judged)} agree</span>'


# --- sections ---------------------------------------------------------------------------------------------------------------------------


def _anchor(outcome: Outcome, index: int) -> str:
    return f"figure-{stem_of(outcome.entry)}" + (f"-{index + 1}" if index else "")


def _heading(number: int, title: str, evidence: str, anchor: str) -> str:
    return f'<h2 id="{anchor}">{number}. {escape(title)} {_badge(evidence)}</h2>'


def _failure(outcome: Outcome) -> Iterator[str]:
    entry = outcome.entry
    yield _heading(entry.number, entry.title, entry.evidence, _anchor(outcome, 0))
    yield f'<p class="failed">Failed: {escape(outcome.error or "")}</p>'


def _sections(outcome: Outcome) -> Iterator[str]:
    for i, figure in enumerate(outcome.figures):
        yield _heading(figure.number, figure.title, figure.evidence, _anchor(outcome, i))
        yield f"<p>{escape(figure.setup)}</p>"
        yield f"<table><thead><tr><th></th><th>published</th><th>ours ({escape(figure.evidence)})</th><th></th></tr></thead><tbody>"
        yield from (_row(row) for row in figure.rows)
        yield "</tbody></table>"
        yield from all_svgs(figure.plots)
        if figure.notes:
            yield f"<ul>{''.join(f'<li>{escape(note)}</li>' for note in figure.notes)}</ul>"
    context = ", ".join(f"{name} {value}" for name, value in outcome.context.items())
    yield f'<p class="quiet">{escape(f"{outcome.date}, {outcome.seconds:.1f} s; {context}")}</p>'


def _row(row: Row) -> str:
    verdict = {True: '<span class="hit">✓ agrees</span>', False: '<span class="miss">✗ differs</span>', None: ""}[row.hit]
    cells = "".join(f"<td>{escape(text)}</td>" for text in (row.what, row.published, row.ours))
    return f'<tr>{cells}<td class="verdict">{verdict}</td></tr>'
