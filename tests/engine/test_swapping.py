"""A pool of a tenth of the demand, on the cpu backend: every answer equals that in a large pool, however sequences are preempted."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, RequestOutput, SamplingParams
from octavo.config import ConfigError
from octavo.core.request import FinishReason, ParameterError
from octavo.engine.engine import Engine
from octavo.engine.llm import make_config
from tests.models.tiny import write_tiny_gguf

BLOCK, SWAP_BYTES = 16, 1 << 19
WAYS: dict[str, dict[str, Any]] = {
    "recompute": {"preemption": "recompute"},
    "swap": {"preemption": "swap", "swap_space": SWAP_BYTES},
    "swap with little space": {"preemption": "swap", "swap_space": 1 << 14},
    "auto": {"swap_space": SWAP_BYTES},
    "swap, no prefix caching": {"preemption": "swap", "swap_space": SWAP_BYTES, "enable_prefix_caching": False},
    "swap, srf": {"preemption": "swap", "swap_space": SWAP_BYTES, "scheduling_policy": "srf"},
    "swap, n-gram drafts": {"preemption": "swap", "swap_space": SWAP_BYTES, "spec": 3, "spec_method": "ngram"},
    "swap, self-drafts": {"preemption": "swap", "swap_space": SWAP_BYTES, "spec": 3, "spec_method": "self", "self_draft_layers": 1},
    "swap, a bound on gaps": {"preemption": "swap", "swap_space": SWAP_BYTES, "max_itl_ms": 5.0},
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("models") / "rand.gguf")


def jobs() -> tuple[list[list[int]], list[SamplingParams]]:
    rng = random.Random(20)
    prompts = [[rng.randrange(3, 500) for _ in range(rng.randint(5, 60))] for _ in range(20)]
    params = [
        SamplingParams(
            n=1 + i % 2, temperature=0.9, seed=i, max_tokens=rng.randint(30, 90), ignore_eos=True, logprobs=2, frequency_penalty=0.6,
            repetition_penalty=1.1, presence_penalty=0.3, bad_words=("qq",),
        )
        for i in range(20)
    ]  # fmt: skip
    return prompts, params


@pytest.fixture(scope="module")
def expected(path: Path) -> Iterator[list[RequestOutput]]:
    with LLM(str(path), num_kv_blocks=512, threads=1, preemption="recompute", enable_prefix_caching=False) as llm:
        outputs = llm.generate(*jobs())
        assert llm.engine.scheduler.stats.num_preemptions == 0
    return outputs


@pytest.mark.parametrize("way", WAYS)
def test_a_tenth_of_the_demand(path: Path, expected: list[RequestOutput], way: str) -> None:
    prompts, params = jobs()
    demand = sum(one.n * -(-(len(p) + (one.max_tokens or 0)) // BLOCK) for p, one in zip(prompts, params, strict=True))
    with LLM(str(path), num_kv_blocks=demand // 10, threads=1, admission_lookahead=1, **WAYS[way]) as llm:
        outputs = llm.generate(prompts, params)
        scheduler = llm.engine.scheduler
        scheduler.check_invariants()
        assert scheduler.num_used_blocks == scheduler.num_used_host_blocks == 0
        stats = scheduler.stats
    assert stats.num_preemptions > 5
    assert [o.outputs for o in outputs] == [o.outputs for o in expected]
    num_tokens = sum(len(p) for p in prompts) + sum(len(c.token_ids) - 1 for o in outputs for c in o.outputs)
    if way == "recompute":
        assert stats.num_swap_preemptions == stats.num_blocks_saved == 0 and stats.num_computed_tokens > num_tokens
    elif way == "swap":
        assert stats.num_swap_preemptions == stats.num_preemptions and stats.num_computed_tokens == num_tokens
        assert 0 < stats.num_blocks_loaded <= stats.num_blocks_saved and stats.move_s > 0
    elif way == "swap with little space":
        assert 0 < stats.num_swap_preemptions < stats.num_preemptions


def make_engine(path: Path, **options: Any) -> Engine:
    sizes = {"num_kv_blocks": 6, "threads": 1, "admission_lookahead": 1}
    return Engine.load(make_config(str(path), **sizes, preemption="swap", swap_space=SWAP_BYTES, **options))


def step_until_swapped(engine: Engine) -> None:
    for i in range(2):
        engine.add(engine.prepare([5 + i] * 20, SamplingParams(max_tokens=60, ignore_eos=True), f"r{i}"))
    while not engine.scheduler.num_swapped:
        engine.step()
    assert engine.scheduler.num_used_host_blocks > 0


def test_an_abort_of_a_swapped_request_frees_its_host_blocks(path: Path) -> None:
    engine = make_engine(path)
    step_until_swapped(engine)
    assert [event.finish_reason for event in engine.abort("r1")] == [FinishReason.ABORT]
    assert engine.scheduler.num_used_host_blocks == engine.scheduler.num_swapped == 0
    while engine.has_work:
        engine.step()
    engine.scheduler.check_invariants()
    engine.close()


def test_a_failed_step_ends_swapped_requests_too(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(path)
    step_until_swapped(engine)
    with monkeypatch.context() as patch:
        patch.setattr(engine.backend, "execute", lambda plan: 1 / 0)
        events = engine.step()
    assert {event.finish_reason for event in events} == {FinishReason.ERROR} and len(events) == 2
    assert engine.scheduler.num_used_host_blocks == engine.scheduler.num_used_blocks == 0
    engine.scheduler.check_invariants()
    engine.close()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"preemption": "swap"}, "preemption: 'swap' is not allowed; it needs swap_space"),
        ({"preemption": "recompute", "swap_space": 1}, "swap_space: 1 is not allowed; 0 with preemption recompute"),
        ({"swap_space": -1}, "swap_space: -1 is not allowed; at least 0 bytes"),
        ({"swap_space": 7}, "swap_space: 7 bytes hold no block; one takes [0-9]+"),
        ({"preemption": "never"}, "preemption: 'never' is not allowed; one of auto, recompute, swap"),
        ({"admission_lookahead": 0}, "admission_lookahead: 0 is not allowed; from 1 to 1048576 tokens"),
        ({"scheduling_policy": "lottery"}, "scheduling_policy: 'lottery' is not allowed; one of fcfs, static, priority, fair, srf"),
    ],
)
def test_settings_that_cannot_be(path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(str(path), num_kv_blocks=8, **options)


def test_priorities_need_their_policy(path: Path) -> None:
    with LLM(str(path), num_kv_blocks=8) as llm:
        with pytest.raises(ParameterError, match="priority: 1 is not allowed; 0, or a server with scheduling_policy priority; this"):
            llm.generate({"prompt_token_ids": [5, 6], "priority": 1}, SamplingParams(max_tokens=1))
        llm.generate({"prompt_token_ids": [5, 6], "priority": 0, "user": "me"}, SamplingParams(max_tokens=1))
    with LLM(str(path), num_kv_blocks=8, scheduling_policy="priority") as llm:
        with pytest.raises(ParameterError, match="priority: 1.5 is not allowed; an integer"):
            llm.generate({"prompt_token_ids": [5, 6], "priority": 1.5}, SamplingParams(max_tokens=1))
        llm.generate({"prompt_token_ids": [5, 6], "priority": -2}, SamplingParams(max_tokens=1))
