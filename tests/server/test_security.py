"""The API key on every route, and the size of bodies."""

from __future__ import annotations

import http.client
import logging
import socket
from collections.abc import Iterator

import pytest

from octavo.engine.async_engine import AsyncEngine
from octavo.server.app import OPEN_PATHS, ServerOptions, create_app
from tests.engine.scripted import bigram_engine
from tests.server.harness import TIMEOUT_S, RunningServer, strict_json

KEY = "sk-secret-1234"
PATH = "/v1/completions"
LIMIT = 2 << 20


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with RunningServer(bigram_engine(), ServerOptions(api_key=KEY, max_body_bytes=LIMIT)) as running:
        yield running


def routes() -> list[tuple[str, str]]:
    app = create_app(AsyncEngine(bigram_engine()))
    return [(method, route.path) for route in app.routes for method in sorted(route.methods)]  # type: ignore[attr-defined]


@pytest.mark.parametrize(("method", "path"), routes())
def test_every_route_needs_the_key(server: RunningServer, method: str, path: str) -> None:
    path = path.replace("{model:path}", "m")
    if path in OPEN_PATHS:
        assert server.request(method, path)[0] == 200
        return
    for header in (None, "Bearer wrong", f"Basic {KEY}", f"Bearer {KEY[:-1]}", f"Bearer {KEY}x", "Bearer ", "", KEY):
        status, headers, data = server.request(method, path, b"{}", {} if header is None else {"Authorization": header})
        assert status == 401 and headers["www-authenticate"] == "Bearer"
        if method != "HEAD":
            assert strict_json(data)["error"]["code"] == "invalid_api_key"
    status, _, data = server.request(method, path, b"{}", {"Authorization": f"Bearer {KEY}"})
    assert status in (200, 400, 404) and KEY.encode() not in data


@pytest.mark.parametrize(
    "path", ["//v1/models", "/v1/../v1/models", "/V1/models", "/v1/models/", "/nothing", "/health/", "/health/../v1/models"]
)
def test_odd_paths_are_no_way_in(server: RunningServer, path: str) -> None:
    with socket.create_connection(("127.0.0.1", server.port), TIMEOUT_S) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n".encode())
        assert b" 401 " in connection.makefile("rb").readline()


def test_two_authorization_headers_are_refused(server: RunningServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), TIMEOUT_S) as connection:
        head = f"GET /v1/models HTTP/1.1\r\nHost: t\r\nAuthorization: Bearer {KEY}\r\nAuthorization: Bearer {KEY}\r\n"
        connection.sendall(head.encode() + b"Connection: close\r\n\r\n")
        assert b" 401 " in connection.makefile("rb").readline()


def test_the_key_is_in_no_log_and_no_answer(server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    authorized = {"Authorization": f"Bearer {KEY}"}
    with caplog.at_level(logging.DEBUG):
        assert server.post(PATH, {"prompt": "x", "max_tokens": 1}, authorized)
        for path, body in ((PATH, b"{"), ("/nothing", b"")):
            assert KEY.encode() not in server.request("POST", path, body, authorized)[2]
        assert KEY.encode() not in server.request("GET", "/metrics", headers=authorized)[2]
    assert KEY not in caplog.text


def body_of(num_bytes: int) -> bytes:
    start = b'{"prompt":[5],"max_tokens":1,"user":"'
    return start + b"u" * (num_bytes - len(start) - 2) + b'"}'


@pytest.mark.parametrize("num_bytes", [7 << 10, 1 << 20, LIMIT])
def test_bodies_up_to_the_limit_are_read(server: RunningServer, num_bytes: int) -> None:
    status, _, data = server.request("POST", PATH, body_of(num_bytes), {"Authorization": f"Bearer {KEY}"})
    assert status == 200, data


def read_answer(connection: socket.socket) -> tuple[int, bytes]:
    """(status, body) of an answer, without waiting until the server closes: it does so when it has no more patience with the body."""
    with connection, http.client.HTTPResponse(connection) as answer:
        answer.begin()
        return answer.status, answer.read()


def test_a_declared_size_above_the_limit_is_refused_before_it_is_sent(server: RunningServer) -> None:
    connection = socket.create_connection(("127.0.0.1", server.port), TIMEOUT_S)
    head = f"POST {PATH} HTTP/1.1\r\nHost: t\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {100 << 20}\r\n\r\n"
    connection.sendall(head.encode() + b"{")
    status, answer = read_answer(connection)
    assert status == 413 and b'"body_too_large"' in answer and str(LIMIT).encode() in answer


def test_a_chunked_body_is_refused_when_it_passes_the_limit(server: RunningServer) -> None:
    connection = socket.create_connection(("127.0.0.1", server.port), TIMEOUT_S)
    head = f"POST {PATH} HTTP/1.1\r\nHost: t\r\nAuthorization: Bearer {KEY}\r\nTransfer-Encoding: chunked\r\n\r\n"
    connection.sendall(head.encode())
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    for _ in range(LIMIT // 0x10000 + 10):
        connection.sendall(chunk)
    status, answer = read_answer(connection)
    assert status == 413 and b'"body_too_large"' in answer


def test_a_body_shorter_than_declared_harms_nobody(server: RunningServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), TIMEOUT_S) as connection:
        head = f"POST {PATH} HTTP/1.1\r\nHost: t\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 1000\r\n\r\n"
        connection.sendall(head.encode() + b'{"prompt":"x"}')
    assert server.post(PATH, {"prompt": "x", "max_tokens": 1}, {"Authorization": f"Bearer {KEY}"})
