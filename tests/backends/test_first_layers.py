"""The first layers of a model as a model: what a file with just those layers computes, on weights and pages of the whole model."""

from __future__ import annotations

import random
from array import array

import numpy as np
import pytest

from octavo.backends.base import BackendError
from octavo.core.request import SamplingParams
from octavo.core.step import SequenceSlice, SlotOpen, StepPlan
from octavo.models.loaded import LoadedModel
from tests.backends.cpu_runs import cpu_logits, make_cpu
from tests.backends.exactness import fixture_model, quantised
from tests.backends.reference_runs import all_logits, make_backend

FAMILIES = ("llama", "gemma3")


def model_of(family: str) -> LoadedModel:
    return quantised(fixture_model(family), ("q4_1", "q8_0", "q5_0", "q4_0", "q5_1"))


def alone(model: LoadedModel, num_layers: int) -> LoadedModel:
    """As if a file had had no more layers."""
    from dataclasses import replace

    program = model.program.first_layers(num_layers)
    return replace(model, program=program, weights={name: model.weights[name] for name in program.weights})


@pytest.mark.parametrize("family", FAMILIES)
def test_the_program_is_that_of_a_shorter_model(family: str) -> None:
    program = fixture_model(family).program
    num_layers = len(program.kv_layers)
    assert len(program.layer_ends) == num_layers and len({program.ops[end - 1].out for end in program.layer_ends}) == num_layers
    for n in range(1, num_layers):
        short = program.first_layers(n)
        assert len(short.kv_layers) == len(short.layer_ends) == n
        assert not any(name.startswith(f"layers.{i}.") for name in short.weights for i in range(n, num_layers))
        assert {"embed", "norm_final"} <= short.weights.keys() and short.logits == program.logits
    for n in (0, num_layers, -1):
        with pytest.raises(ValueError, match=f"num_layers: {n} is not allowed; from 1 to {num_layers - 1}"):
            program.first_layers(n)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_pages(family: str, isa: str) -> None:
    """Behind a prompt that the whole model computed: the short model's logits to the bit; and the whole model goes on as if alone."""
    model = model_of(family)
    rng = random.Random(2)
    ids = [rng.randrange(model.program.vocab_size) for _ in range(90)]
    table = list(range(6))[::-1]
    whole, plain = make_cpu(model, "fast", threads=2, num_blocks=8), make_cpu(model, "fast", threads=2, num_blocks=8)
    want_whole = np.concatenate([cpu_logits(plain, ids[:70], table), cpu_logits(plain, ids[70:], table, start=70)])
    for n in range(1, len(model.program.kv_layers)):
        short = make_cpu(alone(model, n), "fast", threads=1, num_blocks=8)
        want = cpu_logits(short, ids, table)
        shallow = whole.first_layers(n)
        got = cpu_logits(whole, ids[:70], table)
        assert np.array_equal(got, want_whole[:70])
        assert np.array_equal(cpu_logits(shallow, ids[70:], table, chunk=7, start=70), want[70:])
        others = [(token + 1) % model.program.vocab_size for token in ids[70:80]]
        cpu_logits(shallow, others, table, start=70)  # drafts that did not come true
        assert np.array_equal(cpu_logits(whole, ids[70:], table, start=70), want_whole[70:])
        shallow.close()
        short.close()
    whole.close()
    plain.close()


def test_slots_are_its_own() -> None:
    model = model_of("llama")
    whole = make_cpu(model, "fast", num_blocks=4)
    shallow = whole.first_layers(1)
    opened = [SlotOpen(0, SamplingParams(temperature=0), 1, [5, 6], [])]
    piece = SequenceSlice(0, 0, [5, 6], array("i", [0]), 1, [0])
    for backend in (whole, shallow):
        backend.execute(StepPlan(0, [piece], slot_opens=opened))
    assert whole.fingerprint() != shallow.fingerprint()
    whole.close()
    shallow.close()


def test_the_reference_backend_does_the_same() -> None:
    model = fixture_model("gemma3")
    ids = list(range(20, 60))
    whole, short = make_backend(model), make_backend(alone(model, 1))
    shallow = whole.first_layers(1)
    all_logits(whole, ids[:30], 30, range(3))
    assert np.array_equal(all_logits(shallow, ids[30:], 1, range(3), start=30), all_logits(short, ids, 7, range(3))[30:])


def test_pages_have_to_be_there() -> None:
    from octavo.backends.cpu.backend import CpuBackend
    from octavo.config import EngineConfig

    backend = CpuBackend(model_of("llama"), EngineConfig())
    with pytest.raises(BackendError, match="allocate_kv comes before first_layers"):
        backend.first_layers(1)
    backend.close()
