"""The real models against golden float32 values: the fast path as good as llama.cpp on the same files, the exact mode nearly exact."""

from __future__ import annotations

import pytest

from octavo.models.loading import load_model
from tests.golden.measures import Gates, load, measure

# llama.cpp's own figures on these files, and what float32 must reach.
GATES = {
    ("smollm2", "fast"): Gates(top1=0.970, far_off=4, rms_lp=0.057, nll_mean_diff=0.01),
    ("gemma3", "fast"): Gates(top1=0.974, far_off=2, rms_lp=0.067, nll_mean_diff=0.01),
    ("smollm2", "f32"): Gates(top1=0.997, far_off=0, rms_lp=0.002, nll_mean_diff=0.0005),
    ("gemma3", "f32"): Gates(top1=0.997, far_off=0, rms_lp=0.002, nll_mean_diff=0.0005),
}


@pytest.mark.model
@pytest.mark.parametrize("compute", ["fast", "f32"])
@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_along_the_golden_path(request: pytest.FixtureRequest, name: str, compute: str) -> None:
    model = load_model(request.getfixturevalue(f"{name}_path"))
    found = measure(model, load(name), compute)
    print(name, compute, found)
    assert not found.failures(GATES[name, compute]), found


@pytest.mark.model
@pytest.mark.soak
@pytest.mark.parametrize("isa", ["avx2", "portable"])
@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_on_other_kernel_paths(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, name: str, isa: str) -> None:
    monkeypatch.setenv("OCTAVO_ISA", isa)
    found = measure(load_model(request.getfixturevalue(f"{name}_path")), load(name), "fast")
    print(name, isa, found)
    assert not found.failures(GATES[name, "fast"]), found


@pytest.mark.model
@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_tokenisation_is_exact(request: pytest.FixtureRequest, name: str) -> None:
    tokenizer = load_model(request.getfixturevalue(f"{name}_path")).tokenizer
    golden = load(name)
    wrong = [t["text"] for t in golden["tokenize"] + golden["prompts"] if tokenizer.encode(t["text"], add_special_tokens=False) != t["ids"]]
    assert not wrong
