"""What a StepPlan says, the cpu backend does: slots, copies, draws, masks and log-probabilities, each against the rule it matches."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from octavo.backends.cpu.backend import CpuBackend
from octavo.backends.reference.backend import ReferenceBackend
from octavo.config import BackendConfig, EngineConfig
from octavo.core.request import SamplingParams
from octavo.core.step import NO_TOKEN_ALLOWED, BlockCopy, SequenceSlice, SliceResult, SlotOpen, StepPlan
from octavo.models.loaded import LoadedModel
from octavo.sampling.reference import ReferenceSampler, raw_logprobs
from octavo.sampling.structured import mask_from_ids
from tests.backends.cpu_runs import cpu_logits, make_cpu
from tests.backends.reference_runs import open_gguf_weights
from tests.models.tiny import write_tiny_gguf

VOCAB = 272
GREEDY = SamplingParams(temperature=0.0)
IDS = np.random.default_rng(3).integers(0, VOCAB, 60).tolist()
OTHER_IDS = np.random.default_rng(4).integers(0, VOCAB, 60).tolist()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path = tmp_path_factory.mktemp("models") / "m.gguf"
    return open_gguf_weights(write_tiny_gguf(path, vocab=VOCAB, hidden=64, tensor_type="Q8_0", tensor_types={"token_embd.weight": "F32"}))


@pytest.fixture
def backend(model: LoadedModel) -> Iterator[CpuBackend]:
    made = make_cpu(model, "fast", threads=2)
    yield made
    made.close()


class Recorder:
    """Runs plans on a backend and keeps the raw logits by (seq_id, position)."""

    def __init__(self, backend: CpuBackend) -> None:
        self.backend = backend
        self.logits: dict[tuple[int, int], np.ndarray] = {}
        self.num_steps = 0
        backend.logits_hook = lambda seq_id, position, row: self.logits.update({(seq_id, position): row.copy()})

    def run(self, *slices: SequenceSlice, **plan: object) -> list[SliceResult]:
        self.num_steps += 1
        result = self.backend.execute(StepPlan(self.num_steps, list(slices), **plan))  # type: ignore[arg-type]
        assert result.step_index == self.num_steps and result.seconds > 0
        return result.slices


def piece(seq_id: int, ids: list[int], blocks: list[int], start: int = 0, slots: tuple[int, ...] = (), **wanted: object) -> SequenceSlice:
    return SequenceSlice(seq_id, start, ids, array("i", blocks), len(slots), list(slots), **wanted)  # type: ignore[arg-type]


def opened(slot: int, params: SamplingParams = GREEDY, seed: int = 1, prompt: tuple[int, ...] = (1, 2)) -> SlotOpen:
    return SlotOpen(slot, params, seed, list(prompt), [])


# --- blocks -------------------------------------------------------------------------------------------------------------------------------


def test_a_copied_block_is_written_apart(model: LoadedModel, backend: CpuBackend) -> None:
    """Two sequences share 20 tokens; one copies the part-filled block and both go on."""
    plain = make_cpu(model, "fast")
    want = cpu_logits(plain, IDS[:40], [0, 1, 2])[20:], cpu_logits(plain, IDS[:20] + OTHER_IDS[:20], [3, 4, 5])[20:]
    plain.close()
    cpu_logits(backend, IDS[:20], [0, 1])
    backend.execute(StepPlan(1, block_copies=[BlockCopy(1, 5)]))
    got_other = cpu_logits(backend, OTHER_IDS[:20], [0, 5, 6], start=20)
    got = cpu_logits(backend, IDS[20:40], [0, 1, 2], start=20)
    assert got.tobytes() == want[0].tobytes() and got_other.tobytes() == want[1].tobytes()


def test_copies_come_before_the_rows_of_their_plan_and_in_their_order(model: LoadedModel, backend: CpuBackend) -> None:
    plain = make_cpu(model, "fast")
    want_first, want_second = cpu_logits(plain, IDS[:17], [0, 1])[16], cpu_logits(plain, OTHER_IDS[:17], [2, 3])[16]
    plain.close()
    cpu_logits(backend, IDS[:16], [0])
    cpu_logits(backend, OTHER_IDS[:16], [1])
    recorder = Recorder(backend)
    recorder.run(
        piece(0, [IDS[16]], [2, 9], 16, (0,)), piece(1, [OTHER_IDS[16]], [0, 8], 16, (1,)),
        block_copies=[BlockCopy(0, 2), BlockCopy(1, 0)], slot_opens=[opened(0), opened(1)],
    )  # fmt: skip
    assert recorder.logits[0, 16].tobytes() == want_first.tobytes()
    assert recorder.logits[1, 16].tobytes() == want_second.tobytes()


def test_blocks_hold_what_was_written_whatever_ran_in_between(model: LoadedModel, backend: CpuBackend) -> None:
    whole = cpu_logits(backend, IDS, [3, 1, 0, 2])
    cpu_logits(backend, OTHER_IDS, [4, 5, 6, 7], chunk=11)
    assert cpu_logits(backend, IDS[33:], [3, 1, 0, 2], start=33).tobytes() == whole[33:].tobytes()


# --- slots --------------------------------------------------------------------------------------------------------------------------------


def test_slots_close_open_and_fork_in_that_order_before_the_draws(backend: CpuBackend) -> None:
    """One plan closes a slot, opens it for another sequence, forks that, and draws from both."""
    hot = SamplingParams(temperature=1.5, repetition_penalty=1.3, frequency_penalty=0.5)
    recorder, oracle = Recorder(backend), ReferenceSampler(VOCAB, 8)
    recorder.run(piece(0, IDS[:9], [0], slots=(0,)), slot_opens=[opened(0)])
    second = opened(0, hot, seed=7, prompt=tuple(OTHER_IDS[:5]))
    results = recorder.run(
        piece(1, OTHER_IDS[:5], [1], slots=(0,)), piece(2, OTHER_IDS[:6], [2], slots=(3,)),
        slot_closes=[0], slot_opens=[second], slot_forks=[(0, 3, 99)],
    )  # fmt: skip
    oracle.open(second)
    oracle.fork(0, 3, 99)
    for seq_id, slot, position in ((1, 0, 5), (2, 3, 6)):
        want = oracle.sample(slot, recorder.logits[seq_id, position - 1], position)
        assert results[seq_id - 1].token_ids == [want.token_id]


PARAMS = [
    GREEDY,
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(temperature=1.3, top_k=20, min_p=0.01),
    SamplingParams(temperature=0.0, frequency_penalty=1.5, presence_penalty=0.5),
    SamplingParams(temperature=1.0, repetition_penalty=1.5, logit_bias={5: 8.0, 6: -100.0}),
    SamplingParams(temperature=2.0, allowed_token_ids=tuple(range(40, 60)), min_tokens=3, stop_token_ids=(41,)),
    SamplingParams(temperature=1.0, bad_words_token_ids=((9,), (7, 8))),
]


def test_draws_and_log_probabilities_are_the_sampling_rule_s_on_the_raw_logits(backend: CpuBackend) -> None:
    """Seven sequences with seven kinds of parameters, decoding together for twelve steps."""
    recorder, oracle = Recorder(backend), ReferenceSampler(VOCAB, 8)
    entries = [opened(i, params, seed=100 + i, prompt=tuple(IDS[i : i + 4])) for i, params in enumerate(PARAMS)]
    known = [IDS[i : i + 4] for i in range(len(PARAMS))]
    for entry in entries:
        oracle.open(entry)
    for step in range(12):
        pieces = []
        for i, ids in enumerate(known):
            start = 0 if step == 0 else len(ids) - 1
            pieces.append(piece(i, ids[start:], [2 * i, 2 * i + 1], start, (i,), logprobs=i))
        results = recorder.run(*pieces, slot_opens=entries if step == 0 else [])
        for i, result in enumerate(results):
            position = len(known[i])
            want = oracle.sample(i, recorder.logits[i, position - 1], position, None, i)
            assert result.token_ids == [want.token_id] and result.error is None
            assert repr(result.logprobs) == repr([want.logprobs])
            known[i] = known[i] + [want.token_id]


def test_n_samples_of_one_row_draw_each_with_its_own_slot(backend: CpuBackend) -> None:
    recorder, oracle = Recorder(backend), ReferenceSampler(VOCAB, 8)
    entries = [opened(i, SamplingParams(temperature=1.5), seed=i, prompt=tuple(IDS[:20])) for i in range(4)]
    (result,) = recorder.run(piece(0, IDS[:20], [0, 1], slots=(0, 1, 2, 3), logprobs=3), slot_opens=entries)
    for entry in entries:
        oracle.open(entry)
    wanted = [oracle.sample(i, recorder.logits[0, 19], 20, None, 3) for i in range(4)]
    assert result.token_ids == [w.token_id for w in wanted] and len(set(result.token_ids)) > 1
    assert repr(result.logprobs) == repr([w.logprobs for w in wanted])
    assert list(recorder.logits) == [(0, 19)]


def test_the_time_of_drawing_is_told_and_is_part_of_the_step_s(model: LoadedModel, backend: CpuBackend) -> None:
    reference = ReferenceBackend(model, EngineConfig())
    reference.allocate_kv(8)
    for one in (backend, reference):
        drawn = one.execute(StepPlan(1, [piece(0, IDS[:20], [0, 1], slots=(0,))], slot_opens=[opened(0)]))
        assert 0.0 < drawn.sampling_seconds < drawn.seconds
        assert one.execute(StepPlan(2, [piece(1, IDS[:5], [2])])).sampling_seconds == 0.0


def test_masks_belong_to_their_slice(backend: CpuBackend) -> None:
    allowed: list[list[int] | None] = [[17], None, [200, 201], [VOCAB - 1]]
    pieces = [
        piece(i, IDS[:5], [i], slots=(i,), mask=None if ids is None else mask_from_ids(ids, VOCAB)) for i, ids in enumerate(allowed)
    ]
    results = Recorder(backend).run(*pieces, slot_opens=[opened(i) for i in range(4)])
    assert results[0].token_ids == [17] and results[2].token_ids[0] in (200, 201) and results[3].token_ids == [VOCAB - 1]
    assert results[1].token_ids == Recorder(backend).run(piece(5, IDS[:5], [5], slots=(5,)), slot_opens=[opened(5)])[0].token_ids


# --- log-probabilities of known tokens ----------------------------------------------------------------------------------------------------


def prompt_results(backend: CpuBackend, chunk: int, k: int) -> tuple[list[object], dict[tuple[int, int], np.ndarray]]:
    """Prompt log-probabilities of IDS beside a sequence of strangers, in chunks; and the logits of their rows."""
    recorder, entries = Recorder(backend), []
    for start in range(0, len(IDS), chunk):
        ids = IDS[start : start + chunk]
        wanted = piece(1, ids, [4, 5, 6, 7], start, prompt_logprobs=k, next_token_ids=IDS[start + 1 : start + 1 + chunk])
        stranger = piece(2, OTHER_IDS[start : start + chunk], [8, 9, 10, 11], start)
        results = recorder.run(stranger, wanted)
        assert results[0] == SliceResult() and results[1].token_ids == []
        entries += results[1].prompt_logprobs or []
    return entries, recorder.logits


@pytest.mark.parametrize("k", [0, 5, 20])
def test_prompt_log_probabilities_do_not_depend_on_chunks(backend: CpuBackend, k: int) -> None:
    whole, logits = prompt_results(backend, len(IDS), k)
    assert sorted(logits) == [(1, position) for position in range(len(IDS) - 1)]  # the last row has no known next token
    want = [raw_logprobs(logits[1, i], IDS[i + 1], k) for i in range(len(IDS) - 1)]
    assert repr(whole) == repr(want)
    for chunk in (1, 7, 16):
        assert repr(prompt_results(backend, chunk, k)[0]) == repr(whole)


def test_a_prompt_s_last_row_gives_its_log_probability_and_draws(backend: CpuBackend) -> None:
    recorder = Recorder(backend)
    wanted = piece(0, IDS[:20], [0, 1], slots=(0, 1), logprobs=1, prompt_logprobs=2, next_token_ids=IDS[1:21])
    (result,) = recorder.run(wanted, slot_opens=[opened(0), opened(1)])
    assert result.prompt_logprobs is not None and len(result.prompt_logprobs) == 20
    assert repr(result.prompt_logprobs[19]) == repr(raw_logprobs(recorder.logits[0, 19], IDS[20], 2))
    assert result.token_ids == [int(recorder.logits[0, 19].argmax())] * 2


def test_more_log_probabilities_than_tokens(tmp_path: Path) -> None:
    """A vocabulary of seven: the twenty best are seven."""
    values = {name: np.random.default_rng(1).standard_normal((7, 32), dtype=np.float32) for name in ("token_embd.weight", "output.weight")}
    tiny = open_gguf_weights(write_tiny_gguf(tmp_path / "m.gguf", hidden=32, heads=2, kv_heads=1, ffn=32, layers=1, tensors=values))
    assert tiny.program.vocab_size == 7
    recorder = Recorder(make_cpu(tiny))
    wanted = piece(0, [1, 2, 3], [0], slots=(0,), logprobs=20, prompt_logprobs=20, next_token_ids=[2, 3])
    (result,) = recorder.run(wanted, slot_opens=[opened(0)])
    assert result.logprobs is not None and result.prompt_logprobs is not None
    assert repr(result.logprobs) == repr([raw_logprobs(recorder.logits[0, 2], result.token_ids[0], 20)])
    assert [len(entry.top_ids) for entry in result.prompt_logprobs + result.logprobs] == [7, 7, 7]


# --- rows that allow no answer ------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["F32", "BF16", "Q8_0", "Q4_1"])
def poisoned(request: pytest.FixtureRequest, tmp_path: Path) -> LoadedModel:
    """Token 7 has a NaN in its embedding, token 9 an infinity."""
    embedding = np.random.default_rng(0).standard_normal((VOCAB, 64), dtype=np.float32)
    embedding[7, 3], embedding[9, 60] = np.nan, np.inf
    kinds = {"token_embd.weight": "F32"}
    path = tmp_path / "m.gguf"
    return open_gguf_weights(
        write_tiny_gguf(path, vocab=VOCAB, tensors={"token_embd.weight": embedding}, tensor_type=request.param, tensor_types=kinds)
    )


@pytest.mark.parametrize("bad", [7, 9])
def test_a_nan_is_the_error_of_its_sequence_alone(isa: str, poisoned: LoadedModel, bad: int) -> None:
    backend = make_cpu(poisoned, "fast", threads=2)
    recorder = Recorder(backend)
    pieces = [piece(i, IDS[:8], [i], slots=(i,), logprobs=2) for i in (0, 2)]
    plain = recorder.run(*pieces, slot_opens=[opened(0), opened(2)])
    plain_logits = {key: row.tobytes() for key, row in recorder.logits.items()}
    tainted = piece(1, [5, bad, 6], [1], slots=(1,), logprobs=2)
    results = recorder.run(pieces[0], tainted, pieces[1], slot_opens=[opened(i) for i in range(3)], slot_closes=[0, 2])
    assert results[0] == plain[0] and results[2] == plain[1] and plain[0].error is None
    assert all(recorder.logits[key].tobytes() == row for key, row in plain_logits.items())
    assert results[1] == SliceResult(error="logit of token 0 is nan; every logit must be finite or -inf")
    # What the bad row left in its block is nothing to a later owner of the block.
    again = recorder.run(replace(pieces[0], block_table=array("i", [1])), slot_opens=[opened(0)], slot_closes=[0])
    assert again == plain[:1]
    backend.close()


def test_errors_of_prompt_rows_are_those_of_the_reference(poisoned: LoadedModel) -> None:
    wanted = piece(0, [5, 6, 7, 8], [0], slots=(0,), prompt_logprobs=1, next_token_ids=[6, 7, 8])
    results = []
    for backend in (make_cpu(poisoned), ReferenceBackend(poisoned, EngineConfig(backend=BackendConfig(backend="reference")))):
        if isinstance(backend, ReferenceBackend):
            backend.allocate_kv(2)
        (result,) = backend.execute(StepPlan(0, [wanted], slot_opens=[opened(0)])).slices
        results.append((result.error, len(result.prompt_logprobs or []), result.token_ids, result.logprobs))
        backend.close()
    assert results[0] == results[1] == ("position 2: logit of token 0 is nan; every logit must be finite or -inf", 2, [], None)


def test_a_mask_that_forbids_everything_is_an_error_and_not_a_token(backend: CpuBackend) -> None:
    nothing = array("I", bytes(4 * (-(-VOCAB // 32))))
    results = Recorder(backend).run(
        piece(0, IDS[:4], [0], slots=(0,), mask=nothing), piece(1, IDS[:4], [1], slots=(1,)), slot_opens=[opened(0), opened(1)]
    )
    assert results[0].token_ids == [] and results[0].error is not None and "every token is forbidden" in results[0].error
    assert results[0].error_code == NO_TOKEN_ALLOWED and results[1].error_code is None
    assert len(results[1].token_ids) == 1 and results[1].error is None


# --- plans with little in them ------------------------------------------------------------------------------------------------------------


def test_empty_plans(backend: CpuBackend) -> None:
    recorder = Recorder(backend)
    assert recorder.run() == []
    assert recorder.run(slot_opens=[opened(3)], block_copies=[BlockCopy(0, 1)]) == []
    assert recorder.run(slot_closes=[3]) == []
    assert recorder.run(piece(0, IDS[:20], [0, 1])) == [SliceResult()] and recorder.logits == {}
    assert len(recorder.run(piece(0, [IDS[20]], [0, 1], 20, (3,)), slot_opens=[opened(3)])[0].token_ids) == 1
