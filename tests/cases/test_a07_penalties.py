"""Penalties and bias act before the best token is chosen, row by row (A07), on a model whose logits are known in closed form.

Its hidden size is its vocabulary, its embedding the identity, and attention and MLP write nothing; so the logits after a token are one
column of the output matrix, times sqrt(hidden) from the last norm.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from octavo.core.request import SamplingParams
from tests.backends.cpu_runs import cpu_logits, make_cpu
from tests.backends.reference_runs import open_gguf_weights
from tests.cases.harness import Job, open_engine, run
from tests.models.tiny import write_tiny_gguf

SIZE = 288  # vocabulary and hidden
A, B = 100, 101


@pytest.fixture(scope="module")
def bigram(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """After A: A 5, B 4, all else -10. After B: A 5, B 0, all else -10. After anything else: B."""
    logits = np.full((SIZE, SIZE), -10.0, np.float32)  # [next, last]
    logits[B] = 5.0
    logits[[A, B], A] = 5.0, 4.0
    logits[[A, B], B] = 5.0, 0.0
    zero = np.zeros((SIZE, SIZE), np.float32)
    tensors = {
        "token_embd.weight": np.eye(SIZE, dtype=np.float32), "output.weight": logits / np.float32(np.sqrt(SIZE)),
        "output_norm.weight": np.ones(SIZE, np.float32), "blk.0.attn_output.weight": zero, "blk.0.ffn_down.weight": zero[:, :32],
    }  # fmt: skip
    path = tmp_path_factory.mktemp("models") / "bigram.gguf"
    return write_tiny_gguf(path, layers=1, hidden=SIZE, heads=9, kv_heads=3, ffn=32, vocab=SIZE, tensors=tensors)


CASES: dict[str, tuple[dict[str, object], list[int]]] = {
    "none": ({}, [A, A, A, A]),
    "frequency 0.6": ({"frequency_penalty": 0.6}, [A, A, B, A]),  # 5, 4.4, then 3.8 < 4; after B: 3.8 > -0.6
    "frequency 2": ({"frequency_penalty": 2.0}, [A, B, A, B]),  # 3 < 4; after B: 3 > -2; then 1 < 2
    "presence 2": ({"presence_penalty": 2.0}, [A, B, A, A]),  # 3 < 4; after B 3 > -2; then 3 > 2
    "repetition 1.5": ({"repetition_penalty": 1.5}, [B, A, A, A]),  # the prompt counts: 5 / 1.5 < 4; then 3.33 > 0 and 3.33 > 2.67
    "bias": ({"logit_bias": {B: 3.0}}, [B, A, B, A]),  # 7 > 5; after B: 5 > 3
}


def params(**change: object) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0, "max_tokens": 4, "ignore_eos": True} | change))  # type: ignore[arg-type]


def test_the_model_is_what_it_should_be(bigram: Path) -> None:
    """Within what the epsilon of the norms takes away."""
    for compute in ("f32", "fast"):
        after_a = cpu_logits(make_cpu(open_gguf_weights(bigram), compute), [7, A], [0])[1]
        assert np.allclose(after_a[[A, B, 7]], [5.0, 4.0, -10.0], rtol=0.003)


@pytest.mark.parametrize("name", CASES)
def test_alone_and_beside_rows_without_penalties(bigram: Path, name: str) -> None:
    change, want = CASES[name]
    with open_engine(bigram, num_kv_blocks=32) as engine:
        alone = Job([A], params(**change))
        run(engine, alone)
        rows = [Job([A], params(**change)) if i % 3 == 1 else Job([A], params()) for i in range(9)]
        run(engine, *rows)
    assert alone.answer()[0] == want
    assert [row.answer()[0] for row in rows] == [want if i % 3 == 1 else [A, A, A, A] for i in range(9)]
