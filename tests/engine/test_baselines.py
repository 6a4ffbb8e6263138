"""The mechanisms of earlier engines, as switches: through the whole engine they change when and where, never a token."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.config import ConfigError
from octavo.core.request import FinishReason, ParameterError
from octavo.engine.engine import Engine
from octavo.engine.metric_families import metric_families
from octavo.server.prometheus import exposition
from tests.engine.scripted import Bigram, bigram_config, bigram_model, byte_ids, byte_tokenizer
from tests.models.tiny import write_tiny_gguf

RESERVED = {"enable_prefix_caching": False, "num_kv_blocks": 40, "max_model_len": 256}
BASELINES: dict[str, dict[str, Any]] = {
    "static": {"scheduling_policy": "static", "max_num_seqs": 5, "num_kv_blocks": 24},
    "static, whole prompts": {"scheduling_policy": "static", "max_num_seqs": 5, "num_kv_blocks": 24, "enable_chunked_prefill": False},
    "max": {"kv_reservation": "max", **RESERVED, "num_kv_blocks": 60},
    "pow2": {"kv_reservation": "pow2", **RESERVED},
    "oracle": {"kv_reservation": "oracle", **RESERVED},
    "oracle, whole prompts": {"kv_reservation": "oracle", **RESERVED, "enable_chunked_prefill": False},
    "pow2, drafts": {"kv_reservation": "pow2", **RESERVED, "spec": 4, "spec_method": "ngram"},
    "static, drafts": {"scheduling_policy": "static", "max_num_seqs": 5, "num_kv_blocks": 24, "spec": 4, "spec_method": "ngram"},
    "FasterTransformer-like": {"scheduling_policy": "static", "kv_reservation": "max", **RESERVED, "num_kv_blocks": 60},
    "whole prompts": {"enable_chunked_prefill": False},
    "no prefix caching": {"enable_prefix_caching": False},
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("models") / "rand.gguf", context=1024)


@pytest.fixture(scope="module")
def plain(path: Path) -> Iterator[LLM]:
    with LLM(str(path), num_kv_blocks=256, enable_prefix_caching=False, max_num_batched_tokens=1024) as llm:
        yield llm


@pytest.mark.parametrize("name", BASELINES)
def test_every_mode_gives_the_tokens_of_the_plain_run(path: Path, plain: LLM, name: str) -> None:
    rng = random.Random(7)
    stem = [rng.randrange(3, 500) for _ in range(60)]
    prompts = [stem[: rng.choice((0, 20, 40))] + [rng.randrange(3, 500) for _ in range(rng.randrange(1, 50))] for _ in range(12)]
    base = SamplingParams(logprobs=1, frequency_penalty=0.4)
    params = [
        replace(base, n=rng.choice((1, 1, 3)), temperature=rng.choice((0, 0.9)), seed=i, max_tokens=rng.choice((1, 7, 40)))
        for i in range(12)
    ]
    expected = [plain.generate(prompt, one)[0] for prompt, one in zip(prompts, params, strict=True)]
    with LLM(str(path), **{"max_num_batched_tokens": 64, **BASELINES[name]}) as llm:
        outputs = llm.generate(prompts, params)
        llm.engine.scheduler.check_invariants()
        stats = llm.engine.scheduler.stats
        assert llm.engine.scheduler.num_used_blocks == 0
        assert stats.num_preemptions == 0 or "kv_reservation" not in BASELINES[name]
        assert (stats.num_draft_tokens > 0) == ("spec" in BASELINES[name])
    assert [output.outputs for output in outputs] == [output.outputs for output in expected]


def test_a_pool_without_a_chunk_for_the_longest_sequence_is_refused(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^kv_reservation: 'max' is not allowed; .* max_model_len \(256\)"):
        LLM(str(path), kv_reservation="max", **(RESERVED | {"num_kv_blocks": 15}))


def scripted_engine(reservation: str) -> Engine:
    tokenizer = byte_tokenizer()
    config = bigram_config(20, max_num_seqs=8)
    config = replace(config, cache=replace(config.cache, kv_reservation=reservation, enable_prefix_caching=False))
    return Engine(bigram_model(tokenizer, 64), config, Bigram(tokenizer.vocab_size))


@pytest.mark.parametrize("reservation", ["max", "pow2", "oracle"])
def test_nothing_is_held_after_a_failed_step_or_an_abort(reservation: str) -> None:
    engine = scripted_engine(reservation)
    params = SamplingParams(n=2, max_tokens=9, ignore_eos=True, temperature=0)

    def start() -> None:
        engine.add(engine.prepare(byte_ids(engine, "abc"), params, "r"))
        engine.step()
        assert engine.scheduler.num_used_blocks == {"max": 8, "pow2": 4, "oracle": 2}[reservation]

    def fails(plan: object) -> None:
        raise RuntimeError("the device is gone")

    start()
    engine.backend.before_step = fails
    assert [event.finish_reason for event in engine.step()] == [FinishReason.ERROR] * 2
    assert engine.scheduler.num_used_blocks == 0
    engine.backend.before_step = None
    start()
    engine.abort("r")
    assert engine.scheduler.num_used_blocks == 0 and not engine.has_work
    start()
    while engine.has_work:
        engine.step()
        engine.scheduler.check_invariants()
    assert engine.scheduler.num_used_blocks == 0
    with pytest.raises(ParameterError, match="^n: 6 is not allowed; at most 5 with kv_reservation max"):
        scripted_engine("max").prepare(byte_ids(engine, "abc"), replace(params, n=6))


def filled(engine: Engine) -> float:
    lines = exposition(metric_families(engine))[0].decode().splitlines()
    (line,) = [line for line in lines if line.startswith("octavo_kv_slots_filled_ratio ")]
    return float(line.split()[1])


@pytest.mark.parametrize(("reservation", "num_slots"), [("paged", 16), ("oracle", 32), ("pow2", 64), ("max", 64)])
def test_the_share_of_filled_slots_in_the_metrics(reservation: str, num_slots: int) -> None:
    engine = scripted_engine(reservation)
    assert math.isnan(filled(engine))
    engine.add(engine.prepare(byte_ids(engine, "abcde"), SamplingParams(max_tokens=20, ignore_eos=True, temperature=0), "r"))
    for num_written in (5, 6, 7):
        engine.step()
        assert filled(engine) == num_written / num_slots
    engine.abort("r")
    assert math.isnan(filled(engine))
