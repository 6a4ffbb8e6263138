"""Looked-up and same-model drafts change no token, keep within their bounds, and every setting is felt (A18).

Other methods, sampling, choices and tight pools: tests/engine/test_speculation.py; the look-ups against brute force:
tests/speculative/test_lookup.py; bounds in the scheduler: tests/core/test_drafts.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo.backends.base import Backend
from octavo.config import MAX_DRAFTS, SpeculativeConfig
from octavo.core.clock import VirtualClock
from octavo.core.request import SamplingParams
from octavo.core.step import StepPlan, StepResult
from octavo.engine.engine import Engine
from octavo.speculative.speculator import SpeculationStats, create_speculator
from tests.cases.harness import Job, open_engine, plain_answer, prompt_of, run
from tests.cases.served import served
from tests.models.tiny import write_tiny_gguf
from tests.speculative.replay import Device, Replay, Text, flat_then_linear

CONTEXT = 256
GREEDY = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, logprobs=2)
NGRAM = {"spec": 5, "spec_method": "ngram", "ngram_min": 1, "ngram_max": 3}
PHRASE = [70, 71, 75, 90, 80, 81]
PROMPTS = {
    "1 1 1": [1, 1, 1],
    "shorter than the n-gram": [66, 67],
    "a phrase again, and then other words": [*PHRASE, *PHRASE, *PHRASE[:4], 9, 200, 3],
    "2 positions left": [*prompt_of(CONTEXT - 2 - len(PHRASE)), *PHRASE],
}


def draft_of(path: Path) -> dict[str, Any]:
    return {"spec": 5, "spec_method": "draft", "draft_model": str(path)}


def record_plans(backend: Backend | None, plans: list[StepPlan]) -> None:
    """Append the plans that a backend is given from now on."""
    if backend is None:
        return
    execute = backend.execute

    def executing(plan: StepPlan) -> StepResult:
        plans.append(plan)
        return execute(plan)

    backend.execute = executing  # type: ignore[method-assign]


@pytest.mark.parametrize("method", ["ngram", "draft"])
@pytest.mark.parametrize("name", PROMPTS)
def test_token_for_token_as_plain(rand: Path, plain: Engine, name: str, method: str) -> None:
    """Alone and beside the others; no position at or past the limit, no more than max_tokens, for the target and for the draft."""
    options = NGRAM if method == "ngram" else draft_of(rand)
    with open_engine(rand, num_kv_blocks=64, **options) as engine:
        plans = list[StepPlan]()
        for backend in (engine.backend, engine._drafting._backend):
            record_plans(backend, plans)
        job = Job(PROMPTS[name], GREEDY)
        run(engine, job)
        assert job.answer() == plain_answer(plain, job) and job.num_tokens == min(60, CONTEXT - len(PROMPTS[name]))
        stats = engine.speculator.stats
        if method == "draft":
            assert stats.num_accepted == stats.num_proposed and (stats.num_proposed > 0) == (job.num_tokens > 2)
        for plan in plans:
            for piece in plan.slices:
                assert piece.start + piece.num_tokens < min(CONTEXT, len(job.prompt_ids) + 60) and piece.num_drafts <= 5
        jobs = [Job(prompt, GREEDY) for prompt in PROMPTS.values()]
        run(engine, *jobs)
        assert [one.answer() for one in jobs] == [plain_answer(plain, one) for one in jobs]


def test_the_metric_says_that_every_draft_was_accepted(rand: Path) -> None:
    """A draft cache that lacks the last accepted token would show from the second draft on."""
    with served(rand, **draft_of(rand)) as (server, client):
        for prompt in PROMPTS.values():
            body = {"model": "m", "prompt": prompt, "max_tokens": 60, "temperature": 0, "extra_body": {"ignore_eos": True}}
            answer = client.completions.create(**body)
            assert answer.usage is not None and answer.usage.completion_tokens == min(60, CONTEXT - len(prompt))
        metrics = server.metrics()
        name = "octavo_spec_decode_num_{}_tokens{}_total"
        assert metrics[name.format("accepted", "")] == metrics[name.format("draft", "")] > 100
        for place in range(5):
            accepted, tested = (metrics[name.format(what, "_per_pos") + f'{{position="{place}"}}'] for what in ("accepted", "tested"))
            assert accepted == tested > 20


SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "spec": (NGRAM, {"spec": 2}),
    "spec off": (NGRAM, {"spec": "off"}),
    "spec_method": (NGRAM, {"spec_method": "suffix"}),
    "ngram_max": (NGRAM, {"ngram_max": 1}),
    "ngram_min": (NGRAM, {"ngram_min": 3}),
    "suffix_min": ({"spec": 5, "spec_method": "suffix", "suffix_min": 1}, {"suffix_min": 4}),
    "draft_model": ({"spec": 5, "spec_method": "draft"}, {"draft_model": "other"}),
    "self_draft_layers": ({"spec": 5, "spec_method": "self", "self_draft_layers": 1}, {"self_draft_layers": 2}),
    "spec_rule": ({"spec": 5, "spec_method": "self", "self_draft_layers": 2}, {"spec_rule": "resample"}),
}


@pytest.fixture(scope="module")
def three_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("models") / "three.gguf", layers=3)


def counted(path: Path, prompts: list[list[int]], params: SamplingParams, **options: Any) -> SpeculationStats:
    with open_engine(path, **options) as engine:
        run(engine, *(Job(prompt, params) for prompt in prompts))
        return engine.speculator.stats


@pytest.mark.parametrize("name", SETTINGS)
def test_each_setting_changes_the_counters(rand: Path, three_layers: Path, name: str) -> None:
    base, change = SETTINGS[name]
    path = three_layers
    if name == "draft_model":
        base, change = base | {"draft_model": str(path)}, {"draft_model": str(rand)}
    texts = [[*PHRASE, 7, *PHRASE[3:], 8, *PHRASE, 5, *PHRASE[:3]], PROMPTS["a phrase again, and then other words"]]
    params = GREEDY if name != "spec_rule" else SamplingParams(temperature=1, seed=5, max_tokens=60, ignore_eos=True)
    before, after = counted(path, texts, params, **base), counted(path, texts, params, **(base | change))
    shown = [(stats.num_proposed, stats.num_accepted, stats.tested) for stats in (before, after)]
    assert shown[0] != shown[1] and before.num_proposed > 0
    assert (after.num_proposed == 0) == (name == "spec off")
    assert len(before.tested) == MAX_DRAFTS and not any(before.tested[5:])


def test_max_drafts_bounds_auto() -> None:
    """On a device whose rows cost nothing, so that many pay."""
    ring, most, counts = list(range(10, 22)), [], []
    for max_drafts in (3, 6, 9):
        config = SpeculativeConfig(spec="auto", max_drafts=max_drafts)
        speculator = create_speculator(config, 10**6, VirtualClock())
        outcome = Replay(speculator, Device(flat_then_linear(64), position_s=0.0), [Text(ring * 3, ring * 40)]).run()
        assert max(outcome.drafts) <= max_drafts
        most.append(max(outcome.drafts))
        counts.append(speculator.stats.num_proposed)
    assert most == sorted(set(most)) and len(set(counts)) == 3
