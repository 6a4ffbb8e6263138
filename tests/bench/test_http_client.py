"""The client against a server that does as it is told: pieces of any size, connections that end anywhere, errors of every kind."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.bench import http_client
from octavo.bench.http_client import HTTPClient, HTTPError
from octavo.bench.stream_record import EventReader, StreamRecord
from tests.bench.scripted_http import (
    DONE,
    LAST_CHUNK,
    STREAM_HEAD,
    Answer,
    ScriptedHTTP,
    answer_of,
    chunked,
    event,
    plain,
    then_close,
    usage,
)

Result = TypeVar("Result")


def with_client(use: Callable[[HTTPClient, ScriptedHTTP], Awaitable[Result]], *answers: bytes | Answer, timeout_s: float = 60.0) -> Result:
    async def run() -> Result:
        async with ScriptedHTTP(*answers) as server:
            client = HTTPClient(server.url, "key", timeout_s)
            try:
                return await use(client, server)
            finally:
                await client.close()

    return asyncio.run(run())


def streamed(*answers: bytes | Answer, timeout_s: float = 60.0, record: StreamRecord | None = None) -> StreamRecord:
    """The record of one request; ``record``, if answers want to look at it meanwhile."""
    record = record or StreamRecord(1, 3)

    async def use(client: HTTPClient, _: ScriptedHTTP) -> StreamRecord:
        await client.stream("/v1/completions", b"{}", record)
        return record

    return with_client(use, *answers, timeout_s=timeout_s)


def test_a_whole_answer() -> None:
    record = streamed(answer_of(3))
    assert (record.error_kind, len(record.event_times), record.num_tokens) == (None, 3, 3)
    assert record.sent_s < record.event_times[0] <= record.event_times[-1] <= record.end_s


def test_bytes_one_by_one() -> None:
    async def slowly(writer: asyncio.StreamWriter) -> None:
        for byte in answer_of(4):
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0)

    record = streamed(slowly)
    assert (record.error_kind, len(record.event_times), record.num_tokens) == (None, 4, 4)


def test_events_are_timed_as_they_come() -> None:
    """Each is sent a while after the one before it has been read."""
    gap_s, record = 0.05, StreamRecord(1, 3)

    async def with_pauses(writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        for number, data in enumerate((event(), event(), event(finish="length"), DONE)):
            while len(record.event_times) < number:
                await asyncio.sleep(0.001)
            await asyncio.sleep(gap_s)
            writer.write(chunked(data))
        writer.write(LAST_CHUNK)

    streamed(with_pauses, record=record)
    times = [record.sent_s, *record.event_times, record.end_s]
    assert len(times) == 5 and all(later - earlier > gap_s / 2 for earlier, later in zip(times, times[1:], strict=False))


TWO = chunked(event()) + chunked(event())
ERRORS: list[tuple[str, bytes | Answer, str, str]] = [
    ("an error before the stream", plain(400, b'{"error":{"message":"prompt: no"}}'), "http_400", "prompt: no"),
    ("an error that is a string", plain(404, b'{"error":"File Not Found"}'), "http_404", "File Not Found"),
    ("an error without JSON", plain(503, b"<b>busy</b>", "text/html"), "http_503", "<b>busy</b>"),
    ("an error without reason", plain(500, b""), "http_500", "no reason given"),
    ("no stream", plain(200, b'{"choices":[]}'), "protocol", "no event stream"),
    ("no HTTP", b"SSH-2.0-OpenSSH\r\n", "protocol", "not HTTP"),
    ("no JSON", STREAM_HEAD + chunked(b"data: {oops\n\n" + event(finish="stop")) + LAST_CHUNK, "protocol", "not a chunk"),
    ("another form", STREAM_HEAD + chunked(b'data: {"choices":3}\n\n' + event(finish="stop")) + LAST_CHUNK, "protocol", "not a chunk"),
    ("bad chunks", STREAM_HEAD + b"zz\r\n", "protocol", "not HTTP"),
    ("nothing", then_close(b""), "broken_off", "closed before the answer"),
    ("half a head", then_close(STREAM_HEAD[:30]), "broken_off", "closed"),
    ("a head alone", then_close(STREAM_HEAD), "broken_off", "closed after 0 events"),
    ("two events", then_close(STREAM_HEAD + TWO), "broken_off", "closed after 2 events"),
    ("within an event", then_close(STREAM_HEAD + TWO + chunked(event())[:40]), "broken_off", "closed after 2 events"),
    ("ended without a reason", STREAM_HEAD + TWO + LAST_CHUNK, "broken_off", "ended after 2 events, without a finish reason and [DONE]"),
    ("without a token", STREAM_HEAD + chunked(event("", "stop")) + chunked(DONE) + LAST_CHUNK, "empty", "without a token"),
    (
        "an error in the stream",
        STREAM_HEAD + TWO + chunked(b'data: {"error":{"message":"out of blocks"}}\n\n') + chunked(DONE) + LAST_CHUNK,
        "stream_error",
        "out of blocks",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "kind", "message"), [case[1:] for case in ERRORS], ids=[case[0] for case in ERRORS])
def test_errors_have_kinds(answer: bytes | Answer, kind: str, message: str) -> None:
    record = streamed(answer)
    assert record.error_kind == kind and message in record.error_message
    assert record.end_s >= record.sent_s > 0


@pytest.mark.parametrize(
    "body",
    [
        event() + event(finish="length") + DONE,
        event() + event(finish="length"),  # some servers send no [DONE]
        (event() + event(finish="length") + DONE).replace(b"\n", b"\r\n"),
        (event() + event(finish="length") + DONE).replace(b"data: ", b"data:"),
        b": comment\n\nevent: message\n" + event() + event(finish="length") + DONE.rstrip(),
        event() + event() + event("", "stop") + DONE,  # the end of text is no token
    ],
)
def test_other_manners_of_a_good_stream(body: bytes) -> None:
    record = streamed(STREAM_HEAD + chunked(body) + LAST_CHUNK)
    assert (record.error_kind, len(record.event_times), record.num_reported) == (None, 2, None)


def test_an_answer_that_ends_with_its_connection() -> None:
    """HTTP/1.0: neither length nor chunks."""
    head = b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    assert streamed(then_close(head + event() + event(finish="length") + DONE)).error_kind is None
    assert streamed(then_close(head + event())).error_kind == "broken_off"


def test_tokens_are_as_reported() -> None:
    """A speculating server sends several in an event."""
    record = streamed(STREAM_HEAD + chunked(event("ab") + event("c", "length") + usage(5, 64) + DONE) + LAST_CHUNK)
    assert (len(record.event_times), record.num_tokens, record.num_cached) == (2, 5, 64)


def test_a_single_token_without_text_is_a_token() -> None:
    """A special token: the only event has a finish reason and no text, and the usage tells that it was one."""
    record = streamed(STREAM_HEAD + chunked(event("", "length") + usage(1) + DONE) + LAST_CHUNK)
    assert (record.error_kind, len(record.event_times), record.num_tokens) == (None, 1, 1)
    assert streamed(STREAM_HEAD + chunked(event("", "stop") + usage(0) + DONE) + LAST_CHUNK).error_kind == "empty"


def test_a_connection_is_used_again_after_good_answers_and_refusals() -> None:
    async def use(client: HTTPClient, server: ScriptedHTTP) -> None:
        for kind in (None, "http_400", None):
            record = StreamRecord(1, 2)
            await client.stream("/v1/completions", b"{}", record)
            assert record.error_kind == kind
        assert server.num_connections == 1
        assert all("authorization: bearer key\r\n" in head.lower() for head in server.heads)

    with_client(use, answer_of(2), plain(400, b"{}"), answer_of(2))


def test_a_kept_connection_that_the_server_closed_is_no_error() -> None:
    async def use(client: HTTPClient, server: ScriptedHTTP) -> None:
        for _ in range(2):
            record = StreamRecord(1, 2)
            await client.stream("/v1/completions", b"{}", record)
            assert record.error_kind is None
        assert server.num_connections == 2

    with_client(use, answer_of(2), then_close(b""), answer_of(2))


def test_a_connection_that_broke_off_is_not_used_again() -> None:
    async def use(client: HTTPClient, server: ScriptedHTTP) -> list[str | None]:
        kinds = []
        for _ in range(2):
            record = StreamRecord(1, 2)
            await client.stream("/v1/completions", b"{}", record)
            kinds.append(record.error_kind)
        assert server.num_connections == 2
        return kinds

    assert with_client(use, STREAM_HEAD + TWO + b"junk\r\n", answer_of(2)) == ["protocol", None]


def test_silence_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock that counts is the test's, and goes on when two events have been read."""
    now_s, record = 0.0, StreamRecord(1, 3)
    monkeypatch.setattr(http_client, "time", SimpleNamespace(perf_counter=lambda: now_s))

    async def silent(writer: asyncio.StreamWriter) -> None:
        nonlocal now_s
        writer.write(STREAM_HEAD + TWO)
        while len(record.event_times) < 2:
            await asyncio.sleep(0.001)
        now_s = 0.2
        await asyncio.sleep(60)

    streamed(silent, timeout_s=0.1, record=record)
    assert record.error_kind == "timeout" and record.error_message == "nothing came for 0.1 s after 2 events"


