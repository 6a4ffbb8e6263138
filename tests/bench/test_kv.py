"""`octavo bench kv`: prompts go to disk, come back in another engine and from host memory, and answers that differ are an error.
`octavo bench kv-rounding`: the error of tiers in int8, along the exact path."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octavo.bench import kv
from octavo.bench.kv import KVCase, run_kv
from octavo.bench.kv_rounding import RoundingCase, run_rounding
from octavo.config import BackendConfig, CacheConfig, ConfigError, EngineConfig, ModelConfig
from octavo.costs.restore import RestoreModel
from octavo.engine.engine import Engine
from tests.models.tiny import write_tiny_gguf

CASE = KVCase(num_prompt=100, num_output=3, repeat=3)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    monkeypatch.setattr(RestoreModel, "restoring_pays", lambda *_: True)  # whatever copying and computing take here
    monkeypatch.setattr(RestoreModel, "recompute_s", lambda *_: 60.0)
    (tmp_path / "kv").mkdir()
    cache = CacheConfig(kv_host_memory=1 << 20, kv_disk_path=str(tmp_path / "kv"))
    return EngineConfig(ModelConfig(str(write_tiny_gguf(tmp_path / "rand.gguf"))), cache, backend=BackendConfig(threads=1))


def test_the_record(config: EngineConfig, tmp_path: Path) -> None:
    lines: list[str] = []
    run_kv(config, CASE, lines.append, as_json=False)
    rows = json.loads(lines[-1])["rows"]
    assert "at most 0.25 of computing" in lines[0] and len(lines[1].splitlines()) == 1 + len(rows) and "0, to the bit" in lines[1]
    from_tiers = ["disk (warm)", "host memory", "disk (cold)"]
    assert [(row["source"], row["form"]) for row in rows] == [
        ("computed", "exact"), *((source, form) for form in ("exact", "int8") for source in from_tiers)
    ]  # fmt: skip
    assert [row["cached"] for row in rows] == [0, 96, 96, 96, 96, 96, 96]
    assert rows[0]["ratio"] == 1.0 and all(row["first_s"] > 0 for row in rows)
    assert all(row["rms_logprob"] == 0.0 and row["equal_answers"] == 3 for row in rows[:4])
    assert all(0.0 < row["rms_logprob"] < 0.1 and row["block_bytes"] < 0.7 * rows[1]["block_bytes"] for row in rows[4:])
    assert not list((tmp_path / "kv").iterdir()), "the folder is left as it was"


def test_a_cache_in_int8_has_exact_rows_alone(config: EngineConfig) -> None:
    lines: list[str] = []
    run_kv(replace(config, cache=replace(config.cache, kv_cache_dtype="int8")), CASE, lines.append, as_json=True)
    assert [row["form"] for row in json.loads(lines[0])["rows"]] == ["exact"] * 4


def test_answers_that_differ_are_an_error(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = kv._answer
    numbers = iter(range(99))

    def changed(*args: object) -> kv._Answer:
        one = answer(*args)  # type: ignore[arg-type]
        one.tokens[0] = (next(numbers), 0.0)
        return one

    monkeypatch.setattr(kv, "_answer", changed)
    with pytest.raises(RuntimeError, match="answers from disk \\(warm\\) differ"):
        run_kv(config, CASE, lambda _: None, as_json=True)


def test_rounding(config: EngineConfig) -> None:
    lines: list[str] = []
    case = RoundingCase(num_prompt=70, num_output=5, num_passages=3)
    run_rounding(config, case, lines.append, as_json=False)
    record = json.loads(lines[-1])
    assert record["positions"] == 15 and record["restored_tokens"] >= 3 * 64 and "+host-int8" in record["fingerprint"]
    assert 0.0 < record["rms_logprob"] <= record["max_logprob"] < 0.2 and 0.0 <= record["same_best_token"] <= 1.0
    assert f"rms of log-probability {record['rms_logprob']:.4f}" in lines[0]
    with pytest.raises(ConfigError, match="nothing is rounded"):
        run_rounding(replace(config, cache=replace(config.cache, kv_cache_dtype="int8")), case, lines.append, as_json=True)


def test_there_is_no_error_where_nothing_is_rounded(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same measurement over blocks that are kept as they are: so what it finds is the rounding."""
    monkeypatch.setattr("octavo.engine.engine.Engine._open_tiers", _open_exact_tiers)
    lines: list[str] = []
    run_rounding(config, RoundingCase(num_prompt=70, num_output=5, num_passages=3), lines.append, as_json=True)
    record = json.loads(lines[-1])
    assert record["restored_tokens"] >= 3 * 64 and record["rms_logprob"] == 0.0 and record["same_best_token"] == 1.0


_open_tiers = Engine._open_tiers


def _open_exact_tiers(engine: Engine, *args: Any) -> Any:
    engine.config = replace(engine.config, cache=replace(engine.config.cache, kv_host_dtype="auto"))
    return _open_tiers(engine, *args)
