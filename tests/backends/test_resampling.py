"""ResamplingBackend: every step is what the rule says of full sequences, computed anew; the wrapped backend draws the rest."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from octavo.backends.base import BackendError
from octavo.backends.resampling import LENIENCES, ResamplingBackend
from octavo.config import CacheConfig, SchedulerConfig
from octavo.core import policy
from octavo.core.request import Request, SamplingParams, Sequence, derive_seed
from octavo.core.scheduler import Scheduler
from octavo.core.step import SequenceSlice, SliceResult, SlotOpen, StepPlan, TokenEvent
from octavo.sampling.accept import accept_or_resample, overlap
from octavo.sampling.reference import ReferenceSampler, raw_logprobs
from tests.engine.scripted import Bigram

VOCAB = 12
EOS = frozenset([11])
PARAMS = {
    "plain": SamplingParams(max_tokens=20),
    "greedy": SamplingParams(max_tokens=20, temperature=0),
    "nucleus": SamplingParams(max_tokens=20, temperature=0.7, top_p=0.8, logprobs=2),
    "penalties": SamplingParams(max_tokens=20, frequency_penalty=0.7, presence_penalty=0.4, repetition_penalty=1.2, logprobs=0),
    "choices": SamplingParams(max_tokens=20, n=3, frequency_penalty=1.0),
    "some tokens": SamplingParams(max_tokens=20, allowed_token_ids=(0, 2, 3, 5, 7, 8), logit_bias={3: 1.5}),
    "ends": SamplingParams(max_tokens=20, min_tokens=4, stop_token_ids=(6,), bad_words_token_ids=((1, 2), (4,))),
}


def bigram(seed: int = 0) -> Bigram:
    backend = Bigram(VOCAB, 8)
    backend.logits = np.random.default_rng(seed).normal(0, 1.5, (VOCAB, VOCAB)).astype(np.float32)
    return backend


def sampler_of(request: Request, choice: int, output_token_ids: list[int]) -> ReferenceSampler:
    """Slot 0 has said ``output_token_ids``."""
    sampler = ReferenceSampler(VOCAB, 1)
    seed = derive_seed(request.seed, choice)
    sampler.open(SlotOpen(0, request.params, seed, request.prompt_token_ids, output_token_ids, request.eos_token_ids))
    return sampler


class Run:
    """Requests through the real scheduler, with drafts and their distributions at random; each slice is compared with its twin."""

    def __init__(self, seed: int, num_blocks: int = 14) -> None:
        self.rng = random.Random(seed)
        self.inner = bigram(seed)
        self.backend = ResamplingBackend(self.inner)
        self.backend.allocate_kv(num_blocks)
        self.scheduler = Scheduler(SchedulerConfig(8, 24), CacheConfig(block_size=4), num_blocks, 64)
        self.texts: dict[tuple[str, int], list[int]] = {}
        self.num_accepted = self.num_drafts = 0

    def drafts(self) -> dict[int, list[int]]:
        return {
            seq.seq_id: [self.rng.randrange(VOCAB) for _ in range(self.rng.randint(1, 4))]
            for seq in self.scheduler.decoding_sequences
            if self.rng.random() < 0.7
        }

    def law(self, draft: int) -> np.ndarray | None:
        if self.rng.random() < 0.3:
            return None
        weights = np.array([self.rng.random() ** 3 for _ in range(VOCAB)])
        weights[draft] += 0.01
        return weights / weights.sum()

    def step(self) -> list[TokenEvent] | None:
        plan = self.scheduler.plan(drafts=self.drafts())
        if plan is None:
            return None
        for piece in plan.slices:
            if piece.num_drafts and self.rng.random() < 0.8:
                piece.draft_distributions = [self.law(t) for t in piece.token_ids[-piece.num_drafts :]]
        sequences = self.scheduler.in_flight_sequences
        want = [self.twin(seq, piece) for seq, piece in zip(sequences, plan.slices, strict=True)]
        result = self.backend.execute(plan)
        assert result.slices == want
        events = self.scheduler.apply(result)
        self.scheduler.check_invariants()
        for event in events:
            self.texts.setdefault((event.request_id, event.choice), []).extend(event.token_ids)
        return events

    def twin(self, seq: Sequence, piece: SequenceSlice) -> SliceResult:
        result = SliceResult(logprobs=[] if piece.num_samples and piece.logprobs is not None else None)
        for i in range(piece.num_samples - piece.num_drafts):
            tokens = list(seq.token_ids)
            drafts = piece.token_ids[piece.num_tokens - piece.num_drafts :]
            for j in range(piece.num_drafts + 1):
                sampler = sampler_of(seq.request, seq.choice + i, tokens[seq.num_prompt_tokens :])
                row, accepted = self.inner.logits[tokens[-1]], False
                if j == len(drafts):
                    token = sampler.choose(0, row, len(tokens), piece.mask)
                else:
                    p = sampler.distribution(0, row, piece.mask)
                    q: object = None if piece.draft_distributions is None else piece.draft_distributions[j]
                    assert q is None or isinstance(q, np.ndarray)
                    seed = derive_seed(seq.request.seed, seq.choice)
                    token, accepted = accept_or_resample(p, q, drafts[j], seed, len(tokens))
                    self.num_drafts += 1
                    self.num_accepted += accepted
                tokens.append(token)
                result.token_ids.append(token)
                if result.logprobs is not None:
                    result.logprobs.append(raw_logprobs(row, token, piece.logprobs or 0))
                if not accepted:
                    break
        return result


@pytest.mark.parametrize("seed", range(6))
def test_every_step_is_the_rule_of_full_sequences(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All kinds of requests at once, in a pool so small that some are preempted."""
    monkeypatch.setattr(policy, "expected_growth", lambda *_: 0)  # admission as careless as can be
    run = Run(seed)
    for i, params in enumerate(PARAMS.values()):
        prompt = [(3 * i + j * j) % VOCAB for j in range(5 + i)]
        run.scheduler.add(Request(f"r{i}", prompt, params, 100 * seed + i, EOS))
    while run.step() is not None:
        pass
    assert run.scheduler.stats.num_preemptions > 0
    assert sum(run.backend.acceptance.tested) == run.num_drafts > run.num_accepted == sum(run.backend.acceptance.accepted) > 0
    assert not run.scheduler.has_work and run.scheduler.num_used_blocks == 0


