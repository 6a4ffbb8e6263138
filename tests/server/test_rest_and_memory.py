"""What the server costs when nobody asks, and whether it grows with those who did."""

from __future__ import annotations

import gc
import http.client
import json
import os
import re
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.config import CacheConfig, EngineConfig, ModelConfig
from octavo.engine.engine import Engine
from tests.models.tiny import write_tiny_gguf
from tests.server.harness import RunningServer, wait_until
from tests.server.test_process import serving_file

PATH = "/v1/completions"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf", layers=1, context=512)


@pytest.fixture
def server(path: Path) -> Iterator[RunningServer]:
    with RunningServer(Engine.load(EngineConfig(ModelConfig(str(path), "m"), CacheConfig(num_kv_blocks=64)))) as running:
        yield running


def test_an_idle_process_takes_less_than_a_hundredth_of_a_core(path: Path) -> None:
    with serving_file(path, "cpu") as child:
        assert child.request("POST", PATH, {"prompt": "x", "max_tokens": 3})[0] == 200
        time.sleep(0.2)
        stat = Path(f"/proc/{child.process.pid}/stat")

        def busy_s() -> float:
            fields = stat.read_text().rsplit(")", 1)[1].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

        before_s, started_s = busy_s(), time.monotonic()
        time.sleep(3)
        assert busy_s() - before_s <= 0.01 * (time.monotonic() - started_s) + 0.01  # 0.01: one tick of the clock


def anonymous_bytes() -> int:
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def ask_many(connection: http.client.HTTPConnection, numbers: range) -> None:
    for i in numbers:
        prompt = [5 + (i * 7 + j) % 400 for j in range(1 + i % 40)]
        body = {"prompt": prompt, "max_tokens": 1 + i % 3, "stream": i % 2 == 0, "logprobs": i % 4, "n": 1 + i % 2, "stop": ["zz"]}
        if i % 10 == 0:
            body = {"prompt": [100_000]}  # refused
        connection.request("POST", PATH, json.dumps(body))
        response = connection.getresponse()
        response.read()
        assert response.status == (400 if i % 10 == 0 else 200)


def test_memory_does_not_grow_with_requests(server: RunningServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    timeline = server.engine.timeline  # what it keeps is bounded, by bounds that this test would take long to reach
    timeline.ended_records.capacity = 100  # accounts of ended requests
    timeline.window._seconds = deque(maxlen=1)  # gaps, by the second
    ask_many(connection, range(700))  # fills the prefix cache many times over, what accounts there are, and all that is made on first use
    wait_until(server.is_idle)
    gc.collect()
    num_objects, num_bytes = len(gc.get_objects()), anonymous_bytes()
    ask_many(connection, range(700, 1700))
    wait_until(server.is_idle)
    gc.collect()
    assert len(gc.get_objects()) - num_objects < 250  # of 1,000 requests not one object each
    assert anonymous_bytes() - num_bytes < 1 << 20
    connection.close()
