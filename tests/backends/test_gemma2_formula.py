"""Soft caps, alternating windows and the exact window boundary: the reference backend against the formula written straight down."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.backends.gemma2_formula import HEAD_DIM, VOCAB, Settings, formula, read_weights, write_model
from tests.backends.reference_runs import all_logits, make_backend, open_gguf_weights

LENGTHS = (31, 32, 33, 34, 63, 64, 65, 200)
TOLERANCE = 1e-4
BLOCKS = list(range(13))


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("gemma2") / "model.gguf")


@pytest.fixture(scope="module")
def weights(model_path: Path) -> dict[str, np.ndarray]:
    return read_weights(model_path)


@pytest.fixture(scope="module")
def ids() -> list[int]:
    return np.random.default_rng(1).integers(0, VOCAB, max(LENGTHS)).tolist()


@pytest.fixture(scope="module")
def computed(model_path: Path, ids: list[int]) -> np.ndarray:
    """Logits of the longest sequence, in one piece."""
    return all_logits(make_backend(open_gguf_weights(model_path)), ids, len(ids), BLOCKS)


@pytest.mark.parametrize("length", LENGTHS)
def test_agrees_with_the_formula_however_it_is_cut(model_path: Path, weights: dict[str, np.ndarray], ids: list[int], length: int) -> None:
    expected = formula(weights, ids[:length], Settings())
    backend = make_backend(open_gguf_weights(model_path))
    whole = all_logits(backend, ids[:length], length, BLOCKS)
    assert np.abs(whole - expected).max() < TOLERANCE
    for chunk in (7, 1):
        assert all_logits(backend, ids[:length], chunk, BLOCKS).tobytes() == whole.tobytes()


WRONG_SETTINGS = [
    replace(Settings(), **change)
    for change in (
        {"attention_cap": None},
        {"final_cap": None},
        {"window": None},
        {"window": 31},
        {"window": 33},
        {"window_on": "odd"},
        {"window_on": "all"},
        {"scale": HEAD_DIM**-0.5},
    )
]


@pytest.mark.parametrize("wrong", WRONG_SETTINGS, ids=repr)
def test_every_setting_is_felt(weights: dict[str, np.ndarray], ids: list[int], computed: np.ndarray, wrong: Settings) -> None:
    length = 64
    assert np.abs(computed[:length] - formula(weights, ids[:length], wrong)).max() > 100 * TOLERANCE


@pytest.mark.parametrize(("window", "first_felt"), [(31, 31), (32, None), (33, 32)])
def test_the_window_begins_to_tell_at_its_boundary(
    weights: dict[str, np.ndarray], ids: list[int], computed: np.ndarray, window: int, first_felt: int | None
) -> None:
    difference = np.abs(computed[:64] - formula(weights, ids[:64], Settings(window=window))).max(1)
    felt = np.flatnonzero(difference > TOLERANCE)
    assert (int(felt[0]) if felt.size else None) == first_felt


def test_a_second_sequence_on_the_first_one_s_blocks(model_path: Path, ids: list[int]) -> None:
    """48 shared tokens: three blocks that were written before the first sequence went on to 200, far past their window."""
    backend = make_backend(open_gguf_weights(model_path))
    first = all_logits(backend, ids, 200, BLOCKS)
    other = ids[:48] + ids[100:140]
    shared = all_logits(backend, other[48:], 7, [0, 1, 2, 20, 21, 22], start=48)
    plain = all_logits(make_backend(open_gguf_weights(model_path)), other, len(other), BLOCKS)
    assert shared.tobytes() == plain[48:].tobytes()
    assert all_logits(backend, ids[192:], 1, BLOCKS, start=192).tobytes() == first[192:].tobytes()
