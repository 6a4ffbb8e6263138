"""`octavo bench cascade`: its record, exact counts in it, and cases that are refused."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import Octavo


def test_record(octavo: Octavo, tiny: Path) -> None:
    sizes = ("--streams", "4", "--streams", "1", "--shared", "0", "--shared", "576", "--own", "5", "--seconds", "0.001")
    ended = octavo("bench", "cascade", "--model", tiny, "--threads", "1", "--num-kv-blocks", "192", *sizes)
    assert ended.code == 0 and ended.err == ""
    *shown, last = ended.out.splitlines()
    record = json.loads(last)
    for level in ("attention", "engine"):
        rows = {(row["num_streams"], row["num_shared"]): row for row in record[level]}
        assert set(rows) == {(4, 0), (4, 576), (1, 0), (1, 576)}
        assert all(row["together_s"] > 0 and row["alone_s"] > 0 and row["gain"] > 0 for row in rows.values())
        both = rows[4, 576]
        assert both["together_bytes"] > 0 and both["alone_bytes"] >= both["own_bytes"] + 4 * both["together_bytes"]
        assert all(row["together_bytes"] == 0 for case, row in rows.items() if case != (4, 576))
    assert sum("576" in line for line in shown) == 4


def test_refused(octavo: Octavo, tiny: Path) -> None:
    ended = octavo("bench", "cascade", "--model", tiny, "--threads", "1", "--streams", "4", "--shared", "100000")
    assert ended.code == 1 and "--shared: " in ended.err and "more than the context of" in ended.err
    ended = octavo("bench", "cascade", "--model", tiny, "--no-enable-prefix-caching")
    assert ended.code == 2 and "--no-enable-prefix-caching" in ended.err
