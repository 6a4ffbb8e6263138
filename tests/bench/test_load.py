"""Loads as a server sees them: how many at once, when, with what in them; and from when latencies count."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from octavo.bench.http_client import HTTPClient
from octavo.bench.latency import Goodput
from octavo.bench.load import LoadRun
from octavo.bench.serve import ServeCase, Target, _measure, report
from octavo.bench.spike import Spike
from octavo.workload.arrivals import ClosedLoop, OpenLoop
from octavo.workload.lengths import Fixed
from octavo.workload.requests import Independent, SharedPrefix, TokenRange, Workload
from tests.bench.scripted_http import DONE, LAST_CHUNK, STREAM_HEAD, Answer, ScriptedHTTP, answer_of, chunked, event, plain

LOAD = Workload(ClosedLoop(3), Independent(Fixed(4), Fixed(2)), 9, None, TokenRange(10, 20))


def run_load(drive: Callable[[LoadRun], Awaitable[None]], *answers: bytes | Answer) -> tuple[LoadRun, ScriptedHTTP]:
    async def run() -> tuple[LoadRun, ScriptedHTTP]:
        async with ScriptedHTTP(*answers) as server:
            client = HTTPClient(server.url)
            made = LoadRun(client, "m")
            await drive(made)
            await client.close()
            return made, server

    return asyncio.run(run())


def meeting(number: int) -> Answer:
    """Answers only when ``number`` requests wait for one."""
    waiting: list[asyncio.Future[None]] = []

    async def answer(writer: asyncio.StreamWriter) -> None:
        waiting.append(asyncio.get_running_loop().create_future())
        mine = waiting[-1]
        if len(waiting) == number:
            for one in waiting:
                one.set_result(None)
            waiting.clear()
        await mine
        writer.write(answer_of(2))

    return answer


def test_a_closed_loop_keeps_so_many_at_once() -> None:
    """Fewer would wait for ever here."""
    run, server = run_load(lambda run: run.closed(LOAD.requests(), 3), meeting(3))
    assert server.most_at_once == 3 and server.num_connections == 3 and len(run.records) == 9
    assert all(r.error_kind is None and r.due_s <= r.sent_s for r in run.records) and run.num_running == 0


def test_the_requests_are_those_of_the_workload() -> None:
    load = replace(LOAD, prefix=SharedPrefix(3, 2))
    _, server = run_load(lambda run: run.closed(load.requests(), 1), answer_of(2))
    assert [body["prompt"] for body in server.bodies] == [r.prompt_token_ids for r in load.requests()]
    first = {name: value for name, value in server.bodies[0].items() if name != "prompt"}
    assert first == {
        **{"model": "m", "max_tokens": 2, "temperature": 0, "ignore_eos": True},
        **{"stream": True, "stream_options": {"include_usage": True}},
    }


def test_without_ignore_eos_only_standard_fields_are_sent() -> None:
    async def drive(run: LoadRun) -> None:
        run.ignore_eos = False
        await run.closed(LOAD.requests(), 1)

    _, server = run_load(drive, answer_of(2))
    assert all("ignore_eos" not in body for body in server.bodies)


def test_an_open_loop_sends_when_requests_are_due_whatever_the_server_does() -> None:
    """No answer comes until all requests have: a generator that waits for answers would never send the second."""
    run, server = run_load(lambda run: run.open(replace(LOAD, arrivals=OpenLoop(200.0)).requests()), meeting(9))
    assert server.most_at_once == 9
    arrivals = [r.arrival_s for r in replace(LOAD, arrivals=OpenLoop(200.0)).requests()]
    assert [r.due_s for r in run.records] == [run.started_s + arrival_s for arrival_s in arrivals]
    assert all(r.sent_s >= r.due_s for r in run.records)


def test_waiting_for_a_place_counts_as_latency() -> None:
    """Coordinated omission: with one at a time and 50 ms each, the third of three that are due within 30 ms has waited for two."""
    step_s = 0.05

    async def slow(writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(step_s)
        writer.write(answer_of(2))

    load = replace(LOAD, arrivals=OpenLoop(100.0, 0.0), num_requests=3)
    run, server = run_load(lambda run: run.open(load.requests(), 1), slow)
    assert server.most_at_once == 1
    third = run.records[2]
    assert third.due_s == run.started_s + 0.03
    clock_s = 0.005  # a sleep may end early by the resolution of the loop's clock
    assert third.sent_s - third.due_s > 0.01 + 2 * step_s - 0.03 - clock_s
    assert third.event_times[0] - third.due_s > 0.01 + 3 * step_s - 0.03 - clock_s


def test_a_duration_ends_the_sending_and_not_what_runs() -> None:
    endless = replace(LOAD, num_requests=None)
    run, _ = run_load(lambda run: run.closed(endless.requests(), 2, 0.1), answer_of(2))
    assert len(run.records) >= 2 and all(r.error_kind is None for r in run.records)
    assert max(r.due_s for r in run.records) - run.started_s < 0.1 + 60  # it ended; the bound is no matter of speed
    timed = replace(endless, arrivals=OpenLoop(50.0, 0.0))
    run, _ = run_load(lambda run: run.open(timed.requests(), None, 0.1), answer_of(2))
    assert [round(r.due_s - run.started_s, 6) for r in run.records] == [0.02, 0.04, 0.06, 0.08]


def test_errors_do_not_end_a_run() -> None:
    run, _ = run_load(lambda run: run.closed(LOAD.requests(), 1), answer_of(2), plain(400, b"{}"), answer_of(2))
    assert [r.error_kind for r in run.records] == [None, "http_400", *[None] * 7]


CASE = ServeCase(LOAD, {"load": "a load", "ignore_eos": True, "shared_prefix": None})


Measured = tuple[dict[str, Any], ScriptedHTTP]


def measured(case: ServeCase, *answers: bytes | Answer, model: str | None = None, lines: list[str] | None = None) -> Measured:
    async def run() -> Measured:
        async with ScriptedHTTP(*answers) as server:
            return await _measure(Target(server.url, model), case, None if lines is None else lines.append), server

    return asyncio.run(run())


def test_a_measurement_warms_up_with_other_prompts_and_does_not_count_them() -> None:
    record, server = measured(replace(CASE, num_warmup=2), answer_of(2), model="other")
    assert record["num_requests"] == 9 and len(server.bodies) == 11
    own = {tuple(r.prompt_token_ids) for r in LOAD.requests()}
    assert [tuple(body["prompt"]) in own for body in server.bodies] == [False] * 2 + [True] * 9
    assert record["model"] == "other" and all(body["model"] == "other" for body in server.bodies)
    assert record["client_cpu_us_per_token"] > 0


def test_the_first_model_is_taken_and_an_unknown_one_refused() -> None:
    assert measured(CASE, answer_of(2))[0]["model"] == "m"
    with pytest.raises(ValueError, match="served_model_name: 'x' is not served at http://127.0.0.1:.*; there is: m, other"):
        measured(CASE, answer_of(2), model="x")


def test_a_refused_warm_up_ends_the_measurement() -> None:
    with pytest.raises(RuntimeError, match="warming up failed: http_400: too long"):
        measured(CASE, plain(400, b'{"error":{"message":"too long"}}'))


def test_the_report_says_what_went_wrong() -> None:
    case = replace(CASE, num_warmup=0, goodput=Goodput.parse("ttft:60000"))
    record, _ = measured(case, answer_of(2), plain(503, b"busy"), answer_of(1), answer_of(2))
    lines = "\n".join(report(record))
    assert "8 of 9 requests" in lines and "errors: 1 (http_503 1); the first: busy" in lines
    assert "1 answers are shorter than asked for" in lines
    assert "goodput: 88.9 % of requests" in lines
    assert "sent late by" in lines and "requests/s within ttft <= 60000 ms" in lines


def test_prompts_that_the_server_knew_are_pointed_out() -> None:
    known = STREAM_HEAD + chunked(event() + event(finish="length")) + chunked(
        b'data: {"choices":[],"usage":{"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":4}}}\n\n' + DONE
    ) + LAST_CHUNK  # fmt: skip
    record, _ = measured(CASE, known)
    assert record["num_cached_tokens"] == 36 and "another --seed makes other ones" in "\n".join(report(record))
    shared = {**CASE.described, "shared_prefix": "4:1"}
    assert "another --seed" not in "\n".join(report(measured(replace(CASE, described=shared), known)[0]))


def test_progress_is_told_while_requests_run() -> None:
    lines: list[str] = []

    async def held(writer: asyncio.StreamWriter) -> None:
        """Answers once progress has been told twice."""
        while len(lines) < 2:
            await asyncio.sleep(0.01)
        writer.write(answer_of(2))

    measured(replace(CASE, num_warmup=0), held, lines=lines)
    assert lines[0].startswith("0 done, 3 running, 0 errors, 0 token/s, ")


def test_a_spike_comes_when_all_streams_run() -> None:
    """Streams have so many tokens before it, and go on when its first token has come."""
    spike = Spike(3, 4, 9, 5, 50, 2, TokenRange(10, 20))
    arrived = asyncio.Event()
    began: list[int] = []

    async def answer(writer: asyncio.StreamWriter) -> None:
        began.append(0)
        if len(began) == 1 + spike.num_streams + 1:  # the warm-up, the streams, the long prompt
            writer.write(STREAM_HEAD + chunked(event()))
            await writer.drain()
            await asyncio.sleep(0.05)
            arrived.set()
            writer.write(chunked(event(finish="length") + DONE) + LAST_CHUNK)
            return
        if len(began) == 1:
            writer.write(answer_of(9))
            return
        writer.write(STREAM_HEAD + chunked(event() * 5))
        await arrived.wait()
        writer.write(chunked(event() * 3 + event(finish="length") + DONE) + LAST_CHUNK)

    record, server = measured(ServeCase(spike, {"load": "spike", "ignore_eos": True}), answer)
    assert [len(body["prompt"]) for body in server.bodies] == [4, 4, 4, 4, 50]
    assert record["num_requests"] == 3 and record["num_completed"] == 3
    assert record["spike"]["overlap"] is True and record["spike"]["prompt_ttft_ms"] > 0
    assert any("long prompt: TTFT" in line for line in report(record))


def test_a_spike_whose_streams_end_early_says_so() -> None:
    spike = Spike(2, 4, 3, 5, 50, 2, TokenRange(10, 20))
    record, _ = measured(ServeCase(spike, {"load": "spike", "ignore_eos": True}), answer_of(3))
    assert record["spike"]["overlap"] is False
    assert "not all streams outlasted the long prompt: this case says nothing" in report(record)
