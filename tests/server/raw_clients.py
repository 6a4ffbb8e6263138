"""Clients that write bytes of their own to a real server: clumsy, slow and hostile ones. The server is patient or hasty, as asked."""

from __future__ import annotations

import contextlib
import json
import socket
from typing import Any

import pytest

from octavo.server.app import ServerOptions
from tests.engine.scripted import bigram_engine, script
from tests.server.harness import TIMEOUT_S, RunningServer, strict_json, wait_until

PATH = "/v1/completions"
SHORT = {"prompt": "x", "temperature": 0}
LONG = {"prompt": "x", "max_tokens": 3900, "ignore_eos": True, "temperature": 0}
ATTEMPTS = 20  # of a client that must keep its pace: a busy machine may hold up any one
CLOSE = "Connection: close\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nHost: t\r\n\r\n"


def serving(head_s: float, stall_s: float) -> RunningServer:
    engine = bigram_engine(max_num_seqs=8)
    script(engine, "x", ["a", "b", "c"])
    made = RunningServer(engine, ServerOptions(head_s=head_s, stall_s=stall_s, max_body_bytes=1 << 20))
    made.server.config.timeout_keep_alive = 600  # a client that a busy machine holds up finds its connection
    return made


def assert_everybody_is_served(server: RunningServer) -> None:
    assert_served(server)
    wait_until(server.is_idle)
    server.engine.scheduler.check_invariants()
    wait_until(lambda: len(server.server.server_state.connections) == 0)


def assert_served(server: RunningServer) -> None:
    """A short request is answered. A hasty server may take this client, held up by a busy machine, for a slow one, and is asked again."""
    for _ in range(ATTEMPTS):
        data = b""
        with contextlib.suppress(ConnectionError):
            connection = connect(server)
            connection.sendall(post(SHORT, CLOSE))
            data = received(connection)
        if data and b" 408 " not in data:
            break
    status, content = read_answer(data)
    assert status == 200 and text_of(content) == "abc"


def connect(server: RunningServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), TIMEOUT_S)


def connect_and_ask(server: RunningServer) -> socket.socket:
    """A kept connection that has had an answer, however often this client was held up before it could ask."""
    for _ in range(ATTEMPTS):
        connection = connect(server)
        with contextlib.suppress(ConnectionError):
            connection.sendall(HEALTH)
            if b" 200 " in connection.recv(1000):
                return connection
        connection.close()
    pytest.fail("it gives up whoever connects")


def post(body: dict[str, Any] | bytes, headers: str = "", path: str = PATH, version: str = "1.1") -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return f"POST {path} HTTP/{version}\r\nHost: t\r\n{headers}Content-Length: {len(data)}\r\n\r\n".encode() + data


def received(connection: socket.socket) -> bytes:
    """All until the server closes; whatever came, when it resets."""
    data = b""
    with connection:
        try:
            while chunk := connection.recv(1 << 16):
                data += chunk
        except ConnectionError:
            pass
    return data


def ask_health(connection: socket.socket) -> None:
    """One request, after which the connection stays open."""
    connection.sendall(HEALTH)
    data = b""
    while not data.endswith(b'{"status":"ok"}'):
        data += connection.recv(1000) or pytest.fail("closed")


def exchange(server: RunningServer, data: bytes) -> tuple[int, Any]:
    """(status, JSON) of the one answer to ``data``, after which the server must close."""
    connection = connect(server)
    connection.sendall(data)
    return read_answer(received(connection))


def read_answer(data: bytes) -> tuple[int, Any]:
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split()[1]), strict_json(body)


def assert_refused(answer: bytes, status: int, code: str) -> None:
    got, content = read_answer(answer)
    assert got == status and b"application/json" in answer.lower() and b"connection: close" in answer.lower()
    assert set(content["error"]) == {"message", "type", "param", "code"} and content["error"]["code"] == code


def text_of(content: Any) -> str:
    return content["choices"][0]["text"]
