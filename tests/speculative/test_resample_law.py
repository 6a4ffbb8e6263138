"""spec_rule resample, through the whole engine: the joint law of the first tokens is the target's, with drafts that are often wrong.

Each text's first token is drawn at the prompt's end, as ever; the next two are verified drafts, resampled tokens, or what is drawn behind
accepted ones. Pairs and triples are counted against the product of the target's laws, computed from its logits behind each prefix.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from octavo import LLM
from octavo.backends.resampling import AcceptanceStats, ResamplingBackend
from octavo.core.request import SamplingParams, derive_seed
from octavo.core.step import SlotOpen
from octavo.sampling.reference import ReferenceSampler
from tests.backends.cpu_runs import cpu_logits, make_cpu
from tests.models.tiny import write_tiny_gguf
from tests.sampling.chi_square import p_value

LIMIT = 0.001
SEED = 8  # p-values of 0.1 and more on every kernel path: one that rounds otherwise draws a few texts otherwise, which moves them little
CHOICES = 30  # of one request: all of them can draft at once
Law = Callable[[tuple[int, ...]], np.ndarray]  # tokens behind the prompt -> float64 [vocab] of the next one
PROMPT = [5 + (i * i + 7 * i) % 60 for i in range(8)] * 2  # of whole blocks: choices copy none of them; and it repeats itself

PARAMS = SamplingParams(temperature=0.9, top_k=6, top_p=0.97, max_tokens=4, ignore_eos=True)
# method -> (settings, how tokens are drawn)
METHODS = {
    "first layers": ({"spec_method": "self", "self_draft_layers": 1}, PARAMS),
    "another model": ({"spec_method": "draft"}, replace(PARAMS, frequency_penalty=0.7, repetition_penalty=1.2)),
    "looked up": ({"spec_method": "suffix", "suffix_min": 1}, replace(PARAMS, allowed_token_ids=tuple(PROMPT[:8]))),
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    return write_tiny_gguf(folder / "a.gguf", seed=1), write_tiny_gguf(folder / "b.gguf", seed=1, layers=1, tensor_type="Q4_0")


def draws(llm: LLM, prompt: list[int], params: SamplingParams, seed: int, num: int) -> list[tuple[int, ...]]:
    """Token ids of ``num`` texts, rounded up to whole requests."""
    several = [replace(params, n=CHOICES, seed=derive_seed(seed, 1 + i)) for i in range(-(-num // CHOICES))]
    return [tuple(text.token_ids) for request in llm.generate([prompt] * len(several), several) for text in request.outputs]


def joint(law: Law, depth: int, least: float) -> dict[tuple[int, ...], float]:
    """Probabilities of the tuples of ``depth`` tokens whose probability is at least ``least``."""
    found = {(): 1.0}
    for _ in range(depth):
        longer: dict[tuple[int, ...], float] = {}
        for prefix, mass in found.items():
            p = mass * law(prefix)
            longer |= {(*prefix, int(t)): float(p[t]) for t in np.flatnonzero(p >= least)}
        found = longer
    return found


def joint_p_value(texts: list[tuple[int, ...]], probabilities: dict[tuple[int, ...], float]) -> float:
    """All other tuples are one cell."""
    depth = len(next(iter(probabilities)))
    seen = Counter(text[:depth] for text in texts)
    observed = [seen[cell] for cell in probabilities]
    expected = [len(texts) * p for p in probabilities.values()]
    rest = 1 - sum(probabilities.values())
    if rest > 1e-9:  # of what was left out
        observed.append(len(texts) - sum(observed))
        expected.append(len(texts) * rest)
    else:
        assert sum(observed) == len(texts)
        expected = [e / (1 - rest) for e in expected]
    return p_value(np.array(observed), np.array(expected))


def laws_of(llm: LLM, prompt: list[int], *several: SamplingParams) -> list[Law]:
    """One for each way of drawing, from the logits of the engine's model behind each prefix, run on a backend without drafts."""
    backend = make_cpu(llm.engine.model, "fast", num_blocks=16)
    rows: dict[tuple[int, ...], np.ndarray] = {}

    def law(prefix: tuple[int, ...], params: SamplingParams) -> np.ndarray:
        if prefix not in rows:
            ids = [*prompt, *prefix]
            rows[prefix] = cpu_logits(backend, ids, list(range(-(-len(ids) // 16))))[-1]
        sampler = ReferenceSampler(rows[prefix].size, 1)
        sampler.open(SlotOpen(0, params, 0, prompt, list(prefix)))
        return sampler.distribution(0, rows[prefix])

    return [partial(law, params=params) for params in several]


def open_llm(paths: tuple[Path, Path], method: str) -> LLM:
    options: dict[str, object] = {"draft_model": str(paths[1])} if method == "another model" else {}
    options |= METHODS[method][0]
    return LLM(str(paths[0]), spec=2, spec_rule="resample", num_kv_blocks=512, max_num_seqs=CHOICES, threads=1, **options)


def stats_of(llm: LLM) -> AcceptanceStats:
    backend = llm.engine.backend
    assert isinstance(backend, ResamplingBackend)
    return backend.acceptance


@pytest.mark.parametrize("method", METHODS)
def test_first_tokens_of_a_small_model(paths: tuple[Path, Path], method: str) -> None:
    with open_llm(paths, method) as llm:
        params = METHODS[method][1]
        (law,) = laws_of(llm, PROMPT, params)
        texts = draws(llm, PROMPT, params, SEED, 2000)
        stats = stats_of(llm)
        assert joint_p_value(texts, joint(law, 2, 1e-4)) > LIMIT
        assert joint_p_value(texts, joint(law, 3, 1e-4)) > LIMIT
        tested, accepted = sum(stats.tested), sum(stats.accepted)
        assert tested > 0.3 * len(texts) and 0.02 < accepted / tested < 0.9  # often wrong, and sometimes right
        assert stats.alpha == pytest.approx(accepted / tested, abs=4 * math.sqrt(0.25 / tested))


NUM_SETS = 20
NUM_TEXTS = 900  # of each
BEGINNING = "I went to the market this morning and bought apples, bread, cheese, and"


@pytest.mark.soak
@pytest.mark.model
@pytest.mark.timeout(1800)
def test_first_two_tokens_of_smollm2(smollm2_path: Path) -> None:
    """Temperature 1, whole vocabulary; the model's first 24 of 30 layers draft, and are wrong more often than not."""
    params = SamplingParams(temperature=1.0, max_tokens=3, ignore_eos=True)
    options = {"spec": 2, "spec_method": "self", "self_draft_layers": 24, "spec_rule": "resample"}
    with LLM(str(smollm2_path), max_num_seqs=CHOICES, num_kv_blocks=512, **options) as llm:
        prompt = llm.tokenizer.encode(BEGINNING)
        assert len(prompt) == 16  # a block
        law, other = laws_of(llm, prompt, params, replace(params, temperature=1.05))
        frequent = joint(law, 2, 5 / NUM_TEXTS)
        texts, values = [], []
        for seed_set in range(NUM_SETS):
            texts.append(draws(llm, prompt, params, derive_seed(2023, 1 + seed_set), NUM_TEXTS))
            values.append(joint_p_value(texts[-1], frequent))
        together = [text for some in texts for text in some]
        cells = joint(law, 2, 5 / len(together))
        of_all, of_wrong = joint_p_value(together, cells), joint_p_value(together, joint(other, 2, 5 / len(together)))
        stats = stats_of(llm)
        tested, accepted = sum(stats.tested), sum(stats.accepted)
        print(f"Measures: {len(frequent)} pairs of tokens, p of {NUM_SETS} sets of {NUM_TEXTS}:", *(f"{v:.3f}" for v in values))
        print(f"Measures: {len(cells)} pairs, p of all {of_all:.3f}, under another law {of_wrong:.1e}")
        print(f"Measures: {accepted} of {tested} drafts accepted, alpha {stats.alpha:.3f}")
        assert min(values) > LIMIT and of_all > LIMIT
        assert of_wrong < 1e-6  # 5 % off in temperature would be seen
        assert tested >= len(together) and 0.1 < accepted / tested < 0.7
        assert stats.alpha == pytest.approx(accepted / tested, abs=4 * math.sqrt(0.25 / tested))
