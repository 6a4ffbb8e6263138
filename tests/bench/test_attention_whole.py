"""Tiles against all scores: the scores against a slow loop, the measurement against faults put in. Times are not looked at."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from octavo.backends.cpu import _native
from octavo.bench import attention_whole
from octavo.bench.attention_whole import Shape, measure_whole, peak_growth, with_scores
from octavo.engine.engine import Engine
from octavo.engine.llm import make_config
from octavo.models.program import Attention
from tests.models.tiny import write_tiny_gguf

SHAPE = Shape(_native.isa_levels()[-1], 1, Attention("o", "q", "k", "v", 0, 4, 2, 32, 0.2))


def test_scores_against_a_slow_loop() -> None:
    rng, op, rows = np.random.default_rng(0), SHAPE.op, 7
    shapes = ((rows, 4, 32), (rows, 2, 32), (rows, 2, 32), (16, 128))
    q, k, v, output = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    found = with_scores(attention_whole._Inputs(q, k, v, output), op, np.float64)
    for i in range(rows):
        out = np.zeros((4, 32))
        for head in range(4):
            weights = [math.exp(float(q[i, head].astype(float) @ k[j, head // 2].astype(float)) * op.scale) for j in range(i + 1)]
            for j, weight in enumerate(weights):
                out[head] += weight / sum(weights) * v[j, head // 2].astype(float)
        assert found[i] == pytest.approx(output.astype(float) @ out.reshape(-1), rel=1e-9)


@pytest.mark.parametrize("num_rows", [1, 70, 500])
def test_tiles_differ_by_rounding_alone_and_pieces_not_at_all(num_rows: int) -> None:
    found = measure_whole(SHAPE, num_rows, 1)
    assert 0 < found.error < 1e-5 and found.same_in_pieces
    assert found.scores_bytes == 16 * num_rows**2 and found.tiled_s > 0 < found.scores_s
    assert found.peak_bytes is None or found.peak_bytes >= 0


def test_an_error_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = replace(SHAPE.op, scale=0.2001)
    monkeypatch.setattr(attention_whole, "with_scores", lambda inputs, op, dtype: with_scores(inputs, wrong, dtype))
    assert measure_whole(SHAPE, 200, 1).error > 1e-5


def test_pieces_that_differ_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    in_pieces = attention_whole._in_pieces
    monkeypatch.setattr(attention_whole, "_in_pieces", lambda *args: np.nextafter(in_pieces(*args), np.float32(9e9)))
    assert not measure_whole(SHAPE, 100, 1).same_in_pieces


MEASURED = """
import statistics, numpy
from octavo.bench.attention_whole import growth_bytes
for work in (lambda: numpy.ones(50_000_000, numpy.uint8).sum(), lambda: None):
    told = [growth_bytes(work) for _ in range(5)]
    print(-1 if None in told else round(statistics.median(told)))
"""


def test_growth_is_that_of_the_work() -> None:
    """In a process of its own: in this one others' memory is still given back, or touched for the first time, beside it."""
    ended = subprocess.run([sys.executable, "-c", MEASURED], capture_output=True, text=True, check=True)
    some, none = map(int, ended.stdout.split())
    if some < 0:
        pytest.skip("this system does not tell")
    assert 45_000_000 < some < 120_000_000 and none < 10_000_000
    assert peak_growth(SHAPE, 256) is not None


def test_shapes_that_are_not_known_are_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("models")
    for arch, backend, told in (("gemma2", "cpu", "model: .* window or softcap"), ("llama", "reference", "backend: reference")):
        engine = Engine.load(make_config(str(write_tiny_gguf(folder / f"{arch}.gguf", arch)), backend=backend, num_kv_blocks=8))
        try:
            with pytest.raises(ValueError, match=told):
                Shape.of(engine)
        finally:
            engine.close()
