"""What a figure leaves in the output folder: a text and a JSON file of its entry. Writes and reads them; runs nothing.

    03-name.txt     as printed
    03-name.json    the same as data, with the plots' points: what the report is made from
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from octavo.engine.user_files import write_whole
from octavo.reproduce.figure import Figure, Line, Plot, Range, Row
from octavo.reproduce.registry import ENTRIES, Entry

FORMAT = "octavo-figure"


class FigureFileError(ValueError):
    """A file in the output folder is no figure's; the message names it and what is wrong."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """An entry that was run. ``error``: why it made no figures; else None. ``date``: the day, ``seconds``: what it took."""

    entry: Entry
    figures: tuple[Figure, ...] = ()
    error: str | None = None
    seconds: float = 0.0
    date: str = ""
    context: Mapping[str, str] = field(default_factory=dict)  # version, model, seed and so on, by name

    def to_text(self) -> str:
        """As printed: the figures one after the other, or that it failed."""
        if self.error is not None:
            return f"{self.entry.number}. {self.entry.title}\nfailed: {self.error}"
        return "\n\n".join(figure.to_text() for figure in self.figures)


def stem_of(entry: Entry) -> str:
    """The name of the entry's files without their ending."""
    return f"{entry.number:02d}-{entry.name}"


def write_outcome(outcome: Outcome, folder: Path) -> None:
    """Both files of an entry, each whole or as it was before. Raises UserFileError."""
    data = {"format": FORMAT, **asdict(outcome)}
    stem = stem_of(outcome.entry)
    write_whole(folder / f"{stem}.txt", f"{outcome.to_text()}\n")
    write_whole(folder / f"{stem}.json", f"{json.dumps(data, indent=1)}\n")


def read_outcomes(
    folder: Path, check: Callable[[Outcome], object] = lambda outcome: None
) -> tuple[list[Outcome], list[FigureFileError]]:
    """Of the figures' JSON files in ``folder``, by number and then as in the registry; and what is wrong with those that cannot be read.

    ``check`` raises one of ``DAMAGED`` for an outcome that is none. Files with other names are nobody's business here. Raises OSError for
    a folder that cannot be listed.
    """
    places = {entry.name: place for place, entry in enumerate(ENTRIES)}
    outcomes, wrong = list[Outcome](), list[FigureFileError]()
    for path in sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_file()):
        try:
            outcomes.append(_read(path, check))
        except FigureFileError as error:
            wrong.append(error)
    return sorted(outcomes, key=lambda outcome: (outcome.entry.number, places.get(outcome.entry.name, len(places)))), wrong


DAMAGED = (TypeError, KeyError, ValueError, AttributeError, ArithmeticError, IndexError)
"""What data that are not what they should be may raise on their way to a page."""
_NAME = re.compile(r"\d{2,}-.+\.json")


def _read(path: Path, check: Callable[[Outcome], object]) -> Outcome:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise FigureFileError(f"{path}: it cannot be read: {error}") from None
    if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
        raise FigureFileError(f"{path}: no figure; files of the form {FORMAT} are expected under such names")
    try:
        figures = tuple(_figure(value) for value in data.pop("figures"))
        outcome = Outcome(_entry(**data.pop("entry")), figures, **data)
        check(outcome)
    except DAMAGED as error:
        raise FigureFileError(f"{path}: its data are damaged ({type(error).__name__}: {error})") from None
    return outcome


def _entry(number: int, **texts: str) -> Entry:
    if type(number) is not int or any(type(text) is not str for text in texts.values()):
        raise TypeError("the entry is not a number and texts")
    return Entry(number, **texts)


def _figure(data: dict[str, Any]) -> Figure:
    rows = tuple(Row(**row) for row in data.pop("rows"))
    plots = tuple(_plot(plot) for plot in data.pop("plots"))
    return Figure(rows=rows, plots=plots, notes=tuple(data.pop("notes")), **data)


def _plot(data: dict[str, Any]) -> Plot:
    ranges = tuple(Range(**value) for value in data.pop("ranges"))
    lines = tuple(Line(value["label"], tuple((x, y) for x, y in value["points"])) for value in data.pop("lines"))
    marks = tuple((label, value) for label, value in data.pop("marks"))
    return Plot(ranges=ranges, lines=lines, marks=marks, **data)
