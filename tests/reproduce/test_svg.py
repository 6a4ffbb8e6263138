"""Plots: all data inside the picture, no label over another, whatever the values are."""

from __future__ import annotations

import math
import random
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.reproduce.axis import Axis, number
from octavo.reproduce.figure import Line, Plot, Range
from octavo.reproduce.svg import FONT_PX, WIDTH, all_svgs, cut, plot_svg, text_px

SVG = "{http://www.w3.org/2000/svg}"
FINITE = st.floats(min_value=-1e6, max_value=1e6, allow_nan=False).map(lambda value: value if abs(value) > 1e-200 else 0.0)


def drawn(plot: Plot) -> ElementTree.Element:
    return ElementTree.fromstring(plot_svg(plot))


def boxes(root: ElementTree.Element) -> list[tuple[float, float, float, float, str]]:
    """(left, top, right, bottom, text) of each label, by the widths that the drawing reckons with."""
    found = []
    for element in root.iter(f"{SVG}text"):
        text, x, y = element.text or "", float(element.attrib["x"]), float(element.attrib["y"])
        width = text_px(text)
        left = {"start": x, "middle": x - width / 2, "end": x - width}[element.attrib["text-anchor"]]
        found.append((left, y - FONT_PX, left + width, y, text))
    return found


def check_labels(root: ElementTree.Element) -> None:
    """All inside the picture, and none over another."""
    height = float(root.attrib["height"])
    labels = boxes(root)
    for i, (left, top, right, bottom, text) in enumerate(labels):
        assert left >= -0.5 and right <= WIDTH + 0.5 and top >= 0 and bottom <= height, text
        for left_2, top_2, right_2, bottom_2, text_2 in labels[:i]:
            apart = right <= left_2 or right_2 <= left or bottom <= top_2 or bottom_2 <= top
            assert apart, f"{text!r} over {text_2!r}"


def check_geometry(root: ElementTree.Element) -> None:
    height = float(root.attrib["height"])
    for element in root.iter():
        for name in ("x", "x1", "x2", "cx"):
            assert -0.5 <= float(element.attrib.get(name, 0)) <= WIDTH + 0.5
        for name in ("y", "y1", "y2", "cy"):
            assert -0.5 <= float(element.attrib.get(name, 0)) <= height + 0.5
        for place in element.attrib.get("points", "").split():
            x, y = map(float, place.split(","))
            assert 0 <= x <= WIDTH and 0 <= y <= height


def lines_of(seed: int, log: bool) -> Plot:
    rng = random.Random(seed)
    scale = 10.0 ** rng.randint(-6, 6)
    lines = [
        Line(f"line {i} " + "x" * rng.randint(0, 130), tuple((x + 1.0, scale * rng.random()) for x in range(rng.randint(0, 60))))
        for i in range(rng.randint(1, 9))
    ]
    lines.append(Line("one point", ((3.0, scale),)))
    marks = tuple((f"published {i}", scale * rng.random()) for i in range(rng.randint(0, 3)))
    x_marks = tuple((f"there {i}", rng.uniform(1, 60)) for i in range(rng.randint(0, 3)))
    return Plot("T" * rng.randint(0, 200), "y", lines=tuple(lines), x_label="x", marks=marks, x_marks=x_marks, log_x=log, log_y=log)


@pytest.mark.parametrize("seed", range(20))
def test_lines(seed: int) -> None:
    plot = lines_of(seed, log=seed % 2 == 1)
    root = drawn(plot)
    check_geometry(root)
    check_labels(root)
    assert len(root.findall(f"{SVG}polyline")) == sum(len(line.points) > 1 for line in plot.lines)


