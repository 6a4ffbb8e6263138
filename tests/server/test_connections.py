"""Connections of clumsy and hostile clients: odd HTTP, endless heads and bodies, pipelining. Slow ones: test_slow_clients."""

from __future__ import annotations

import json
import re
import socket
import struct
import time
from collections.abc import Callable, Iterator

import pytest

from octavo.server.connection import MAX_HEAD_BYTES
from tests.engine.scripted import Bigram
from tests.server.harness import RunningServer, wait_until
from tests.server.raw_clients import (
    CLOSE,
    LONG,
    PATH,
    SHORT,
    ask_health,
    assert_everybody_is_served,
    assert_refused,
    connect,
    exchange,
    post,
    read_answer,
    received,
    serving,
    text_of,
)


@pytest.fixture(scope="module")
def patient() -> Iterator[RunningServer]:
    with serving(600.0, 600.0) as running:
        yield running


@pytest.fixture
def server(patient: RunningServer) -> Iterator[RunningServer]:
    """One that gives up nobody for being slow: nothing here is a matter of time."""
    yield patient
    assert_everybody_is_served(patient)


@pytest.fixture
def slow(server: RunningServer) -> Iterator[RunningServer]:
    """Whose long answers go on until their clients have done something, however long a busy machine holds these up."""
    backend = server.engine.backend
    assert isinstance(backend, Bigram)
    backend.delay_s = 0.01
    yield server
    wait_until(server.is_idle)
    backend.delay_s = 0.0


# --- odd HTTP ---


UPGRADES = {
    "h2c": "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n",
    "websocket": "Connection: keep-alive, Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: x\r\nSec-WebSocket-Version: 13\r\n",
    "unknown": "Upgrade: TLS/1.0\r\nConnection: upgrade\r\n",
}


@pytest.mark.parametrize("name", UPGRADES)
@pytest.mark.parametrize("cut", [None, 1, 20, 120, 200])
def test_offers_to_upgrade_are_served_as_they_are(server: RunningServer, name: str, cut: int | None) -> None:
    data = post(SHORT, UPGRADES[name]) + post(SHORT, UPGRADES[name]) + post(SHORT, CLOSE)
    connection = connect(server)
    connection.sendall(data[:cut])
    if cut is not None:
        time.sleep(0.01)
        connection.sendall(data[cut:])
    answers = received(connection).split(b"HTTP/1.1 ")[1:]
    assert [text_of(read_answer(b"HTTP/1.1 " + answer)[1]) for answer in answers] == ["abc"] * 3


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "GET /é HTTP/1.1\r\nHost: t\r\n\r\n".encode(),
        b"CONNECT a:1 HTTP/1.1\r\nHost: t\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: abc\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /health HTTP/1.1\r\nHost: t\r\nX: a\x00b\r\n\r\n",
        b"GET /health HTTP/9.9\r\nHost: t\r\n\r\n",
    ],
)
def test_what_is_not_http_is_a_400_in_json(server: RunningServer, data: bytes) -> None:
    connection = connect(server)
    connection.sendall(data)
    assert_refused(received(connection), 400, "invalid_http")


def test_rubbish_after_a_stream_has_begun_ends_it_unmixed(slow: RunningServer) -> None:
    connection = connect(slow)
    connection.sendall(post({**LONG, "stream": True}))
    assert connection.recv(1, socket.MSG_PEEK)
    connection.sendall(b"\x00\x01rubbish\r\n\r\n")
    assert received(connection).count(b"HTTP/1.1 ") == 1
    wait_until(slow.is_idle)


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_bodies_in_chunks(server: RunningServer, size: int) -> None:
    data = json.dumps({**SHORT, "user": "u" * 3000}).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: t\r\n{CLOSE}Transfer-Encoding: chunked\r\n\r\n".encode()
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (data[i : i + size] for i in range(0, len(data), size)))
    status, content = exchange(server, head + chunks + b"0\r\n\r\n")
    assert status == 200 and text_of(content) == "abc"


def test_a_client_that_waits_for_100_continue_gets_it(server: RunningServer) -> None:
    data = json.dumps(SHORT).encode()
    connection = connect(server)
    connection.sendall(f"POST {PATH} HTTP/1.1\r\nHost: t\r\n{CLOSE}Expect: 100-continue\r\nContent-Length: {len(data)}\r\n\r\n".encode())
    assert connection.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
    connection.sendall(data)
    assert text_of(read_answer(received(connection))[1]) == "abc"


def test_http_1_0_closes(server: RunningServer) -> None:
    status, content = exchange(server, post(SHORT, version="1.0"))
    assert status == 200 and text_of(content) == "abc"


@pytest.mark.parametrize("encoding", ["gzip", "br", "identity, gzip"])
def test_compressed_bodies_are_refused_by_name(server: RunningServer, encoding: str) -> None:
    status, content = exchange(server, post(b"\x1f\x8b\x08\x00", f"Content-Encoding: {encoding}\r\n{CLOSE}"))
    assert status == 415 and encoding in content["error"]["message"]
    assert exchange(server, post(SHORT, f"Content-Encoding: identity\r\n{CLOSE}"))[0] == 200


def test_small_writes_are_sent_at_once(server: RunningServer) -> None:
    """Else each piece of a stream may wait for the acknowledgement of the one before, which clients delay by 40 ms."""
    with connect(server) as connection:
        ask_health(connection)
        (served,) = server.server.server_state.connections
        assert served.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


# --- endless and slow ---


def endless(start: bytes, part: Callable[[int], bytes]) -> Iterator[bytes]:
    yield start
    yield from (part(i) for i in range(1000))


CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n"
ENDLESS = {
    "url": (b"GET /", lambda i: b"u" * 9000),
    "headers": (b"GET /health HTTP/1.1\r\n", lambda i: b"X-%d: %b\r\n" % (i, b"v" * 9000)),
    "small headers": (b"GET /health HTTP/1.1\r\n", lambda i: b"a: b\r\n" * 1500),
    "header name": (b"GET /health HTTP/1.1\r\nX", lambda i: b"x" * 9000),
    "header value": (b"GET /health HTTP/1.1\r\nX: ", lambda i: b"v" * 9000),
    "trailers": (CHUNKED + b"1\r\n{\r\n0\r\n", lambda i: b"X-%d: %b\r\n" % (i, b"v" * 9000)),
    "trailer": (CHUNKED + b"1\r\n{\r\n0\r\nX: ", lambda i: b"v" * 9000),
    "chunk extension": (CHUNKED + b"1;a=", lambda i: b"v" * 9000),
}


@pytest.mark.parametrize("name", ENDLESS)
@pytest.mark.parametrize("gathered", [1, 20])
def test_endless_heads_and_framing_are_refused(server: RunningServer, name: str, gathered: int) -> None:
    """Whether they come in pieces or a whole kernel buffer at a time."""
    connection = connect(server)
    pending, num_sent = b"", 0
    try:
        for i, part in enumerate(endless(*ENDLESS[name])):
            pending += part
            if i % gathered == 0:
                connection.sendall(pending)
                num_sent, pending = num_sent + len(pending), b""
    except ConnectionError:
        pass
    answer = received(connection)
    assert num_sent < 8_000_000  # of 9 MB and more: the server had closed
    if answer:  # else the reset came first, as the client had kept sending
        assert_refused(answer, 431 if b" 431 " in answer else 400, "head_too_large" if b" 431 " in answer else "invalid_http")


def test_a_head_at_the_limit_is_read(server: RunningServer) -> None:
    for num_bytes, status in ((MAX_HEAD_BYTES - 1000, 200), (MAX_HEAD_BYTES + 1000, 431)):
        for num_headers in (1, 20):
            headers = b"X: %b\r\n" % (b"v" * (num_bytes // num_headers - 5)) * num_headers
            assert exchange(server, b"GET /health HTTP/1.1\r\nHost: t\r\nConnection: close\r\n" + headers + b"\r\n")[0] == status


def test_large_bodies_behind_each_other_are_no_large_heads(server: RunningServer) -> None:
    connection = connect(server)
    body = {**SHORT, "user": "u" * 300_000}
    data = post(body) + post(body) + post(body, CLOSE)
    for i in range(0, len(data), 1 << 16):
        connection.sendall(data[i : i + (1 << 16)])
    assert received(connection).count(b'"text":"abc"') == 3


def test_large_bodies_find_room_or_are_put_off_and_small_ones_always_pass(server: RunningServer) -> None:
    """There is room for eight of the largest; slow senders take it, and give it back when they leave or are answered."""
    large = post({**SHORT, "user": "u" * 1_040_000}, CLOSE)
    slow = [connect(server) for _ in range(8)]
    for connection in slow:
        connection.sendall(large[:-10])
    num_sent = sum(len(large[:-10].partition(b"\r\n\r\n")[2]) for _ in slow)
    wait_until(lambda: sum(served._body_bytes for served in server.server.server_state.connections) == num_sent)
    refused = connect(server)
    refused.sendall(large)
    assert_refused(received(refused), 503, "overloaded")
    status, content = exchange(server, post({**SHORT, "user": "u" * 60_000}, CLOSE))
    assert status == 200 and text_of(content) == "abc"
    for connection in slow[:4]:
        connection.close()
    for connection in slow[4:]:
        connection.sendall(large[-10:])
        assert text_of(read_answer(received(connection))[1]) == "abc"
    wait_until(lambda: exchange(server, large)[0] == 200)


# --- several requests on a connection ---


def test_pipelined_requests_are_answered_in_order(server: RunningServer) -> None:
    requests = [post({**SHORT, "max_tokens": 1 + i % 3, "stream": i % 2 == 1}) for i in range(40)]
    connection = connect(server)
    connection.sendall(b"".join(requests) + post(SHORT, CLOSE))
    answers = received(connection).split(b"HTTP/1.1 200 OK")[1:]
    assert len(answers) == 41
    for i, answer in enumerate(answers[:-1]):
        assert (b"[DONE]" in answer) == (i % 2 == 1)
        assert b"".join(re.findall(rb'"text":"(\w*)"', answer)) == b"abc"[: 1 + i % 3]


@pytest.mark.parametrize("first", ["stream", "whole"])
@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("num_behind", [1, 15])
def test_a_client_that_leaves_ends_all_it_has_pipelined(slow: RunningServer, first: str, reset: bool, num_behind: int) -> None:
    before = slow.metrics()
    connection = connect(slow)
    connection.sendall(post({**LONG, "stream": first == "stream"}) + post(LONG) * num_behind)
    wait_until(lambda: slow.engine.scheduler.num_running == 1)
    if reset:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
    wait_until(slow.is_idle)
    after = slow.metrics()
    for counter in ("octavo_requests_total", 'octavo_requests_finished_total{reason="abort"}'):
        assert after[counter] == before[counter] + 1  # none of the others was started


def test_a_client_that_shuts_its_side_has_left(slow: RunningServer) -> None:
    connection = connect(slow)
    connection.sendall(post(LONG))
    wait_until(lambda: slow.engine.scheduler.num_running == 1)
    connection.shutdown(socket.SHUT_WR)
    assert received(connection) == b""
