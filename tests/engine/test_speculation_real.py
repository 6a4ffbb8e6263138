"""Speculation on real models and real text: every proposer, greedy and sampled, alone, together, preempted: the plain run's tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from octavo import LLM, SamplingParams
from tests.engine.real_prompts import real_prompts
from tests.packed_drafts import packed_draft

PARAMS = {
    "greedy": SamplingParams(temperature=0, ignore_eos=True),
    "sampled": SamplingParams(temperature=0.8, top_p=0.95, repetition_penalty=1.05, ignore_eos=True),
}
METHODS: dict[str, dict[str, object]] = {
    "auto": {"spec": "auto"},
    "ngram": {"spec": 4, "spec_method": "ngram"},
    "suffix": {"spec": 8, "spec_method": "suffix"},
    "self": {"spec": 3, "spec_method": "self", "self_draft_layers": 4},
    "packed": {"spec": 3, "spec_method": "draft"},  # the model itself, packed anew in about 3 bits
}
ROOM = {"max_num_seqs": 16, "num_kv_blocks": 1400}
TIGHT = {"num_kv_blocks": 110, "admission_lookahead": 1}
Plain = Callable[[Path, int, str, int], list[list[int]]]


def options_of(method: str, path: Path) -> dict[str, object]:
    return METHODS[method] | ({"draft_model": str(packed_draft(path))} if method == "packed" else {})


def tokens(path: Path, prompts: list[str], params: SamplingParams, num_tokens: int, **options: object) -> tuple[list[list[int]], LLM]:
    with LLM(str(path), max_model_len=1200, **{**ROOM, **options}) as llm:
        wanted = [replace(params, seed=i, max_tokens=num_tokens) for i in range(len(prompts))]
        return [out.outputs[0].token_ids for out in llm.generate(prompts, wanted)], llm


@pytest.fixture(scope="module")
def plain() -> Plain:
    """The tokens of ``real_prompts(count)`` without drafts, in a large pool. Kept: all methods are compared with the same."""

    @cache
    def of(path: Path, count: int, name: str, num_tokens: int) -> list[list[int]]:
        got, llm = tokens(path, real_prompts(count), PARAMS[name], num_tokens)
        assert llm.engine.scheduler.stats.num_preemptions == 0
        return got

    return of


def check(plain: Plain, path: Path, count: int, num_tokens: int, name: str, **options: object) -> LLM:
    want = plain(path, count, name, num_tokens)
    got, llm = tokens(path, real_prompts(count), PARAMS[name], num_tokens, **options)
    assert [i for i in range(count) if got[i] != want[i]] == []
    assert llm.engine.loop.speculator is not None, "drafting failed"
    stats = llm.engine.speculator.stats
    assert stats.num_proposed > count or llm.engine.config.speculative.spec == "auto"  # which may find nothing worth it
    print(f"{count} prompts, {options}: {stats.num_accepted} of {stats.num_proposed} drafts came true")
    return llm


@pytest.mark.model
@pytest.mark.parametrize("method", METHODS)
def test_some_prompts(plain: Plain, smollm2_path: Path, method: str) -> None:
    for name in PARAMS:
        stats = check(plain, smollm2_path, 8, 24, name, **options_of(method, smollm2_path)).engine.speculator.stats
        if method == "packed":  # often right and often wrong, which is what it is for
            assert 0.2 < stats.num_accepted / stats.num_proposed < 0.9


@pytest.mark.soak
@pytest.mark.model
@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("method", METHODS)
def test_200_prompts(plain: Plain, path: Path, method: str, name: str) -> None:
    check(plain, path, 200, 128, name, **options_of(method, path))


@pytest.mark.soak
@pytest.mark.model
@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("method", METHODS)
def test_200_prompts_with_preemption(plain: Plain, path: Path, method: str, name: str) -> None:
    """16 at once in a pool for a third of them; greedy ones are swapped out, sampled ones computed again."""
    swaps = name == "greedy"
    ways = {"preemption": "swap", "swap_space": 1 << 29} if swaps else {"preemption": "recompute"}
    stats = check(plain, path, 200, 128, name, **options_of(method, path), **TIGHT, **ways).engine.scheduler.stats
    assert stats.num_preemptions > 0 and stats.num_swap_preemptions == (stats.num_preemptions if swaps else 0)


@pytest.mark.soak
@pytest.mark.model
@pytest.mark.parametrize("name", PARAMS)
def test_the_model_as_its_own_draft(plain: Plain, path: Path, name: str) -> None:
    """Every draft comes true; with preemption too, but for prompts that find no room in the draft's pool."""
    draft = {"spec": 3, "spec_method": "draft", "draft_model": str(path)}
    llm = check(plain, path, 30, 64, name, **draft, num_kv_blocks=700)
    assert llm.engine.speculator.stats.alpha == 1.0
    llm = check(plain, path, 60, 64, name, **draft, **TIGHT)
    assert llm.engine.speculator.stats.alpha == 1.0 and llm.engine.scheduler.stats.num_preemptions > 0


@pytest.mark.soak
@pytest.mark.model
@pytest.mark.parametrize("name", PARAMS)
def test_one_by_one(plain: Plain, path: Path, name: str) -> None:
    check(plain, path, 30, 128, name, max_num_seqs=1, spec="auto")
