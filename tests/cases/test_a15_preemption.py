"""A preempted request goes on as if nothing had happened: tokens, log-probabilities, penalties, held-back text, the stream (A15)."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from octavo.core.request import SamplingParams
from octavo.engine.engine import Engine
from tests.cases.harness import Job, open_engine, plain_answer, prompt_of, run

NUM_PROMPT, MAX_TOKENS = 18, 120
BLOCKS_EACH = -(-(NUM_PROMPT + MAX_TOKENS) // 16)


def six_jobs(stop: tuple[str, ...]) -> list[Job]:
    return [
        Job(
            prompt_of(NUM_PROMPT, salt=k),
            SamplingParams(
                temperature=0.9, seed=k, frequency_penalty=0.8, repetition_penalty=1.2, min_tokens=20, max_tokens=MAX_TOKENS,
                logprobs=2, stop=stop, ignore_eos=True,
            ),
        )
        for k in range(6)
    ]  # fmt: skip


WAYS = {
    "recompute": {"preemption": "recompute"},
    "swap": {"preemption": "swap", "swap_space": 1 << 19, "threads": 1},
    "auto": {"swap_space": 1 << 19, "threads": 1},
}


NEVER, SOMETIMES = (("qq",), 2 * BLOCKS_EACH, {"length"}), (("Q", "Z", "X", "#"), BLOCKS_EACH + 1, {"length", "stop"})


@pytest.mark.parametrize(
    ("way", "caching", "stop", "num_blocks", "reasons"),
    [
        *((way, caching, *NEVER) for way in WAYS for caching in (True, False) if way != "auto" or caching),
        ("recompute", True, *SOMETIMES),
        ("swap", False, *SOMETIMES),
    ],
)
def test_two_of_six_fit(
    rand: Path, plain: Engine, way: str, caching: bool, stop: tuple[str, ...], num_blocks: int, reasons: set[str]
) -> None:
    tight, roomy = six_jobs(stop), six_jobs(stop)
    num_preempted: Counter[int] = Counter()

    def watch(_: int) -> None:
        engine.scheduler.check_invariants()
        for seq in engine.scheduler._state.waiting:
            num_preempted[seq.seq_id] = max(num_preempted[seq.seq_id], seq.num_preemptions)

    with open_engine(rand, num_kv_blocks=num_blocks, enable_prefix_caching=caching, admission_lookahead=1, **WAYS[way]) as engine:
        run(engine, *tight, after_step=watch)
        stats = engine.scheduler.stats
        assert stats.num_preemptions > 2
        if way != "auto":
            assert stats.num_swap_preemptions == (stats.num_preemptions if way == "swap" else 0)
        assert stats.num_computed_tokens == sum(NUM_PROMPT + job.num_tokens - 1 for job in tight) or way != "swap"  # no token twice
    if reasons == {"length"}:  # the longest runs: somebody gave way more than once
        assert max(num_preempted.values()) >= 2
    with open_engine(rand, enable_prefix_caching=caching) as engine:
        run(engine, *roomy)
        assert engine.scheduler.stats.num_preemptions == 0
    for job, other in zip(tight, roomy, strict=True):
        assert job.answer() == other.answer() == plain_answer(plain, job)
        assert job.num_cached == other.num_cached  # what is found after a preemption is not a hit of the request
        streamed = [token for event in job.events for token in event.token_ids]
        assert streamed == job.answer()[0] and "".join(event.text for event in job.events) == job.answer()[1]
        assert [(e.token_ids, e.text) for e in job.events] == [(e.token_ids, e.text) for e in other.events]
    assert {job.answer()[2] for job in tight} == reasons


@pytest.mark.parametrize("way", WAYS)
def test_prompt_log_probabilities_come_once_and_whole(rand: Path, plain: Engine, way: str) -> None:
    """They are delivered with the first token, and not again when a preemption computes the prompt anew."""
    params = SamplingParams(temperature=0, max_tokens=30, prompt_logprobs=1, logprobs=0, ignore_eos=True)
    jobs = [Job(prompt_of(60 + k, salt=k), params) for k in range(6)]
    sizes = {"num_kv_blocks": 10, "max_num_batched_tokens": 16, "max_num_seqs": 6, "admission_lookahead": 1}
    with open_engine(rand, **sizes, **WAYS[way]) as engine:
        run(engine, *jobs)
        assert engine.scheduler.stats.num_preemptions > 0
    for job in jobs:
        alone = Job(job.prompt_ids, params)
        run(plain, alone)
        assert job.output is not None and alone.output is not None
        assert repr(job.output.prompt_logprobs) == repr(alone.output.prompt_logprobs)
        assert len(job.output.prompt_logprobs or []) == len(job.prompt_ids) and job.answer() == alone.answer()
