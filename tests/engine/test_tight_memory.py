"""Pools, budgets and switches at their limits on the cpu backend: every answer equals that of the same request alone in a large pool."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, RequestOutput, SamplingParams
from octavo.core.request import ParameterError
from tests.models.tiny import write_tiny_gguf

BLOCK = 16
SWITCHES: dict[str, dict[str, Any]] = {
    "default": {},
    "no prefix caching": {"enable_prefix_caching": False},
    "whole prompts": {"enable_chunked_prefill": False},
    "whole prompts, no prefix caching": {"enable_chunked_prefill": False, "enable_prefix_caching": False},
    "smallest budget": {"max_num_seqs": 8, "max_num_batched_tokens": 8},
    "smallest budget, whole prompts": {"max_num_seqs": 8, "max_num_batched_tokens": 8, "enable_chunked_prefill": False},
    "one at a time": {"max_num_seqs": 1, "max_num_batched_tokens": 1},
    "request-level batching": {"scheduling_policy": "static"},
    "odd chunks": {"max_num_seqs": 16, "max_num_batched_tokens": 17},
    "host memory": {"kv_host_memory": 1 << 16},
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("models") / "rand.gguf", context=1024)


@pytest.fixture(scope="module")
def plain(path: Path) -> Iterator[LLM]:
    with LLM(str(path), num_kv_blocks=1024, enable_prefix_caching=False, max_num_batched_tokens=1024) as llm:
        yield llm


def make_jobs(rng: random.Random, num_blocks: int, max_n: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts around the limits of blocks and pool, some of them beginnings of others, with mixed sampling."""
    pool = num_blocks * BLOCK
    sizes = [1, 15, 16, 17, 33, pool - 17, pool - 16, pool - 1, pool, *(rng.randrange(1, pool + 1) for _ in range(15))]
    stem = [rng.randrange(3, 500) for _ in range(pool)]
    jobs = []
    for i, size in enumerate(sizes):
        shared = rng.choice((0, 0, size // 2, size))
        prompt = stem[:shared] + [rng.randrange(3, 500) for _ in range(size - shared)]
        params = SamplingParams(
            n=rng.choice([n for n in (1, 1, 1, 2, 8) if n <= max_n]),
            temperature=rng.choice((0, 0.9)),
            seed=i,
            max_tokens=rng.choice((0, 1, 2, 17, 40)),
            ignore_eos=rng.random() < 0.7,
            frequency_penalty=rng.choice((0.0, 0.7)),
            logprobs=rng.choice((None, 2)),
            prompt_logprobs=rng.choice((None, None, 1)),
            stop=rng.choice(((), ("e", "qq"))),
        )
        jobs.append((prompt, params))
    rng.shuffle(jobs)
    return jobs


def alone(plain: LLM, prompt: list[int], params: SamplingParams, room: int) -> RequestOutput:
    """``room``: tokens that the tight pool leaves for the output, to which max_tokens is cut there."""
    assert params.max_tokens is not None
    (output,) = plain.generate(prompt, replace(params, max_tokens=min(params.max_tokens, room)))
    return output


@pytest.mark.parametrize("num_blocks", [4, 9, 40])
@pytest.mark.parametrize("switches", SWITCHES)
def test_equal_to_the_plain_run(path: Path, plain: LLM, num_blocks: int, switches: str) -> None:
    options = SWITCHES[switches]
    jobs = make_jobs(random.Random(f"{num_blocks} {switches}"), num_blocks, options.get("max_num_seqs", 64))
    with LLM(str(path), num_kv_blocks=num_blocks, **options) as llm:
        with pytest.raises(ParameterError, match=f"{num_blocks * BLOCK}"):
            llm.generate([5] * (num_blocks * BLOCK + 1), SamplingParams(max_tokens=1))
        outputs = llm.generate([prompt for prompt, _ in jobs], [params for _, params in jobs])
        scheduler = llm.engine.scheduler
        scheduler.check_invariants()
        assert scheduler.num_used_blocks == 0
        assert scheduler.stats.num_preemptions > 0 or options.get("max_num_seqs") == 1 or num_blocks == 40
        rooms = [llm.engine.room(len(prompt)) for prompt, _ in jobs]
    for (prompt, params), output, room in zip(jobs, outputs, rooms, strict=True):
        expected = alone(plain, prompt, params, room)
        assert output.outputs == expected.outputs
        assert output.prompt_logprobs == expected.prompt_logprobs
        assert bool(output.warnings) == (params.max_tokens is not None and params.max_tokens > room)
