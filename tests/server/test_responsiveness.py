"""The server answers others while it works on something large."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from octavo.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from octavo.engine.engine import Engine
from tests.models.tiny import write_tiny_gguf
from tests.server.harness import RunningServer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TEXT = "the quick brown fox jumps over the lazy dog and nobody knows what is the capital of France "


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    path = write_tiny_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf", layers=12, hidden=256, ffn=512, context=8192)
    config = EngineConfig(ModelConfig(str(path), "m"), CacheConfig(num_kv_blocks=1024), SchedulerConfig(max_num_batched_tokens=4096))
    with RunningServer(Engine.load(config)) as running:
        yield running


class HealthWatch:
    """Asks for /health without pause; ``worst_s`` is its slowest answer."""

    def __init__(self, port: int) -> None:
        self.worst_s = 0.0
        self._stop = False
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> HealthWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._thread.join()
        self._connection.close()

    def _run(self) -> None:
        while not self._stop:
            started_s = time.monotonic()
            self._connection.request("GET", "/health")
            response = self._connection.getresponse()
            response.read()
            assert response.status == 200
            self.worst_s = max(self.worst_s, time.monotonic() - started_s)
            time.sleep(0.002)


LARGE: dict[str, tuple[str, dict[str, Any], int]] = {
    "prefill": (COMPLETIONS, {"prompt": [5 + i % 400 for i in range(4000)], "max_tokens": 1}, 200),
    "text": ("/tokenize", {"prompt": TEXT * 20_000}, 200),
    "many texts": (COMPLETIONS, {"prompt": [TEXT * 100] * 200, "max_tokens": 0, "min_tokens": 1}, 400),
    "many token ids": (COMPLETIONS, {"prompt": [[5] * 2000] * 1000 + [[5] * 8192], "max_tokens": 1}, 400),
    "conversation": (CHAT, {"messages": [{"role": "user", "content": "x"}] * 100_000}, 400),
    "token ids": ("/detokenize", {"tokens": [5] * 2_000_000}, 200),
}


ATTEMPTS = 20
"""A busy machine may hold up any one answer; work that blocks the loop holds up one in every attempt."""


@pytest.mark.parametrize("name", LARGE)
def test_health_is_answered_meanwhile(server: RunningServer, name: str) -> None:
    path, body, status = LARGE[name]
    data = json.dumps(body).encode()  # before, since it lets nobody else in this process run
    seen = []
    for _ in range(ATTEMPTS):
        with HealthWatch(server.port) as watch:
            started_s = time.monotonic()
            assert server.request("POST", path, data)[0] == status
            seconds = time.monotonic() - started_s
        seen.append((watch.worst_s, seconds))
        if watch.worst_s < max(0.1, seconds / 3):
            return
    pytest.fail(f"slowest answer and length of the load, seconds: {seen}")


@pytest.mark.parametrize(
    ("prompt", "aside"),
    [([5] * 10, False), ([[5] * 10] * 10, False), ([5] * 20_000, True), ([[5] * 10_000] * 2, True), ([[5]] * 100, True)],
)
def test_many_tokens_or_prompts_are_checked_on_another_thread(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, prompt: list[Any], aside: bool
) -> None:
    threads = []
    prepare = server.engine.prepare_checked

    def prepare_here(*args: Any, **named: Any) -> Any:
        threads.append(threading.current_thread())
        return prepare(*args, **named)

    monkeypatch.setattr(server.engine, "prepare_checked", prepare_here)
    server.request("POST", COMPLETIONS, {"prompt": prompt, "max_tokens": 0})
    assert {thread is not server.thread for thread in threads} == {aside}
