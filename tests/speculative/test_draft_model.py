"""The draft model: the target as its own draft says what it will say, greedy and sampled; pools may be small; tokens must be the same."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo import LLM
from octavo.backends.reference.backend import ReferenceBackend
from octavo.config import CacheConfig, EngineConfig, SchedulerConfig
from octavo.core.request import Request, SamplingParams
from octavo.models.loading import open_model
from octavo.speculative import draft_model
from octavo.speculative.draft_model import DraftModel, OwnBlocks, VocabularyMismatch, check_vocabularies
from tests.engine.scripted import byte_tokenizer
from tests.models.tiny import write_tiny_gguf

PARAMS = {
    "greedy": SamplingParams(temperature=0),
    "sampled": SamplingParams(temperature=0.9, top_p=0.95),
    "penalties": SamplingParams(temperature=0.8, frequency_penalty=0.8, repetition_penalty=1.3, min_tokens=3),
    "some tokens": SamplingParams(temperature=1.0, allowed_token_ids=tuple(range(40, 90))),
}
PROMPT = [5 + (i * i + 7 * i) % 480 for i in range(21)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("models") / "rand.gguf")


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with LLM(str(path), backend="reference", num_kv_blocks=128) as llm:
        yield llm


def make_draft(path: Path, num_blocks: int = 32, max_len: int = 512) -> DraftModel:
    model = open_model(str(path)).body
    backend = ReferenceBackend(model, EngineConfig(cache=CacheConfig(num_kv_blocks=num_blocks), scheduler=SchedulerConfig(max_num_seqs=8)))
    backend.allocate_kv(num_blocks)
    return DraftModel(backend, num_blocks, 16, backend.vocab_size, max_len)


def request_of(prompt: list[int], params: SamplingParams, seed: int = 7) -> Request:
    return Request("r", prompt, params, seed, frozenset([2]))


def coming(llm: LLM, prompt: list[int], params: SamplingParams, num_tokens: int, seed: int = 7) -> list[int]:
    from dataclasses import replace

    return llm.generate(prompt, replace(params, max_tokens=num_tokens, seed=seed, ignore_eos=True))[0].outputs[0].token_ids


@pytest.mark.parametrize("name", PARAMS)
def test_the_target_as_its_own_draft(path: Path, llm: LLM, name: str) -> None:
    """Each draft is what the target draws, wherever drafting begins, and behind drafts that did not come true."""
    from dataclasses import replace

    params = replace(PARAMS[name], ignore_eos=True, max_tokens=30)
    want = coming(llm, PROMPT, params, 30)
    draft = make_draft(path)
    draft.begin(0, PROMPT, request_of(PROMPT, params), 0)
    num_known = 0
    for num_new, most in ((0, 5), (1, 3), (4, 4), (2, 6), (6, 1), (3, 8)):
        draft.extend(0, want[num_known : num_known + num_new])
        num_known += num_new
        assert draft.propose([(0, most)]) == [want[num_known : num_known + most]]


def test_text_that_goes_another_way(path: Path, llm: LLM) -> None:
    """KV of drafts that did not come true is not looked at."""
    params = SamplingParams(temperature=0, ignore_eos=True)
    draft = make_draft(path)
    known = list(PROMPT)
    draft.begin(0, known, request_of(known, params), 0)
    rng = random.Random(1)
    for _ in range(6):
        assert draft.propose([(0, 4)]) == [coming(llm, known, params, 4)]
        others = [rng.randrange(5, 480) for _ in range(rng.randint(1, 6))]
        known = known + others
        draft.extend(0, others)


def test_many_sequences_in_a_small_pool(path: Path, llm: LLM) -> None:
    """A pool of fewer blocks than all need together: those that find no room propose nothing, the others what is right."""
    params = SamplingParams(temperature=0, ignore_eos=True)
    prompts = {i: [(i + 1) * 3 + j % 50 for j in range(10 + 9 * i)] for i in range(5)}
    want = {i: coming(llm, p, params, 6) for i, p in prompts.items()}
    draft = make_draft(path, num_blocks=7)
    for i, prompt in prompts.items():
        draft.begin(i, prompt, request_of(prompt, params), 0)
    answered = set()
    for group in ([0, 1], [2, 3], [4], [0, 1, 2, 3, 4], [4, 3], [0]):
        for i, drafts in zip(group, draft.propose([(i, 6) for i in group]), strict=True):
            assert drafts in ([], want[i])
            if drafts:
                answered.add(i)
        held = [block for drafted in draft._sequences.values() for block in drafted.table]
        assert isinstance(draft._blocks, OwnBlocks) and sorted([*held, *draft._blocks._free]) == list(range(7))
    assert answered == {0, 1, 2, 3, 4}
    for i in prompts:
        draft.end(i)
    assert len(draft._blocks._free) == 7 and len(draft._slots) == draft._backend.max_num_slots


@pytest.mark.parametrize("max_rows", [1, 30, 45, 64])
def test_texts_that_do_not_fit_one_step_together(path: Path, llm: LLM, max_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read one after the other, and nobody goes without drafts."""
    monkeypatch.setattr(draft_model, "MAX_ROWS", max_rows)
    params = SamplingParams(temperature=0, ignore_eos=True)
    prompts = {i: [(i + 1) * 3 + j % 50 for j in range(10 + 9 * i)] for i in range(5)}
    draft = make_draft(path)
    for i, prompt in prompts.items():
        draft.begin(i, prompt, request_of(prompt, params), 0)
    assert draft.propose([(i, 4) for i in prompts]) == [coming(llm, prompt, params, 4) for prompt in prompts.values()]


