"""Tiers in int8: twice the blocks, answers near to the computed ones, files of their own; nothing rounded where exactness is promised."""

from __future__ import annotations

import logging
import math
import random
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, RequestOutput, SamplingParams
from octavo.config import ConfigError
from octavo.engine.kv_disk import list_stores
from tests.engine.test_kv_tiers import OTHERS, PARAMS, PROMPT, restored_always, tiered, tiering_of
from tests.models.tiny import write_tiny_gguf


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("models") / "rand.gguf", context=1024)


def logprobs(llm: LLM) -> tuple[int, list[float]]:
    """Cached tokens, and the log-probabilities of the best tokens after the prompt, in order of token ids."""
    (output,) = llm.generate(PROMPT, SamplingParams(max_tokens=1, temperature=0.0, logprobs=20))
    entry = output.outputs[0].logprobs[0]  # type: ignore[index]
    return output.num_cached_tokens, list(entry.top_logprobs)


@pytest.mark.parametrize(
    ("kv", "options"),
    [("bf16", {}), ("f16", {"kv_cache_dtype": "f16"}), ("f32", {"compute": "f32"}), ("f32", {"backend": "reference"})],
    ids=str,
)
def test_what_comes_back_is_near(path: Path, kv: str, options: dict[str, Any]) -> None:
    """Exact tiers give the same bits; packed ones hold about twice as many blocks of bf16 and give nearly the same answer."""
    with tiered(path, kv_host_memory=1 << 18, **options) as llm:
        num_exact = tiering_of(llm).tiers.num_host_blocks
    with tiered(path, kv_host_memory=1 << 18, kv_host_dtype="int8", **options) as llm:
        restored_always(llm)
        num_blocks = tiering_of(llm).tiers.num_host_blocks
        assert num_exact * (1.5 if kv != "f32" else 3) < num_blocks < num_exact * (2 if kv != "f32" else 4)
        none, computed = logprobs(llm)
        llm.generate(OTHERS[0], PARAMS)
        cached, restored = logprobs(llm)
        assert (none, cached) == (0, 112)
        again_cached, again = logprobs(llm)
        assert again_cached == 112 and again == restored, "what is in the pool now stays as it is"
        llm.generate(OTHERS[0], PARAMS)
        assert logprobs(llm) == (112, restored), "what was rounded once is not rounded further"
    error = math.sqrt(sum((a - b) ** 2 for a, b in zip(computed, restored, strict=True)) / len(computed))
    assert 0.0 < error < 0.05


def test_files_are_found_only_by_those_who_want_them_rounded(path: Path, tmp_path: Path) -> None:
    fingerprints = []
    for options, num_cached in (({}, 0), ({"kv_host_dtype": "int8"}, 0), ({}, 112), ({"kv_host_dtype": "int8"}, 112)):
        with tiered(path, kv_disk_path=str(tmp_path), **options) as llm:
            restored_always(llm)
            assert logprobs(llm)[0] == num_cached
            fingerprints.append(llm.engine.backend.fingerprint())
    assert fingerprints[0] == fingerprints[2] != fingerprints[1] == fingerprints[3]
    assert "+host-int8" in fingerprints[1]
    sizes = sorted(store.num_bytes / store.num_blocks for store in list_stores(tmp_path))
    assert len(sizes) == 2 and 1.4 < sizes[1] / sizes[0] < 2.0


def test_a_cache_in_int8_goes_as_it_is(path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = {"kv_disk_path": str(tmp_path), "kv_cache_dtype": "int8"}
    with tiered(path, **options) as llm:
        expected = logprobs(llm)
        fingerprint = llm.engine.backend.fingerprint()
    with caplog.at_level(logging.WARNING, "octavo.kv"), tiered(path, kv_host_dtype="int8", **options) as llm:
        restored_always(llm)
        assert logprobs(llm) == (112, expected[1])
        assert llm.engine.backend.fingerprint() == fingerprint
    assert "int8 changes nothing" in caplog.text
    assert len(list_stores(tmp_path)) == 1


def test_swapping_stays_exact(path: Path) -> None:
    """Sequences that are swapped out and back beside packed tiers: every answer as in a large pool without any."""
    rng = random.Random(3)
    prompts = [[rng.randrange(3, 500) for _ in range(rng.randint(20, 60))] for _ in range(12)]
    params = [SamplingParams(max_tokens=rng.randint(30, 80), ignore_eos=True, logprobs=2, temperature=0.9, seed=i) for i in range(12)]

    def answers(**options: Any) -> tuple[list[RequestOutput], Any]:
        with LLM(str(path), admission_lookahead=1, **options) as llm:
            return llm.generate(prompts, params), llm.engine

    expected, _ = answers(num_kv_blocks=512)
    packed = {"kv_host_memory": 1 << 20, "kv_host_dtype": "int8"}
    outputs, engine = answers(num_kv_blocks=20, preemption="swap", swap_space=1 << 20, **packed)
    assert engine.scheduler.stats.num_swap_preemptions > 3 and engine.tiering.tiers.stats.num_saved_blocks > 10
    assert [output.outputs for output in outputs] == [output.outputs for output in expected]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_host_dtype": "int8"}, "kv_host_dtype: 'int8' is not allowed; it is for kv_host_memory and kv_disk_path, and neither is set"),
        ({"kv_host_dtype": "int4", "kv_host_memory": 1 << 20}, "kv_host_dtype: 'int4' is not allowed; one of auto, int8"),
        ({"kv_host_dtype": "int8", "kv_host_memory": 9}, "kv_host_memory: 9 bytes hold no block; one takes"),
    ],
)
def test_configurations_that_cannot_be(path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiered(path, **options)


def test_a_swapped_sequence_shares_nothing_that_was_rounded(path: Path) -> None:
    """While it is away, its prompt is restored for another: it comes back to its own blocks, not to those of the other."""
    params = SamplingParams(max_tokens=100, ignore_eos=True, logprobs=2, temperature=0.9, seed=5)
    with LLM(str(path), num_kv_blocks=64, enable_prefix_caching=False) as llm:
        expected = [token for token in llm.generate(PROMPT, params)[0].outputs[0].logprobs or ()]
    options = {"preemption": "swap", "swap_space": 1 << 20, "scheduling_policy": "priority", "admission_lookahead": 1}
    with tiered(path, num_kv_blocks=20, kv_host_memory=1 << 20, kv_host_dtype="int8", **options) as llm:
        restored_always(llm)
        engine, entries = llm.engine, []
        stats, tier_stats = engine.scheduler.stats, tiering_of(llm).tiers.stats
        long = SamplingParams(max_tokens=220, ignore_eos=True)
        engine.add(engine.prepare(PROMPT[:16][::-1], long, "runs"))
        engine.add(engine.prepare(PROMPT, params, "swapped", priority=5))

        def step() -> None:
            for event in engine.step():
                entries.extend(event.logprobs or () if event.request_id == "swapped" else ())

        while not stats.num_swap_preemptions:
            step()
        for name, prompt in (("evicts", OTHERS[0]), ("restores", PROMPT)):
            engine.add(engine.prepare(prompt, SamplingParams(max_tokens=1, ignore_eos=True), name))
            while name in engine.scheduler._state.requests:
                step()
            assert engine.scheduler.num_swapped == 1, "it is away all the while"
        assert tier_stats.host_hit_tokens > 0
        engine.abort("runs")  # there is room now, and the restored blocks are still in the pool
        while engine.has_work:
            step()
        engine.scheduler.check_invariants()
        assert entries == expected and stats.num_blocks_loaded > 0
