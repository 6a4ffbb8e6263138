"""The server as a process: ready line, signals with work in flight, exit codes, a port in use, a real model file."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.config import BackendConfig, CacheConfig, EngineConfig, ModelConfig
from octavo.server.run import run_server
from tests.models.tiny import write_tiny_gguf
from tests.server.harness import sse_events, strict_json

PATH = "/v1/completions"
ROOT = Path(__file__).parents[2]


class Child:
    """A process that prints one line when it is ready."""

    def __init__(self, *args: str) -> None:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
        self.process = subprocess.Popen(
            [sys.executable, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, cwd=ROOT
        )
        assert self.process.stdout is not None
        self.ready_line = self.process.stdout.readline().strip()
        port = re.search(r"(?:^|:)(\d+)(?: |$)", self.ready_line)
        assert port is not None, (self.ready_line, self.process.communicate())
        self.port = int(port[1])

    def request(self, method: str, path: str, body: Any = None) -> tuple[int, dict[str, Any]]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        with contextlib.closing(connection):
            connection.request(method, path, None if body is None else json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, strict_json(response.read())

    def open_stream(self, num_tokens: int) -> socket.socket:
        data = json.dumps({"prompt": "x", "max_tokens": num_tokens, "ignore_eos": True, "stream": True}).encode()
        connection = socket.create_connection(("127.0.0.1", self.port), 20)
        connection.sendall(f"POST {PATH} HTTP/1.1\r\nHost: t\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        return connection

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def exit_code(self) -> int:
        return self.process.wait(20)


@contextlib.contextmanager
def scripted(drain_s: float, delay_s: float) -> Iterator[Child]:
    child = Child("-m", "tests.server.serve_scripted", str(drain_s), str(delay_s))
    try:
        yield child
    finally:
        child.process.kill()
        child.process.communicate()


def wait_for_streams(child: Child, connections: list[socket.socket]) -> None:
    """Until each has got its first bytes."""
    for connection in connections:
        assert connection.recv(1, socket.MSG_PEEK)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_running_and_waiting_requests_finish_within_the_drain(number: int) -> None:
    with scripted(drain_s=15, delay_s=0.01) as child:
        running = [child.open_stream(40) for _ in range(4)]
        wait_for_streams(child, running)
        waiting = [child.open_stream(3) for _ in range(4)]
        idle = http.client.HTTPConnection("127.0.0.1", child.port, timeout=20)
        idle.request("GET", "/health")
        assert idle.getresponse().read() == b'{"status":"ok"}'
        child.signal(number)
        time.sleep(0.2)
        status, body = child.request("POST", PATH, {"prompt": "x"})
        assert status == 503 and "shutting down" in body["error"]["message"]
        assert child.request("GET", "/health")[0] == 503 and child.request("GET", "/health/live")[0] == 200
        for connection, num_tokens in [(c, 40) for c in running] + [(c, 3) for c in waiting]:
            *events, done = sse_events(connection)
            assert len(events) == num_tokens and done == "[DONE]"
        assert child.exit_code() == 0
        idle.close()
        with pytest.raises(ConnectionError):
            socket.create_connection(("127.0.0.1", child.port), 1)


def test_at_the_limit_of_the_drain_streams_end_with_an_error_event() -> None:
    with scripted(drain_s=0.3, delay_s=0.01) as child:
        running = [child.open_stream(4000) for _ in range(4)]
        wait_for_streams(child, running)
        child.signal(signal.SIGTERM)
        for connection in running:
            *_, error, done = sse_events(connection)
            assert "shutting down" in strict_json(error)["error"]["message"] and done == "[DONE]"
        assert child.exit_code() == 0


def test_a_second_signal_ends_at_once() -> None:
    with scripted(drain_s=600, delay_s=0.01) as child:
        running = child.open_stream(4000)
        wait_for_streams(child, [running])
        child.signal(signal.SIGTERM)
        time.sleep(0.2)
        started = time.monotonic()
        child.signal(signal.SIGTERM)
        assert child.exit_code() == 128 + signal.SIGTERM
        assert time.monotonic() - started < 2
        running.close()


def config_of(path: Path) -> EngineConfig:
    return EngineConfig(ModelConfig(str(path), "m"), CacheConfig(num_kv_blocks=64), backend=BackendConfig("reference"))


def test_a_real_file_is_served(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    code = "import sys; from tests.server.test_process import serve_file; serve_file(sys.argv[1])"
    child = Child("-c", code, str(path))
    try:
        assert child.ready_line.startswith("octavo: m is ready at http://127.0.0.1:")
        status, answer = child.request("POST", PATH, {"model": "m", "prompt": "hello world", "max_tokens": 4, "temperature": 0})
        assert status == 200 and answer["usage"]["completion_tokens"] == 4
        child.signal(signal.SIGTERM)
        assert child.exit_code() == 0
    finally:
        child.process.kill()
        child.process.communicate()


def serve_file(path: str) -> None:
    run_server(config_of(Path(path)), port=0)


def test_a_port_in_use_is_known_before_the_model_loads(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"port.*{port}"):
            run_server(config_of(tmp_path / "missing.gguf"), port=port)
