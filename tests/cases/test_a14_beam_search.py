"""Beam search through the whole engine on a tiny random model: equal to a search over plain runs, whatever surrounds it (A14, A36)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from octavo.core.request import BeamParams, SamplingParams
from octavo.engine.engine import Engine
from tests.cases.harness import GREEDY, Job, open_engine, prompt_of, run, take
from tests.models.tiny import IM_END_ID

THREE = SamplingParams(n=3, max_tokens=24, beam=BeamParams(3, 1.0, "never"), logprobs=2, ignore_eos=True)


def strangers(num: int) -> list[Job]:
    return [Job(prompt_of(9 + 7 * i, salt=60 + i), SamplingParams(seed=i, max_tokens=30, ignore_eos=True)) for i in range(num)]


def answers(job: Job) -> list[object]:
    assert job.output is not None
    return [(job.answer(i), job.output.outputs[i].cumulative_logprob) for i in range(job.params.n)]


@pytest.fixture(scope="module")
def plain_beams(plain: Engine) -> Any:
    """The answers of a search on the plain engine, alone. Kept: a search has no seed."""

    @cache
    def of(prompt: tuple[int, ...], width: int) -> list[object]:
        job = Job(list(prompt), wide(width))
        run(plain, job)
        return answers(job)

    return of


def wide(width: int) -> SamplingParams:
    return replace(THREE, n=width, beam=BeamParams(width, 1.0, "never"))


@pytest.mark.parametrize("num_prompt", [1, 15, 17])
def test_the_search_is_that_over_plain_rows(plain: Engine, num_prompt: int) -> None:
    """Written down again over the log-probabilities of requests of their own, one for each prefix."""
    width, max_tokens, prompt = 2, 4, prompt_of(num_prompt)
    running: list[tuple[float, list[int]]] = [(0.0, [])]
    for _ in range(max_tokens):
        ranked = []
        for total, tokens in running:
            row = Job(prompt + tokens, SamplingParams(temperature=0, max_tokens=1, logprobs=20, ignore_eos=True))
            run(plain, row)
            assert row.output is not None and row.output.outputs[0].logprobs is not None
            (entry,) = row.output.outputs[0].logprobs
            ranked += [(-(total + lp), [*tokens, t]) for t, lp in zip(entry.top_ids, entry.top_logprobs, strict=True)]
        running = [(-negative, tokens) for negative, tokens in sorted(ranked)[:width]]
    job = Job(prompt, replace(wide(width), max_tokens=max_tokens))
    run(plain, job)
    assert job.output is not None
    assert [(o.cumulative_logprob, o.token_ids) for o in job.output.outputs] == running
    for o in job.output.outputs:
        assert [entry.token_id for entry in o.logprobs or ()] == o.token_ids
        assert math.fsum(entry.logprob for entry in o.logprobs or ()) == pytest.approx(o.cumulative_logprob, abs=1e-9)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enable_prefix_caching": False},
        {"max_num_batched_tokens": 64, "max_num_seqs": 16},
        {"max_num_batched_tokens": 7, "max_num_seqs": 7},
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 512},
        {"num_kv_blocks": 13, "admission_lookahead": 1},
        {"num_kv_blocks": 13, "admission_lookahead": 1, "enable_prefix_caching": False},
        {"num_kv_blocks": 13, "admission_lookahead": 1, "prefix_granularity": "token"},
        {"num_kv_blocks": 13, "admission_lookahead": 1, "swap_space": 1 << 20, "preemption": "swap"},
        {"num_kv_blocks": 13, "admission_lookahead": 1, "scheduling_policy": "srf"},
        {"spec": "auto"},
        {"max_itl_ms": 5.0},
        {"threads": 1},
    ],
    ids=str,
)
def test_nothing_around_a_search_changes_it(rand: Path, plain_beams: Any, options: dict[str, Any]) -> None:
    """Batch mates, chunks, prefix hits, a pool that forces preemption, threads; and two searches for one prompt."""
    jobs = [Job(prompt_of(n, salt=n % 2), wide(width)) for n, width in ((20, 3), (20, 3), (33, 4), (1, 2))]
    with open_engine(rand, **options) as engine:
        run(engine, *strangers(2), *jobs, *strangers(4)[2:], after_step=lambda _: engine.scheduler.check_invariants())
        if "num_kv_blocks" in options:
            assert engine.scheduler.stats.num_preemptions > 0
    for job in jobs:
        assert job.params.beam is not None
        assert answers(job) == plain_beams(tuple(job.prompt_ids), job.params.beam.width)


@pytest.mark.parametrize("caching", [True, False])
def test_a_search_shares_its_history_and_gives_it_back(rand: Path, caching: bool) -> None:
    """Full prompt blocks exist once; no more blocks than without sharing, and fewer as long as hypotheses have a history in common."""
    peak, tables = 0, list[tuple[int, int]]()

    def watch(_: int) -> None:
        nonlocal peak
        engine.scheduler.check_invariants()
        peak = max(peak, engine.scheduler.num_used_blocks)
        tables.append((engine.scheduler.num_used_blocks, engine.scheduler.num_table_blocks))

    with open_engine(rand, enable_prefix_caching=caching) as engine:
        run(engine, Job(prompt_of(40), replace(wide(4), max_tokens=40)), after_step=watch)
    assert peak <= 40 // 16 + 4 * (-(-(40 + 39) // 16) - 40 // 16)
    assert any(used < held for used, held in tables) and all(used <= held for used, held in tables)


@pytest.mark.parametrize("stay", [1, 2, 5, 12])
def test_a_client_leaves_in_the_middle_of_a_search(rand: Path, plain_beams: Any, stay: int) -> None:
    leaving, job = Job(prompt_of(20), replace(wide(4), max_tokens=60)), Job(prompt_of(20), wide(3))

    def leave(step: int) -> None:
        engine.scheduler.check_invariants()
        if step == stay and leaving.output is not None:
            for event in engine.abort(leaving.output.request_id):
                take(leaving, event)

    with open_engine(rand) as engine:
        run(engine, leaving, job, after_step=leave)
    assert {leaving.answer(i)[2] for i in range(4)} == {"abort"}
    assert answers(job) == plain_beams(tuple(job.prompt_ids), 3)


def test_hypotheses_are_distinct_and_sorted(rand: Path) -> None:
    """With ends in reach, of different lengths."""
    params = SamplingParams(n=6, max_tokens=12, beam=BeamParams(6, 0.7), stop_token_ids=tuple(range(5, 14)))
    job = Job(prompt_of(18), params)
    with open_engine(rand) as engine:
        run(engine, job)
    assert job.output is not None
    scores = []
    for o in job.output.outputs:
        assert o.cumulative_logprob is not None
        scores.append(o.cumulative_logprob / max(len(o.token_ids) - (o.finish_reason == "stop"), 1) ** 0.7)
    assert scores == sorted(scores, reverse=True)
    assert len({tuple(o.token_ids) for o in job.output.outputs}) == 6


def test_a_width_of_one_is_greedy(rand: Path) -> None:
    job, greedy = Job(prompt_of(20), replace(wide(1), max_tokens=12)), Job(prompt_of(20), GREEDY)
    with open_engine(rand) as engine:
        run(engine, job, greedy)
    assert job.answer() == greedy.answer()


def test_max_tokens_is_what_the_pool_leaves_for_all_beams(rand: Path) -> None:
    with open_engine(rand, num_kv_blocks=2 + 4 * 2) as engine:
        prepared = engine.prepare(prompt_of(32), replace(wide(4), max_tokens=500))
        assert prepared.request.params.max_tokens == (2 + 2) * 16 + 1 - 32
        assert prepared.warnings == ["max_tokens: 500 was reduced to 33, all that the KV cache leaves after 32 prompt tokens"]
        job = Job(prompt_of(32), replace(wide(4), max_tokens=500))
        run(engine, job)
        assert engine.scheduler.stats.num_preemptions == 0 and job.output is not None
        assert [len(o.token_ids) for o in job.output.outputs] == [33] * 4


def test_the_end_of_text_counts_as_a_stop(rand: Path) -> None:
    def texts(ignore_eos: bool) -> Sequence[tuple[list[int], str | None]]:
        job = Job(prompt_of(12), SamplingParams(n=4, max_tokens=6, ignore_eos=ignore_eos, beam=BeamParams(4, 0.0)))
        with open_engine(rand) as engine:
            run(engine, job)
        assert job.output is not None
        return [(o.token_ids, o.finish_reason) for o in job.output.outputs]

    for tokens, reason in texts(ignore_eos=False):
        assert (tokens[-1] == IM_END_ID) == (reason == "stop") and IM_END_ID not in tokens[:-1]
    assert {reason for _, reason in texts(ignore_eos=True)} == {"length"}
