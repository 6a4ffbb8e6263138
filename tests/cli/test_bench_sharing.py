"""`octavo bench sharing`: what it prints and its record."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import Octavo


def test_the_command(octavo: Octavo, tiny: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 30)
    argv = ("bench", "sharing", "--model", tiny, "--dataset", "alpaca", "--width", "2", "--requests", "2", "--threads", "1")
    *shown, last = octavo(*argv, "--text", text).out.splitlines()
    record = json.loads(last)
    runs = [(run["method"], run["width"], run["paper_percent"]) for run in record["runs"]]
    assert runs == [("samples", 2, "6.09"), ("beams", 2, "37.56")]
    assert shown[0] == "tiny: KV blocks saved by sharing, 2 requests, blocks of 16 tokens" and len(shown) == 5
    assert "6.09 %" in shown[2] and "37.56 %" in shown[3]
    (line,) = octavo(*argv, "--json", "--seed", "1").out.splitlines()
    assert json.loads(line)["runs"][0]["saved_by_step"] >= 0
