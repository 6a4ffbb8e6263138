"""A request that can never fit is refused at once, one that just fits is served, and those behind it do not wait (A28)."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.core.request import ParameterError, SamplingParams
from tests.cases.harness import GREEDY, Job, open_engine, open_plain, plain_answer, prompt_of, run
from tests.models.tiny import write_tiny_gguf

NUM_BLOCKS, CONTEXT = 32, 4096


@pytest.fixture(scope="module")
def long_context(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("models") / "long.gguf", context=CONTEXT)


def test_pool_of_512_tokens(long_context: Path) -> None:
    wide = SamplingParams(temperature=0, max_tokens=502, ignore_eos=True, logprobs=0)
    fitting = [Job(prompt_of(511), GREEDY), Job(prompt_of(512), GREEDY), Job(prompt_of(10), wide)]
    endless = Job(prompt_of(10, salt=1), SamplingParams(temperature=0, max_tokens=4000, ignore_eos=True, logprobs=0))
    small = [Job(prompt_of(10, salt=2 + i), GREEDY) for i in range(10)]
    with open_engine(long_context, num_kv_blocks=NUM_BLOCKS) as engine:
        assert engine.max_model_len == CONTEXT
        for length in (513, 2000):
            with pytest.raises(ParameterError, match=f"{length} tokens and the KV pool holds 512 tokens .32 blocks of 16.") as refused:
                engine.prepare(prompt_of(length), GREEDY)
            assert (refused.value.param, refused.value.code) == ("prompt", "context_length_exceeded")
        run(engine, *fitting, endless, *small)
    assert [job.num_tokens for job in (*fitting, endless)] == [2, 1, 502, 503]
    assert endless.output is not None
    assert endless.output.warnings == ["max_tokens: 4000 was reduced to 503, all that the KV cache leaves after 10 prompt tokens"]
    with open_plain(long_context) as plain:
        for job in (*fitting, endless, *small):
            assert job.answer() == plain_answer(plain, job, max_tokens=job.num_tokens)


def test_small_requests_are_served_while_a_lone_one_fills_the_pool(long_context: Path) -> None:
    large = Job(prompt_of(10), SamplingParams(temperature=0, max_tokens=4000, ignore_eos=True))
    small = [Job(prompt_of(10, salt=2 + i), GREEDY) for i in range(10)]
    ended: list[int] = []

    def watch(step: int) -> None:
        ended.extend([step] * (sum(job.output is not None and job.output.finished for job in small) - len(ended)))

    with open_engine(long_context, num_kv_blocks=NUM_BLOCKS) as engine:
        run(engine, large, *small, after_step=watch)
    assert len(ended) == 10 and max(ended) <= 40 and large.num_tokens == 503
