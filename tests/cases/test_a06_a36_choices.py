"""n > 1: choices that differ, repeat, end by themselves and write apart (A06, A36)."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.core.request import SamplingParams, derive_seed
from octavo.engine.engine import Engine
from tests.cases.harness import GREEDY, Job, open_engine, plain_answer, prompt_of, run, take
from tests.models.tiny import IM_END_ID

FOUR = SamplingParams(n=4, seed=7, temperature=1, max_tokens=40, ignore_eos=True, logprobs=2)


def strangers(num: int) -> list[Job]:
    return [Job(prompt_of(10 + 7 * i, salt=50 + i), SamplingParams(seed=i, max_tokens=30, ignore_eos=True)) for i in range(num)]


def answers(job: Job) -> list[object]:
    return [job.answer(choice) for choice in range(job.params.n)]


def test_a_seed_gives_four_different_answers_and_the_same_four_again(rand: Path) -> None:
    with open_engine(rand) as engine:
        first, again, busy = (Job(prompt_of(33), FOUR) for _ in range(3))
        run(engine, first)
        run(engine, again)
        run(engine, *strangers(4), busy, *strangers(8)[4:])
        assert answers(first) == answers(again) == answers(busy)
        assert len({tuple(first.answer(i)[0]) for i in range(4)}) == 4
        assert (first.num_cached, again.num_cached) == (0, 32)


def test_without_a_seed_two_calls_differ(rand: Path) -> None:
    with open_engine(rand) as engine:
        first, second = (Job(prompt_of(20), SamplingParams(n=4, temperature=1, max_tokens=20)) for _ in range(2))
        run(engine, first)
        run(engine, second)
        assert answers(first) != answers(second)
        assert first.output is not None and second.output is not None and first.output.seed != second.output.seed
        same = Job(prompt_of(20), SamplingParams(n=4, temperature=1, max_tokens=20, seed=first.output.seed))
        run(engine, same)
        assert answers(same) == answers(first)


def test_every_choice_has_its_own_stream_and_end(rand: Path) -> None:
    """The end of text is made likely, so that lengths differ."""
    params = SamplingParams(n=8, seed=1, temperature=1, max_tokens=40, logit_bias={IM_END_ID: 5.0}, logprobs=0)
    job = Job(prompt_of(12), params)
    with open_engine(rand) as engine:
        run(engine, job)
    lengths, reasons = set(), set()
    for choice in range(8):
        token_ids, text, reason, _, _ = job.answer(choice)
        events = [event for event in job.events if event.choice == choice]
        assert [t for event in events for t in event.token_ids] == token_ids and all(len(event.token_ids) == 1 for event in events)
        assert "".join(event.text for event in events) == text
        assert [event.finish_reason for event in events[:-1]] == [None] * (len(events) - 1) and events[-1].finish_reason is not None
        assert (token_ids[-1] == IM_END_ID) == (reason == "stop") and IM_END_ID not in token_ids[:-1]
        lengths.add(len(token_ids))
        reasons.add(reason)
    assert len(lengths) >= 3 and "stop" in reasons


def test_the_prompt_is_computed_once(rand: Path) -> None:
    with open_engine(rand, enable_prefix_caching=False) as engine:
        run(engine, Job(prompt_of(33), FOUR))
        assert engine.scheduler.stats.num_computed_tokens == 33 + 4 * 39


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("num_prompt", [1, 15, 16, 17, 20])
def test_a_choice_equals_a_request_of_its_own(rand: Path, plain: Engine, caching: bool, num_prompt: int) -> None:
    params = SamplingParams(n=4, seed=3, temperature=1, max_tokens=50, ignore_eos=True, logprobs=2)
    job = Job(prompt_of(num_prompt), params)
    peak = 0

    def watch(_: int) -> None:
        nonlocal peak
        engine.scheduler.check_invariants()
        peak = max(peak, engine.scheduler.num_used_blocks)

    with open_engine(rand, enable_prefix_caching=caching) as engine:
        run(engine, job, after_step=watch)
        full, ends = num_prompt // 16, -(-(num_prompt + 48) // 16)  # the last token is drawn in the step that ends all
        assert peak == full + 4 * (ends - full)  # full prompt blocks once, all others four times
        beside = Job(prompt_of(num_prompt), params)
        run(engine, beside, *strangers(5))
        assert answers(beside) == answers(job)
    for choice in range(4):
        assert job.answer(choice) == plain_answer(plain, job, n=1, seed=derive_seed(3, choice))


@pytest.mark.parametrize("stay", [1, 2, 9, 22])
def test_one_choice_ends_early_and_another_client_leaves(rand: Path, plain: Engine, stay: int) -> None:
    ending = SamplingParams(n=4, seed=5, temperature=1, max_tokens=50, logit_bias={IM_END_ID: 4.0}, logprobs=1)
    job, greedy = Job(prompt_of(20), ending), Job(prompt_of(20), GREEDY)
    leaving = Job(prompt_of(20), SamplingParams(n=4, seed=6, temperature=1, max_tokens=200, ignore_eos=True))

    def leave(step: int) -> None:
        engine.scheduler.check_invariants()
        if step == stay and leaving.output is not None:
            for event in engine.abort(leaving.output.request_id):
                take(leaving, event)

    with open_engine(rand) as engine:
        run(engine, leaving, job, greedy, after_step=leave)
    assert {leaving.answer(i)[2] for i in range(4)} == {"abort"}
    assert len({len(job.answer(i)[0]) for i in range(4)}) > 1
    for choice in range(4):
        assert job.answer(choice) == plain_answer(plain, job, n=1, seed=derive_seed(5, choice))
    assert greedy.answer() == plain_answer(plain, greedy)