def test_a_slow_stream_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than the timeout in all, never silent for so long. The clock that counts is the test's, so a stall of the machine is none."""
    now_s = 0.0
    monkeypatch.setattr(http_client, "time", SimpleNamespace(perf_counter=lambda: now_s))

    async def slow(writer: asyncio.StreamWriter) -> None:
        nonlocal now_s
        writer.write(STREAM_HEAD)
        for _ in range(4):
            await asyncio.sleep(0.06)  # in real time, so that the client looks
            now_s += 0.04
            writer.write(chunked(event()))
        writer.write(chunked(event(finish="length") + DONE) + LAST_CHUNK)

    record = streamed(slow, timeout_s=0.05)
    assert record.error_kind is None and record.end_s == 0.16


def test_nobody_listens() -> None:
    async def use(client: HTTPClient, server: ScriptedHTTP) -> StreamRecord:
        server._server.close()
        await server._server.wait_closed()
        with pytest.raises(HTTPError, match="no connection: Connection refused") as error:
            await client.get_json("/v1/models")
        assert error.value.kind == "connect"
        record = StreamRecord(1, 1)
        await client.stream("/v1/completions", b"{}", record)
        return record

    record = with_client(use, b"")
    assert record.error_kind == "connect" and record.end_s >= record.sent_s


