"""Soft caps, alternating windows and their exact boundary on the cpu backend, against the formula; and reuse past the window (A25)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from octavo.core.request import SamplingParams
from octavo.models.loaded import LoadedModel
from tests.backends.cpu_runs import cpu_logits, make_cpu
from tests.backends.gemma2_formula import VOCAB, Settings, formula, read_weights, write_model
from tests.backends.reference_runs import open_gguf_weights
from tests.cases.harness import Job, open_engine, open_plain, plain_answer, run

LENGTHS = (31, 32, 33, 34, 63, 64, 65, 200)
TOLERANCE = 1e-4
TABLE = (12, 3, 7, 0, 1, 9, 2, 11, 10, 4, 5, 6, 8)
IDS = np.random.default_rng(1).integers(0, VOCAB, max(LENGTHS)).tolist()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("gemma2") / "model.gguf")


@pytest.fixture(scope="module")
def model(path: Path) -> LoadedModel:
    return open_gguf_weights(path)


@pytest.fixture(scope="module")
def weights(path: Path) -> dict[str, np.ndarray]:
    return read_weights(path)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("length", LENGTHS)
def test_agrees_with_the_formula_however_it_is_cut(model: LoadedModel, weights: dict[str, np.ndarray], length: int) -> None:
    backend = make_cpu(model, "f32", threads=2, num_blocks=13)
    whole = cpu_logits(backend, IDS[:length], TABLE)
    assert np.abs(whole - formula(weights, IDS[:length], Settings())).max() < TOLERANCE
    for chunk in (7, 1):
        assert cpu_logits(backend, IDS[:length], TABLE, chunk).tobytes() == whole.tobytes()


@pytest.mark.parametrize(("window", "first_felt"), [(31, 31), (32, None), (33, 32)])
def test_the_window_begins_to_tell_at_its_boundary(
    model: LoadedModel, weights: dict[str, np.ndarray], window: int, first_felt: int | None
) -> None:
    computed = cpu_logits(make_cpu(model), IDS[:64], TABLE)
    felt = np.flatnonzero(np.abs(computed - formula(weights, IDS[:64], Settings(window=window))).max(1) > TOLERANCE)
    assert (int(felt[0]) if felt.size else None) == first_felt


@pytest.mark.parametrize("change", [{"attention_cap": None}, {"final_cap": None}, {"window": None}, {"window_on": "all"}], ids=repr)
def test_caps_and_windows_are_felt(model: LoadedModel, weights: dict[str, np.ndarray], change: dict) -> None:
    computed = cpu_logits(make_cpu(model), IDS[:64], TABLE)
    assert np.abs(computed - formula(weights, IDS[:64], Settings(**change))).max() > 100 * TOLERANCE


@pytest.mark.parametrize("compute", ["fast", "f32"])
def test_a_second_request_on_blocks_the_first_has_left_far_behind(path: Path, compute: str) -> None:
    """48 tokens shared with a request that ran to 200, far past the window; while it runs, and after it has gone."""
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=2)
    long = Job(IDS[:100], SamplingParams(temperature=0, max_tokens=100, ignore_eos=True, logprobs=2))
    later = [Job(IDS[:48] + IDS[100 + i : 140 + i], params) for i in range(3)]
    with open_engine(path, compute=compute, num_kv_blocks=40) as engine:
        run(engine, Job(IDS[:48], params), long, later[0])
        run(engine, *later[1:])
        assert [job.num_cached for job in later[1:]] == [48, 48]
    with open_plain(path, compute=compute) as plain:
        for job in (long, *later):
            assert job.answer() == plain_answer(plain, job)
