"""Requests that go on after tokens made elsewhere: planned as a preempted sequence is, and refused where they cannot be."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.config import CacheConfig, SchedulerConfig
from octavo.core.policies.order import PRIORITY_AGEING_S
from octavo.core.request import BeamParams, ParameterError, Request
from octavo.core.scheduler import Scheduler
from tests.core.harness import Harness, Oracle, make_request
from tests.core.kv_memory import plain_run

PROMPT = [3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("num_made", [1, 2, 3, 7, 19])
def test_the_rest_is_that_of_an_undisturbed_run(num_made: int) -> None:
    harness = Harness()
    harness.add(make_request("a", PROMPT, seed=5, max_tokens=20, ignore_eos=True, logprobs=0, prompt_logprobs=0), num_made)
    harness.run()
    harness.check_texts()
    harness.check_idle()
    assert sum(plan.num_tokens for plan in harness.plans) == len(PROMPT) + 20 - 1
    assert harness.scheduler.stats.num_output_tokens == 20 - num_made


def test_its_prompt_and_its_tokens_are_found_in_the_cache_and_not_counted_as_a_hit() -> None:
    harness = Harness(num_blocks=32)
    first = make_request("a", PROMPT, seed=5, max_tokens=14, ignore_eos=True)
    harness.run_all([first])
    before = (harness.scheduler.stats.prefix_query_tokens, harness.scheduler.stats.prefix_hit_tokens)
    harness.add(make_request("b", PROMPT, seed=5, max_tokens=14, ignore_eos=True), num_made=10)
    plan = harness.step()
    assert plan is not None and plan.slices[0].start == 12  # three blocks of four; 16 tokens are known
    harness.run()
    harness.check_texts()
    assert harness.num_cached["b", 0] == 0 and "b" not in harness.reports
    assert (harness.scheduler.stats.prefix_query_tokens, harness.scheduler.stats.prefix_hit_tokens) == before


def test_ends_that_count_tokens_count_those_made_elsewhere() -> None:
    """min_tokens bars an end that comes before; the tokens after it are tested from where they are."""
    for seed in range(40):
        request = make_request("a", PROMPT, seed=seed, max_tokens=24, min_tokens=6, stop_token_ids=[2, 9])
        num_all = len(plain_run(request, 0, 64).token_ids)
        for num_made in (1, 5, 6, num_all - 1):
            if num_made < num_all:
                harness = Harness()
                harness.add(request, num_made)
                harness.run()
                harness.check_texts()


@given(st.integers(0, 10**6))
def test_in_any_company_and_any_straits(seed: int) -> None:
    """New and continued requests side by side in a small pool, with preemption, drafts, and aborts."""
    rng = random.Random(seed)
    harness = Harness(num_blocks=rng.choice([8, 12, 24]), num_host_blocks=rng.choice([0, 6]), chunked=rng.random() < 0.8)
    if rng.random() < 0.5:
        harness.guess = Oracle(harness, most=3, hit=0.7, seed=seed)
    for i in range(6):
        prompt = PROMPT[: rng.randint(1, 6)] + [rng.randrange(3, 9) for _ in range(rng.randint(0, 6))]
        request = make_request(str(i), prompt, seed=i, max_tokens=rng.randint(2, 14), logprobs=0, n=1)
        num_all = len(plain_run(request, 0, harness.scheduler.limits.max_total_tokens).token_ids)
        harness.add(request, rng.randrange(num_all))
        if rng.random() < 0.5:
            harness.step()
    harness.abort(str(rng.randrange(6)))
    harness.run()
    harness.check_texts()
    harness.check_idle()


def test_what_cannot_go_on_is_refused_and_leaves_nothing() -> None:
    harness = Harness()
    for request, made, param in (
        (make_request("a", PROMPT, n=2), [6], "n"),
        (make_request("a", PROMPT, temperature=0.0, beam=BeamParams(2)), [6], "n"),
        (make_request("a", PROMPT, max_tokens=2), [6, 6], "output_token_ids"),
        (make_request("a", [3] * 30, max_tokens=9), [6] * 3, "output_token_ids"),
    ):
        with pytest.raises(ParameterError) as error:
            harness.scheduler.add(request, made)
        assert error.value.param == param
    harness.check_idle()


# --- its place in the queue --------------------------------------------------------------------------------------------------------------


def moved(name: str, arrival_s: float, came_s: float | None, priority: int = 0) -> Request:
    return replace(make_request(name, PROMPT, priority=priority, max_tokens=2), arrival_s=arrival_s, came_s=came_s)


def queue_of(scheduler: Scheduler) -> list[str]:
    return [seq.request.request_id for seq in scheduler.waiting_sequences]


COMERS = st.lists(st.tuples(st.booleans(), st.integers(0, 60), st.booleans(), st.integers(0, 2)), max_size=25)


@given(COMERS, st.sampled_from(["fcfs", "priority"]))
def test_one_that_another_engine_lost_is_before_all_that_came_after_it_first_did(
    comers: list[tuple[bool, int, bool, int]], policy: str
) -> None:
    """Whoever leaves meanwhile. Among equals who came here first is first."""
    scheduler = Scheduler(SchedulerConfig(scheduling_policy=policy), CacheConfig(), 64, 64)
    there: list[Request] = []
    for number, (was_elsewhere, before, leaves, priority) in enumerate(comers):
        came_s = float(2 * number - before) if was_elsewhere else None
        request = moved(f"{number}", 2.0 * number, came_s, priority if policy == "priority" else 0)
        scheduler.add(request, [5] if was_elsewhere else [])
        there.append(request)
        if leaves:
            scheduler.abort(there.pop(before % len(there)).request_id)
        waited = sorted(there, key=lambda one: one.queued_s)
        if policy == "priority":
            waited.sort(key=lambda one: one.priority + one.queued_s / PRIORITY_AGEING_S)
        assert queue_of(scheduler) == [one.request_id for one in waited]


def test_its_waiting_time_here_begins_here() -> None:
    """What is told of queues is this engine's own: whoever lost it has told of its own."""
    scheduler = Scheduler(SchedulerConfig(), CacheConfig(), 64, 64)
    scheduler.add(moved("a", 10.0, 3.0))
    scheduler.plan(12.0)
    assert scheduler.stats.queue_s == 2.0