@pytest.mark.parametrize("seed", range(20))
def test_ranges(seed: int) -> None:
    rng = random.Random(seed)
    scale = 10.0 ** rng.randint(-3, 5)
    pairs = [sorted((scale * rng.random(), scale * rng.random())) for _ in range(rng.randint(1, 12))]
    ranges = tuple(Range(f"range {i} " + "w" * rng.randint(0, 150), low, high) for i, (low, high) in enumerate(pairs))
    marks = tuple((f"published long label {i}", scale * rng.random()) for i in range(rng.randint(0, 5)))
    plot = Plot("Title", "value", ranges=ranges, marks=marks, log_x=seed % 2 == 1)
    root = drawn(plot)
    check_geometry(root)
    check_labels(root)
    bars = [element for element in root.iter(f"{SVG}rect") if "rx" in element.attrib]
    assert len(bars) == len(ranges)
    by_low = sorted(zip(ranges, bars, strict=True), key=lambda pair: pair[0].low)
    lefts = [float(bar.attrib["x"]) for _, bar in by_low]
    assert all(a <= b + 4.1 for a, b in zip(lefts, lefts[1:], strict=False)), "a lower range begins further left"


def test_values_without_a_limit_end_at_the_border() -> None:
    root = drawn(Plot("t", "v", ranges=(Range("open", 1.0, math.inf), Range("closed", 1.0, 2.0)), marks=(("published", 1.5),)))
    check_geometry(root)
    texts = [text for *_, text in boxes(root)]
    assert "1 to no limit" in texts and "1 to 2" in texts


def test_marks_of_one_value_have_one_label() -> None:
    plot = Plot("t", "v", ranges=(Range("a", 1.0, 2.0),), marks=(("equal cost", 1.4), ("equal power", 1.4), ("equal cost", 1.4)))
    assert [text for *_, text in boxes(drawn(plot)) if "equal" in text] == ["equal cost, equal power: 1.4"]


def test_what_has_no_place_is_left_out() -> None:
    points = ((0.0, 5.0), (1.0, 0.0), (10.0, math.inf), (100.0, 7.0), (1000.0, 8.0))
    root = drawn(Plot("t", "y", lines=(Line("a", points),), log_x=True, log_y=True))
    check_geometry(root)
    assert len(root.findall(f"{SVG}circle")) == 2, "neither what is not above 0 nor what is not finite"


def test_a_plot_of_nothing_is_not_drawn() -> None:
    assert all_svgs([Plot("empty", "v"), Plot("no points", "v", lines=(Line("a", ()),))]) == []
    assert len(all_svgs([Plot("one", "v", ranges=(Range("a", 0.0, 0.0),))])) == 1


def test_text_is_escaped() -> None:
    plot = Plot("<b>&\"'", "a < b", lines=(Line("x & y <script>", ((0.0, 1.0), (1.0, 2.0))),), x_label="]]>", marks=(("<", 1.5),))
    texts = [text for *_, text in boxes(drawn(plot))]
    assert "<b>&\"'" in texts and "x & y <script>" in texts and "<: 1.5" in texts
    assert drawn(plot).attrib["aria-label"] == "<b>&\"'"


def test_long_text_is_cut() -> None:
    assert cut("short", 500) == "short"
    assert text_px(cut("x" * 200, 300)) <= 300 and cut("x" * 200, 300).endswith("…")


@given(st.lists(FINITE, min_size=1, max_size=8), st.booleans())
@settings(max_examples=100, deadline=None)
def test_an_axis_shows_all_its_values(values: list[float], log: bool) -> None:
    axis = Axis.of(values, 10.0, 110.0, log)
    shown = [value for value in values if value > 0 or not log]
    assert all(map(axis.shows, shown)) and not axis.shows(math.inf) and not axis.shows(math.nan)
    assert axis.low < axis.high and list(axis.ticks) == sorted(set(axis.ticks)) and len(axis.ticks) >= 2
    assert all(axis.low <= tick <= axis.high for tick in axis.ticks)
    places = [axis.place(value) for value in sorted(shown)]
    assert places == sorted(places) and all(10.0 - 1e-6 <= place <= 110.0 + 1e-6 for place in places)
    assert len(axis.ticks) <= 60


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.3, "0.3"), (1500.0, "1,500"), (1e7, "10⁷"), (2.5e6, "2.5 × 10⁶"), (1e-5, "10⁻⁵"), (-2.0, "-2"), (math.inf, "no limit")],
)
def test_numbers_at_ticks(value: float, text: str) -> None:
    assert number(value) == text
