"""Figures: percentiles against a slow twin and NumPy, records whose figures are known by hand."""

from __future__ import annotations

import math
from array import array
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.bench.latency import PERCENTILES, Goodput, distribution_ms, percentile, summary
from octavo.bench.spike import spike_figures
from octavo.bench.stream_record import StreamRecord

VALUES = st.lists(st.integers(0, 10_000), min_size=1, max_size=60)


def twin(values: list[int], percent: int) -> Fraction:
    """Walk along the line through the points (100 i / (n - 1), i-th smallest), in exact arithmetic."""
    rest = list(values)
    points = []
    while rest:
        smallest = min(rest)
        rest.remove(smallest)
        points.append(smallest)
    if len(points) == 1:
        return Fraction(points[0])
    step = Fraction(100, len(points) - 1)
    for i in range(len(points) - 1):
        if step * i <= percent <= step * (i + 1):
            return points[i] + (points[i + 1] - points[i]) * (percent - step * i) / step
    raise AssertionError("no percentile lies outside 0 to 100")


@settings(max_examples=300, deadline=None)
@given(VALUES, st.integers(0, 100))
def test_percentiles_are_those_of_the_twin_and_of_numpy(values: list[int], percent: int) -> None:
    found = percentile(sorted(values), percent)
    assert found == pytest.approx(float(twin(values, percent)), rel=1e-12, abs=1e-9)
    assert found == pytest.approx(float(np.percentile(values, percent)), rel=1e-12, abs=1e-9)


@settings(deadline=None)
@given(VALUES)
def test_a_distribution_in_milliseconds(values: list[int]) -> None:
    found = distribution_ms(value / 1000 for value in values)
    assert found is not None and list(found) == ["mean", *(f"p{p}" for p in PERCENTILES), "max"]
    assert found["max"] == max(values) and found["mean"] == pytest.approx(sum(values) / len(values), abs=6e-4)
    assert all(found[f"p{p}"] == pytest.approx(float(twin(values, p)), abs=6e-4) for p in PERCENTILES)


def test_no_values_have_no_distribution() -> None:
    assert distribution_ms([]) is None


def record(due_s: float, *times: float, prompt: int = 10, reported: int | None = None, error: str | None = None) -> StreamRecord:
    made = StreamRecord(prompt, len(times), due_s, due_s + 0.5, array("d", times), (times[-1] if times else due_s + 1) + 0.25, reported)
    if error is not None:
        made.fail(error, f"{error} message")
    return made


def test_figures_of_a_run() -> None:
    one = record(100.0, 101.0, 101.5, 102.5)  # TTFT 1, gaps 0.5 and 1, TPOT 0.75, E2E 2.75
    two = record(101.0, 104.0, 104.25, reported=6, prompt=20)  # TTFT 3, gap 0.25, TPOT 0.05, E2E 3.5
    bad = record(100.5, 101.0, 109.75, error="broken_off", prompt=40)  # ends the run, at 110
    figures = summary([one, two, bad, record(102.0, error="connect")], Goodput.parse("ttft:1500"))
    assert (figures["num_requests"], figures["num_completed"], figures["num_errors"]) == (4, 2, 2)
    assert figures["errors"] == {"broken_off": 1, "connect": 1} and figures["first_error"] == "broken_off message"
    assert figures["wall_s"] == 10.0
    assert (figures["num_output_tokens"], figures["output_tok_s"]) == (9, 0.9)
    assert (figures["num_prompt_tokens"], figures["total_tok_s"], figures["request_s"]) == (30, 3.9, 0.2)
    assert figures["ttft_ms"] == {"mean": 2000.0, "p50": 2000.0, "p90": 2800.0, "p95": 2900.0, "p99": 2980.0, "max": 3000.0}
    assert figures["itl_ms"]["max"] == 1000.0 and figures["itl_ms"]["p50"] == 500.0
    assert figures["itl_ms"]["mean"] == pytest.approx(1750 / 3, abs=1e-3)
    assert figures["tpot_ms"]["mean"] == 400.0 and figures["e2e_ms"]["max"] == 3500.0
    assert figures["send_delay_ms"]["p50"] == 500.0
    assert figures["goodput"] == {"limits_ms": {"ttft": 1500.0}, "num_good": 1, "share": 0.25, "request_s": 0.1}


def test_answers_shorter_than_asked_for_are_counted() -> None:
    short = record(0.0, 1.0, 2.0, reported=1)
    assert summary([short, record(0.0, 1.0, 2.0)])["num_short"] == 1


def test_a_run_without_a_whole_answer_has_no_latencies() -> None:
    figures = summary([record(0.0, error="connect")])
    assert figures["num_completed"] == 0 and figures["output_tok_s"] == 0.0
    assert all(figures[name] is None for name in ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms"))
    assert summary([])["wall_s"] == 0.0


@pytest.mark.parametrize(
    ("text", "met"),
    [("ttft:1000", True), ("ttft:999", False), ("itl:1000", True), ("itl:999.9", False), ("tpot:750", True), ("tpot:749", False)]
    + [("e2e:2750", True), ("e2e:2749", False), ("ttft:1000,itl:1000,tpot:750,e2e:2750", True), ("ttft:1000, itl:1", False)],
)  # fmt: skip
def test_goodput_needs_every_limit(text: str, met: bool) -> None:
    assert Goodput.parse(text).met_by(record(100.0, 101.0, 101.5, 102.5)) is met
    assert not Goodput.parse(text).met_by(record(100.0, 101.0, 101.5, 102.5, error="broken_off"))


BAD_GOODPUT = ["", "ttft", "ttft:", "ttft:x", "ttft:0", "ttft:-1", "ttft:nan", "ttft:inf", "speed:3", "ttft:1,ttft:2", "itl:1,"]


@pytest.mark.parametrize("text", BAD_GOODPUT)
def test_bad_goodput(text: str) -> None:
    with pytest.raises(ValueError, match="^goodput: .*is not allowed; NAME:MILLISECONDS"):
        Goodput.parse(text)


def test_a_spike_counts_gaps_that_touch_its_wait() -> None:
    late = record(10.0, 14.0)
    stream = record(0.0, 1.0, 9.5, 10.5, 13.0, 15.0, 20.0)
    figures = spike_figures([stream], late)
    assert figures["prompt_ttft_ms"] == 4000.0 and figures["overlap"] is True
    gaps = [1.0, 2.5, 2.0]  # not 8.5, which was over, nor 5, which had not begun
    assert figures["gap_ms"]["max"] == 2500.0 and figures["gap_ms"]["mean"] == pytest.approx(1000 * math.fsum(gaps) / 3, abs=1e-3)
    assert spike_figures([stream, record(0.0, 1.0, 13.0)], late)["overlap"] is False
    assert spike_figures([stream], record(10.0, error="http_400"))["error"] == "http_400"
