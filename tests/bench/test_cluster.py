"""The bench of a front end: every event of every stream comes out, through a real server and stub workers; what is lost is found out."""

from __future__ import annotations

import json
import os
import resource
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from octavo.bench import cluster as bench_cluster
from octavo.bench.cluster import ClusterCase, allowed_streams, run_cluster, texts_of, usage_of
from octavo.cli.main import cli
from tests.models.tiny import write_tiny_gguf


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_tiny_gguf(path)
    return path


def test_every_event_of_every_stream_comes_out(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_cluster, "IDLE_S", 0.05)
    flags = ["-m", str(model), "--streams", "60", "--rate", "600", "--duration", "0.5", "--workers", "3"]
    found = CliRunner().invoke(cli, ["bench", "cluster", *flags])
    assert found.exit_code == 0, (found.output, found.exception)
    *lines, last = found.output.splitlines()
    record = json.loads(last)
    assert (record["num_streams"], record["num_workers"], record["num_tokens"]) == (60, 3, 5)
    assert record["events_sent"] == record["events_received"] == 300
    assert (record["lost"], record["wrong"], record["failed"]) == (0, 0, {})
    assert record["rss_bytes"] > 1 << 20 and record["cpu_us_per_event"] >= 0
    assert any("processor time an event" in line for line in lines) and any("KiB a stream" in line for line in lines)


def test_wrong_streams_are_found_out(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_cluster, "IDLE_S", 0.05)
    monkeypatch.setattr(bench_cluster, "texts_of", lambda place, n, size: texts_of(place, n, size)[:: -1 if place == 3 else 1])
    with pytest.raises(RuntimeError, match="0 of 16 events were lost; 0 streams failed, 1 were wrong"):
        run_cluster(str(model), ClusterCase(8, 1, 160.0, 0.1), lambda line: None)


def test_the_limit_of_open_files_is_raised_as_far_as_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"now": (100, 1000)}
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits["now"])
    monkeypatch.setattr(resource, "setrlimit", lambda which, new: limits.update(now=new))
    assert allowed_streams(500) == 500 and limits["now"] == (500 + bench_cluster.OWN_FILES, 1000)
    assert allowed_streams(5000) == 1000 - bench_cluster.OWN_FILES and limits["now"] == (1000, 1000)
    limits["now"] = (100, resource.RLIM_INFINITY)
    assert allowed_streams(5000) == 5000


def test_the_usage_of_a_process() -> None:
    before_s, rss_bytes = usage_of(os.getpid())
    begin_s = time.process_time()
    while time.process_time() - begin_s < 0.05:
        pass
    assert usage_of(os.getpid())[0] - before_s >= 0.03 and rss_bytes > 1 << 20
