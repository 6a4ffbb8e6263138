"""The figure of measured KV transfer: what it judges, and that it is made of real workers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from octavo.bench.handoff import Row as Timed
from octavo.reproduce import kv_transfer_measured
from octavo.reproduce.kv_transfer_measured import shown
from octavo.reproduce.setup import Setup
from tests.models.tiny import write_tiny_gguf

ALONE = Timed("alone", None, 512, 11_800_000, 490.0, 4.8, 4.4, 770.0)
SERIAL = replace(ALONE, way="serial", link_gbps=1.0, second_ms=110.0, e2e_ms=995.0, e2e_over=29.2)
LAYERWISE = replace(ALONE, way="layer-wise", link_gbps=1.0, second_ms=6.7, e2e_ms=781.0, e2e_over=1.4)


@pytest.mark.parametrize(("layerwise", "hits"), [
    (LAYERWISE, [True, True]),
    (replace(LAYERWISE, second_ms=111.0), [False, True]),
    (replace(LAYERWISE, e2e_ms=1000.0), [True, False]),
])  # fmt: skip
def test_the_order_is_judged_and_nothing_else(layerwise: Timed, hits: list[bool]) -> None:
    figure = shown([ALONE, SERIAL, layerwise], "made up")
    assert [row.hit for row in figure.rows if row.hit is not None] == hits
    assert any("11.8 MB, serial: whole answer longer by" in row.what and row.ours == "29.2 %" for row in figure.rows)


@pytest.mark.soak
def test_real_workers_make_it(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf", "llama", layers=2, hidden=64, heads=4, ffn=64, context=512)
    figure = kv_transfer_measured.run(Setup(model=str(path), quick=True))
    assert sum(row.hit is not None for row in figure.rows) == 2 and len(figure.plots[0].lines) == 3
