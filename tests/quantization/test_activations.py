"""What goes into the matrices, against the reference backend, which takes one token at a time."""

from __future__ import annotations

from array import array
from pathlib import Path

import numpy as np
import pytest

from octavo.backends.reference import ops
from octavo.backends.reference.backend import ReferenceBackend
from octavo.config import CacheConfig, EngineConfig
from octavo.core.step import SequenceSlice, StepPlan
from octavo.models.loaded import LoadedModel
from octavo.models.loading import load_model
from octavo.models.program import Linear
from octavo.quantization.activations import observe
from tests.models.tiny import write_tiny_gguf

TEXTS = [[5 + 7 * i % 300 for i in range(45)], [9], [300 - i for i in range(7)]]  # longer than the windows of 32


def by_reference(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[np.ndarray]]:
    """The inputs of each matrix, token by token."""
    seen: list[np.ndarray] = []
    plain = ops.linear

    def linear(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
        seen.append(x)
        return plain(x, weight, bias)

    monkeypatch.setattr(ops, "linear", linear)
    backend = ReferenceBackend(model, EngineConfig(cache=CacheConfig(block_size=16)))
    backend.allocate_kv(4)
    backend.all_logits = True
    for text in TEXTS:  # each from position 0, so that none sees another
        backend.execute(StepPlan(0, [SequenceSlice(0, 0, text, array("i", range(4)))]))
    names = [op.weight for op in model.program.ops if isinstance(op, Linear)]
    assert len(seen) == len(names) * sum(map(len, TEXTS))
    return {name: seen[i :: len(names)] for i, name in enumerate(names)}


CASES = [("llama", False), ("llama", True), ("qwen2", False), ("qwen3", True), ("gemma2", True), ("gemma3", True)]


@pytest.mark.parametrize("arch,tied", CASES)
def test_the_inputs_are_the_reference_backend_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arch: str, tied: bool) -> None:
    model = load_model(write_tiny_gguf(tmp_path / "m.gguf", arch, tied=tied))
    expected = by_reference(model, monkeypatch)
    found: dict[str, np.ndarray] = {}
    observe(model, TEXTS, lambda name, x: found.__setitem__(name, x.copy()))
    assert list(found) == list(expected)
    for name, rows in expected.items():
        want = np.stack(rows)
        np.testing.assert_allclose(found[name], want, atol=1e-4 * np.abs(want).max(), err_msg=name)


def test_bad_texts_are_refused(tmp_path: Path) -> None:
    model = load_model(write_tiny_gguf(tmp_path / "m.gguf"))
    for texts in ([], [[]], [[1], []]):
        with pytest.raises(ValueError, match="one token at least"):
            observe(model, texts, lambda *_: None)
    for token in (-1, 512):
        with pytest.raises(ValueError, match="from 0 to 511"):
            observe(model, [[token]], lambda *_: None)
