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
from octavo.core.request import BeamParams, ParameterError
from octavo.core.step import StepPlan, StepResult
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
    for i, size in enumerate([1, WINDOW - 1, WINDOW, WINDOW + 1, most - 40, *(rng.randrange(1, most - 20) for _ in range(7))]):
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


@pytest.mark.parametrize(("switches", "num_blocks"), [*((name, 9) for name in SWITCHES), ("tokens", 30), ("host memory", 30)])
def test_equal_to_a_pool_that_keeps_everything(path: Path, plain: dict[str, LLM], switches: str, num_blocks: int) -> None:
    options = {"max_num_seqs": 16, "max_num_batched_tokens": 64, **SWITCHES[switches]}
    with LLM(str(path), num_kv_blocks=num_blocks, **options) as llm:
        assert pool_of(llm).needs.num_full == 1 and pool_of(llm).needs.num_window == 5
        if llm.engine.tiering is not None:
            llm.engine.tiering.cost.restoring_pays = lambda *_: True  # type: ignore[method-assign]
        most = min(llm.engine.scheduler.limits.max_total_tokens, 400)
        jobs = make_jobs(random.Random(f"{num_blocks} {switches}"), most, options["max_num_seqs"])
        check_equal(llm, plain[options.get("kv_cache_dtype", "auto")], jobs)
        assert pool_of(llm).num_used == 0


def test_pages_that_are_nobody_s_are_never_read(path: Path) -> None:
    """The reference backend on pages that hold nothing but nan unless they are somebody's."""
    rng = random.Random(5)
    options: dict[str, Any] = {"backend": "reference", "max_num_batched_tokens": 32, "max_num_seqs": 8, "block_size": 8}
    jobs = [(prompt[:70], replace(params, max_tokens=6)) for prompt, params in make_jobs(rng, 90, 2)[:7]]
    with (
        LLM(str(path), num_kv_blocks=64, enable_prefix_caching=False, enable_kv_groups=False, **options) as plain,
        LLM(str(path), num_kv_blocks=8, preemption="recompute", admission_lookahead=1, **options) as llm,
    ):
        pool, backend = pool_of(llm), llm.engine.backend
        execute = backend.execute

        def poisoned(plan: StepPlan) -> StepResult:
            result = execute(plan)
            backend._kv.memory[pool._free_pages] = float("nan")  # type: ignore[attr-defined]
            return result

        backend.execute = poisoned  # type: ignore[method-assign]
        check_equal(llm, plain, jobs)


def test_beams_share_and_pass(path: Path, plain: dict[str, LLM]) -> None:
    params = SamplingParams(beam=BeamParams(3, 1.0, False), n=3, max_tokens=40, ignore_eos=True, logprobs=1)
    prompt = [3 + 5 * i % 300 for i in range(75)]
    with LLM(str(path), num_kv_blocks=16, max_num_batched_tokens=64) as llm:
        (output,), (expected,) = llm.generate(prompt, params), plain["auto"].generate(prompt, params)
        assert output.outputs == expected.outputs
        assert pool_of(llm).num_used == 0


def test_a_conversation_goes_on_for_the_price_of_its_last_window(path: Path) -> None:
    """Full parts of a long text and window parts of its end are less than a fourth of the blocks; they are all that is needed."""
    text = [3 + 7 * i % 400 for i in range(640)]
    params = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.0)
    with LLM(str(path), num_kv_blocks=16, max_num_batched_tokens=64) as llm:  # 40 blocks of tokens
        (told,) = llm.generate(text, params)
        (more,) = llm.generate(text + told.outputs[0].token_ids + [9, 9], params)
        assert more.num_cached_tokens == 640
        (less,) = llm.generate(text[:300], params)
        assert less.cache_match is not None and less.cache_match.reason == "window"


def test_reserved_chunks_hold_all_layers(path: Path, plain: dict[str, LLM]) -> None:
    with LLM(str(path), num_kv_blocks=64, kv_reservation="oracle", enable_prefix_caching=False) as llm:
        assert llm.engine.backend.kv_capacity(0).layout.num_pages == 1  # type: ignore[union-attr]
        check_equal(llm, plain["auto"], [([5] * 50, SamplingParams(max_tokens=20, ignore_eos=True, seed=1))])


def test_a_request_that_never_fits_is_refused_by_what_it_needs(path: Path) -> None:
    with LLM(str(path), num_kv_blocks=16, max_num_batched_tokens=64) as llm:
        most = llm.engine.scheduler.limits.num_pool_tokens
        assert most > 2 * 16 * BLOCK
        with pytest.raises(ParameterError, match="KV pool"):
            llm.generate([5] * (most + 1), SamplingParams(max_tokens=1))
        assert len(llm.generate([5] * most, SamplingParams(max_tokens=1, ignore_eos=True))[0].outputs[0].token_ids) == 1


@pytest.mark.model
def test_what_a_long_context_of_a_real_model_holds(gemma3_path: Path) -> None:
    """1,200 tokens in a pool that holds 800 with all layers: 75 full parts of one page, and the window of 512 in parts of five."""
    prompt = [1000 + 37 * i % 50000 for i in range(1200)]
    params = SamplingParams(max_tokens=3, ignore_eos=True, temperature=0.0, logprobs=2)
    with LLM(str(gemma3_path), num_kv_blocks=100, enable_kv_groups=False, max_num_batched_tokens=256) as llm:
        (expected,) = llm.generate(prompt, params)
    with LLM(str(gemma3_path), num_kv_blocks=56, max_num_batched_tokens=256) as llm:
        pool, used = pool_of(llm), list[int]()
        execute = llm.engine.backend.execute
        llm.engine.backend.execute = lambda plan: used.append(pool.num_used_pages) or execute(plan)  # type: ignore[method-assign, func-returns-value]
        (output,) = llm.generate(prompt, params)
    assert output.outputs == expected.outputs
    assert (pool.needs.num_full, pool.needs.num_window, pool.needs.window) == (1, 5, 512)
    passed = (1201 - 512 + 1) // 16
    assert used[-1] == 76 + 5 * (76 - passed)
    assert max(used) <= 56 * 6
