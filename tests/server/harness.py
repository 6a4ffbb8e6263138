"""A real server on a real socket in this process, on the scripted model, and plain clients for it."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from octavo.engine.async_engine import AsyncEngine
from octavo.engine.engine import Engine
from octavo.engine.replay_advice import Replayer
from octavo.server.app import ServerOptions, create_app
from octavo.server.run import Server, make_server

TIMEOUT_S = 120.0  # hangs are found, slow machines are forgiven


class RunningServer:
    """uvicorn in a thread. ``engine`` is the one behind it, for scripting and for looking at."""

    def __init__(
        self, engine: Engine, options: ServerOptions | None = None, replayer: Replayer | None = None, **async_options: Any
    ) -> None:
        self.engine = engine
        self.async_engine = AsyncEngine(engine, **async_options)
        options = options or ServerOptions()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        app = create_app(self.async_engine, options, replayer)
        self.server: Server = make_server(app, self.async_engine, options)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self._listener]}, daemon=True)

    def __enter__(self) -> RunningServer:
        self.thread.start()
        wait_until(lambda: self.server.started)
        return self

    def __exit__(self, *_: object) -> None:
        self.server.should_exit = True
        self.thread.join(TIMEOUT_S)
        assert not self.thread.is_alive()

    def request(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[int, dict[str, str], bytes]:
        """(status, headers, body). ``body``: bytes as they are, anything else as JSON."""
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_S)
        with contextlib.closing(connection):
            connection.request(method, path, data, {"Content-Type": "application/json", **(headers or {})})
            response = connection.getresponse()
            return response.status, {k.lower(): v for k, v in response.getheaders()}, response.read()

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> dict[str, Any]:
        """The JSON answer, which must be a 200."""
        status, _, data = self.request("POST", path, body, headers)
        assert status == 200, data
        return strict_json(data)

    def error(self, path: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, dict[str, Any]]:
        """(status, the error object) of an answer that must be an error in OpenAI's shape."""
        status, answer_headers, data = self.request("POST", path, body, headers)
        assert status >= 400 and answer_headers["content-type"] == "application/json", (status, data)
        error = strict_json(data)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return status, error

    def complete(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        return self.post("/v1/completions", {"prompt": prompt, "temperature": 0, **fields})

    def stream(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The chunks of a stream, which must end with [DONE]."""
        events = list(sse_events(self.open_stream(path, body)))
        assert events[-1] == "[DONE]"
        return [strict_json(e) for e in events[:-1]]

    def limit_buffers(self, num_bytes: int) -> None:
        """Small kernel buffers for connections made from now on, so that a reader that stops is felt soon."""
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, num_bytes)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, num_bytes)

    def open_stream(self, path: str, body: dict[str, Any]) -> socket.socket:
        """A connection that has sent a streaming request and read nothing."""
        return self.send_raw("POST", path, json.dumps({**body, "stream": True}).encode())

    def send_raw(self, method: str, path: str, data: bytes, receive_buffer_bytes: int | None = None) -> socket.socket:
        connection = socket.socket()
        connection.settimeout(TIMEOUT_S)
        if receive_buffer_bytes is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        connection.connect(("127.0.0.1", self.port))
        head = f"{method} {path} HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
        connection.sendall(head.encode() + b"Connection: close\r\n\r\n" + data)
        return connection

    def metrics(self) -> dict[str, float]:
        """Samples of /metrics by name with labels."""
        _, _, data = self.request("GET", "/metrics")
        lines = (line.rsplit(" ", 1) for line in data.decode().splitlines() if not line.startswith("#"))
        return {name: float(value) for name, value in lines}

    def is_idle(self) -> bool:
        scheduler = self.engine.scheduler
        return not self.engine.has_work and scheduler.num_used_blocks == 0 and self.async_engine.num_open_requests == 0


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A port of the loopback that only who asks for it by its number can listen at, however often, until the end of the block."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def sse_events(connection: socket.socket) -> Iterator[str]:
    """The data of each event of an open streaming answer; AssertionError when it is not a 200."""
    with connection, connection.makefile("rb") as file:
        status = file.readline()
        assert b" 200 " in status, status + file.read()
        headers = dict(line.decode().strip().lower().split(": ", 1) for line in iter(file.readline, b"\r\n"))
        assert headers["content-type"].startswith("text/event-stream")
        text = b"".join(_chunks(file)) if headers.get("transfer-encoding") == "chunked" else file.read()
        for event in text.decode().split("\n\n"):
            if event:
                assert event.startswith("data: ")
                yield event[len("data: ") :]


def _chunks(file: Any) -> Iterator[bytes]:
    while size := int(file.readline(), 16):
        yield file.read(size)
        file.readline()


def strict_json(data: bytes | str) -> Any:
    """JSON that has no NaN or infinity."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(data, parse_constant=refuse)


def wait_until(condition: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)
