"""The reference backend as a Backend: paged KV, order of effects, slots, logprobs, and rows that depend on their own past alone."""

from __future__ import annotations

from array import array
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.backends.base import BackendError
from octavo.backends.reference.backend import ReferenceBackend
from octavo.config import BackendConfig, CacheConfig, EngineConfig
from octavo.core.request import SamplingParams
from octavo.core.step import NO_TOKEN_ALLOWED, BlockCopy, SequenceSlice, SliceResult, SlotOpen, StepPlan
from octavo.models.loaded import LoadedModel
from octavo.sampling.reference import ReferenceSampler, raw_logprobs
from tests.backends.reference_runs import all_logits, make_backend, open_gguf_weights
from tests.models.tiny import write_tiny_gguf

VOCAB = 272
IDS = np.random.default_rng(5).integers(0, VOCAB, 40).tolist()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """Local and global layers, q/k norms and post norms; window 6."""
    overrides = {"gemma3.attention.sliding_window": 6, "gemma3.attention.sliding_window_pattern": 2}
    path = tmp_path_factory.mktemp("reference") / "m.gguf"
    return open_gguf_weights(write_tiny_gguf(path, "gemma3", hidden=32, ffn=48, vocab=VOCAB, metadata_overrides=overrides))


@pytest.fixture(scope="module")
def plain(model: LoadedModel) -> np.ndarray:
    """Logits of IDS computed alone, in one piece."""
    return all_logits(make_backend(model), IDS, len(IDS), range(3))


def slice_of(ids: list[int], start: int, blocks: list[int], **fields: object) -> SequenceSlice:
    return SequenceSlice(0, start, ids, array("i", blocks), **fields)  # type: ignore[arg-type]


def run_one(backend: ReferenceBackend, s: SequenceSlice, **plan: object) -> SliceResult:
    return backend.execute(StepPlan(0, [s], **plan)).slices[0]  # type: ignore[arg-type]


def opened(slot: int, params: SamplingParams | None = None, seed: int = 3) -> SlotOpen:
    return SlotOpen(slot, params or SamplingParams(temperature=0.0), seed, IDS, [])


