"""A published figure rebuilt: what was published beside what we get, of which kind ours is, and how it was made. Plain data, and its text.

Owns no figure and computes none. Kinds of evidence are never mixed in one figure: a simulated number is no measurement.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

MEASURED, SIMULATED, ARITHMETIC = "measured on CPU", "simulated", "arithmetic"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the comparison. ``hit``: whether ours agrees with what was published; None where nothing was, or no verdict is due."""

    what: str
    published: str
    ours: str
    hit: bool | None = None


@dataclass(frozen=True, slots=True)
class Range:
    """A value that is known to lie in a range."""

    label: str
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Line:
    label: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Plot:
    """``ranges`` are drawn as bars from low to high, one under the other; ``lines`` over a common axis. ``marks``: published values of y
    (with lines) or of the value (with ranges); ``x_marks``: published values of x, with lines. ``log_x``, ``log_y``: the axis is
    logarithmic, and what is not above 0 is not drawn; with ranges only ``log_x`` counts."""

    title: str
    value_label: str
    ranges: tuple[Range, ...] = ()
    lines: tuple[Line, ...] = ()
    x_label: str = ""
    marks: tuple[tuple[str, float], ...] = ()
    x_marks: tuple[tuple[str, float], ...] = ()
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True, slots=True)
class Figure:
    """``number``: in the list of figures that are rebuilt. ``setup``: model, machines, load, seeds, grid, and what was searched."""

    number: int
    title: str
    evidence: str
    setup: str
    rows: Seq[Row]
    plots: Seq[Plot] = ()
    notes: Seq[str] = field(default=())

    @property
    def num_misses(self) -> int:
        return sum(row.hit is False for row in self.rows)

    def to_text(self) -> str:
        """A table for a terminal; misses stand beside hits."""
        verdicts = {True: "agrees", False: "differs", None: ""}
        cells = [("", "published", f"ours ({self.evidence})", ""), *((r.what, r.published, r.ours, verdicts[r.hit]) for r in self.rows)]
        widths = [max(len(row[i]) for row in cells) for i in range(3)]
        lines = ["  ".join([*(cell.ljust(width) for cell, width in zip(row[:3], widths, strict=True)), row[3]]).rstrip() for row in cells]
        return "\n".join([f"{self.number}. {self.title}", self.setup, *lines, *self.notes])


def within(published: float, low: float, high: float, share: float = 0.0) -> bool:
    """Whether a published value lies in our range, widened by a share of itself on both sides."""
    return low - share * published <= published <= high + share * published
