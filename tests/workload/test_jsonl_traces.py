from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.workload.jsonl_traces import JsonlTrace
from octavo.workload.traces import Resampled, Trace, TraceError, TraceRow


def written(folder: Path, *lines: dict[str, Any] | str) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return path


def test_lines_become_requests_from_the_first_arrival_on(tmp_path: Path) -> None:
    first, second = ({"timestamp": t, "input_length": p, "output_length": o} for t, p, o in ((5000, 7, 3), (6500, 1, 1)))
    path = written(tmp_path, first, "\n", second)
    requests = list(JsonlTrace(path, speed=2.0).requests())
    shown = [(one.arrival_s, len(one.prompt_token_ids), one.num_output, one.session) for one in requests]
    assert shown == [(0.0, 7, 3, None), (0.75, 1, 1, None)]
    assert requests == list(JsonlTrace(path, speed=2.0).requests())


def test_plain_names_and_sessions(tmp_path: Path) -> None:
    path = written(tmp_path, {"arrival_s": 1.5, "num_prompt": 2, "num_output": 3, "session": "s", "other": 1})
    (request,) = JsonlTrace(path).requests()
    assert (request.arrival_s, len(request.prompt_token_ids), request.num_output, request.session) == (0.0, 2, 3, "s")


def test_equal_block_ids_are_equal_tokens(tmp_path: Path) -> None:
    line = {"timestamp": 0, "output_length": 1}
    path = written(
        tmp_path,
        line | {"input_length": 10, "hash_ids": [1, 2, 3]},
        line | {"input_length": 9, "hash_ids": [1, 2, 4]},
        line | {"input_length": 4, "hash_ids": [2]},
    )
    first, second, third = (one.prompt_token_ids for one in JsonlTrace(path, block_tokens=4).requests())
    assert first[:8] == second[:8] and first[8] != second[8] and third == first[4:8] != first[:4]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: it is no JSON"),
        ("[1]", "line 2: an object is needed"),
        ({"arrival_s": -1, "num_prompt": 1, "num_output": 1}, "line 2: arrival_s: -1 is not allowed"),
        ({"timestamp": "now", "num_prompt": 1, "num_output": 1}, "line 2: timestamp: 'now' is not allowed"),
        ({"arrival_s": float("nan"), "num_prompt": 1, "num_output": 1}, "line 2: arrival_s: nan"),
        ({"num_prompt": 1, "num_output": 1}, "line 2: exactly one of arrival_s and timestamp is needed; it has neither"),
        ({"arrival_s": 2.0, "num_prompt": 0, "num_output": 1}, "line 2: num_prompt: 0 is not allowed; an integer from 1"),
        ({"arrival_s": 2.0, "input_length": 1.5, "num_output": 1}, "line 2: input_length: 1.5 is not allowed"),
        ({"arrival_s": 2.0, "num_prompt": 10**12, "num_output": 1}, "line 2: num_prompt: 1000000000000"),
        ({"arrival_s": 2.0, "num_prompt": 1}, "line 2: exactly one of num_output and output_length is needed; it has neither"),
        ({"arrival_s": None, "num_prompt": 1, "num_output": 1}, "line 2: arrival_s: null is not allowed"),
        ({"arrival_s": True, "num_prompt": 1, "num_output": 1}, "line 2: arrival_s: true is not allowed"),
        ({"arrival_s": 2.0, "timestamp": 2000, "num_prompt": 1, "num_output": 1}, "it has arrival_s and timestamp"),
        ({"arrival_s": 2.0, "num_prompt": 1, "input_length": 1, "num_output": 1}, "it has num_prompt and input_length"),
        ({"arrival_s": 2.0, "num_prompt": 1, "num_output": 1, "session": {"a": 1}}, 'line 2: session: {"a": 1} is not allowed'),
        ({"arrival_s": 2.0, "num_prompt": 1, "num_output": 1, "session": False}, "line 2: session: false is not allowed"),
        ('{"arrival_s": 2, "num_prompt": 1, "num_prompt": 2, "num_output": 1}', "line 2: .* 'num_prompt' is there more than once"),
        ({"arrival_s": 0.5, "num_prompt": 1, "num_output": 1}, "line 2: it comes 0.5 s before the line above it"),
        ({"arrival_s": 2.0, "num_prompt": 9, "num_output": 1, "hash_ids": [1]}, "line 2: hash_ids: 1 of 4 tokens"),
        ({"arrival_s": 2.0, "num_prompt": 4, "num_output": 1, "hash_ids": [1, 2]}, "line 2: hash_ids: 2 of 4 tokens"),
        ({"arrival_s": 2.0, "num_prompt": 1, "num_output": 1, "hash_ids": ["a"]}, "line 2: hash_ids: .* is not a list of integers"),
    ],
)
def test_a_wrong_line_is_refused_by_line_and_field(tmp_path: Path, line: dict[str, Any] | str, message: str) -> None:
    path = written(tmp_path, {"arrival_s": 1.0, "num_prompt": 1, "num_output": 1}, line)
    with pytest.raises(TraceError, match=message):
        list(JsonlTrace(path, block_tokens=4).requests())


def test_a_mark_at_the_start_and_no_line_at_all(tmp_path: Path) -> None:
    path = written(tmp_path, '\ufeff{"arrival_s": 0, "num_prompt": 1, "num_output": 1}')
    assert len(list(JsonlTrace(path).requests())) == 1
    assert list(JsonlTrace(written(tmp_path)).requests()) == []


def test_resampled_lengths_stay_in_pairs() -> None:
    import random
    from itertools import islice

    trace = Trace((TraceRow(0.0, 1, 10), TraceRow(1.0, 2, 20)))
    drawn = list(islice(Resampled(trace).lengths(random.Random(1)), 200))
    assert set(drawn) == {(1, 10), (2, 20)}
    assert drawn == list(islice(Resampled(trace).lengths(random.Random(1)), 200))