@pytest.mark.parametrize("block_size", [1, 3, 16, 32])
def test_block_size_and_block_order_do_not_matter(model: LoadedModel, plain: np.ndarray, block_size: int) -> None:
    num_blocks = -(-len(IDS) // block_size)
    table = np.random.default_rng(block_size).permutation(num_blocks + 4)[:num_blocks].tolist()
    backend = make_backend(model, block_size, num_blocks + 4)
    assert all_logits(backend, IDS, 7, table).tobytes() == plain.tobytes()


@settings(max_examples=15, deadline=None)
@given(cuts=st.lists(st.integers(1, 39), max_size=6, unique=True), mates=st.lists(st.integers(1, 12), max_size=3))
def test_rows_do_not_depend_on_cuts_or_batch_mates(model: LoadedModel, plain: np.ndarray, cuts: list[int], mates: list[int]) -> None:
    backend = make_backend(model, block_size=4, num_blocks=30)
    rows: dict[tuple[int, int], np.ndarray] = {}
    backend.logits_hook = lambda seq_id, position, logits: rows.__setitem__((seq_id, position), logits)
    backend.all_logits = True
    ends = [*sorted(cuts), len(IDS)]
    for step, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        slices = [SequenceSlice(9, start, IDS[start:end], array("i", range(20, 30)))]
        for mate, length in enumerate(mates):  # strangers, starting afresh in each step
            slices.insert(mate % 2, SequenceSlice(mate, 0, IDS[-length:], array("i", range(3 * mate, 3 * mate + 3))))
        backend.execute(StepPlan(step, slices))
    assert np.stack([rows[9, position] for position in range(len(IDS))]).tobytes() == plain.tobytes()


def test_everything_is_float32(plain: np.ndarray) -> None:
    assert plain.dtype == np.float32
    assert np.isfinite(plain).all() and plain.std() > 0.1


def test_a_copied_block_goes_its_own_way(model: LoadedModel, plain: np.ndarray) -> None:
    backend = make_backend(model, block_size=16, num_blocks=8)
    all_logits(backend, IDS[:20], 20, [0, 1])
    other = [*IDS[:20], 5, 6, 7]
    backend.all_logits = False
    run_one(backend, slice_of([5, 6, 7], 20, [0, 2]), block_copies=[BlockCopy(1, 2)])
    copied = all_logits(backend, [8], 1, [0, 2], start=23)
    assert copied.tobytes() == all_logits(make_backend(model), [*other, 8], 24, [0, 1])[23:].tobytes()
    assert all_logits(backend, IDS[20:], 20, [0, 1, 3], start=20).tobytes() == plain[20:].tobytes()


def test_only_wanted_rows_reach_the_hook(model: LoadedModel, plain: np.ndarray) -> None:
    backend = make_backend(model)
    seen: list[tuple[int, int]] = []
    backend.logits_hook = lambda seq_id, position, logits: seen.append((seq_id, position))
    run_one(backend, slice_of(IDS[:10], 0, [0]))
    assert seen == []
    run_one(backend, slice_of(IDS[10:14], 10, [0], num_samples=1, sample_slots=[0]), slot_opens=[opened(0)])
    assert seen == [(0, 13)]
    run_one(backend, slice_of(IDS[14:18], 14, [0, 1], prompt_logprobs=0, next_token_ids=IDS[15:18]))
    assert seen[1:] == [(0, 14), (0, 15), (0, 16)]
    assert all_logits(backend, IDS[18:], 22, [0, 1, 2], start=18).tobytes() == plain[18:].tobytes()


def test_tokens_and_logprobs_are_those_of_the_sampler(model: LoadedModel, plain: np.ndarray) -> None:
    params = SamplingParams(temperature=0.9, top_p=0.9, frequency_penalty=0.5)
    backend, sampler = make_backend(model), ReferenceSampler(VOCAB, 4)
    sampler.open(opened(2, params))
    s = slice_of(IDS, 0, [0, 1, 2], num_samples=1, sample_slots=[2], logprobs=3)
    result = run_one(backend, s, slot_opens=[opened(2, params)])
    expected = sampler.sample(2, plain[-1], len(IDS), None, 3)
    assert result.token_ids == [expected.token_id] and result.logprobs == [expected.logprobs]
    follow = slice_of(result.token_ids, len(IDS), [0, 1, 2], num_samples=1, sample_slots=[2])
    logits = all_logits(make_backend(model), IDS + result.token_ids, 41, range(3))[-1]
    assert run_one(backend, follow).token_ids == [sampler.sample(2, logits, len(IDS) + 1).token_id]


def test_a_mask_allows_only_its_tokens(model: LoadedModel) -> None:
    mask = array("I", [0] * (-(-VOCAB // 32)))
    mask[3] = 1 << 5
    s = slice_of(IDS, 0, [0, 1, 2], num_samples=1, sample_slots=[0], mask=mask)
    assert run_one(make_backend(model), s, slot_opens=[opened(0)]).token_ids == [3 * 32 + 5]


def test_n_samples_draw_with_their_own_seeds(model: LoadedModel, plain: np.ndarray) -> None:
    params = SamplingParams(temperature=1.0)
    backend, sampler = make_backend(model), ReferenceSampler(VOCAB, 4)
    s = slice_of(IDS, 0, [0, 1, 2], num_samples=3, sample_slots=[0, 1, 2], logprobs=0)
    result = run_one(backend, s, slot_opens=[opened(0, params, seed=11)], slot_forks=[(0, 1, 12), (0, 2, 13)])
    expected = []
    for slot, seed in ((0, 11), (1, 12), (2, 13)):
        sampler.open(opened(slot, params, seed))
        expected.append(sampler.sample(slot, plain[-1], len(IDS)).token_id)
    assert result.token_ids == expected
    assert len(set(expected)) > 1
    assert [entry.token_id for entry in result.logprobs or []] == expected


def test_slots_are_closed_before_they_are_opened_again(model: LoadedModel) -> None:
    backend = make_backend(model)
    backend.execute(StepPlan(0, slot_opens=[opened(0)]))
    with pytest.raises(ValueError, match="slot: 0 is already open"):
        backend.execute(StepPlan(1, slot_opens=[opened(0)]))
    backend.execute(StepPlan(2, slot_closes=[0], slot_opens=[opened(0)]))


def test_prompt_logprobs_belong_to_the_known_next_tokens(model: LoadedModel, plain: np.ndarray) -> None:
    backend = make_backend(model)
    first = run_one(backend, slice_of(IDS[:25], 0, [0, 1, 2], prompt_logprobs=2, next_token_ids=IDS[1:26]))
    last = slice_of(IDS[25:], 25, [0, 1, 2], prompt_logprobs=2, next_token_ids=IDS[26:], num_samples=1, sample_slots=[0])
    second = run_one(backend, last, slot_opens=[opened(0)])
    entries = [*(first.prompt_logprobs or []), *(second.prompt_logprobs or [])]
    assert entries == [raw_logprobs(plain[i], IDS[i + 1], 2) for i in range(len(IDS) - 1)]
    assert second.token_ids == [int(plain[-1].argmax())]


def test_a_row_without_an_answer_fails_alone(model: LoadedModel, plain: np.ndarray) -> None:
    allowed_then_banned = SamplingParams(temperature=0.0, allowed_token_ids=(7,), bad_words_token_ids=((7,),))
    good = SequenceSlice(1, 0, IDS, array("i", [3, 4, 5]), 1, [1])
    bad = SequenceSlice(0, 0, IDS, array("i", [0, 1, 2]), 1, [0])
    results = make_backend(model).execute(StepPlan(0, [bad, good], slot_opens=[opened(0, allowed_then_banned), opened(1)])).slices
    assert results[0].token_ids == [] and "every token is forbidden" in (results[0].error or "")
    assert results[0].error_code == NO_TOKEN_ALLOWED and results[1].error_code is None
    assert results[1].token_ids == [int(plain[-1].argmax())] and results[1].error is None


@pytest.mark.parametrize(
    ("s", "message"),
    [
        (slice_of([], 0, [0]), "0 tokens from position 0"),
        (slice_of([1], -1, [0]), "from position -1"),
        (slice_of([VOCAB], 0, [0]), "token id 272 is not in 0 .. 271"),
        (slice_of([1], 0, [0], prompt_logprobs=0, next_token_ids=[-1]), "token id -1"),
        (slice_of([1], 0, [0], prompt_logprobs=0, next_token_ids=[1, 1]), "at most as many next tokens"),
        (slice_of([1], 16, [0]), "must name 2 blocks from 0 to 3"),
        (slice_of([1], 0, [4]), "must name 1 blocks from 0 to 3"),
        (slice_of([1], 0, [-1]), "must name 1 blocks from 0 to 3"),
        (slice_of([1], 0, [0], num_samples=2, sample_slots=[0]), "2 samples need as many slots"),
        (slice_of([1, 2], 0, [0], num_drafts=1), "1 drafts among 2 tokens need 2 samples, not 0"),
        (slice_of([1, 2], 0, [0], num_drafts=2, num_samples=3, sample_slots=[0]), "2 drafts among 2 tokens"),
        (slice_of([1, 2], 0, [0], num_drafts=1, num_samples=2, sample_slots=[0, 1]), "2 samples need as many slots"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(model: LoadedModel, s: SequenceSlice, message: str) -> None:
    with pytest.raises(BackendError, match=message):
        run_one(make_backend(model, num_blocks=4), s)


def test_a_copy_of_a_block_that_is_not_there_is_refused(model: LoadedModel) -> None:
    with pytest.raises(BackendError, match="copy of page 0 to page 8: pages are 0 to 7"):
        make_backend(model, num_blocks=4).execute(StepPlan(0, block_copies=[BlockCopy(0, 4)]))


def test_capacity_counts_both_keys_and_values_of_all_layers(model: LoadedModel) -> None:
    backend = ReferenceBackend(model, EngineConfig(cache=CacheConfig(block_size=16)))
    capacity = backend.kv_capacity(1_000_000)
    assert capacity.bytes_per_block == 16 * 2 * 2 * (2 * 8) * 4  # tokens, K and V, layers, kv_heads * head_dim, bytes
    assert (capacity.num_blocks, capacity.dtype) == (1_000_000 // capacity.bytes_per_block, "f32")


def test_the_pool_is_allocated_once_before_steps(model: LoadedModel) -> None:
    backend = ReferenceBackend(model, EngineConfig())
    with pytest.raises(BackendError, match="allocate_kv comes before execute"):
        backend.execute(StepPlan(0))
    with pytest.raises(BackendError, match="no memory for"):
        backend.allocate_kv(1 << 50)
    backend.allocate_kv(2)
    with pytest.raises(BackendError, match="already allocated"):
        backend.allocate_kv(2)
    backend.close()
    backend.close()
    with pytest.raises(BackendError, match="nothing after close"):
        backend.execute(StepPlan(0))


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (EngineConfig(cache=CacheConfig(kv_cache_dtype="f16")), "kv_cache_dtype"),
        (EngineConfig(backend=BackendConfig(backend="reference", threads=2)), "threads"),
    ],
)
def test_what_it_cannot_honour_is_refused(model: LoadedModel, config: EngineConfig, field: str) -> None:
    with pytest.raises(BackendError, match=field):
        ReferenceBackend(model, config)


def test_the_fingerprint_names_the_model_and_the_arithmetic(model: LoadedModel, tmp_path: Path) -> None:
    fingerprint = make_backend(model).fingerprint()
    assert model.fingerprint in fingerprint and "f32" in fingerprint and np.__version__ in fingerprint