def test_greedy_text_is_that_without_drafts() -> None:
    texts = []
    for spoken in (True, False):
        run = Run(3)
        if not spoken:
            run.drafts = dict  # type: ignore[method-assign]
        run.scheduler.add(Request("g", [1, 2, 3], replace(PARAMS["greedy"], ignore_eos=True), 5, EOS))
        while run.step() is not None:
            pass
        texts.append(run.texts["g", 0])
    assert texts[0] == texts[1] and len(texts[0]) == 20


def test_the_same_steps_give_the_same_text() -> None:
    texts = []
    for _ in range(2):
        run = Run(4)
        run.scheduler.add(Request("r", [1, 2, 3], SamplingParams(max_tokens=30), 5, EOS))
        while run.step() is not None:
            pass
        texts.append(run.texts)
    assert texts[0] == texts[1]


def opened(backend: ResamplingBackend, **params: object) -> SlotOpen:
    return SlotOpen(0, SamplingParams(**params), 9, [1, 2], [])  # type: ignore[arg-type]


def drafted(drafts: list[int], last: int = 2, start: int = 1, **fields: object) -> SequenceSlice:
    from array import array

    piece = SequenceSlice(0, start, [last, *drafts], array("i", [0, 1]), 1 + len(drafts), [0], num_drafts=len(drafts))
    return replace(piece, **fields)  # type: ignore[arg-type]


