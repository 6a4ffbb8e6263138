"""Traces: each known format, windows, and files that are damaged, foreign or hostile."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.workload.traces import Trace, TraceError, TraceRow, read_trace

Write = Callable[[bytes], Path]

AZURE = (
    b"TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    b"2023-11-16 18:17:03.9799600,4808,10\r\n2023-11-16 18:17:04.0319600,3180,8\r\n2023-11-17 00:00:00,110,27"
)
SAME = {
    "azure": AZURE,
    "azure of 2024": b"TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.5+00:00,4808,10\n"
    b"2024-05-10 00:00:00.552+00:00,3180,8\n2024-05-10 05:42:56.52004+00:00,110,27\n",
    "burstgpt": b"Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,4808,10,4818,API log\n"
    b"5.052,GPT-4,3180,8,3188,x\n20581.02004,GPT-4,110,27,137,x\n",
    "splitwise-sim": b"request_id,request_type,application_id,arrival_timestamp,batch_size,prompt_size,token_size\n"
    b"0,2,0,0.0,1,4808,10\n1,2,0,0.052,1,3180,8\n2,2,0,20576.02004,1,110,27\n",
    "plain, by other columns' order": b'num_output,arrival_s,num_prompt\n10,1e3,4808\n8,1000.052,"3180"\n\n27,21576.02004,110\n',
    "with a byte order mark": b"\xef\xbb\xbf" + AZURE,
}
ROWS = (TraceRow(0.0, 4808, 10), TraceRow(0.052, 3180, 8), TraceRow(20576.02004, 110, 27))


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def written(content: bytes) -> Path:
        path = tmp_path / "trace.csv"
        path.write_bytes(content)
        return path

    return written


@pytest.mark.parametrize("name", SAME)
def test_the_same_load_in_every_format(write: Write, name: str) -> None:
    trace = read_trace(write(SAME[name]))
    assert [row[1:] for row in trace.rows] == [row[1:] for row in ROWS] and trace.num_left_out == 0
    assert [row.arrival_s for row in trace.rows] == pytest.approx([row.arrival_s for row in ROWS], abs=1e-6)
    assert trace.rows[0].arrival_s == 0.0


def test_rows_without_prompt_or_output_are_left_out_and_counted(write: Write) -> None:
    trace = read_trace(write(b"arrival_s,num_prompt,num_output\n1,0,5\n2,5,0\n3,5,6\n4,5,7\n"))
    assert trace == Trace((TraceRow(0.0, 5, 6), TraceRow(1.0, 5, 7)), 2)


def test_strictly_a_prompt_is_needed_and_output_is_not(write: Write) -> None:
    trace = read_trace(write(b"arrival_s,num_prompt,num_output\n2,5,0\n3,5,6\n"), strict=True)
    assert trace == Trace((TraceRow(0.0, 5, 0), TraceRow(1.0, 5, 6)))
    with pytest.raises(TraceError, match="line 3: column num_prompt: 0 is not allowed; from 1 to"):
        read_trace(write(b"arrival_s,num_prompt,num_output\n2,5,0\n3,0,6\n"), strict=True)


HEAD = b"arrival_s,num_prompt,num_output\n0,1,1\n"
DAMAGED = [
    (b"", "line 1: the file is empty"),
    (b"\n0,1,1\n", "line 1: no known trace has these columns: ; needed are (Azure LLM inference: TIMESTAMP, "),
    (b"model,prompt_size,token_size\n", "line 1: no known trace has these columns: model, prompt_size, token_size; needed"),
    (b"timestamp,ContextTokens,GeneratedTokens\n", "line 1: no known trace"),
    (HEAD[:32], "there is no request in it"),
    (b"arrival_s,num_prompt,num_output\n1,0,5\n", "there is no request in it"),
    (HEAD + b"1,2\n", "line 3: column num_output is missing"),
    (HEAD + b"1,2,3,4\n", "line 3: it has 4 cells, and the header line 3"),
    (HEAD + b"2,2,3\n\n1.5,2,3\n", "line 5: it comes 0.5 s before the line above it; requests are needed by arrival"),
    (b"arrival_s,num_prompt,num_output,num_prompt\n0,1,1,2\n", "line 1: column num_prompt is there 2 times"),
    (HEAD + b"1,2,\n", "line 3: column num_output: '' is not a whole number of tokens"),
    (HEAD + b"1,2.5,3\n", "line 3: column num_prompt: '2.5' is not a whole number of tokens"),
    (HEAD + b"1,-2,3\n", "line 3: column num_prompt: -2 is not allowed; from 0 to 16777216 tokens"),
    (HEAD + b"1,2,99999999999999999999\n", "line 3: column num_output: 99999999999999999999 is not allowed"),
    (HEAD + b"1,2," + b"9" * 5000 + b"\n", "line 3: column num_output: '9999"),
    (HEAD + b"soon,2,3\n", "line 3: column arrival_s: 'soon' is not a number of seconds"),
    (HEAD + b"nan,2,3\n", "line 3: column arrival_s: 'nan' is not a number of seconds"),
    (HEAD + b"1e999,2,3\n", "line 3: column arrival_s: '1e999' is not a number of seconds"),
    (HEAD + b"-5,2,3\n", "line 3: column arrival_s: '-5' is not a number of seconds from 0 to 1e+15"),
    (HEAD + b"1e20,2,3\n", "line 3: column arrival_s: '1e20' is not a number of seconds from 0 to 1e+15"),
    (HEAD + b"1,2,3\n4,\xff\xfe,6\n", "line 4: it is not text (byte 2 of the line is no UTF-8)"),
    (HEAD + b'1,"2,3\n4,5,6\n', "line 4: "),
    (HEAD + b"1," + b"2" * 200_000 + b",3\n", "line 3: field larger than field limit"),
    (AZURE.replace(b"18:17:04.0319600", b"18:77:04"), "line 3: column TIMESTAMP: '2023-11-16 18:77:04' is not a date and time"),
    (AZURE.replace(b"2023-11-16 18:17:04.0319600", b"17"), "line 3: column TIMESTAMP: '17' is not a date and time"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "message"), DAMAGED, ids=[re.sub(r"\W+", " ", m)[:40] for _, m in DAMAGED])
def test_a_damaged_file_is_an_error_that_says_where(write: Write, content: bytes, message: str) -> None:
    path = write(content)
    with pytest.raises(TraceError) as error:
        read_trace(path)
    assert str(error.value).startswith(f"{path}: {message}")


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(OSError, match=re.escape("nosuch.csv")):
        read_trace("nosuch.csv")


EDIT = st.tuples(st.integers(0, 300), st.binary(max_size=3), st.integers(0, 3))


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(SAME)), st.lists(EDIT, min_size=1, max_size=6))
def test_any_damage_is_an_error_or_a_sound_trace(
    tmp_path_factory: pytest.TempPathFactory, name: str, edits: list[tuple[int, bytes, int]]
) -> None:
    content = SAME[name]
    for at, inserted, num_removed in edits:
        content = content[:at] + inserted + content[at + num_removed :]
    path = tmp_path_factory.getbasetemp() / "fuzzed.csv"
    path.write_bytes(content)
    try:
        trace = read_trace(path)
    except TraceError as error:
        assert re.match(rf"{re.escape(str(path))}: (line \d+: .|there is no request)", str(error))
        return
    times = [row.arrival_s for row in trace.rows]
    assert times[0] == 0.0 and times == sorted(times) and math.isfinite(times[-1])
    assert all(row.num_prompt >= 1 and row.num_output >= 1 for row in trace.rows)


TEN = Trace(tuple(TraceRow(float(i), 10 * i + 1, 5) for i in range(10)))


def test_windows_by_time_and_by_number() -> None:
    assert [row.arrival_s for row in TEN.window(3.0, 4.0).rows] == [0.0, 1.0, 2.0, 3.0]
    assert TEN.window(3.0, 4.0).rows[0].num_prompt == 31
    assert [row.num_prompt for row in TEN.window(3.5, num_requests=2).rows] == [41, 51]
    assert [row.arrival_s for row in TEN.window(3.5, num_requests=2).rows] == [0.5, 1.5]
    assert TEN.window(100.0).rows == ()


def test_speed_and_length() -> None:
    assert [row.arrival_s for row in TEN.faster(4.0).rows] == [i / 4 for i in range(10)]
    fitting = TEN.fitting(36)
    assert [row.num_prompt for row in fitting.rows] == [1, 11, 21, 31] and fitting.num_left_out == 6


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: TEN.window(-1.0), "start_s"),
        (lambda: TEN.window(math.nan), "start_s"),
        (lambda: TEN.window(0.0, 0.0), "duration_s"),
        (lambda: TEN.faster(0.0), "speed"),
        (lambda: TEN.faster(math.inf), "speed"),
    ],
)
def test_limits(call: Callable[[], Trace], name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: .* is not allowed"):
        call()


def test_a_trace_is_arrivals_and_lengths() -> None:
    rng = random.Random(0)
    assert list(TEN.times(rng)) == [float(i) for i in range(10)]
    assert list(TEN.lengths(rng))[:2] == [(1, 5), (11, 5)]
