"""Clients that leave, stop reading or never fit; gauges afterwards; health."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from octavo.core.step import StepPlan
from octavo.server.options import ServerOptions
from tests.engine.scripted import Bigram, bigram_engine, byte_ids, script
from tests.server.harness import RunningServer, sse_events, strict_json, wait_until

PATH = "/v1/completions"
LONG = {"prompt": [7] * 100, "max_tokens": 3900, "ignore_eos": True, "temperature": 0}


def backend_of(server: RunningServer) -> Bigram:
    assert isinstance(server.engine.backend, Bigram)
    return server.engine.backend


@pytest.fixture
def server() -> Iterator[RunningServer]:
    engine = bigram_engine(num_kv_blocks=2048, max_num_seqs=8, max_num_batched_tokens=32)  # eight long requests have room
    with RunningServer(engine) as running:
        backend_of(running).delay_s = 0.0005
        yield running


def test_streaming_client_leaves(server: RunningServer) -> None:
    backend_of(server).delay_s = 0.01  # all of it would take 39 s
    connection = server.open_stream(PATH, LONG)
    assert connection.recv(4096)
    connection.close()
    wait_until(server.is_idle)
    steps = len(backend_of(server).plans)
    time.sleep(0.02)
    assert len(backend_of(server).plans) == steps < 2000  # no further token is computed
    assert server.metrics()['octavo_requests_finished_total{reason="abort"}'] == 1
    again = server.complete([7] * 100, max_tokens=4, ignore_eos=True, temperature=0, return_token_ids=True)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 96
    assert again["choices"][0]["token_ids"] == [0] * 4  # as without a cache: nothing is scripted, so the lowest id


def test_waiting_client_leaves_without_having_read_anything(server: RunningServer) -> None:
    backend_of(server).delay_s = 0.01
    connection = server.send_raw("POST", PATH, json.dumps(LONG).encode())
    wait_until(lambda: server.engine.scheduler.num_running == 1)
    connection.close()
    wait_until(server.is_idle)
    assert server.metrics()['octavo_requests_finished_total{reason="abort"}'] == 1


def test_client_leaves_while_queued_or_in_a_long_prefill(server: RunningServer) -> None:
    backend_of(server).delay_s = 0.01
    runners = [server.open_stream(PATH, LONG) for _ in range(8)]
    wait_until(lambda: server.engine.scheduler.num_running == 8)
    queued = server.send_raw("POST", PATH, json.dumps(LONG).encode())
    wait_until(lambda: server.engine.scheduler.num_waiting == 1)
    queued.close()
    wait_until(lambda: server.engine.scheduler.num_waiting == 0)
    for connection in runners:
        connection.close()
    wait_until(server.is_idle)
    prefilling = server.open_stream(PATH, {**LONG, "prompt": [9] * 2000})
    wait_until(lambda: server.engine.scheduler.num_running == 1)
    prefilling.close()
    wait_until(server.is_idle)
    server.engine.scheduler.check_invariants()


def test_blocks_come_back_after_many_rounds(server: RunningServer) -> None:
    scheduler = server.engine.scheduler
    for i in range(50):
        connection = server.open_stream(PATH, {**LONG, "n": 1 + i % 3})
        if i % 2:
            connection.recv(100)
        connection.close()
    wait_until(server.is_idle)
    scheduler.check_invariants()
    assert scheduler.num_free_blocks + scheduler.num_cached_blocks == scheduler.num_blocks


def test_gauges_after_every_client_has_left(server: RunningServer) -> None:
    backend_of(server).delay_s = 0.01
    connections = [server.open_stream(PATH, LONG) for _ in range(100)]
    wait_until(lambda: server.engine.scheduler.num_running + server.engine.scheduler.num_waiting == 100)
    before = server.metrics()
    assert 1 <= before["octavo_num_requests_running"] <= 8 and before["octavo_num_requests_waiting"] >= 92
    for connection in connections:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        connection.close()

    def settled() -> bool:
        now = server.metrics()
        return now["octavo_num_requests_running"] == now["octavo_num_requests_waiting"] == 0 and now['octavo_kv_blocks{state="used"}'] == 0

    wait_until(settled)
    after = server.metrics()
    assert after['octavo_requests_finished_total{reason="abort"}'] == 100
    assert all(after[name] >= value for name, value in before.items() if name.split("{")[0].endswith(("_total", "_count", "_bucket")))
    assert not any(value < 0 for value in after.values())  # NaN: nothing to say yet


def test_counters_of_one_request(server: RunningServer) -> None:
    server.complete([5] * 40, max_tokens=10, ignore_eos=True)
    metrics = server.metrics()
    assert metrics["octavo_prompt_tokens_total"] == 40 and metrics["octavo_generation_tokens_total"] == 10
    assert metrics['octavo_requests_finished_total{reason="length"}'] == 1
    assert metrics["octavo_time_to_first_token_seconds_count"] == 1 and metrics["octavo_inter_token_seconds_count"] == 9
    assert metrics['octavo_step_tokens_bucket{le="32.0"}'] == metrics["octavo_steps_total"] == 11  # 32 + 8 prompt tokens, then 9


def test_requests_that_can_never_fit() -> None:
    engine = bigram_engine(num_kv_blocks=32, context=4096)
    with RunningServer(engine) as server:
        for num_prompt in (513, 2000):
            status, error = server.error(PATH, {"prompt": [5] * num_prompt})
            assert status == 400 and error["code"] == "context_length_exceeded" and "512" in error["message"]
        for num_prompt, num_output in ((511, 2), (512, 1)):
            answer = server.complete([5] * num_prompt, max_tokens=num_output, ignore_eos=True)
            assert answer["usage"]["completion_tokens"] == num_output and "warnings" not in answer
        exact = server.complete([6] * 10, max_tokens=502, ignore_eos=True)
        assert exact["usage"]["completion_tokens"] == 502 and "warnings" not in exact
        results: list[dict[str, Any]] = []
        thread = threading.Thread(target=lambda: results.append(server.complete([7] * 10, max_tokens=4000, ignore_eos=True)))
        thread.start()
        for _ in range(10):
            assert server.complete([8, 9], max_tokens=3, ignore_eos=True)["usage"]["completion_tokens"] == 3
        thread.join()
        assert results[0]["usage"]["completion_tokens"] == 503 and "4000 was reduced to 503" in results[0]["warnings"][0]
        assert results[0]["choices"][0]["finish_reason"] == "length"


def open_stuck_stream(server: RunningServer) -> socket.socket:
    """A long answer that nobody reads."""
    server.limit_buffers(4096)
    body = {"prompt": "x", "max_tokens": 16000, "ignore_eos": True, "n": 4, "logprobs": 20, "stream": True}
    return server.send_raw("POST", PATH, json.dumps(body).encode(), receive_buffer_bytes=4096)


def test_a_reader_that_stops_reading_is_cut_off() -> None:
    engine = bigram_engine(context=16384, num_kv_blocks=4096)
    with RunningServer(engine, ServerOptions(stall_s=30), stream_limit_bytes=200_000) as server:
        stuck = open_stuck_stream(server)
        normal = [server.open_stream(PATH, {"prompt": "x", "max_tokens": 20, "ignore_eos": True}) for _ in range(3)]
        for connection in normal:
            events = list(sse_events(connection))
            assert len(events) == 21 and events[-1] == "[DONE]"
        wait_until(server.is_idle)
        assert server.metrics()['octavo_requests_finished_total{reason="abort"}'] == 1
        received = b""
        with contextlib.suppress(ConnectionError):
            while chunk := stuck.recv(1 << 16):
                received += chunk
        assert not received.endswith(b"[DONE]\n\n\r\n0\r\n\r\n")
        stuck.close()


def test_large_answers_to_readers_that_read_are_no_overflow() -> None:
    """However small the limit: it is for what piles up while a reader is away, not for what one step gives."""
    with RunningServer(bigram_engine(), stream_limit_bytes=1) as server:
        answer = server.complete([5] * 300, max_tokens=20, ignore_eos=True, prompt_logprobs=20, logprobs=20, n=3)
        assert len(answer["choices"][0]["prompt_logprobs"]) == 300
        answer = server.complete([[5] * 50] * 20, max_tokens=1, echo=True, logprobs=20, n=3)
        assert len(answer["choices"]) == 60
    with RunningServer(bigram_engine(), stream_limit_bytes=300_000) as server:  # more than all but the prompt's
        chunks = server.stream(PATH, {"prompt": [5] * 300, "max_tokens": 20, "ignore_eos": True, "echo": True, "logprobs": 20, "n": 3})
        assert sum(chunk["choices"][0]["finish_reason"] == "length" for chunk in chunks) == 3
        assert server.metrics()['octavo_requests_finished_total{reason="abort"}'] == 0


def test_a_write_that_waits_too_long_is_cut_off() -> None:
    engine = bigram_engine(context=16384, num_kv_blocks=4096)
    with RunningServer(engine, ServerOptions(stall_s=0.5), stream_limit_bytes=1 << 30) as server:
        stuck = open_stuck_stream(server)
        wait_until(lambda: not server.async_engine.num_open_requests and not server.engine.has_work)
        stuck.close()


def test_health_follows_progress() -> None:
    engine = bigram_engine()
    with RunningServer(engine, stall_s=0.1) as server:
        assert server.request("GET", "/health")[0] == server.request("GET", "/health/live")[0] == 200
        release = threading.Event()
        backend_of(server).before_step = lambda plan: (release.wait(), None)[1]
        stuck = server.open_stream(PATH, {"prompt": "x", "max_tokens": 2, "ignore_eos": True})
        wait_until(lambda: server.request("GET", "/health")[0] == 503)
        assert b"no step has finished" in server.request("GET", "/health")[2]
        release.set()
        assert list(sse_events(stuck))[-1] == "[DONE]"
        wait_until(lambda: server.request("GET", "/health")[0] == 200)


def test_a_failing_backend_is_reported_and_outlived() -> None:
    engine = bigram_engine()
    script(engine, "x", ["a", "b"])
    with RunningServer(engine) as server:
        backend = backend_of(server)
        num_left = [3]

        def fail(plan: StepPlan) -> None:
            num_left[0] -= 1
            if num_left[0] >= 0:
                raise RuntimeError("broken")

        backend.before_step = fail
        for _ in range(3):
            status, error = server.error(PATH, {"prompt": "x"})
            assert status == 500 and "broken" in error["message"] and error["type"] == "server_error"
        assert server.request("GET", "/health")[0] == 503  # three steps in a row
        assert server.complete("x")["choices"][0]["text"] == "ab"
        assert server.request("GET", "/health")[0] == 200
        assert server.metrics()["octavo_failed_steps_total"] == 3

        def fail_later(plan: StepPlan) -> None:
            if plan.slices[0].start == 2:
                raise RuntimeError("broken")

        backend.before_step = fail_later
        chunks = server.stream(PATH, {"prompt": "x", "temperature": 0})
        assert [c["choices"][0]["text"] for c in chunks[:-1]] == ["a", "b"]
        assert "broken" in chunks[-1]["error"]["message"]


def test_the_loop_dies_only_loudly() -> None:
    engine = bigram_engine()
    with RunningServer(engine) as server:

        def explode() -> None:
            raise AssertionError("a bug")

        engine.step = explode  # type: ignore[method-assign, assignment]
        status, error = server.error(PATH, {"prompt": "x"})
        assert status == 500 and "a bug" in error["message"]
        for path in ("/health", "/health/live"):
            assert server.request("GET", path)[0] == 503
        assert server.error(PATH, {"prompt": "x"})[0] == 503


def test_a_fault_in_planning_ends_the_requests_it_hits() -> None:
    engine = bigram_engine()
    with RunningServer(engine) as server:
        expected = server.complete("x")["choices"]
        begin_step = engine.loop.begin_step

        def explode(now_s: float) -> None:
            raise AssertionError("a bug")

        engine.loop.begin_step = explode  # type: ignore[method-assign, assignment]
        status, error = server.error(PATH, {"prompt": "x"})
        assert status == 500 and "a bug" in error["message"]
        engine.loop.begin_step = begin_step  # type: ignore[method-assign]
        assert server.request("GET", "/health")[0] == 200
        assert server.complete("x")["choices"] == expected


def test_an_idle_server_takes_no_processor_time() -> None:
    others = threading.enumerate()
    with RunningServer(bigram_engine()) as server:
        server.complete("x")
        # Those of other servers in this process may be about to end.
        (thread,) = (t for t in threading.enumerate() if t.name == "octavo-loop" and t not in others)
        assert thread.ident is not None
        clock, taken = time.pthread_getcpuclockid(thread.ident), list[int]()
        for _ in range(20):  # it may have something to finish in the first of them
            before = time.clock_gettime_ns(clock)
            time.sleep(0.05)
            taken.append(time.clock_gettime_ns(clock) - before)
            if taken[-1] == 0:
                return
        pytest.fail(f"nanoseconds of processor time in each of 20 pauses: {taken}")


def test_streams_at_once_are_as_one_alone() -> None:
    engine = bigram_engine()
    script(engine, "x", list(byte_ids(engine, "hi😀字!")))
    with RunningServer(engine) as server:
        connections = [server.open_stream(PATH, {"prompt": "x", "temperature": 0, "max_tokens": 10}) for _ in range(8)]
        for connection in connections:
            *events, done = sse_events(connection)
            assert done == "[DONE]"
            texts = [strict_json(e)["choices"][0]["text"] for e in events]
            assert texts == ["h", "i", "", "", "", "😀", "", "", "字", "!"]
