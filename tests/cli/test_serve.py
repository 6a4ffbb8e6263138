"""`octavo serve`: from flags to the server, and one real process."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from octavo.cli import serve as serve_module
from octavo.config import EngineConfig
from octavo.server import launch
from octavo.server.options import ServerOptions
from tests.cli.conftest import Octavo

ROOT = Path(__file__).parents[2]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What ``run_server`` was called with; nothing is fetched or served."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(serve_module, "fetched", lambda config: config)
    monkeypatch.setattr(launch, "run_server", lambda *args: calls.append(args))
    return calls


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ([], "smollm2"),
        (["--model", "gemma3-270m"], "gemma3-270m"),
        (["--model", "hf:me/repo:a.gguf"], "hf:me/repo:a.gguf"),
        (["--model", "/models/a.gguf"], None),  # the file's own name, which loading gives
        (["--model", "smollm2", "--served-model-name", "m"], "m"),
    ],
)
def test_the_served_name_is_the_model_as_typed(octavo: Octavo, started: list, flags: list[str], name: str | None) -> None:
    assert octavo("serve", *flags).code == 0
    config: EngineConfig = started[0][0]
    assert config.model.served_model_name == name


def test_flags_reach_the_configuration(octavo: Octavo, started: list, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_API_KEY", "secret")
    flags = "--host :: --port 81 --max-body-size 1.5k --drain-s 2 --max-model-len 99 --max-num-seqs 3 --max-num-batched-tokens 77 "
    flags += "--block-size 32 --kv-cache-memory 2GiB --kv-cache-dtype bf16 --no-enable-prefix-caching "
    flags += "--no-enable-chunked-prefill --backend cpu --compute f32 --threads 2"
    assert octavo("serve", *flags.split()).code == 0
    config, host, port, options, *_ = started[0]
    assert (host, port) == ("::", 81)
    assert options == ServerOptions(api_key="secret", max_body_bytes=1536, drain_s=2.0)
    assert (config.model.max_model_len, config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens) == (99, 3, 77)
    assert (config.cache.block_size, config.cache.num_kv_blocks, config.cache.kv_cache_memory) == (32, None, 2 << 30)
    assert config.cache.kv_cache_dtype == "bf16" and not config.cache.enable_prefix_caching
    assert not config.scheduler.enable_chunked_prefill
    assert (config.backend.backend, config.backend.compute, config.backend.threads) == ("cpu", "f32", 2)


def test_the_pool_is_given_in_blocks_or_in_bytes(octavo: Octavo, started: list) -> None:
    assert octavo("serve", "--num-kv-blocks", "7").code == 0
    assert started[0][0].cache.num_kv_blocks == 7
    ended = octavo("serve", "--num-kv-blocks", "7", "--kv-cache-memory", "2GiB")
    assert ended.code == 2 and "'--kv-cache-memory': 2147483648 is not allowed; give either num_kv_blocks or kv_cache_memory" in ended.err


def test_the_defaults_of_the_flags_are_those_of_the_configuration(octavo: Octavo, started: list) -> None:
    assert octavo("serve", "--served-model-name", "m").code == 0
    config, host, port, options, *_ = started[0]
    default = EngineConfig()
    assert (config.cache, config.scheduler, config.backend) == (default.cache, default.scheduler, default.backend)
    assert (config.model.model, config.model.max_model_len) == (default.model.model, default.model.max_model_len)
    assert (host, port, options) == ("127.0.0.1", 8000, ServerOptions())


def test_a_server_as_a_process(tiny: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "octavo.cli.main", "serve", "--model", str(tiny), "--port", "0", "--num-kv-blocks", "64"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    try:
        assert process.stdout is not None
        ready = re.fullmatch(r"octavo: tiny is ready at http://127.0.0.1:(\d+) \(Ctrl-C stops\)\n", process.stdout.readline())
        assert ready is not None, process.communicate()
        connection = http.client.HTTPConnection("127.0.0.1", int(ready[1]), timeout=120)
        connection.request("POST", "/v1/completions", json.dumps({"model": "tiny", "prompt": "hello", "max_tokens": 3, "temperature": 0}))
        answer = json.loads(connection.getresponse().read())
        assert answer["model"] == "tiny" and answer["usage"]["completion_tokens"] == 3
        connection.close()
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 0
        assert "shutting down" in process.communicate()[1]
    finally:
        process.kill()
        process.communicate()
