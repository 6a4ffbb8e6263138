"""`octavo bench kv`: prompts go to disk, come back in another engine and from host memory, and answers that differ are an error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.bench import kv
from octavo.bench.kv import KVCase, run_kv
from octavo.config import BackendConfig, CacheConfig, EngineConfig, ModelConfig
from octavo.costs.restore import RestoreModel
from tests.models.tiny import write_tiny_gguf

CASE = KVCase(num_prompt=100, num_output=3, repeat=3, cold=True)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    monkeypatch.setattr(RestoreModel, "restoring_pays", lambda *_: True)  # whatever copying and computing take here
    monkeypatch.setattr(RestoreModel, "recompute_s", lambda *_: 60.0)
    cache = CacheConfig(kv_host_memory=1 << 20, kv_disk_path=str(tmp_path / "kv"))
    return EngineConfig(ModelConfig(str(write_tiny_gguf(tmp_path / "rand.gguf"))), cache, backend=BackendConfig(threads=1))


def test_the_record(config: EngineConfig) -> None:
    lines: list[str] = []
    run_kv(config, CASE, lines.append, as_json=False)
    record = json.loads(lines[-1])
    assert len(lines) == 5 and "answers equal to the bit" in lines[0]
    assert (record["computed_cached"], record["disk_cached"], record["host_cached"]) == (0, 96, 96)
    assert record["computed_ratio"] == 1.0 and record["disk_first_s"] > 0 and record["host_ratio"] > 0


def test_answers_that_differ_are_an_error(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = kv._answer
    numbers = iter(range(99))

    def changed(*args: object) -> kv._Answer:
        one = answer(*args)  # type: ignore[arg-type]
        one.tokens[0] = (next(numbers), 0.0)
        return one

    monkeypatch.setattr(kv, "_answer", changed)
    with pytest.raises(RuntimeError, match="answers from disk differ"):
        run_kv(config, CASE, lambda _: None, as_json=True)
