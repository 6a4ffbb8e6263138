"""200 clients that connect, read a few tokens, or none, and leave in every way there is: nothing of them is left."""

from __future__ import annotations

import json
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from octavo.engine.engine import Engine
from octavo.server.options import ServerOptions
from tests.models.tiny import write_tiny_gguf
from tests.server.harness import TIMEOUT_S, RunningServer, wait_until

NUM_CLIENTS = 200
NUM_AT_ONCE = 40
TEXT = "the quick brown fox jumps over the lazy dog and runs into the forest where nobody knows "


def serving(path: Path, num_kv_blocks: int, **scheduler: Any) -> RunningServer:
    config = EngineConfig(ModelConfig(str(path), "m"), CacheConfig(num_kv_blocks=num_kv_blocks), SchedulerConfig(**scheduler))
    return RunningServer(Engine.load(config), ServerOptions())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """The cpu backend on a tiny model; the pool holds a few of the clients' requests at full length."""
    path = write_tiny_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf", context=4096)
    with serving(path, num_kv_blocks=128, max_num_seqs=12, max_num_batched_tokens=128) as running:
        yield running


class Client:
    """One visit, drawn from ``seed``: what is asked, how much of the answer is read, and how the connection ends."""

    def __init__(self, port: int, seed: int) -> None:
        self.rng = random.Random(seed)
        self.port = port
        self.stream = self.rng.random() < 0.6
        self.num_events = self.rng.choice((0, 0, 1, 3, 8)) if self.stream else 0
        self.patience_s = self.rng.choice((0.0, 0.01, 0.1))
        self.how = self.rng.choice(("close", "reset", "shut"))

    def request(self) -> bytes:
        rng = self.rng
        text = (TEXT * 20)[rng.randrange(80) :][: rng.choice((10, 200, 1500))]
        body: dict[str, Any] = {"max_tokens": 3000, "ignore_eos": True, "n": rng.randint(1, 3), "stream": self.stream}
        sampling = ({"temperature": 0}, {"temperature": 1.1, "top_k": 40}, {"logprobs": True, "top_logprobs": 5}, {"stop": ["zzz"]})
        body |= rng.choice(sampling)
        path = "/v1/chat/completions"
        if "top_logprobs" in body or rng.random() < 0.5:
            body["messages"] = [{"role": "user", "content": text}]
        else:
            body["prompt"] = rng.choice((text, [text, text + " now"]))
            path = "/v1/completions"
        data = json.dumps(body).encode()
        return f"POST {path} HTTP/1.1\r\nHost: t\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data

    def visit(self) -> None:
        connection = socket.create_connection(("127.0.0.1", self.port), TIMEOUT_S)
        connection.sendall(self.request())
        received = b""
        while received.count(b"data: ") < self.num_events:
            chunk = connection.recv(4096)
            assert chunk, received
            received += chunk
        assert b'"error"' not in received and b"[DONE]" not in received
        time.sleep(self.patience_s)
        if self.how == "reset":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        elif self.how == "shut":
            connection.shutdown(socket.SHUT_WR)
            time.sleep(self.patience_s)
        connection.close()


def visit_all(server: RunningServer, num_clients: int, num_at_once: int) -> list[str]:
    """Tracebacks of clients that failed."""
    failures: list[str] = []

    def visitor(first: int) -> None:
        for seed in range(first, num_clients, num_at_once):
            try:
                Client(server.port, seed).visit()
            except Exception as error:
                failures.append(f"client {seed}: {error!r}")

    threads = [threading.Thread(target=visitor, args=(i,)) for i in range(num_at_once)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failures


def assert_nothing_is_left(server: RunningServer) -> None:
    wait_until(server.is_idle)
    scheduler = server.engine.scheduler
    scheduler.check_invariants()
    assert scheduler.num_running == scheduler.num_waiting == scheduler.num_used_blocks == 0
    assert scheduler.num_free_blocks + scheduler.num_cached_blocks == scheduler.num_blocks  # cached: in the trie, referenced by nobody
    metrics = server.metrics()
    assert metrics["octavo_num_requests_running"] == metrics["octavo_num_requests_waiting"] == 0
    used, cached, free = (metrics[f'octavo_kv_blocks{{state="{state}"}}'] for state in ("used", "cached", "free"))
    assert used == 0 and cached + free == scheduler.num_blocks
    finished = {r: metrics[f'octavo_requests_finished_total{{reason="{r}"}}'] for r in ("stop", "length", "abort", "error")}
    assert sum(finished.values()) == metrics["octavo_requests_total"]
    assert finished["error"] == metrics["octavo_failed_steps_total"] == 0


def test_clients_that_leave_leave_nothing_behind(server: RunningServer) -> None:
    question = {"prompt": "once upon a time", "max_tokens": 20, "ignore_eos": True, "temperature": 0.8, "seed": 5, "logprobs": 3}
    before = server.post("/v1/completions", question)["choices"]
    resident = server.open_stream("/v1/completions", {"prompt": "x", "max_tokens": 3000, "ignore_eos": True, "n": 6})  # wants all blocks
    assert visit_all(server, NUM_CLIENTS, NUM_AT_ONCE) == []
    wait_until(lambda: server.engine.scheduler.stats.num_preemptions > 0)
    resident.close()
    assert_nothing_is_left(server)
    surely_asked = sum(Client(server.port, seed).num_events > 0 for seed in range(NUM_CLIENTS))  # others left unread
    assert server.metrics()['octavo_requests_finished_total{reason="abort"}'] >= surely_asked > 0.25 * NUM_CLIENTS
    assert server.post("/v1/completions", question)["choices"] == before
    wait_until(lambda: not server.server.server_state.connections)
    assert not server.server.server_state.tasks


@pytest.mark.soak
@pytest.mark.model
def test_clients_of_a_real_model_leave_nothing_behind(smollm2_path: Path) -> None:
    with serving(smollm2_path, num_kv_blocks=1000, max_num_seqs=16) as server:
        question = {"prompt": "The capital of France is", "max_tokens": 12, "temperature": 0, "logprobs": 3}
        before = server.post("/v1/completions", question)["choices"]
        assert visit_all(server, NUM_CLIENTS, NUM_AT_ONCE) == []
        assert_nothing_is_left(server)
        assert server.post("/v1/completions", question)["choices"] == before