def test_counters() -> None:
    """Tested are the positions up to the first that is not accepted; the overlap is that of the laws, whatever came of it."""
    inner = bigram()
    backend = ResamplingBackend(inner)
    assert backend.acceptance.alpha is None and backend.acceptance.lenient_alphas == {}
    sampler = ReferenceSampler(VOCAB, 1)
    sampler.open(opened(backend))
    p = sampler.distribution(0, inner.logits[2])
    q = np.full(VOCAB, 1 / VOCAB)
    never, always = int(p.argmin()), int(p.argmax())
    result = backend.execute(StepPlan(0, [drafted([always, 0], draft_distributions=[p, q])], slot_opens=[opened(backend)])).slices[0]
    stats = backend.acceptance
    assert result.token_ids[0] == always and stats.tested[:3] == [1, 1, 0] and stats.accepted[0] == 1
    assert stats.overlap[0] == pytest.approx(1.0)
    following = ReferenceSampler(VOCAB, 1)
    following.open(replace(opened(backend), output_token_ids=[always]))
    second = following.distribution(0, inner.logits[always])
    assert stats.overlap[1] == pytest.approx(np.minimum(second, q).sum())
    assert stats.alpha == pytest.approx((1 + np.minimum(second, q).sum()) / 2)
    for lenience in LENIENCES:
        assert stats.lenient_alphas[lenience] == pytest.approx((1 + np.minimum(second / lenience, q).sum()) / 2)
    assert overlap(p, None, never) == pytest.approx(p[never]) and overlap(p, None, never, 1e-9) == 1.0


def test_a_row_that_allows_no_answer() -> None:
    """At the first row it is the slice's error; behind accepted drafts the next step begins with it."""
    inner = bigram()
    backend = ResamplingBackend(inner)
    inner.logits[5, 3] = np.nan
    first = backend.execute(StepPlan(0, [drafted([1, 2], last=5)], slot_opens=[opened(backend)])).slices[0]
    assert first.error is not None and "token 3 is nan" in first.error and first.token_ids == []
    inner.logits[2] = -30
    inner.logits[2, 5] = 30
    later = backend.execute(StepPlan(1, [drafted([5, 1], logprobs=1)])).slices[0]
    assert later.error is None and later.token_ids == [5] and later.logprobs is not None and len(later.logprobs) == 1
    forbidden = ResamplingBackend(bigram())
    none = drafted([1], mask=np.zeros(1, np.uint32))
    outcome = forbidden.execute(StepPlan(0, [none], slot_opens=[opened(forbidden)])).slices[0]
    assert outcome.error_code == "no_token_allowed"


def test_a_failed_step_leaves_nothing_behind() -> None:
    """The next plan closes all slots, opened or not, and runs."""
    inner = bigram()
    backend = ResamplingBackend(inner)
    backend.execute(StepPlan(0, [drafted([1])], slot_opens=[opened(backend)]))

    def fail(plan: StepPlan) -> None:
        raise RuntimeError("gone")

    inner.before_step = fail
    seen: list[int] = []
    backend.logits_hook = lambda seq_id, position, logits: seen.append(position)
    with pytest.raises(RuntimeError, match="gone"):
        backend.execute(StepPlan(1, [drafted([1])]))
    inner.before_step = None
    backend.execute(StepPlan(2, [drafted([1])], slot_closes=[0], slot_opens=[opened(backend)]))
    assert seen == [1, 2]  # the hook of whoever set it is there again, and sees the rows of drafts


REFUSED = {
    "more samples than drafts and one": (drafted([1], num_samples=3), "1 drafts among 2 tokens need 2 samples, not 3"),
    "nothing but drafts": (drafted([1], num_drafts=2, num_samples=3), "2 drafts among 2 tokens"),
    "prompt logprobs": (drafted([1], prompt_logprobs=0), "1 drafts among 2 tokens"),
    "a law for another number of drafts": (drafted([1], draft_distributions=[None, None]), "2 draft_distributions for 1 drafts"),
    "a law of another vocabulary": (drafted([1], draft_distributions=[np.ones(3)]), "no array of 12 probabilities"),
    "a draft that its law cannot draw": (drafted([1], draft_distributions=[np.eye(VOCAB)[0]]), "in the draft's distribution is 0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    backend = ResamplingBackend(bigram())
    piece, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        backend.execute(StepPlan(0, [piece], slot_opens=[opened(backend)]))


def test_a_backend_that_hides_its_logits() -> None:
    inner = bigram()
    del inner.logits_hook
    with pytest.raises(BackendError, match="spec_rule: resample needs a backend with a logits_hook; bigram has none"):
        ResamplingBackend(inner)