def test_no_drafts_past_the_draft_s_context(path: Path, llm: LLM) -> None:
    params = SamplingParams(temperature=0, ignore_eos=True)
    draft = make_draft(path, max_len=len(PROMPT) + 2)
    draft.begin(0, PROMPT, request_of(PROMPT, params), 0)
    want = coming(llm, PROMPT, params, 6)
    assert draft.propose([(0, 5)]) == [want[:2]]
    draft.extend(0, want[:2])
    assert draft.peek(0)[0] == 0 and draft.propose([(0, 5)]) == [[]]


def test_nothing_behind_the_end(path: Path, llm: LLM) -> None:
    want = coming(llm, PROMPT, SamplingParams(temperature=0), 6)
    draft = make_draft(path)
    for ignore_eos, num in ((False, 3), (True, 6)):
        params = SamplingParams(temperature=0, ignore_eos=ignore_eos)
        draft.begin(num, PROMPT, Request("r", PROMPT, params, 7, frozenset([want[2]])), 0)
        assert draft.propose([(num, 6)]) == [want[:num]]


EOS = frozenset([2])


def test_vocabularies() -> None:
    target = byte_tokenizer(["ab", "cd"])
    check_vocabularies(target, byte_tokenizer(["ab", "cd"]), EOS, EOS)
    padded = byte_tokenizer(["ab", "cd"])
    padded.pad_to(padded.vocab_size + 7)
    check_vocabularies(target, padded, EOS, EOS)
    check_vocabularies(padded, target, EOS, EOS)
    kinds = [3] * 3 + [1] * (target.vocab_size - 5) + [5] * 2  # the same texts, the last of which one file calls unused
    unused = byte_tokenizer(["ab", "cd"], **{"tokenizer.ggml.token_type": kinds})
    check_vocabularies(target, unused, EOS, EOS)
    check_vocabularies(unused, padded, EOS, EOS)
    first = target.vocab_size - 2
    with pytest.raises(VocabularyMismatch, match=f"has {first + 1} tokens and the target's {first + 2}"):
        check_vocabularies(target, byte_tokenizer(["ab"]), EOS, EOS)
    with pytest.raises(VocabularyMismatch, match=f"token {first} is 'cd' in the draft and 'ab' in the target"):
        check_vocabularies(target, byte_tokenizer(["cd", "ab"]), EOS, EOS)
    with pytest.raises(VocabularyMismatch, match=r"ends with tokens \[1\] and the target with \[2\]"):
        check_vocabularies(target, target, EOS, frozenset([1]))
