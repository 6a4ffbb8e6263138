"""The engine as a whole: what it closes when it cannot be made, what the time of a step holds, the size of its pool."""

from __future__ import annotations

from typing import Any

import pytest

from octavo import SamplingParams
from octavo.backends import registry
from octavo.config import CacheConfig, ConfigError, EngineConfig
from octavo.core.clock import VirtualClock
from octavo.engine.engine import Engine
from octavo.engine.llm import LLM
from tests.engine.scripted import Bigram, bigram_engine, bigram_model, byte_tokenizer


@pytest.mark.parametrize("make", [Engine.from_loaded, LLM.from_loaded])
def test_a_backend_is_closed_when_its_engine_cannot_be_made(monkeypatch: pytest.MonkeyPatch, make: Any) -> None:
    model = bigram_model(byte_tokenizer())
    backend = Bigram(model.program.vocab_size)
    monkeypatch.setattr(registry, "create_backend", lambda *_: backend)
    with pytest.raises(ConfigError, match="kv_cache_memory: 1023 bytes hold no block; one takes 1024"):
        make(model, EngineConfig(cache=CacheConfig(kv_cache_memory=1023)))
    assert backend.closed


def test_the_pool_has_the_size_that_is_given() -> None:
    model = bigram_model(byte_tokenizer())
    config = EngineConfig(cache=CacheConfig(kv_cache_memory=10 * 1024 + 5))
    assert Engine(model, config, Bigram(model.program.vocab_size)).num_kv_blocks == 10


def test_the_time_of_a_step_includes_its_planning(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = bigram_engine()
    clock = engine.clock = VirtualClock()
    begin_step = engine.loop.begin_step

    def slow(now_s: float) -> Any:
        plan = begin_step(now_s)
        clock.advance(0.25)
        return plan

    monkeypatch.setattr(engine.loop, "begin_step", slow)
    engine.add(engine.prepare([5], SamplingParams(max_tokens=2, ignore_eos=True)))
    while engine.has_work:
        engine.step()
    assert sum(engine.metrics.step_s.counts) == 2 and engine.metrics.step_s.total == 0.5
