"""Speculation on real models and real text: every proposer, greedy and sampled, alone, together, preempted: the plain run's tokens."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from octavo import LLM, SamplingParams
from octavo.bench.spec_prompts import WORKS
from tests.packed_drafts import packed_draft

GREEDY = SamplingParams(temperature=0, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, repetition_penalty=1.05, ignore_eos=True)
METHODS: dict[str, dict[str, object]] = {
    "auto": {"spec": "auto"},
    "ngram": {"spec": 4, "spec_method": "ngram"},
    "suffix": {"spec": 8, "spec_method": "suffix"},
    "self": {"spec": 3, "spec_method": "self", "self_draft_layers": 4},
    "packed": {"spec": 3, "spec_method": "draft"},  # the model itself, packed anew in about 3 bits
}


def options_of(method: str, path: Path) -> dict[str, object]:
    return METHODS[method] | ({"draft_model": str(packed_draft(path))} if method == "packed" else {})


def paragraphs() -> list[str]:
    """English text, tables and commands of this project's pages."""
    pages = sorted((Path(__file__).parents[2] / "docs").glob("*.md"))
    return [p.strip() for page in pages for p in re.split(r"\n\s*\n", page.read_text()) if len(p.strip()) > 60]


def real_prompts(count: int) -> list[str]:
    """The beginnings of paragraphs, some behind the one before them, and the works of the bench, evenly chosen."""
    pieces = paragraphs()
    texts = [text for work in WORKS for text in work.prompts]
    texts += [piece[: 60 + 97 * i % 700] for i, piece in enumerate(pieces)]
    texts += [f"{before[:500]}\n\n{piece[:80]}" for before, piece in zip(pieces, pieces[1:], strict=False)]
    return [texts[i * len(texts) // count] for i in range(count)]


def tokens(path: Path, prompts: list[str], params: SamplingParams, num_tokens: int, **options: object) -> tuple[list[list[int]], LLM]:
    with LLM(str(path), max_model_len=1200, **options) as llm:
        wanted = [replace(params, seed=i, max_tokens=num_tokens) for i in range(len(prompts))]
        return [out.outputs[0].token_ids for out in llm.generate(prompts, wanted)], llm


def check(path: Path, prompts: list[str], num_tokens: int, params: SamplingParams, **options: object) -> None:
    want, _ = tokens(path, prompts, params, num_tokens, max_num_seqs=16, num_kv_blocks=1400)
    got, llm = tokens(path, prompts, params, num_tokens, **{"max_num_seqs": 16, "num_kv_blocks": 1400, **options})
    assert [i for i in range(len(prompts)) if got[i] != want[i]] == []
    stats = llm.engine.speculator.stats
    assert stats.num_proposed > 0 or llm.engine.config.speculative.spec == "auto"  # which may find nothing worth it
    if "draft_model" in options:  # one that is neither never nor always right, and drafts to the end
        assert stats.num_proposed > num_tokens * len(prompts) / 4
        assert 0.2 < stats.num_accepted / stats.num_proposed < 0.99
    print(f"{len(prompts)} prompts, {options}: {stats.num_accepted} of {stats.num_proposed} drafts came true")


@pytest.mark.model
@pytest.mark.parametrize("method", METHODS)
def test_some_prompts(smollm2_path: Path, method: str) -> None:
    for params in (GREEDY, SAMPLED):
        check(smollm2_path, real_prompts(8), 24, params, **options_of(method, smollm2_path))


@pytest.fixture(params=["smollm2", "gemma3"])
def path(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(f"{request.param}_path")  # type: ignore[no-any-return]


@pytest.mark.soak
@pytest.mark.model
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", METHODS)
def test_200_prompts(path: Path, method: str, params: SamplingParams) -> None:
    check(path, real_prompts(200), 128, params, **options_of(method, path))


@pytest.mark.soak
@pytest.mark.model
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", ["suffix", "self", "packed"])
def test_200_prompts_with_preemption(path: Path, method: str, params: SamplingParams) -> None:
    prompts = real_prompts(200)
    want, _ = tokens(path, prompts, params, 128, max_num_seqs=16, num_kv_blocks=1400)
    got, llm = tokens(path, prompts, params, 128, max_num_seqs=16, num_kv_blocks=110, admission_lookahead=1, **options_of(method, path))
    assert got == want and llm.engine.scheduler.stats.num_preemptions > 0


@pytest.mark.soak
@pytest.mark.model
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_one_by_one_and_the_model_as_its_own_draft(path: Path, params: SamplingParams) -> None:
    prompts = real_prompts(30)
    check(path, prompts, 128, params, max_num_seqs=1, spec="auto")
    want, _ = tokens(path, prompts, params, 64, max_num_seqs=8, num_kv_blocks=700)
    got, llm = tokens(path, prompts, params, 64, max_num_seqs=8, num_kv_blocks=700, spec=3, spec_method="draft", draft_model=str(path))
    assert got == want and llm.engine.speculator.stats.alpha == 1.0
