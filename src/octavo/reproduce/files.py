"""What a figure leaves in the output folder: a text and a JSON file of its entry. Writes and reads them; runs nothing.

    03-name.txt     as printed
    03-name.json    the same as data, with the plots' points: what the report is made from
"""

from __future__ import annotations

import json
from collections.abc import Mapping
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


def read_outcomes(folder: Path) -> list[Outcome]:
    """Of all JSON files in ``folder``, by number and then as in the registry. Raises FigureFileError, OSError."""
    places = {entry.name: place for place, entry in enumerate(ENTRIES)}
    outcomes = [_read(path) for path in sorted(folder.glob("*.json"))]
    return sorted(outcomes, key=lambda outcome: (outcome.entry.number, places.get(outcome.entry.name, len(places))))


def _read(path: Path) -> Outcome:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise FigureFileError(f"{path}: {error}") from None
    if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
        raise FigureFileError(f"{path}: no figure; files of the form {FORMAT} are expected in this folder")
    try:
        figures = tuple(_figure(value) for value in data.pop("figures"))
        return Outcome(Entry(**data.pop("entry")), figures, **data)
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise FigureFileError(f"{path}: {type(error).__name__}: {error}") from None


def _figure(data: dict[str, Any]) -> Figure:
    rows = tuple(Row(**row) for row in data.pop("rows"))
    plots = tuple(_plot(plot) for plot in data.pop("plots"))
    return Figure(rows=rows, plots=plots, notes=tuple(data.pop("notes")), **data)


def _plot(data: dict[str, Any]) -> Plot:
    ranges = tuple(Range(**value) for value in data.pop("ranges"))
    lines = tuple(Line(value["label"], tuple((x, y) for x, y in value["points"])) for value in data.pop("lines"))
    marks = tuple((label, value) for label, value in data.pop("marks"))
    return Plot(ranges=ranges, lines=lines, marks=marks, **data)
