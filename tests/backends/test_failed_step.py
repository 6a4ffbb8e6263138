"""A step that fails half way: the engine ends its requests, and the next ones work on the same backend."""

from __future__ import annotations

from array import array

import pytest

from octavo.config import BackendConfig, CacheConfig, EngineConfig
from octavo.core.request import SamplingParams
from octavo.core.step import SequenceSlice, SlotOpen, StepPlan
from tests.backends.exactness import fixture_model


@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_slots_of_a_step_that_failed_before_they_opened_can_be_closed(name: str) -> None:
    from octavo.backends.registry import backend_class

    model = fixture_model("llama")
    backend = backend_class(name)(model, EngineConfig(cache=CacheConfig(kv_cache_dtype="auto"), backend=BackendConfig(backend=name)))
    backend.allocate_kv(8)
    bad = SlotOpen(0, SamplingParams(), 1, [model.program.vocab_size + 5], [])
    good = SlotOpen(1, SamplingParams(temperature=0.0), 1, [1, 2], [])
    with pytest.raises(ValueError):
        backend.execute(StepPlan(0, slot_opens=[bad, good]))
    piece = SequenceSlice(0, 0, [1, 2], array("i", [0]), 1, [1])
    result = backend.execute(StepPlan(1, [piece], slot_closes=[0, 1], slot_opens=[good]))
    assert len(result.slices[0].token_ids) == 1
    backend.close()
