"""Figures made one after the other: each is printed and written as soon as it is there, and one that fails loses no other.

Owns the order, the clock and what failure means. What a figure is, and how a report looks, is known elsewhere.
"""

from __future__ import annotations

import platform
import time
import traceback
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from pathlib import Path

import octavo
from octavo.engine.user_files import write_whole
from octavo.reproduce.figure import MEASURED, Figure
from octavo.reproduce.files import Outcome, write_outcome
from octavo.reproduce.registry import Entry
from octavo.reproduce.report import html_report
from octavo.reproduce.setup import DATA_AT_FAULT, Setup

REPORT = "report.html"


def run_entries(entries: Seq[Entry], setup: Setup, folder: Path, echo: Callable[[str], None]) -> list[Outcome]:
    """Make the figures of ``entries``; files of each and the report of all so far lie in ``folder``, which is made, after each of them.

    Raises OSError or UserFileError when nothing can be written there; whatever a figure raises is its outcome.
    """
    folder.mkdir(parents=True, exist_ok=True)
    outcomes: list[Outcome] = []
    for entry in entries:
        setup.say(f"{entry.number} {entry.name} ({entry.evidence})")
        outcome = run_entry(entry, setup)
        outcomes.append(outcome)
        write_outcome(outcome, folder)
        write_whole(folder / REPORT, html_report(outcomes))
        echo(f"{outcome.to_text()}\n")
        setup.say(f"{entry.number} {entry.name}: {'failed' if outcome.error else 'made'} in {outcome.seconds:.1f} s")
    return outcomes


def run_entry(entry: Entry, setup: Setup) -> Outcome:
    """One entry, whatever becomes of it."""
    started = time.perf_counter()
    figures, failure = tuple[Figure, ...](), None
    try:
        figures = tuple(entry.run(setup))
        failure = _what_is_wrong(entry, figures)
    except DATA_AT_FAULT as error:
        failure = str(error)
    except Exception as error:
        failure = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        setup.say(traceback.format_exc().rstrip())
    seconds = round(time.perf_counter() - started, 3)
    made = () if failure is not None else figures
    return Outcome(entry, made, failure, seconds, time.strftime("%Y-%m-%d"), dict(_context(entry, setup)))


def _what_is_wrong(entry: Entry, figures: Seq[Figure]) -> str | None:
    """A figure of another number or kind of evidence than its entry says would stand in the wrong column of the report."""
    for figure in figures:
        if (figure.number, figure.evidence) != (entry.number, entry.evidence):
            return f"{figure.number} ({figure.evidence}) was made, {entry.number} ({entry.evidence}) was expected"
    return None if figures else "it made no figure"


def _context(entry: Entry, setup: Setup) -> Iterator[tuple[str, str]]:
    yield "octavo", octavo.__version__
    yield "python", platform.python_version()
    if entry.evidence == MEASURED:
        yield "model", setup.model
    yield "seed", str(setup.seed)
    yield "size", "quick" if setup.quick else "full"
