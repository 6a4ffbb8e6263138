"""Clients that are slow with a head or a body, or take no answer: given up when their time is over, and not before.

The server here is hasty, so that the time is short. Clients of one kind wait for their ends side by side.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest

from tests.server.harness import TIMEOUT_S, RunningServer, wait_until
from tests.server.raw_clients import (
    ATTEMPTS,
    CLOSE,
    SHORT,
    ask_health,
    assert_everybody_is_served,
    assert_refused,
    assert_served,
    connect,
    connect_and_ask,
    post,
    read_answer,
    received,
    serving,
    text_of,
)

HEAD_S, STALL_S = 0.4, 0.6


TICKS: list[float] = []  # when the loop of the server came round: ten times a second, unless it was held up


@pytest.fixture(scope="module")
def hasty() -> Iterator[RunningServer]:
    made = serving(HEAD_S, STALL_S)
    on_tick = made.server.on_tick

    async def noted(counter: int) -> bool:
        TICKS.append(time.monotonic())
        return await on_tick(counter)

    made.server.on_tick = noted  # type: ignore[method-assign]
    with made as running:
        yield running


@pytest.fixture
def server(hasty: RunningServer) -> Iterator[RunningServer]:
    yield hasty
    assert_everybody_is_served(hasty)


def give_up_after(server: RunningServer, *starts: bytes) -> None:
    """Each is given up who says so much and no more. A busy machine may hold this client up for longer than a head may take: what it says
    then is answered by a reset, which may take the 408 with it, and it comes once more."""
    for _ in range(ATTEMPTS):
        connections = dict[bytes, socket.socket]()
        for start in starts:
            connections[start] = connect(server)
            with contextlib.suppress(ConnectionError):
                connections[start].sendall(start)
        answers = {start: received(connection) for start, connection in connections.items()}
        for answer in filter(None, answers.values()):
            assert_refused(answer, 408, "request_timeout")
        if not (starts := tuple(start for start, answer in answers.items() if not answer)):
            return
    pytest.fail(f"resets alone after {starts}")


def test_a_head_that_does_not_come_is_given_up(server: RunningServer) -> None:
    started_s = time.monotonic()
    give_up_after(server, b"", b"GET", b"GET /health HTTP/1.1\r\nHost: t\r\n", b"\r\n", b"GET /\r\n")
    assert time.monotonic() - started_s >= HEAD_S


def test_a_head_that_drips_is_given_up(server: RunningServer) -> None:
    """Also as the second of a connection, and also bytes that belong to no request."""
    dripping = list[tuple[bytes, socket.socket]]()
    for drip in (b"\r\n", b"X: y\r\n"):
        for connection in (connect(server), connect_and_ask(server)):
            dripping.append((drip, connection))
            with contextlib.suppress(ConnectionError):
                if drip != b"\r\n":
                    connection.sendall(b"GET /health HTTP/1.1\r\n")
    deadline_s = time.monotonic() + TIMEOUT_S
    while dripping:
        assert time.monotonic() < deadline_s, [drip for drip, _ in dripping]
        for drip, connection in list(dripping):
            try:
                connection.sendall(drip)
            except ConnectionError:
                connection.close()
                dripping.remove((drip, connection))
        time.sleep(0.02)


def test_a_body_that_does_not_come_is_given_up(server: RunningServer) -> None:
    give_up_after(server, post(b"{" + b" " * 1000)[:-900])


class Pace:
    """Of a client: ``beat`` after each piece. ``was_kept``: none came so late that it could be taken for one that has stopped, and the
    server could look at all of them."""

    def __init__(self) -> None:
        self._started_s = self._last_s = time.monotonic()
        self._longest_s = 0.0

    def beat(self) -> None:
        now_s = time.monotonic()
        self._longest_s, self._last_s = max(self._longest_s, now_s - self._last_s), now_s

    @property
    def took_s(self) -> float:
        return self._last_s - self._started_s

    @property
    def was_kept(self) -> bool:
        ticks = [self._started_s, *(tick_s for tick_s in TICKS if tick_s >= self._started_s), time.monotonic()]
        return max(self._longest_s, *(after - before for before, after in pairwise(ticks))) < min(HEAD_S, STALL_S) / 2


def at_pace(attempt: Callable[[Pace], bool]) -> None:
    """Whether it is served is a question for a client that has kept its pace, which a busy machine keeps it from now and then. So it does
    the server, to which a piece that it has not looked at has not come."""
    for _ in range(ATTEMPTS):
        pace = Pace()
        if attempt(pace):
            return
        assert not pace.was_kept, "it was given up in spite of its pace"
    pytest.fail("this machine keeps no pace")


def test_a_body_that_comes_slowly_but_steadily_is_read(server: RunningServer) -> None:
    data = post({**SHORT, "user": "u" * 4000}, CLOSE)

    def attempt(pace: Pace) -> bool:
        connection = connect(server)
        try:
            for i in range(0, len(data), 200):
                connection.sendall(data[i : i + 200])
                pace.beat()
                time.sleep(0.05)
        except ConnectionError:
            return False
        assert pace.took_s > STALL_S + 0.25
        answer = received(connection)
        return b" 200 " in answer and text_of(read_answer(answer)[1]) == "abc"

    at_pace(attempt)


def test_a_hundred_connections_that_say_nothing_disturb_nobody(server: RunningServer) -> None:
    kept, silent = [connect_and_ask(server) for _ in range(50)], [connect(server) for _ in range(50)]
    assert_served(server)
    for connection in silent:
        assert_refused(received(connection), 408, "request_timeout")
    time.sleep(HEAD_S)
    for connection in kept:  # kept alive, not taken for slow
        ask_health(connection)
        connection.close()


# --- answers that nobody takes ---


def large_answer(stream: bool, num_tokens: int) -> bytes:
    """Of some 7 kB a token."""
    return post({"prompt": "x", "max_tokens": num_tokens, "ignore_eos": True, "n": 8, "logprobs": 20, "stream": stream, "seed": 1})


def narrow(server: RunningServer) -> socket.socket:
    """A connection with small kernel buffers on both sides."""
    server.limit_buffers(4096)
    connection = socket.socket()
    connection.settimeout(TIMEOUT_S)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", server.port))
    return connection


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_not_taken_is_dropped(server: RunningServer, stream: bool) -> None:
    """Of a client that never reads it, of one that has asked for another behind it, and of one that has closed its own side."""
    connections, answer = [narrow(server) for _ in range(3)], large_answer(stream, 50)
    for connection, data in zip(connections, (answer, answer * 2, answer), strict=True):
        connection.sendall(data)
    for connection in connections:
        assert connection.recv(1, socket.MSG_PEEK)
    connections[2].shutdown(socket.SHUT_WR)
    wait_until(lambda: len(server.server.server_state.connections) == 0)
    wait_until(server.is_idle)
    for connection in connections:
        connection.close()


def test_an_answer_that_is_taken_slowly_is_not_dropped(server: RunningServer) -> None:
    """For several times as long as one that is not taken would be."""

    def attempt(pace: Pace, stream: bool) -> bool:
        num_bytes, last = 0, b""
        with narrow(server) as connection, contextlib.suppress(ConnectionError):
            connection.sendall(large_answer(stream, 120).replace(b"Host: t", b"Host: t\r\nConnection: close"))
            while chunk := connection.recv(24_000):
                pace.beat()
                num_bytes, last = num_bytes + len(chunk), (last + chunk)[-100:]
                if pace.took_s < 2.5 * STALL_S:
                    time.sleep(0.05)
        if not last.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n" if stream else b"}"):
            return False
        assert pace.took_s > 2 * STALL_S and num_bytes > 500_000
        return True

    at_pace(lambda pace: attempt(pace, False))
    at_pace(lambda pace: attempt(pace, True))
