"""`octavo bench start`: its record, what it hands on, and the memory of a start, which holds the weights once."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from octavo.bench.start import Start, start_once
from octavo.models.loading import open_model
from tests.cli.conftest import Octavo
from tests.models.tiny import write_tiny_gguf

ROOT = Path(__file__).parents[2]
ATTEMPTS = 5  # allocators and the kernel add to any one peak; a second copy of the weights is in each
KEYS = {
    *("bench", "model", "serve_args", "repeat", "ready_s", "ready_s_each", "cpus", "date"),
    *("peak_rss_bytes", "anon_rss_bytes", "file_rss_bytes"),
}


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers are processes of their own, which find the sources that are tested."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))


def test_the_last_line_is_the_record(octavo: Octavo, tiny: Path) -> None:
    ended = octavo("bench", "start", "--model", tiny, "--repeat", "2", "--threads", "1", "--num-kv-blocks", "8")
    assert ended.code == 0 and ended.err == ""
    head, last = ended.out.splitlines()
    record = json.loads(last)
    assert record.keys() == KEYS
    assert record["serve_args"] == ["--threads", "1", "--num-kv-blocks", "8"]
    assert record["repeat"] == len(record["ready_s_each"]) == 2 and record["ready_s"] > 0
    assert "ready" in head and "medians of 2" in head


def test_what_the_server_refuses_is_the_error(octavo: Octavo, tiny: Path) -> None:
    ended = octavo("bench", "start", "--model", tiny, "--repeat", "1", "--json", "--threads", "0")
    assert ended.code == 1 and ended.out == ""
    assert "the server ended with code 2" in ended.err and "'--threads': 0 is not allowed" in ended.err


@pytest.mark.skipif(sys.platform != "linux", reason="peaks are read from /proc")
def test_a_start_holds_the_weights_once(tmp_path: Path) -> None:
    """Between two models that differ in their weights alone, the peak differs by at most 1.25 x their bytes.

    Holding the file's pages and the packed weights together would make it 2, and a tied embedding held twice still more.
    """
    small = write_tiny_gguf(tmp_path / "small.gguf", tied=True, tensor_type="Q8_0")
    big = write_big(tmp_path / "big.gguf")
    weights = [sum(len(w.data) for w in open_model(path).body.weights.values()) for path in (small, big)]
    assert weights[1] - weights[0] > 60e6
    seen = list[list[int]]()
    for _ in range(ATTEMPTS):
        seen.append(peaks := [peak_of(start(path)) for path in (small, big)])
        if peaks[1] - peaks[0] <= 1.25 * (weights[1] - weights[0]) and peaks[1] <= 1.25 * weights[1] + 150e6:
            return
    pytest.fail(f"peaks of two models with {weights} bytes of weights: {seen}")


def write_big(path: Path) -> Path:
    """Wide feed-forward matrices of zeros, so that it is written fast: 3 x 512 x 20480 in each of 2 layers."""
    hidden, ffn = 512, 20480
    shapes = {"ffn_gate": (ffn, hidden), "ffn_up": (ffn, hidden), "ffn_down": (hidden, ffn)}
    zeros = {f"blk.{layer}.{name}.weight": np.zeros(shape, np.float32) for layer in range(2) for name, shape in shapes.items()}
    return write_tiny_gguf(path, tied=True, tensor_type="Q8_0", hidden=hidden, ffn=ffn, tensors=zeros)


def start(path: Path) -> Start:
    argv = [sys.executable, "-m", "octavo.cli.main", "serve", "--model", str(path), "--port", "0", "--num-kv-blocks", "8", "--threads", "2"]
    return start_once(argv)


def peak_of(measured: Start) -> int:
    assert measured.peak_rss_bytes is not None
    return measured.peak_rss_bytes
