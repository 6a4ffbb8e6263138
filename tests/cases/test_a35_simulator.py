"""Odd traces in the simulator: empty ones, zero, negative and undefined fields, requests that never fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Ended, Octavo
from tests.cli.conftest import octavo as octavo  # the fixture

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
TIME = "2023-11-16 18:17:03.9799600"


@pytest.fixture
def simulated(octavo: Octavo, tmp_path: Path) -> Any:
    """``simulated(name, text)``: a run over a trace of that text on 32 blocks of 16 tokens, at fixed costs."""
    per = {"row": 1e-3, "pair": 0.0, "position": 0.0, "sequence": 0.0, "logit_row": 0.0, "step": 0.01}
    cost = tmp_path / "cost.json"
    cost.write_text(json.dumps({"format": "octavo-step-cost", "version": 1, "seconds_per": per}))

    def run(name: str, text: str | bytes, *flags: str) -> Ended:
        path = tmp_path / name
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return octavo("simulate", "--fitted", cost, "--num-kv-blocks", "32", "--trace", path, "--json", *flags)

    return run


def record_of(ended: Ended) -> dict[str, Any]:
    assert ended.code == 0, ended.err

    def refuse(text: str) -> None:
        raise AssertionError(f"{text} in a report")

    record = json.loads(ended.out, parse_constant=refuse)  # neither NaN nor Infinity
    assert isinstance(record, dict)
    return record


def test_a_trace_without_requests(simulated: Any) -> None:
    record = record_of(simulated("empty.jsonl", ""))
    assert record["num_arrived"] == record["num_completed"] == 0
    assert record["ttft_s"]["mean"] is record["slo_attainment"] is record["requests_per_s"] is None
    for text, message in (("", "the file is empty"), (HEADER + "\n", "there is no request in it")):
        ended = simulated("empty.csv", text)
        assert ended.code == 1 and message in ended.err and ended.out == ""


def test_one_row_and_rows_of_equal_times(simulated: Any) -> None:
    assert record_of(simulated("one.csv", f"{HEADER}\n{TIME},8,2"))["num_completed"] == 1
    twice = record_of(simulated("two.csv", f"\ufeff{HEADER},Other\r\n{TIME},8,1,x\r\n{TIME},8,1,y\r\n"))
    assert twice["num_completed"] == 2 and twice["num_steps"] == 1
    assert twice["ttft_s"]["max"] == pytest.approx(0.01 + 16e-3)


@pytest.mark.parametrize("cell", ["-1", "1.5", "NaN", "", "1000000000000"])
@pytest.mark.parametrize("column", [1, 2])
def test_a_bad_number_of_tokens_is_refused_by_line_and_field(simulated: Any, cell: str, column: int) -> None:
    cells = [TIME, "8", "8"]
    cells[column] = cell
    ended = simulated("bad.csv", f"{HEADER}\n{TIME},8,8\n{','.join(cells)}\n")
    assert ended.code == 1 and f"line 3: column {HEADER.split(',')[column]}" in ended.err and ended.out == ""


@pytest.mark.parametrize("cell", ["-5", "NaN", "", "1e20x"])
def test_a_bad_time_is_refused(simulated: Any, cell: str) -> None:
    ended = simulated("bad.csv", f"{HEADER}\n{TIME},8,8\n{cell},8,8\n")
    assert ended.code == 1 and "line 3: column TIMESTAMP" in ended.err


@pytest.mark.parametrize("cell", ["-5", "NaN", "", " ", "1e20", "inf"])
def test_a_bad_number_of_seconds_is_refused(simulated: Any, cell: str) -> None:
    """Where times are numbers; dates have their own limits."""
    ended = simulated("bad.csv", f"arrival_s,num_prompt,num_output\n0,8,8\n{cell},8,8\n")
    assert ended.code == 1 and "line 3: column arrival_s" in ended.err and "from 0 to 1e+15" in ended.err and ended.out == ""


@pytest.mark.parametrize("value", [-5, 1e20, None, float("nan")])
def test_a_bad_time_in_json_is_refused(simulated: Any, value: object) -> None:
    line = json.dumps({"arrival_s": value, "num_prompt": 8, "num_output": 8})
    ended = simulated("bad.jsonl", line + "\n")
    assert ended.code == 1 and "line 1: arrival_s" in ended.err


@pytest.mark.parametrize("field", ["num_prompt", "num_output"])
@pytest.mark.parametrize("value", [-1, 1.5, float("nan"), "", None, 10**12, True])
def test_a_bad_number_of_tokens_in_json_is_refused(simulated: Any, field: str, value: object) -> None:
    line = {"arrival_s": 0, "num_prompt": 8, "num_output": 8}
    ended = simulated("bad.jsonl", json.dumps(line) + "\n" + json.dumps(line | {field: value}) + "\n")
    assert ended.code == 1 and f"line 2: {field}" in ended.err and ended.out == ""


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"arrival_s": 0, "num_prompt": 8}', "line 2: exactly one of num_output and output_length is needed"),
        (b'{"num_prompt": 8, "num_output": 8}', "line 2: exactly one of arrival_s and timestamp is needed"),
        (b'{"arrival_s": 0, "num_prompt": 0, "num_output": 8}', "line 2: num_prompt: 0 is not allowed"),
        (b"\xff\xfe", "line 2: it is not text"),
        (b"[" * 100_000, "line 2: it is no JSON"),
        (b'{"arrival_s": 0,', "line 2: it is no JSON"),
    ],
)
def test_a_bad_line_of_json_is_refused(simulated: Any, line: bytes, message: str) -> None:
    ended = simulated("bad.jsonl", b'{"arrival_s": 0, "num_prompt": 8, "num_output": 8}\n' + line + b"\n")
    assert ended.code == 1 and message in ended.err and ended.out == ""


def test_lines_end_in_any_way_and_begin_with_a_mark_and_have_more_fields(simulated: Any) -> None:
    """No newline at the end, CRLF, a byte order mark, other fields, equal times: two requests in one step, from either kind of file."""
    line = '{"arrival_s": 3, "num_prompt": 8, "num_output": 1, "other": null}'
    records = [
        record_of(simulated("two.jsonl", f"\ufeff{line}\r\n\r\n{line}")),
        record_of(simulated("two.csv", "\ufeffarrival_s,num_prompt,num_output,other\r\n3,8,1,\r\n\r\n3,8,1,x")),
    ]
    for record in records:
        assert (record["num_completed"], record["num_steps"], record["prompt_tokens"], record["output_tokens"]) == (2, 1, 16, 2)


def test_a_missing_column_is_named(simulated: Any) -> None:
    ended = simulated("bad.csv", f"TIMESTAMP,ContextTokens\n{TIME},8\n")
    assert ended.code == 1 and "no known trace has these columns: TIMESTAMP, ContextTokens" in ended.err


def test_no_output_ends_with_the_prompt(simulated: Any) -> None:
    lines = [{"arrival_s": 0, "num_prompt": 8, "num_output": 0}, {"arrival_s": 5, "num_prompt": 8, "num_output": 1}]
    record = record_of(simulated("zero.jsonl", "".join(json.dumps(line) + "\n" for line in lines)))
    assert (record["num_completed"], record["output_tokens"]) == (2, 1)
    assert record["ttft_s"]["count"] == 1 and record["e2e_s"]["count"] == 2 and record["itl_s"]["mean"] is None


def test_a_table_has_rows_without_output_and_none_without_a_prompt(simulated: Any) -> None:
    record = record_of(simulated("zero.csv", f"{HEADER}\n{TIME},8,0\n{TIME},8,1\n"))
    assert (record["num_completed"], record["output_tokens"], record["ttft_s"]["count"]) == (2, 1, 1)
    assert record_of(simulated("zero.csv", f"{HEADER}\n{TIME},8,0\n"))["itl_s"]["mean"] is None
    drawn = record_of(simulated("zero.csv", f"{HEADER}\n{TIME},8,0\n", "--rate", "5", "--num-requests", "6"))
    assert (drawn["num_completed"], drawn["output_tokens"], drawn["ttft_s"]["mean"]) == (6, 0, None)
    ended = simulated("zero.csv", f"{HEADER}\n{TIME},8,1\n{TIME},0,1\n")
    assert ended.code == 1 and "line 3: column ContextTokens: 0 is not allowed; from 1 to" in ended.err


def test_a_row_that_ends_early_is_refused(simulated: Any) -> None:
    ended = simulated("short.csv", f"{HEADER}\n{TIME},8,1\n{TIME},8\n")
    assert ended.code == 1 and "line 3: column GeneratedTokens is missing" in ended.err


def test_what_is_larger_than_the_pool_is_rejected_and_the_rest_runs(simulated: Any) -> None:
    record = record_of(simulated("large.csv", f"{HEADER}\n{TIME},600,8\n{TIME},100,8\n", "--slo", "ttft=10"))
    assert (record["num_arrived"], record["num_refused"], record["num_completed"], record["slo_attainment"]) == (2, 1, 1, 0.5)
    assert "600" in record["first_refusal"]
