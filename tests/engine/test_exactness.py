"""Equal to the plain run, token by token, on a tiny random model: after prefix hits, preemption, beside others, for each choice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from octavo import LLM, RequestOutput, SamplingParams
from octavo.core.request import derive_seed
from octavo.engine.outputs import CacheMatch
from tests.models.tiny import write_tiny_gguf

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("models") / "rand.gguf")


def open_llm(path: Path, **options: object) -> LLM:
    return LLM(str(path), backend="reference", **{"num_kv_blocks": 128, **options})


@pytest.fixture(scope="module")
def plain(path: Path) -> Iterator[LLM]:
    """No prefix cache, whole prompts, a large pool: one request at a time is the plain run."""
    with open_llm(path, enable_prefix_caching=False, max_num_batched_tokens=512) as llm:
        yield llm


def prompt_of(num_tokens: int, salt: int = 0) -> list[int]:
    return [5 + (i * i + 7 * i + 13 * salt) % 480 for i in range(num_tokens)]


def ids_of(output: RequestOutput, choice: int = 0) -> list[int]:
    return output.outputs[choice].token_ids


def test_whole_prompts_block_multiples_and_part_filled_blocks(path: Path, plain: LLM) -> None:
    prompts = [prompt_of(n) for n in (1, 15, 16, 17, 31, 32, 33, 48)]
    expected = [ids_of(plain.generate(p, GREEDY)[0]) for p in prompts]
    with open_llm(path) as llm:
        for _ in range(3):
            for prompt, ids in zip(prompts, expected, strict=True):
                output = llm.generate(prompt, GREEDY)[0]
                assert ids_of(output) == ids and output.num_cached_tokens <= len(prompt) - 1
        assert output.num_cached_tokens == 32  # 48 tokens: the last one is always computed, so its block is not shared
        llm.engine.scheduler.check_invariants()
    with open_llm(path) as llm:
        outputs = llm.generate([p for p in prompts for _ in range(3)], GREEDY)
        assert [ids_of(o) for o in outputs] == [ids for ids in expected for _ in range(3)]


def test_only_computed_blocks_are_shared(path: Path, plain: LLM) -> None:
    prompt, others = prompt_of(20), prompt_of(12, salt=3)
    for max_tokens, num_hit in ((12, 16), (13, 32)):
        params = replace(GREEDY, max_tokens=max_tokens)
        with open_llm(path) as llm:
            generated = ids_of(llm.generate(prompt, params)[0])[:12]
            for following, hit in ((others, 16), ([*generated, 9], num_hit)):
                output = llm.generate(prompt + following, GREEDY)[0]
                assert output.num_cached_tokens == hit
                assert ids_of(output) == ids_of(plain.generate(prompt + following, GREEDY)[0])


def test_preemption_keeps_tokens_log_probabilities_and_text(path: Path, plain: LLM) -> None:
    base = SamplingParams(
        temperature=0.9, frequency_penalty=0.8, repetition_penalty=1.2, min_tokens=20, max_tokens=60, logprobs=2, stop=("qq", " the")
    )
    prompts = [prompt_of(18, salt=k) for k in range(6)]
    params = [replace(base, seed=k) for k in range(6)]
    expected = [plain.generate(p, one)[0] for p, one in zip(prompts, params, strict=True)]
    with open_llm(path, num_kv_blocks=11, admission_lookahead=1) as llm:  # two of six at full length
        outputs = llm.generate(prompts, params)
        assert llm.engine.scheduler.stats.num_preemptions > 0
        assert [o.outputs for o in outputs] == [o.outputs for o in expected]
        assert llm.engine.scheduler.num_used_blocks == 0
    assert any(o.outputs[0].finish_reason == "length" for o in outputs)


def test_a_bound_on_gaps_changes_no_token(path: Path, plain: LLM) -> None:
    """A bound that no step can keep: beside a running answer, prompts go in by the block, in turns."""
    params = replace(GREEDY, max_tokens=30)
    prompts = [prompt_of(n, salt=n) for n in (3, 70, 50, 90)]
    with open_llm(path, max_itl_ms=1e-6) as llm:
        outputs = llm.generate(prompts, params)
        assert llm.engine.metrics.itl_excess_s.count > 0
    for prompt, output in zip(prompts, outputs, strict=True):
        assert ids_of(output) == ids_of(plain.generate(prompt, params)[0])


@pytest.mark.parametrize("caching", [True, False])
def test_each_choice_equals_a_request_of_its_own(path: Path, plain: LLM, caching: bool) -> None:
    with open_llm(path, enable_prefix_caching=caching) as llm:
        for num_prompt in (1, 15, 16, 17, 20):
            params = SamplingParams(n=4, seed=3, temperature=1, max_tokens=20, ignore_eos=True)
            output, _ = llm.generate([prompt_of(num_prompt), prompt_of(30, salt=1)], [params, GREEDY])
            for choice in range(4):
                alone = replace(params, n=1, seed=derive_seed(3, choice))
                assert ids_of(output, choice) == ids_of(plain.generate(prompt_of(num_prompt), alone)[0])
        llm.engine.scheduler.check_invariants()
        assert llm.engine.scheduler.num_used_blocks == 0


def test_chunks_and_neighbours_change_nothing(path: Path, plain: LLM) -> None:
    prompts = [prompt_of(n, salt=n) for n in (3, 40, 21, 64)]
    expected = [ids_of(plain.generate(p, GREEDY)[0]) for p in prompts]
    for budget in (4, 7, 64):
        with open_llm(path, max_num_batched_tokens=budget, max_num_seqs=4) as llm:
            assert [ids_of(o) for o in llm.generate(prompts, GREEDY)] == expected


@pytest.mark.parametrize("spec", ["off", 4])
def test_turns_of_a_conversation_by_the_token(path: Path, plain: LLM, spec: object) -> None:
    """Each turn goes on from the part-filled block that the last answer left; several users begin alike, at an odd length."""
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=9, ignore_eos=True, logprobs=2)
    with open_llm(path, prefix_granularity="token", max_num_batched_tokens=64, spec=spec, spec_method="ngram") as llm:
        texts = [prompt_of(21) + prompt_of(1 + user, salt=40 + user) for user in range(3)]
        for turn in range(4):
            outputs = llm.generate(texts, params)
            assert [o.outputs for o in outputs] == [plain.generate(text, params)[0].outputs for text in texts]
            if turn:
                assert [o.num_cached_tokens for o in outputs] == [len(text) - 8 for text in texts]
            texts = [text + ids_of(o) + prompt_of(7, salt=turn) for text, o in zip(texts, outputs, strict=True)]
        llm.engine.scheduler.check_invariants()
        assert llm.engine.scheduler.stats.num_tail_copies > 0


def test_an_output_says_why_its_prompt_was_found_no_further(path: Path) -> None:
    prompt = prompt_of(40)
    with open_llm(path) as llm:
        text = llm.tokenizer.token_text
        assert llm.generate(prompt, GREEDY)[0].cache_match == CacheMatch("never_seen", 0)
        assert llm.generate(prompt, GREEDY)[0].cache_match == CacheMatch("part_block", 32)
        other = [*prompt[:20], 7, *prompt[21:]]
        (output,) = llm.generate(other, replace(GREEDY, n=2))
        assert output.num_cached_tokens == 16
        assert output.cache_match == CacheMatch("different_token", 20, 7, text(7), prompt[20], text(prompt[20]))
        salted = llm.generate({"prompt_token_ids": prompt, "cache_salt": "x"}, GREEDY)[0]
        assert salted.cache_match == CacheMatch("salt", 0)
        assert llm.generate(prompt, replace(GREEDY, prompt_logprobs=0))[0].cache_match is None
