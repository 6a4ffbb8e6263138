"""Window layers that give pages back, through the whole engine: every answer equals, to the bit, that of a large pool that keeps all."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, RequestOutput, SamplingParams
from octavo.core.page_pool import PagePool
from tests.models.tiny import write_tiny_gguf

BLOCK, WINDOW = 16, 32
SWITCHES: dict[str, dict[str, Any]] = {
    "default": {},
    "small chunks": {"max_num_seqs": 4, "max_num_batched_tokens": 23},
    "whole prompts": {"enable_chunked_prefill": False},
    "no prefix caching": {"enable_prefix_caching": False},
    "swapping": {"preemption": "swap", "swap_space": 1 << 22, "admission_lookahead": 1},
    "recomputing": {"preemption": "recompute", "admission_lookahead": 1},
    "host memory": {"kv_host_memory": 1 << 20},
    "host memory and swapping": {"kv_host_memory": 1 << 20, "preemption": "swap", "swap_space": 1 << 22, "admission_lookahead": 1},
    "tokens": {"prefix_granularity": "token"},
    "drafts": {"spec": 4, "spec_method": "ngram", "ngram_min": 1},
    "self-drafts": {"spec": 3, "spec_method": "self", "self_draft_layers": 3},
    "static": {"scheduling_policy": "static"},
    "int8": {"kv_cache_dtype": "int8"},
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six layers, the last of which sees everything."""
    return write_tiny_gguf(tmp_path_factory.mktemp("models") / "g.gguf", "gemma3", layers=6, hidden=32, heads=2, ffn=32, context=2048)


@pytest.fixture(scope="module")
def plain(path: Path) -> Iterator[dict[str, LLM]]:
    """By KV type; made when first asked for."""
    made = {
        dtype: LLM(str(path), num_kv_blocks=512, enable_prefix_caching=False, enable_kv_groups=False, kv_cache_dtype=dtype)
        for dtype in ("auto", "int8")
    }
    yield made
    for llm in made.values():
        llm.close()


def pool_of(llm: LLM) -> PagePool:
    pool = llm.engine.scheduler._state.kv.pool
    assert isinstance(pool, PagePool)
    return pool


def make_jobs(rng: random.Random, most: int, max_n: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts of up to ``most`` tokens, many of which begin like others, and end anywhere in them."""
    stem = [rng.randrange(3, 500) for _ in range(most)]
    jobs = []
    for i, size in enumerate([1, WINDOW - 1, WINDOW, WINDOW + 1, most - 40, *(rng.randrange(1, most - 20) for _ in range(13))]):
        shared = rng.choice((0, size // 3, size - size // 5, size, size))
        prompt = stem[:shared] + [rng.randrange(3, 500) for _ in range(size - shared)]
        params = SamplingParams(
            n=rng.choice([n for n in (1, 1, 1, 2, 4) if n <= max_n]),
            temperature=rng.choice((0, 0.9)),
            seed=i,
            max_tokens=rng.choice((1, 2, 17, 40)),
            ignore_eos=True,
            frequency_penalty=rng.choice((0.0, 0.7)),
            logprobs=rng.choice((None, 2)),
            prompt_logprobs=rng.choice((None, None, None, 1)),
        )
        jobs.append((prompt, params))
    rng.shuffle(jobs)
    return jobs


def check_equal(llm: LLM, plain: LLM, jobs: list[tuple[list[int], SamplingParams]]) -> list[RequestOutput]:
    outputs = llm.generate([prompt for prompt, _ in jobs], [params for _, params in jobs])
    for output, (prompt, params) in zip(outputs, jobs, strict=True):
        assert params.max_tokens is not None
        room = llm.engine.room(len(prompt))
        (expected,) = plain.generate(prompt, replace(params, max_tokens=min(params.max_tokens, room)))
        assert output.outputs == expected.outputs, f"{len(prompt)} tokens, {params}"
        assert output.prompt_logprobs == expected.prompt_logprobs
    llm.engine.scheduler.check_invariants()
    return outputs


@pytest.mark.parametrize("num_blocks", [9, 30])
@pytest.mark.parametrize("switches", SWITCHES)
def test_equal_to_a_pool_that_keeps_everything(path: Path, plain: dict[str, LLM], num_blocks: int, switches: str) -> None:
    options = {"max_num_seqs": 16, "max_num_batched_tokens": 64, **SWITCHES[switches]}
    with LLM(str(path), num_kv_blocks=num_blocks, **options) as llm:
        assert pool_of(llm).needs.num_full == 1 and pool_of(llm).needs.num_window == 5
        if llm.engine.tiering is not None:
            llm.engine.tiering.cost.restoring_pays = lambda *_: True  # type: ignore[method-assign]
        most = min(llm.engine.scheduler.limits.max_total_tokens, 400)
        jobs = make_jobs(random.Random(f"{num_blocks} {switches}"), most, options["max_num_seqs"])
        check_equal(llm, plain[options.get("kv_cache_dtype", "auto")], jobs)
        assert pool_of(llm).num_used == 0
