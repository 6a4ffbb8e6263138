"""Loads: what requests are like, exact by seed, the same at every rate; damaged traces name line and field."""

from __future__ import annotations

import json
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest

from octavo.planning.load import PlanLoad, made_load, read_load
from octavo.workload.lengths import Fixed, Uniform
from octavo.workload.requests import Independent
from octavo.workload.traces import TraceError, TraceRow

ROWS = (TraceRow(0.0, 10, 2), TraceRow(1.0, 20, 5), TraceRow(4.0, 30, 8), TraceRow(8.0, 40, 1))


def test_what_requests_are_like() -> None:
    load = PlanLoad("t", ROWS)
    assert (load.mean_prompt, load.mean_output, load.mean_context, load.rate) == (25.0, 4.0, 29, 3 / 8)
    assert (load.p90_context, load.max_context) == (41, 41)
    ten = PlanLoad("t", tuple(TraceRow(0.0, n, 1) for n in range(1, 11)))
    assert (ten.p90_context, ten.max_context, ten.rate) == (10, 11, None)
    assert json.loads(json.dumps(load.to_dict(), allow_nan=False))["context_mean"] == 29


def test_longer_requests_than_the_context_are_left_out_and_counted() -> None:
    load = PlanLoad("t", ROWS, num_left_out=3).fitting(25)
    assert load.rows == ROWS[:2] and load.num_left_out == 5
    with pytest.raises(ValueError, match="no request fits the model's context of 11 tokens; the shortest takes 12"):
        load.fitting(11)


def test_the_same_requests_at_every_rate() -> None:
    load = PlanLoad("t", ROWS)
    slow, fast = (list(load.requests(rate, 7, 50)) for rate in (1.0, 4.0))
    assert [work.arrival_s for work in fast] == pytest.approx([work.arrival_s / 4 for work in slow])
    assert [(w.prompt_token_ids, w.num_output) for w in fast] == [(w.prompt_token_ids, w.num_output) for w in slow]
    assert {(len(w.prompt_token_ids), w.num_output) for w in slow} == {(row.num_prompt, row.num_output) for row in ROWS}
    assert list(load.requests(1.0, 7, 50)) == slow != list(load.requests(1.0, 8, 50))
    many = list(load.requests(5.0, 0, 2000))
    assert many[-1].arrival_s == pytest.approx(400.0, rel=5 / 2000**0.5)  # Poisson: five standard errors


def test_arrivals_as_recorded() -> None:
    load = PlanLoad("t", ROWS)
    (own,) = {load.rate}
    assert own is not None
    as_it_is = list(load.requests(own, 0, 6, "trace"))
    assert [work.arrival_s for work in as_it_is] == pytest.approx([0.0, 1.0, 4.0, 8.0, 8.0 + 8 / 3, 9.0 + 8 / 3])
    assert [work.num_output for work in as_it_is] == [2, 5, 8, 1, 2, 5]
    twice = list(load.requests(2 * own, 0, 6, "trace"))
    assert [work.arrival_s for work in twice] == pytest.approx([work.arrival_s / 2 for work in as_it_is])
    starts = {next(load.requests(own, seed, 1, "trace")).num_output for seed in range(20)}
    assert starts == {2, 5, 8, 1}
    with pytest.raises(ValueError, match="all requests come at once"):
        next(PlanLoad("t", (TraceRow(0.0, 1, 1),)).requests(1.0, 0, 1, "trace"))


def jsonl(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_shared_beginnings_stay_shared_and_in_order(tmp_path: Path) -> None:
    lines = [{"timestamp": 1000 * i, "input_length": 600, "output_length": 5 + i, "hash_ids": [0, i + 1]} for i in range(4)]
    load = read_load(jsonl(tmp_path / "t.jsonl", lines))
    assert load.prompts is not None and load.to_dict()["shares_prefixes"] is True
    works = list(load.requests(2.0, 0, 6))
    assert [work.num_output for work in works] == [5, 6, 7, 8, 5, 6]
    assert len({tuple(work.prompt_token_ids[:512]) for work in works}) == 1
    assert [work.num_output for work in load.fitting(606).requests(2.0, 0, 3)] == [5, 6, 5]


def test_a_trace_of_lengths_alone(tmp_path: Path) -> None:
    lines = [{"arrival_s": i, "num_prompt": 30, "num_output": max(0, i - 1)} for i in range(4)]
    load = read_load(jsonl(tmp_path / "t.jsonl", lines))
    assert load.prompts is None and load.num_left_out == 2 and [row.num_output for row in load.rows] == [1, 2]


def test_a_load_that_is_made() -> None:
    load = made_load(Independent(Uniform(5, 9), Fixed(3)), 100)
    assert load == made_load(Independent(Uniform(5, 9), Fixed(3)), 100) and len(load.rows) == 100 and load.rate == 1.0
    assert 5 <= load.mean_prompt <= 9 and load.mean_output == 3


HEAD = "arrival_s,num_prompt,num_output\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: the file is empty"), (HEAD, "there is no request in it"), (HEAD + "0,0,5\n", "there is no request in it"),
        (HEAD + "0,-1,5\n", "line 2: column num_prompt: -1 is not allowed"), (HEAD + "0,1.5,5\n", "line 2: column num_prompt: '1.5'"),
        (HEAD + "0,NaN,5\n", "line 2: column num_prompt"), (HEAD + "0,,5\n", "line 2: column num_prompt"),
        (HEAD + "0,1000000000000,5\n", "line 2: column num_prompt: 1000000000000 is not allowed"),
        (HEAD + "0,5,5\nNaN,5,5\n", "line 3: column arrival_s"), (HEAD + ",5,5\n", "line 2: column arrival_s"),
        ("arrival_s,num_prompt\n0,5\n", "line 1: no known trace has these columns"),
        (HEAD + "0,5\n", "line 2: column num_output is missing"),
    ],
)  # fmt: skip
def test_damaged_traces_name_line_and_field(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(TraceError, match=f"t.csv: {message}"):
        read_load(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"arrival_s": -5, "num_prompt": 3, "num_output": 1}', "line 1: arrival_s: -5 is not allowed"),
        ('{"arrival_s": NaN, "num_prompt": 3, "num_output": 1}', "line 1: arrival_s: nan is not allowed"),
        ('{"arrival_s": 1, "num_prompt": 0, "num_output": 1}', "line 1: num_prompt: 0 is not allowed"),
        ('{"arrival_s": 1, "num_prompt": 3}', "line 1: exactly one of num_output and output_length is needed"),
        ("[1]", "line 1: an object is needed"), ("", "there is no request in it"),
        ('{"arrival_s": 1, "num_prompt": 3, "num_output": 0}', "there is no request in it"),
    ],
)  # fmt: skip
def test_damaged_lines_name_their_field(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(TraceError, match=message):
        read_load(path)


@pytest.mark.parametrize("text", ["\ufeff" + HEAD + "0,5,5\r\n1,6,6\r\n", HEAD.strip() + ",extra\n0,5,5,x\n1,6,6,y", HEAD + "0,5,5\n0,6,6"])
def test_harmless_oddities(tmp_path: Path, text: str) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(text.encode())
    load = read_load(path)
    assert [(row.num_prompt, row.num_output) for row in load.rows] == [(5, 5), (6, 6)]
    times = [work.arrival_s for work in islice(load.requests(3.0, 1, 9), 9)]
    assert all(a < b for a, b in pairwise(times))
