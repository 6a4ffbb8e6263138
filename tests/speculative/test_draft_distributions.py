"""What drafts are said to be drawn from is what they were drawn from; and requests through an engine whose rule is accept/resample."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from octavo import LLM
from octavo.backends.reference.backend import ReferenceBackend
from octavo.backends.resampling import ResamplingBackend
from octavo.config import CacheConfig, ConfigError, EngineConfig, SchedulerConfig, SpeculativeConfig
from octavo.core.request import Request, SamplingParams, Sequence
from octavo.core.step import SlotOpen
from octavo.models.loading import open_model
from octavo.sampling.reference import ReferenceSampler
from octavo.speculative.draft_model import DraftModel
from octavo.speculative.self_draft import SelfDraft
from tests.backends.reference_runs import all_logits
from tests.models.tiny import write_tiny_gguf
from tests.speculative.test_self_draft import step_of

PROMPT = [5 + (i * i + 7 * i) % 480 for i in range(21)]
PARAMS = SamplingParams(temperature=0.8, top_p=0.9, frequency_penalty=0.8, repetition_penalty=1.3, min_tokens=3)
REQUEST = Request("r", PROMPT, PARAMS, 7, frozenset([2]))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("models") / "rand.gguf")


def backend_of(path: Path) -> ReferenceBackend:
    config = EngineConfig(cache=CacheConfig(num_kv_blocks=32), scheduler=SchedulerConfig(max_num_seqs=8))
    backend = ReferenceBackend(open_model(str(path)).body, config)
    backend.allocate_kv(32)
    return backend


def logits_of(backend: ReferenceBackend, ids: list[int]) -> np.ndarray:
    """[len(ids), vocab_size]"""
    return all_logits(backend, ids, len(ids), [0, 1, 2])


def laws(backend: ReferenceBackend, known: list[int], drafts: list[int], vocab_size: int) -> list[np.ndarray]:
    """Of the token behind ``known`` and behind each draft but the last: from all logits anew, among the first ``vocab_size`` ids."""
    rows = logits_of(backend, [*known, *drafts[:-1]])[len(known) - 1 :].copy()
    rows[:, vocab_size:] = -np.inf
    found = []
    for i, row in enumerate(rows):
        sampler = ReferenceSampler(row.size, 1)
        sampler.open(SlotOpen(0, PARAMS, 7, PROMPT, [*known[len(PROMPT) :], *drafts[:i]], frozenset([2])))
        found.append(sampler.distribution(0, row)[:vocab_size])
    return found


@pytest.mark.parametrize("padding", [0, 7])
def test_a_draft_model_tells_what_it_drew_from(path: Path, padding: int) -> None:
    """Drafting twice, with text that went another way in between; ids that only the draft has are never drawn."""
    backend, twin = backend_of(path), backend_of(path)
    vocab_size = backend.vocab_size - padding
    draft = DraftModel(backend, 32, 16, vocab_size, 512, keep_distributions=True)
    draft.begin(0, PROMPT, REQUEST, 0)
    draft.begin(1, PROMPT[:9], replace(REQUEST, prompt_token_ids=PROMPT[:9]), 0)
    for more in ([], [17, 300]):
        draft.extend(0, more)
        known = [*PROMPT, *more]
        (drafts, _) = draft.propose([(0, 4), (1, 2)])
        assert len(drafts) == 4 and max(drafts) < vocab_size
        told = draft.take_distributions(0)
        assert told is not None and np.array_equal(np.stack(told), np.stack(laws(twin, known, drafts, vocab_size)))  # type: ignore[arg-type]
        assert draft.take_distributions(0) is None  # handed over
    draft.end(1)
    assert draft.take_distributions(1) is None
    plain = DraftModel(backend_of(path), 32, 16, vocab_size, 512)
    plain.begin(0, PROMPT, REQUEST, 0)
    assert plain.propose([(0, 4)]) and plain.take_distributions(0) is None


def test_first_layers_tell_what_they_drew_from(path: Path) -> None:
    whole, twin = backend_of(path), backend_of(path).first_layers(1)
    logits_of(whole, PROMPT[:-1])
    draft = SelfDraft(whole.first_layers(1), keep_distributions=True)
    seq = Sequence(0, replace(REQUEST, prompt_token_ids=PROMPT[:-1]), token_ids=PROMPT[:], num_prompt_tokens=len(PROMPT) - 1)
    seq.num_computed = len(PROMPT) - 1
    for num_drafts in (3, 1):
        plan = step_of(seq, num_drafts, [0, 1, 2])
        assert draft.fill(plan, [seq]) == num_drafts
        drafts, told = plan.slices[0].token_ids[-num_drafts:], plan.slices[0].draft_distributions
        rows = logits_of(twin, [*PROMPT, *drafts[:-1]])[len(PROMPT) - 1 :]
        assert told is not None and len(told) == num_drafts
        for i, row in enumerate(rows):
            sampler = ReferenceSampler(row.size, 1)
            sampler.open(SlotOpen(0, PARAMS, 7, PROMPT[:-1], [PROMPT[-1], *drafts[:i]], frozenset([2])))
            assert np.array_equal(sampler.distribution(0, row), told[i])  # type: ignore[arg-type]
    unfilled = step_of(seq, 2, [0, 1, 2])
    assert draft.fill(unfilled, []) == 0 and unfilled.slices[0].draft_distributions is None


# --- through the engine -------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llms(path: Path) -> Iterator[tuple[LLM, LLM]]:
    """(without drafts, with)"""
    options = {"num_kv_blocks": 64, "threads": 1, "max_num_seqs": 8}
    how = {"spec": 3, "spec_method": "self", "self_draft_layers": 1, "spec_rule": "resample"}
    with LLM(str(path), **options) as plain, LLM(str(path), **options, **how) as llm:
        yield plain, llm


def test_greedy_text_is_that_without_drafts(llms: tuple[LLM, LLM]) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=2)
    want, got = (llm.generate([PROMPT, PROMPT[3:]], params) for llm in llms)
    assert [o.outputs[0].token_ids for o in got] == [o.outputs[0].token_ids for o in want]
    assert [o.outputs[0].logprobs for o in got] == [o.outputs[0].logprobs for o in want]


def test_logprobs_are_those_of_the_text_read_again(llms: tuple[LLM, LLM]) -> None:
    plain, llm = llms
    params = SamplingParams(temperature=1.0, top_p=0.95, presence_penalty=0.5, max_tokens=30, seed=4, ignore_eos=True, logprobs=3)
    for output in llm.generate(PROMPT, replace(params, n=4))[0].outputs:
        assert output.logprobs is not None and len(output.token_ids) == len(output.logprobs) == 30
        again = plain.generate([*PROMPT, *output.token_ids], SamplingParams(max_tokens=0, prompt_logprobs=3))[0].prompt_logprobs
        assert again is not None and again[-30:] == output.logprobs


def test_a_stop_inside_an_accepted_run(llms: tuple[LLM, LLM]) -> None:
    """Nothing past a stop is kept: the text is a beginning of what goes on without it, since the steps before it are the same."""
    _, llm = llms
    params = SamplingParams(temperature=0.6, max_tokens=40, seed=9, ignore_eos=True)
    whole = llm.generate(PROMPT, params)[0].outputs[0].token_ids
    for stop in sorted(set(whole)):
        output = llm.generate(PROMPT, replace(params, stop_token_ids=(stop,)))[0].outputs[0]
        assert output.token_ids == whole[: whole.index(stop) + 1] and output.finish_reason == "stop"


def test_who_has_the_rule(llms: tuple[LLM, LLM]) -> None:
    plain, llm = llms
    assert not isinstance(plain.engine.backend, ResamplingBackend)
    backend = llm.engine.backend
    assert isinstance(backend, ResamplingBackend) and backend.fingerprint() == plain.engine.backend.fingerprint()
    assert backend.threads == 1 and backend.name == "cpu"  # all else is the wrapped backend's
    stats = llm.engine.speculator.stats
    assert stats.tested == backend.acceptance.tested and stats.accepted == backend.acceptance.accepted
    with pytest.raises(ConfigError, match="spec_rule: 'exact' is not allowed; one of coupling, resample"):
        SpeculativeConfig(spec_rule="exact").validate()
