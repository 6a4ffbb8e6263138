"""Prefix hits change nothing: whole prompts, block multiples, part-filled blocks, salts, a pool too tight for its prefixes (A11 to A13)."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from octavo.core import policy
from octavo.core.request import SamplingParams
from octavo.engine.engine import Engine
from tests.cases.harness import GREEDY, Job, jobs_of, open_engine, plain_answer, prompt_of, run

LENGTHS = (1, 15, 16, 17, 31, 32, 33, 48)


def test_prompts_sent_three_times_alone_and_together(rand: Path, plain: Engine) -> None:
    prompts = [prompt_of(n) for n in LENGTHS]
    expected = [plain_answer(plain, Job(prompt, GREEDY)) for prompt in prompts]
    with open_engine(rand) as engine:
        for round_number in range(3):
            for job, want in zip(jobs_of(prompts), expected, strict=True):
                run(engine, job)
                assert job.answer() == want and job.num_cached <= len(job.prompt_ids) - 1
                if round_number:  # found again: every full block but the one that the last token is in
                    assert job.num_cached == (len(job.prompt_ids) - 1) // 16 * 16
    with open_engine(rand) as engine:
        jobs = jobs_of([prompt for prompt in prompts for _ in range(3)])
        run(engine, *jobs)
        assert [job.answer() for job in jobs] == [want for want in expected for _ in range(3)]
        assert all(job.num_cached <= len(job.prompt_ids) - 1 for job in jobs) and any(job.num_cached for job in jobs)


def test_only_blocks_that_were_computed_are_shared(rand: Path, plain: Engine) -> None:
    """After 20 prompt and 12 output tokens block 2 looks full, but the KV of its last token was never computed."""
    prompt, others = prompt_of(20), prompt_of(12, salt=3)
    for max_tokens, num_hit in ((12, 16), (13, 32)):
        with open_engine(rand) as engine:
            first = Job(prompt, replace(GREEDY, max_tokens=max_tokens))
            run(engine, first)
            generated = first.answer()[0][:12]
            for following, hit in ((others, 16), ([*generated, 9], num_hit)):
                job = Job(prompt + following, GREEDY)
                run(engine, job)
                assert job.num_cached == hit and job.answer() == plain_answer(plain, job)


def test_salts_separate_entries(rand: Path, plain: Engine) -> None:
    """An empty salt is none; every other one begins with an empty cache."""
    prompt = prompt_of(64)
    want = plain_answer(plain, Job(prompt, GREEDY))
    with open_engine(rand) as engine:
        for salt, first_hit in ((None, 0), ("x", 0), ("y", 0), ("", 48), ("adapter:x", 0), ("x\0", 0)):
            for hit in (first_hit, 48):
                job = Job(prompt, GREEDY, salt)
                run(engine, job)
                assert (job.num_cached, job.answer()) == (hit, want), salt
        assert engine.scheduler.num_cached_blocks == 5 * 4


SWAP, TIER = {"swap_space": 1 << 19}, {"kv_host_memory": 40 * 8192}


@pytest.mark.parametrize("host", [{}, SWAP, TIER, SWAP | TIER], ids=str)
def test_a_tight_pool_with_shared_prefixes(rand: Path, plain: Engine, host: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """24 blocks, 200 requests over five prefixes, 32 at once: hits, evictions and preemptions without end."""
    monkeypatch.setattr(policy, "expected_growth", lambda *_: 0)  # admission as careless as can be
    rng = random.Random(13)
    prefixes = [prompt_of(length, salt=length) for length in (33, 48, 64, 65, 80)]
    jobs = []
    for _ in range(200):
        prefix = rng.choice(prefixes)
        tail = rng.choices(range(3, 512), k=max(0, rng.randint(60, 120) - len(prefix)))
        jobs.append(Job(prefix + tail, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=1)))
    with open_engine(rand, num_kv_blocks=24, max_num_seqs=32, max_num_batched_tokens=256, **host) as engine:
        run(engine, *jobs, after_step=lambda step: engine.scheduler.check_invariants() if step % 16 == 0 else None)
        stats = engine.scheduler.stats
        assert stats.num_preemptions > 0 and stats.prefix_hit_tokens > 1000
        assert engine.tiering is None or engine.tiering.tiers.stats.num_saved_blocks > 0
    for job in jobs:
        assert job.num_cached <= len(job.prompt_ids) - 1 and job.answer() == plain_answer(plain, job)


# --- the same by the token ----------------------------------------------------------------------------------------------------------------


def test_by_the_token_prompts_hit_all_but_their_last_token(rand: Path, plain: Engine) -> None:
    prompts = [prompt_of(n) for n in LENGTHS]
    expected = [plain_answer(plain, Job(prompt, GREEDY)) for prompt in prompts]
    with open_engine(rand, prefix_granularity="token") as engine:
        for round_number in range(3):
            for job, want in zip(jobs_of(prompts), expected, strict=True):
                run(engine, job)
                assert job.answer() == want
                if round_number:
                    assert job.num_cached == len(job.prompt_ids) - 1
    with open_engine(rand, prefix_granularity="token") as engine:
        jobs = jobs_of([prompt for prompt in prompts for _ in range(3)])
        run(engine, *jobs)
        assert [job.answer() for job in jobs] == [want for want in expected for _ in range(3)]


def test_by_the_token_only_what_was_computed_is_shared(rand: Path, plain: Engine) -> None:
    prompt, others = prompt_of(20), prompt_of(12, salt=3)
    for max_tokens, num_hit in ((12, 31), (13, 32)):
        with open_engine(rand, prefix_granularity="token") as engine:
            first = Job(prompt, replace(GREEDY, max_tokens=max_tokens))
            run(engine, first)
            generated = first.answer()[0][:12]
            for following, hit in ((others, 20), ([*generated, 9], num_hit)):
                job = Job(prompt + following, GREEDY)
                run(engine, job)
                assert job.num_cached == hit and job.answer() == plain_answer(plain, job)


def test_by_the_token_salts_separate_entries(rand: Path, plain: Engine) -> None:
    prompt = prompt_of(60)
    want = plain_answer(plain, Job(prompt, GREEDY))
    with open_engine(rand, prefix_granularity="token") as engine:
        for salt, first_hit in ((None, 0), ("x", 0), ("y", 0), ("", 59), ("adapter:x", 0)):
            for hit in (first_hit, 59):
                job = Job(prompt, GREEDY, salt)
                run(engine, job)
                assert (job.num_cached, job.answer()) == (hit, want), salt


@pytest.mark.parametrize("host", [{}, {"swap_space": 1 << 19}, TIER], ids=str)
def test_by_the_token_a_tight_pool_with_shared_prefixes(
    rand: Path, plain: Engine, host: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "expected_growth", lambda *_: 0)  # admission as careless as can be
    rng = random.Random(14)
    prefixes = [prompt_of(length, salt=length) for length in (33, 47, 64, 65, 75)]
    jobs = []
    for i in range(80):
        prefix = rng.choice(prefixes)
        tail = rng.choices(range(3, 512), k=max(0, rng.randint(60, 120) - len(prefix)))
        sampling = {"temperature": 0.8, "seed": i} if i % 2 else {"temperature": 0}
        jobs.append(Job(prefix + tail, SamplingParams(max_tokens=16, ignore_eos=True, logprobs=1, **sampling)))  # type: ignore[arg-type]
    options = {"num_kv_blocks": 24, "max_num_seqs": 32, "max_num_batched_tokens": 256, "prefix_granularity": "token"}
    with open_engine(rand, **options, **host) as engine:
        run(engine, *jobs, after_step=lambda step: engine.scheduler.check_invariants() if step % 16 == 0 else None)
        stats = engine.scheduler.stats
        assert stats.num_preemptions > 0 and stats.num_tail_copies > 20
    for job in jobs:
        assert job.num_cached <= len(job.prompt_ids) - 1 and job.answer() == plain_answer(plain, job)
