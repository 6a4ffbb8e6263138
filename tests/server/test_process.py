"""The server as a process: ready line, signals with work in flight, exit codes, a port in use, a real model file."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.config import BackendConfig, CacheConfig, ConfigError, EngineConfig, ModelConfig
from octavo.models.model_file import ModelFileError
from octavo.server.launch import run_server
from octavo.server.options import ServerOptions
from tests.engine.step_gate import VARIABLE, StepGate
from tests.models.tiny import write_tiny_gguf
from tests.server.harness import TIMEOUT_S, reserved_port, sse_events, strict_json, wait_until

PATH = "/v1/completions"
ROOT = Path(__file__).parents[2]


class Child:
    """A process that prints one line when it is ready."""

    def __init__(self, *args: str, environment: dict[str, str] | None = None) -> None:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), **(environment or {})}
        self.process = subprocess.Popen(
            [sys.executable, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, cwd=ROOT
        )
        assert self.process.stdout is not None
        self.ready_line = self.process.stdout.readline().strip()
        port = re.search(r"(?:^|:)(\d+)(?: |$)", self.ready_line)
        assert port is not None, (self.ready_line, self.process.communicate())
        self.port = int(port[1])

    def request(self, method: str, path: str, body: Any = None) -> tuple[int, dict[str, Any]]:
        status, data = self.exchange(method, path, body)
        return status, strict_json(data)

    def exchange(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_S)
        with contextlib.closing(connection):
            connection.request(method, path, None if body is None else json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()

    def num_requests(self) -> int:
        """That run or wait."""
        _, data = self.exchange("GET", "/metrics")
        return sum(int(float(value)) for value in re.findall(rb"^octavo_num_requests_(?:running|waiting) (\S+)$", data, re.MULTILINE))

    def wait_until_it_drains(self) -> None:
        wait_until(lambda: self.exchange("GET", "/health")[0] == 503)

    def open_stream(self, num_tokens: int, **fields: Any) -> socket.socket:
        data = json.dumps({"prompt": "x", "max_tokens": num_tokens, "ignore_eos": True, "stream": True, **fields}).encode()
        connection = socket.create_connection(("127.0.0.1", self.port), TIMEOUT_S)
        connection.sendall(f"POST {PATH} HTTP/1.1\r\nHost: t\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        return connection

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def exit_code(self) -> int:
        return self.process.wait(TIMEOUT_S)


@contextlib.contextmanager
def scripted(drain_s: float, delay_s: float, gate: StepGate | None = None) -> Iterator[Child]:
    environment = {} if gate is None else {VARIABLE: str(gate.path)}
    child = Child("-m", "tests.server.serve_scripted", str(drain_s), str(delay_s), environment=environment)
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
def test_running_and_waiting_requests_finish_within_the_drain(tmp_path: Path, number: int) -> None:
    gate = StepGate(tmp_path / "steps")
    with scripted(drain_s=TIMEOUT_S, delay_s=0.0, gate=gate) as child:
        gate.allow(0)
        steps = itertools.count(1)

        def arrive(num_tokens: int, num_requests: int) -> list[socket.socket]:
            """Four more requests. They are taken in between steps, of which each look at the gauges allows one."""
            streams = [child.open_stream(num_tokens) for _ in range(4)]
            wait_until(lambda: (gate.allow(next(steps)), child.num_requests())[1] == num_requests)
            return streams

        running, waiting = arrive(400, 4), arrive(3, 8)
        wait_for_streams(child, running)
        idle = http.client.HTTPConnection("127.0.0.1", child.port, timeout=TIMEOUT_S)
        idle.request("GET", "/health")
        assert idle.getresponse().read() == b'{"status":"ok"}'
        child.signal(number)
        child.wait_until_it_drains()
        status, body = child.request("POST", PATH, {"prompt": "x"})
        assert status == 503 and "shutting down" in body["error"]["message"]
        assert child.request("GET", "/health")[0] == 503 and child.request("GET", "/health/live")[0] == 200
        gate.open()
        for connection, num_tokens in [(c, 400) for c in running] + [(c, 3) for c in waiting]:
            *events, done = sse_events(connection)
            assert len(events) == num_tokens and done == "[DONE]"
        assert child.exit_code() == 0
        idle.close()
        with pytest.raises(ConnectionError):
            socket.create_connection(("127.0.0.1", child.port), TIMEOUT_S)


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
        child.wait_until_it_drains()
        child.signal(signal.SIGTERM)
        assert child.exit_code() == 128 + signal.SIGTERM  # waited for less than the 600 s that it would drain
        running.close()


def config_of(path: Path, backend: str, num_kv_blocks: int = 64) -> EngineConfig:
    threads = 1 if backend == "cpu" else None  # the other has none of its own
    cache = CacheConfig(num_kv_blocks=num_kv_blocks)
    return EngineConfig(ModelConfig(str(path), "m"), cache, backend=BackendConfig(backend, threads=threads))


@pytest.fixture
def port() -> Iterator[int]:
    with reserved_port() as port:
        yield port


@contextlib.contextmanager
def serving_file(path: Path, backend: str, port: int = 0, drain_s: float = 30.0, num_kv_blocks: int = 64) -> Iterator[Child]:
    code = "import sys; from tests.server.test_process import serve_file; serve_file(*sys.argv[1:])"
    child = Child("-c", code, str(path), backend, str(port), str(drain_s), str(num_kv_blocks))
    try:
        yield child
    finally:
        child.process.kill()
        child.process.communicate()


def serve_file(path: str, backend: str, port: str, drain_s: str = "30", num_kv_blocks: str = "64") -> None:
    run_server(config_of(Path(path), backend, int(num_kv_blocks)), port=int(port), options=ServerOptions(drain_s=float(drain_s)))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("busy", [False, True])
def test_a_real_file_is_served_and_nothing_said_at_the_end(tmp_path: Path, backend: str, busy: bool) -> None:
    with serving_file(write_tiny_gguf(tmp_path / "tiny.gguf"), backend) as child:
        assert child.ready_line.startswith("octavo: m is ready at http://127.0.0.1:")
        status, answer = child.request("POST", PATH, {"model": "m", "prompt": "hello world", "max_tokens": 4, "temperature": 0})
        assert status == 200 and answer["usage"]["completion_tokens"] == 4
        streams = [child.open_stream(200) for _ in range(3 * busy)]
        wait_for_streams(child, streams)
        child.signal(signal.SIGTERM)
        for stream in streams:
            assert list(sse_events(stream))[-1] == "[DONE]"
        assert child.exit_code() == 0
        _, stderr = child.process.communicate()
        assert stderr == "octavo: shutting down; running requests have 30 s\n"  # no leak reported by the native module, no trace


def test_a_killed_server_can_be_started_again_at_once_on_its_port(tmp_path: Path, port: int) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", context=8192)
    for _ in range(3):
        with serving_file(path, "cpu", port, num_kv_blocks=1600) as child:
            assert child.port == port
            # More than any kernel keeps for a client that does not read: none of them can end before this one reads.
            streams = [child.open_stream(8000, logprobs=20) for _ in range(3)]
            wait_for_streams(child, streams)
            child.signal(signal.SIGKILL)
            assert child.exit_code() == -signal.SIGKILL
            for stream in streams:
                with stream, pytest.raises(ValueError), stream.makefile("rb") as file:  # the stream breaks off; it does not end
                    assert b" 200 " in file.readline()
                    while file.readline() != b"\r\n":
                        pass
                    while int(file.readline(), 16):
                        file.readline()
                        file.readline()
                        file.readline()


def test_requests_that_have_not_arrived_are_not_waited_for(tmp_path: Path) -> None:
    with serving_file(write_tiny_gguf(tmp_path / "tiny.gguf"), "cpu", drain_s=600.0) as child:
        starts = [b"", b"POST", f"POST {PATH} HTTP/1.1\r\nHost: t\r\nContent-Length: 100\r\n\r\n".encode() + b"{"]
        slow = [socket.create_connection(("127.0.0.1", child.port), TIMEOUT_S) for _ in starts]
        for connection, start in zip(slow, starts, strict=True):
            connection.sendall(start)
        assert child.request("GET", "/health")[0] == 200
        child.signal(signal.SIGTERM)
        answers = [connection.makefile("rb").read() for connection in slow]
        assert answers[:2] == [b"", b""] and b" 503 " in answers[2] and b"shutting down" in answers[2]
        assert child.exit_code() == 0  # waited for less than the 600 s that it would drain
        assert child.process.communicate()[1] == "octavo: shutting down; running requests have 600 s\n"


def serve_with_few_files(path: str, num_files: str) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_NOFILE, (int(num_files), int(num_files)))
    serve_file(path, "cpu", "0")


def test_more_connections_than_file_descriptors(tmp_path: Path) -> None:
    """Who is too many is turned away; who is served goes on; the log does not fill; and afterwards all is well."""
    path = write_tiny_gguf(tmp_path / "tiny.gguf", context=4096)
    code = "import sys; from tests.server.test_process import serve_with_few_files; serve_with_few_files(*sys.argv[1:])"
    child = Child("-c", code, str(path), "240")
    try:
        stream = child.open_stream(1000)
        wait_for_streams(child, [stream])
        crowd = [socket.create_connection(("127.0.0.1", child.port), TIMEOUT_S) for _ in range(400)]
        answers = [connection.recv(1000) for connection in crowd[200:]]
        assert all(b" 503 " in answer and b'"overloaded"' in answer for answer in answers)
        assert list(sse_events(stream))[-1] == "[DONE]"
        for connection in crowd:
            connection.close()
        wait_until(lambda: child.request("POST", PATH, {"prompt": "x", "max_tokens": 1})[0] == 200)
        child.signal(signal.SIGTERM)
        assert child.exit_code() == 0
        assert child.process.communicate()[1] == "octavo: shutting down; running requests have 30 s\n"
    finally:
        child.process.kill()
        child.process.communicate()


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("api_key", {"api_key": " "}),
        ("max_body_size", {"max_body_bytes": 0}),
        *(("drain_s", {"drain_s": value}) for value in (-1, float("nan"), float("inf"))),
        *((name, {name: value}) for name in ("head_s", "stall_s") for value in (0, -1, float("nan"), float("inf"))),
    ],
)
def test_options_of_the_server_have_limits(field: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: "):
        ServerOptions(**options)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF" + bytes(100), bytes(1000)])
def test_a_broken_file_is_an_error_and_frees_the_port(tmp_path: Path, port: int, content: bytes) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelFileError):
        run_server(config_of(path, "cpu"), port=port)
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_a_port_in_use_is_known_before_the_model_loads(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"port.*{port}"):
            run_server(config_of(tmp_path / "missing.gguf", "reference"), port=port)
