"""What the server costs when nobody asks, and whether it grows with those who did."""

from __future__ import annotations

import gc
import http.client
import json
import re
import time
from collections import deque
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from octavo.config import CacheConfig, EngineConfig, ModelConfig
from octavo.engine.engine import Engine
from tests.models.tiny import write_tiny_gguf
from tests.server.harness import TIMEOUT_S, RunningServer, wait_until
from tests.server.test_process import serving_file

PATH = "/v1/completions"
LAP = 250  # requests


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
        clock, shares = (~child.process.pid << 3) | 2, list[float]()  # processor time of the process (clock_getcpuclockid)
        for _ in range(20):  # it may have something to finish in the first of them, and wakes take a slow machine longer now and then
            busy_s, started_s = time.clock_gettime(clock), time.monotonic()
            time.sleep(1.0)
            shares.append((time.clock_gettime(clock) - busy_s) / (time.monotonic() - started_s))
            if shares[-1] < 0.01:
                return
        pytest.fail(f"shares of a core in 20 seconds: {shares}")


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


def size_at_rest(server: RunningServer) -> tuple[int, int]:
    """Python objects and bytes of this process, once nothing is under way."""
    wait_until(server.is_idle)
    gc.collect()
    return len(gc.get_objects()), anonymous_bytes()


@pytest.fixture
def nothing_older() -> Iterator[None]:
    """Objects of before are neither counted nor looked at."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def test_memory_does_not_grow_with_requests(nothing_older: None, server: RunningServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=TIMEOUT_S)
    timeline = server.engine.timeline  # what it keeps is bounded, by bounds that this test would take long to reach
    timeline.ended_records.capacity = 100  # accounts of ended requests
    timeline.window._seconds = deque(maxlen=1)  # gaps, by the second
    ask_many(connection, range(700))  # fills the prefix cache many times over, what accounts there are, and all that is made on first use
    sizes = [size_at_rest(server)]
    for lap in range(4):
        ask_many(connection, range(700 + lap * LAP, 700 + (lap + 1) * LAP))
        sizes.append(size_at_rest(server))
    grown = [(after[0] - before[0], after[1] - before[1]) for before, after in pairwise(sizes)]
    # What every request leaves behind grows in each lap; an allocator that takes another arena does so in one of them.
    assert min(num_objects for num_objects, _ in grown) < LAP // 4, grown
    assert min(num_bytes for _, num_bytes in grown) < LAP << 9, grown  # half a KiB a request
    connection.close()