@pytest.mark.parametrize("url", ["", "127.0.0.1:8000", "ftp://h", "http://", "http://h/?q", "http://h:port", "http://h:99999"])
def test_bad_urls(url: str) -> None:
    with pytest.raises(ValueError, match="^url: "):
        HTTPClient(url)


BODY = event("é") + event() + b'data: {"choices":[{"text":""}]}\n\n' + event("", "stop") + usage(3, 16) + DONE


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, len(BODY)), max_size=12))
def test_a_stream_cut_anywhere_is_the_same(cuts: list[int]) -> None:
    record = StreamRecord(1, 3)
    reader = EventReader(record)
    edges = [0, *sorted(cuts), len(BODY)]
    for turn, (start, end) in enumerate(zip(edges, edges[1:], strict=False)):
        reader.feed(BODY[start:end], float(turn))
    reader.close(99.0)
    assert (record.error_kind, len(record.event_times), record.num_tokens, record.num_cached) == (None, 3, 3, 16)
    # An event counts when its blank line's first half is there, whatever was cut before.
    ends = [BODY.index(b"\n", start) + 1 for start in (0, len(event("é")), len(event("é") + event()))]
    pieces = [next(turn for turn, edge in enumerate(edges[1:]) if edge >= end) for end in ends]
    assert list(record.event_times) == [float(piece) for piece in pieces]
