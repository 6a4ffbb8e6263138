"""Penalties and bias act before the best token is chosen, row by row, with drafts and without (A07).

On a model whose logits are known in closed form. The rule itself: tests/sampling/test_rule.py; over HTTP beside running streams:
tests/server/test_completions.py::test_penalties_at_temperature_0.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.core.request import SamplingParams
from tests.backends.cpu_runs import cpu_logits, make_cpu
from tests.backends.reference_runs import open_gguf_weights
from tests.cases.bigram import byte_id, write_bigram
from tests.cases.harness import Job, open_engine, run
from tests.cases.served import served

A, B = byte_id("a"), byte_id("b")


@pytest.fixture(scope="module")
def bigram(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """After a: a 5, b 4, all else -10. After b: a 5, b 0, all else -10. After anything else: b."""
    return write_bigram(tmp_path_factory.mktemp("models") / "bigram.gguf", {A: {A: 5.0, B: 4.0}, B: {A: 5.0, B: 0.0}}, {B: 5.0})


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


SPECULATION: dict[str, dict[str, Any]] = {
    "ngram": {"spec": 5, "spec_method": "ngram", "ngram_min": 1},
    "suffix": {"spec": 5, "spec_method": "suffix", "suffix_min": 1},
    "draft": {"spec": 5, "spec_method": "draft"},
    "self": {"spec": 5, "spec_method": "self", "self_draft_layers": 1},
}


@pytest.mark.parametrize("method", SPECULATION)
@pytest.mark.parametrize("name", CASES)
def test_with_drafts(bigram: Path, name: str, method: str) -> None:
    """Alone, and as the one row with penalties; every row is drafted for, and drafts that know of no penalty do not come true."""
    change, want = CASES[name]
    options = SPECULATION[method] | ({"draft_model": str(bigram)} if method == "draft" else {})
    with open_engine(bigram, num_kv_blocks=32, **options) as engine:
        alone = Job([A], params(**change))
        run(engine, alone)
        stats = engine.speculator.stats
        assert stats.num_proposed > 0
        if method == "draft":  # the model as its own draft draws by the same rule
            assert stats.num_accepted == stats.num_proposed
        rows = [Job([A], params(**change if i == 3 else {})) for i in range(8)]
        run(engine, *rows)
    assert alone.answer()[0] == want
    assert [row.answer()[0] for row in rows] == [want if i == 3 else [A, A, A, A] for i in range(8)]


def test_over_http_with_drafts_and_without(bigram: Path) -> None:
    bodies: dict[str, dict[str, Any]] = {name: dict(change) for name, (change, _) in CASES.items()}
    bodies["bias"] = {"logit_bias": {str(B): 3}}
    bodies["repetition 1.5"] = {"extra_body": {"repetition_penalty": 1.5}}
    with served(bigram, num_kv_blocks=32, ngram_min=1) as (server, client):
        for name, (_, want) in CASES.items():
            for num_drafts in ("off", 5):
                body = {"model": "m", "prompt": "a", "max_tokens": 4, "temperature": 0} | bodies[name]
                body["extra_body"] = body.get("extra_body", {}) | {"speculative": {"num_drafts": num_drafts, "method": "ngram"}}
                whole = client.completions.create(**body)
                parts = [chunk.choices[0].text for chunk in client.completions.create(**body, stream=True)]
                assert whole.choices[0].text == "".join(parts) == "".join("ab"[token - A] for token in want), (name, num_drafts)
        metrics = server.metrics()
        num_drafts, num_accepted = (metrics[f"octavo_spec_decode_num_{what}_tokens_total"] for what in ("draft", "accepted"))
        assert num_drafts > num_accepted > 0
