"""Every family agrees with transformers (float32, committed logits), from safetensors and from GGUF, however the prompt is cut.

The fixtures come from scripts/make_parity_fixtures.py. Prompts are longer than the windows; caps, scales and rotary scaling bite.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from octavo.models.loading import load_model
from tests.backends.reference_runs import all_logits, make_backend

PARITY = Path(__file__).resolve().parent.parent / "fixtures" / "parity"
FAMILIES = ("llama", "llama3", "mistral", "qwen2", "qwen3", "gemma2", "gemma3")
TOLERANCE = 1e-4
BLOCK_SIZE = 5  # does not divide the window, the prompts or the chunks
BLOCK_TABLE = (7, 2, 9, 0, 5, 3, 8, 1, 6)  # 45 positions, in no order


def expected(family: str, prompt: int) -> tuple[list[int], np.ndarray]:
    with np.load(PARITY / family / "logits.npz") as arrays:
        return arrays[f"ids_{prompt}"].tolist(), arrays[f"logits_{prompt}"]


def test_every_family_has_fixtures_and_they_are_small() -> None:
    assert sorted(folder.name for folder in PARITY.iterdir()) == sorted(FAMILIES)
    assert sum(file.stat().st_size for file in PARITY.rglob("*") if file.is_file()) < 3_000_000


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("form", ["safetensors", "gguf"])
def test_logits_equal_those_of_transformers(family: str, form: str) -> None:
    path = PARITY / family / "model.gguf" if form == "gguf" else PARITY / family
    backend = make_backend(load_model(path), BLOCK_SIZE, num_blocks=10)
    for prompt in (0, 1):
        ids, logits = expected(family, prompt)
        whole = all_logits(backend, ids, len(ids), BLOCK_TABLE)
        assert np.abs(whole - logits).max() < TOLERANCE
        for chunk in (7, 1):
            assert all_logits(backend, ids, chunk, BLOCK_TABLE).tobytes() == whole.tobytes()


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3"])
def test_prompts_reach_past_the_windows(family: str) -> None:
    program = load_model(PARITY / family / "model.gguf").program
    windows = {layer.window for layer in program.kv_layers}
    assert 8 in windows and (family == "mistral" or None in windows)
    assert len(expected(family, 0)[0]) >= 40
