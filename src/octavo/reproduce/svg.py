"""Plots as SVG: ranges as bars one under the other, lines over a common axis, published values as dashed marks.

Owns the drawing and where labels go, so that none covers another; ``axis`` owns the numbers. The result is one <svg> element with all that
it needs in it: no script, no style sheet, no font but the reader's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise

from octavo.reproduce.axis import Axis, number
from octavo.reproduce.figure import Line, Plot, Range

WIDTH = 760
FONT_PX = 12
_CHAR_PX = 6.7  # a generous mean of proportional letters at FONT_PX
_LINE_PX = 16  # from one line of text to the next
_BORDER = 12
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a5c00")  # told apart with any colour vision
_DASHES = ("", "7 3", "2 3")  # of lines beyond the colours
_INK, _PALE, _MARK = "#222222", "#dddddd", "#a00020"
_BOLD = ' font-weight="600"'
_HALO = ' paint-order="stroke" stroke="#ffffff" stroke-width="4"'  # of labels that lines may run behind
_MOST_DOTS = 40  # points of a line that are drawn as dots too


def text_px(text: str) -> float:
    """About how wide ``text`` is."""
    return _CHAR_PX * len(text)


def cut(text: str, most_px: float) -> str:
    """``text``, or as much of it as fits, with an ellipsis."""
    most = int(most_px / _CHAR_PX)
    return text if len(text) <= most else f"{text[: max(most - 1, 1)].rstrip()}…"


@dataclass(slots=True)
class Canvas:
    """Elements drawn so far. Coordinates in pixels from the top left."""

    elements: list[str] = field(default_factory=list)

    def text(self, x: float, y: float, text: str, anchor: str = "start", colour: str = _INK, more: str = "") -> None:
        """``more``: further attributes."""
        self.elements.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}"{more}>{escape(text)}</text>')

    def line(self, x1: float, y1: float, x2: float, y2: float, colour: str, dash: str = "", width: float = 1) -> None:
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
        self.elements.append(f'<line {ends} stroke="{colour}" stroke-width="{width:g}"{dashes}/>')

    def path(self, points: Seq[tuple[float, float]], colour: str, dash: str) -> None:
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.elements.append(f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>')

    def dot(self, x: float, y: float, colour: str) -> None:
        self.elements.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.8" fill="{colour}"/>')

    def bar(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        self.elements.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="2" fill="{colour}"/>')

    def to_svg(self, height: float, title: str) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" height="{height:.0f}" '
            f'role="img" aria-label="{escape(title)}" font-family="system-ui, sans-serif" font-size="{FONT_PX}">'
        )
        return "\n".join([head, f'<rect width="{WIDTH}" height="{height:.0f}" fill="#ffffff"/>', *self.elements, "</svg>"])


def plot_svg(plot: Plot) -> str:
    """One <svg> element: the ranges of a plot, else its lines."""
    return _ranges_svg(plot) if plot.ranges else _lines_svg(plot)


# --- ranges -----------------------------------------------------------------------------------------------------------------------------


def _ranges_svg(plot: Plot) -> str:
    canvas = Canvas()
    marks = _merged(plot.marks)
    values = [value for r in plot.ranges for value in (r.low, r.high)] + [value for _, value in marks]
    axis = Axis.of(values, _BORDER + 10, WIDTH - 160, plot.log_x)
    top = _title(canvas, plot.title)
    rows = _rows_of([(axis.place(value), f"{label}: {number(value)}") for label, value in marks])
    marks_bottom = top + _LINE_PX * (max(rows, default=-1) + 1)
    step = 2 * _LINE_PX + 6
    bottom = marks_bottom + 8 + step * len(plot.ranges)
    _x_axis(canvas, axis, marks_bottom + 4, bottom, plot.value_label)
    for row, (label, value) in zip(rows, marks, strict=True):
        x, y = axis.place(value), top + _LINE_PX * (row + 1) - 4
        canvas.line(x, y + 3, x, bottom, _MARK, "4 3", 1.3)
        _mark_label(canvas, x, y, f"{label}: {number(value)}")
    for i, found in enumerate(plot.ranges):
        _range(canvas, axis, found, marks_bottom + 10 + i * step)
    return canvas.to_svg(bottom + 3 * _LINE_PX, plot.title)


def _range(canvas: Canvas, axis: Axis, found: Range, top: float) -> None:
    """Its label over its bar, its values to the right of the axis."""
    left, right = axis.place(found.low), axis.place(found.high)
    canvas.text(axis.start + 2, top + FONT_PX, cut(found.label, axis.end - axis.start), more=_HALO)
    canvas.bar(min(left, right - 4), top + _LINE_PX + 2, max(right - left, 4.0), 11, _COLOURS[0])
    values = number(_short(found.low)) if found.low == found.high else f"{number(_short(found.low))} to {number(_short(found.high))}"
    canvas.text(axis.end + 12, top + _LINE_PX + FONT_PX, cut(values, WIDTH - axis.end - 16))


def _merged(marks: Iterable[tuple[str, float]]) -> list[tuple[str, float]]:
    """Marks of the same value are one."""
    labels = dict[float, list[str]]()
    for label, value in marks:
        labels.setdefault(value, []).append(label)
    return [(", ".join(dict.fromkeys(names)), value) for value, names in labels.items()]


def _rows_of(labels: Seq[tuple[float, str]]) -> list[int]:
    """For each (centre, text) the first row, from 0, in which it covers none before it."""
    taken: list[list[tuple[float, float]]] = []
    rows = []
    for centre, text in labels:
        left, right = _label_span(centre, text)
        row = next((i for i, spans in enumerate(taken) if all(right < begin or left > end for begin, end in spans)), len(taken))
        if row == len(taken):
            taken.append([])
        taken[row].append((left - 8, right + 8))
        rows.append(row)
    return rows


def _label_span(centre: float, text: str) -> tuple[float, float]:
    """Of a label that stays on the canvas."""
    half = text_px(text) / 2
    centre = min(max(centre, _BORDER + half), WIDTH - _BORDER - half)
    return centre - half, centre + half


def _mark_label(canvas: Canvas, x: float, y: float, text: str) -> None:
    left, right = _label_span(x, text)
    canvas.text((left + right) / 2, y, text, "middle", _MARK, _HALO)


def _short(value: float) -> float:
    """Three digits, four from 100 on: more than any figure here is sure of."""
    return float(f"{value:.3g}" if abs(value) < 100 else f"{value:.4g}")


# --- lines ------------------------------------------------------------------------------------------------------------------------------


def _lines_svg(plot: Plot) -> str:
    canvas = Canvas()
    points = [point for line in plot.lines for point in line.points]
    top = _legend(canvas, plot.lines, _title(canvas, plot.title))
    x_marks = _merged(plot.x_marks)
    plot_top = top + 10 + _LINE_PX * (1 + len(x_marks))
    bottom = plot_top + 260
    y_axis = Axis.of([*(y for _, y in points), *(value for _, value in plot.marks)], bottom, plot_top, plot.log_y)
    left = _BORDER + max(text_px(number(tick)) for tick in y_axis.ticks) + 10
    x_axis = Axis.of([*(x for x, _ in points), *(value for _, value in plot.x_marks)], left, WIDTH - _BORDER - 16, plot.log_x, 8)
    canvas.text(_BORDER, top + 14, cut(plot.value_label, WIDTH - 2 * _BORDER), colour="#555555")
    _y_axis(canvas, y_axis, left, x_axis.end)
    _x_axis(canvas, x_axis, plot_top, bottom, plot.x_label)
    for i, (label, value) in enumerate(x_marks):
        x, y = x_axis.place(value), top + 14 + _LINE_PX * (i + 1)
        canvas.line(x, y + 3, x, bottom, _MARK, "4 3", 1.3)
        _mark_label(canvas, x, y, f"{label}: {number(value)}")
    for i, line in enumerate(plot.lines):
        _line(canvas, line, x_axis, y_axis, i)
    _y_marks(canvas, plot.marks, x_axis, y_axis)
    return canvas.to_svg(bottom + 3 * _LINE_PX, plot.title)


def _style(index: int) -> tuple[str, str]:
    return _COLOURS[index % len(_COLOURS)], _DASHES[index // len(_COLOURS) % len(_DASHES)]


def _line(canvas: Canvas, line: Line, x_axis: Axis, y_axis: Axis, index: int) -> None:
    colour, dash = _style(index)
    places = [(x_axis.place(x), y_axis.place(y)) for x, y in line.points if x_axis.shows(x) and y_axis.shows(y)]
    if len(places) > 1:
        canvas.path(places, colour, dash)
    if len(places) <= _MOST_DOTS:
        for x, y in places:
            canvas.dot(x, y, colour)


def _legend(canvas: Canvas, lines: Seq[Line], top: float) -> float:
    """As many entries in a row as fit; returns where it ends."""
    x, y, key_px = float(_BORDER), top, 26
    for i, line in enumerate(lines):
        label = cut(line.label, WIDTH - 2 * _BORDER - key_px)
        width = key_px + text_px(label) + 18
        if x > _BORDER and x + width > WIDTH - _BORDER:
            x, y = float(_BORDER), y + _LINE_PX + 2
        colour, dash = _style(i)
        canvas.line(x, y + 9, x + 20, y + 9, colour, dash, 3)
        canvas.text(x + key_px, y + 13, label)
        x += width
    return y + _LINE_PX + 4 if lines else y


def _y_marks(canvas: Canvas, marks: Seq[tuple[str, float]], x_axis: Axis, y_axis: Axis) -> None:
    """Dashed lines, each label over its own at the right, moved up where it would cover the one below, and down again at the top."""
    shown = sorted((mark for mark in _merged(marks) if y_axis.shows(mark[1])), key=lambda mark: mark[1])
    places = list[float]()
    for _, value in shown:
        y = y_axis.place(value)
        canvas.line(x_axis.start, y, x_axis.end, y, _MARK, "4 3", 1.3)
        places.append(min(y - 4, places[-1] - _LINE_PX) if places else y - 4)
    highest = y_axis.end + FONT_PX + 2
    for i in reversed(range(len(places))):
        places[i] = max(places[i], highest)
        highest = places[i] + _LINE_PX
    for (label, value), y in zip(shown, places, strict=True):
        canvas.text(x_axis.end - 4, y, f"{label}: {number(value)}", "end", _MARK, _HALO)


# --- what both have ---------------------------------------------------------------------------------------------------------------------


def _title(canvas: Canvas, title: str) -> float:
    """Returns where it ends."""
    canvas.text(_BORDER, 20, cut(title, WIDTH - 2 * _BORDER), more=_BOLD)
    return 32.0


def _x_axis(canvas: Canvas, axis: Axis, top: float, bottom: float, label: str) -> None:
    shown = set(_apart(axis))
    for tick in axis.ticks:
        x = axis.place(tick)
        canvas.line(x, top, x, bottom, _PALE)
        if tick in shown:
            left, right = _label_span(x, number(tick))
            canvas.text((left + right) / 2, bottom + _LINE_PX, number(tick), "middle")
    canvas.line(axis.start, bottom, axis.end, bottom, _INK)
    canvas.text((axis.start + axis.end) / 2, bottom + 2 * _LINE_PX + 4, cut(label, WIDTH - 2 * _BORDER), "middle", "#555555")


def _apart(axis: Axis) -> Iterator[float]:
    """Ticks whose labels do not touch: every one, every second, every third and so on."""
    for stride in range(1, len(axis.ticks) + 1):
        ticks = axis.ticks[::stride]
        if all(_gap(axis, a, b) > 6 for a, b in pairwise(ticks)):
            return iter(ticks)
    return iter(axis.ticks[:1])


def _gap(axis: Axis, a: float, b: float) -> float:
    return abs(axis.place(b) - axis.place(a)) - (text_px(number(a)) + text_px(number(b))) / 2


def _y_axis(canvas: Canvas, axis: Axis, left: float, right: float) -> None:
    for tick in axis.ticks:
        y = axis.place(tick)
        canvas.line(left, y, right, y, _PALE)
        canvas.text(left - 6, y + 4, number(tick), "end")
    canvas.line(left, axis.start, left, axis.end, _INK)


def all_svgs(plots: Iterable[Plot]) -> list[str]:
    """Each plot that has something to show."""
    return [plot_svg(plot) for plot in plots if plot.ranges or any(line.points for line in plot.lines)]
