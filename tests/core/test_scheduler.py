"""Directed tests of the scheduler: sharing work in flight, budgets, endings, errors."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.config import CacheConfig, SchedulerConfig
from octavo.core import prefix_match
from octavo.core.kv_manager import KVManager
from octavo.core.prefix_index import PrefixNode
from octavo.core.request import FinishReason, ParameterError, Request, SamplingParams
from octavo.core.result_checks import StepProtocolError
from octavo.core.scheduler import Scheduler
from octavo.core.step import SliceResult, StepResult
from octavo.costs.gap import GapModel
from tests.core.harness import Harness, make_request
from tests.core.kv_memory import EOS
from tests.core.test_cases import big, prompt_of

# --- work that another sequence is doing --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [512, 20])
def test_equal_prompts_are_computed_once(budget: int) -> None:
    harness = big(budget=budget, max_num_seqs=16)
    harness.run_all([make_request(f"r{i}", prompt_of(100), seed=i, max_tokens=1) for i in range(16)])
    assert harness.backend.num_rows == 100 + 15 * 4  # 96 tokens in full blocks
    assert [harness.num_cached[f"r{i}", 0] for i in range(16)] == [0] + [96] * 15
    stats = harness.scheduler.stats
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (1600, 15 * 96)


@pytest.mark.parametrize("in_flight", [True, False])
def test_who_waits_goes_on_when_the_other_is_aborted(in_flight: bool) -> None:
    harness = big(budget=40)
    for i in range(4):
        harness.add(make_request(f"r{i}", prompt_of(200), seed=i, max_tokens=3))
    harness.step()
    if in_flight:
        harness.begin()
    harness.abort("r0")
    if in_flight:
        harness.finish()
    harness.run()
    harness.check_texts()
    assert harness.backend.num_rows < 200 + 4 * (8 + 3) + 40


def test_who_waits_goes_on_when_the_other_is_preempted(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an admission rule that takes in too much, who waits may come first in order and find nobody left to wait for."""
    can_admit = KVManager.can_admit
    monkeypatch.setattr(KVManager, "can_admit", lambda kv, seq, match, num_spare: can_admit(kv, seq, match, -5))
    harness, prompt = Harness(num_blocks=5, budget=12), prompt_of(17)
    harness.add(make_request("short", prompt[:9], max_tokens=1))
    harness.add(make_request("waits", prompt[:13], max_tokens=4))
    harness.add(make_request("computes", prompt, max_tokens=2, prompt_logprobs=1))  # takes over where "short" ends
    harness.step()
    plan = harness.step()
    assert plan is not None and harness.scheduler.stats.num_preemptions == 1
    assert [(piece.start, piece.num_tokens) for piece in plan.slices] == [(8, 5)]
    monkeypatch.undo()
    harness.run()
    harness.check_texts()
    harness.check_idle()


def test_a_stranger_is_admitted_past_who_waits() -> None:
    harness = big(budget=40)
    for i in range(3):
        harness.add(make_request(f"r{i}", prompt_of(30), seed=i, max_tokens=3))
    harness.add(make_request("stranger", prompt_of(10, seed=5), max_tokens=3))
    plan = harness.step()
    assert plan is not None
    assert [(piece.start, piece.num_tokens) for piece in plan.slices] == [(0, 30), (0, 10)]
    assert harness.scheduler.num_running == 4


def test_a_block_published_twice_is_kept_once() -> None:
    harness = big()
    for i in range(2):  # prompt log-probabilities never share work, so both compute the same blocks
        harness.add(make_request(f"r{i}", prompt_of(40), seed=i, max_tokens=3, prompt_logprobs=1))
    harness.step()
    assert harness.backend.num_rows == 80 and harness.scheduler.num_used_blocks == 2 + 1 + 1
    harness.run()
    harness.check_texts()
    harness.run_all([make_request("again", prompt_of(40), max_tokens=3)])
    assert harness.num_cached["again", 0] == 32


def test_key_collisions_do_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = prefix_match.block_key
    monkeypatch.setattr(prefix_match, "block_key", lambda parent, tokens: honest(parent, tokens)[:1])
    harness = Harness(num_blocks=24, block_size=2, max_num_seqs=6, budget=16)
    index, collisions = harness.scheduler._state.kv.index, []
    assert index is not None
    publish = index.publish

    def watched(*args: Any) -> PrefixNode | None:
        collisions.append(publish(*args))
        return collisions[-1]

    monkeypatch.setattr(index, "publish", watched)
    harness.run_all([make_request(f"r{i}", prompt_of(9 + i % 5, seed=i % 7), seed=i, max_tokens=12) for i in range(60)])
    assert collisions.count(None) > 10
    harness.check_idle()


# --- budget and order ---------------------------------------------------------------------------------------------------------------------


def test_chunks_share_steps_with_decodes_and_never_stall_them() -> None:
    harness = big(budget=24)
    for i in range(3):
        harness.add(make_request(f"d{i}", prompt_of(5, seed=i), seed=i, max_tokens=40, ignore_eos=True))
    harness.step()
    harness.add(make_request("long", prompt_of(100), max_tokens=2))
    while not harness.texts["long", 0].token_ids:
        plan = harness.step()
        assert plan is not None
        assert [piece.num_tokens for piece in plan.slices[:3]] == [1, 1, 1] and plan.num_tokens <= 24
        assert sum(piece.num_samples for piece in plan.slices[:3]) == 3
    chunks = [piece.num_tokens for plan in harness.plans for piece in plan.slices if piece.seq_id == 3 and piece.start < 100]
    assert chunks == [21, 21, 21, 21, 16]


def test_a_prompt_ahead_leaves_a_token_to_each_decode_behind() -> None:
    harness, prefix = big(budget=40), prompt_of(33)
    harness.add(make_request("first", prefix, max_tokens=1))
    harness.add(make_request("shares", [*prefix[:32], *prompt_of(90, seed=2)], max_tokens=5))  # waits for 32 tokens, then has 90 to do
    harness.add(make_request("too", [*prefix[:32], *prompt_of(90, seed=4)], max_tokens=5))  # likewise; prompts behind reserve nothing
    for i in range(2):
        harness.add(make_request(f"late{i}", [i], seed=i, max_tokens=30, ignore_eos=True))
    shapes = []
    for _ in range(4):
        plan = harness.step()
        assert plan is not None
        shapes.append([piece.num_tokens for piece in plan.slices])
    assert shapes == [[33, 1, 1], [38, 1, 1], [38, 1, 1], [14, 24, 1, 1]]
    harness.run()
    harness.check_texts()


def test_without_chunking_prompts_go_whole() -> None:
    harness = big(budget=32, chunked=False)
    harness.add(make_request("d", prompt_of(5), max_tokens=60, ignore_eos=True))
    harness.step()
    for i, length in enumerate((20, 32, 100, 10)):
        harness.add(make_request(f"p{i}", prompt_of(length, seed=i + 1), max_tokens=2))
    shapes = []
    for _ in range(5):
        plan = harness.step()
        assert plan is not None
        shapes.append([piece.num_tokens for piece in plan.slices])
    assert shapes == [[1, 20], [32], [100], [1, 1, 1, 1, 10], [1, 1]]
    harness.run()
    harness.check_texts()


def test_admission_leaves_running_sequences_their_next_block() -> None:
    harness = Harness(num_blocks=4, block_size=4, max_num_seqs=4, budget=32, caching=False)
    harness.add(make_request("a", prompt_of(4), max_tokens=9, ignore_eos=True))
    harness.step()
    harness.add(make_request("b", prompt_of(12), max_tokens=1))
    harness.run()
    assert harness.scheduler.stats.num_preemptions == 0
    harness.check_texts()


def test_queue_time_is_measured_to_the_first_step() -> None:
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=1), CacheConfig(), num_blocks=8, max_model_len=64)
    for i in range(2):
        scheduler.add(Request(str(i), [1, 2], SamplingParams(max_tokens=1), 0, arrival_s=10.0 + i))
    for now in (12.0, 15.0):
        plan = scheduler.plan(now)
        assert plan is not None
        scheduler.apply(StepResult(plan.step_index, [SliceResult([0])]))
    assert (scheduler.stats.num_started, scheduler.stats.queue_s) == (2, 2.0 + 4.0)


# --- endings ------------------------------------------------------------------------------------------------------------------------------


def apply_tokens(harness: Harness, tokens: list[int], **kwargs: object) -> list:
    plan = harness.scheduler.plan()
    assert plan is not None
    return harness.scheduler.apply(StepResult(plan.step_index, [SliceResult([token]) for token in tokens]), **kwargs)


@pytest.mark.parametrize(
    "params, drawn, reason, stop_reason",
    [
        ({}, [0, EOS], FinishReason.STOP, None),
        ({"ignore_eos": True, "max_tokens": 2}, [0, EOS], FinishReason.LENGTH, None),
        ({"stop_token_ids": (2,)}, [0, 1, 2], FinishReason.STOP, 2),
        ({"stop_token_ids": (EOS,)}, [EOS], FinishReason.STOP, None),
        ({"stop_token_ids": (EOS,), "ignore_eos": True}, [EOS], FinishReason.STOP, EOS),
        ({"max_tokens": 3}, [0, 0, EOS], FinishReason.STOP, None),  # a stop at the cap wins
        ({"max_tokens": 3}, [0, 0, 0], FinishReason.LENGTH, None),
        ({"min_tokens": 2}, [EOS, EOS, EOS], FinishReason.STOP, None),  # not before two others exist
    ],
)
def test_endings(params: dict, drawn: list[int], reason: FinishReason, stop_reason: int | None) -> None:
    harness = big()
    harness.scheduler.add(make_request("a", [0, 1], **params))
    events = [event for token in drawn for event in apply_tokens(harness, [token])]
    assert [event.token_ids for event in events] == [[token] for token in drawn]  # the stop token stays among the ids
    assert [event.finish_reason for event in events] == [None] * (len(drawn) - 1) + [reason]
    assert events[-1].stop_reason == stop_reason
    assert not harness.scheduler.has_work


@pytest.mark.parametrize("keep, kept", [(1, [0]), (0, [])])
def test_a_stop_string_ends_what_the_engine_says(keep: int, kept: list[int]) -> None:
    harness = big()
    harness.scheduler.add(make_request("a", [0, 1], n=2, logprobs=0))
    events = apply_tokens_with_logprobs(harness, {("a", 1): (keep, "END")})
    assert events[0].finish_reason is None and events[0].token_ids == [0]
    assert (events[1].finish_reason, events[1].stop_reason) == (FinishReason.STOP, "END")
    assert events[1].token_ids == kept and len(events[1].logprobs) == keep
    assert harness.scheduler.num_running == 1 and harness.scheduler.stats.num_output_tokens == 1 + keep


def apply_tokens_with_logprobs(harness: Harness, stops: dict) -> list:
    assert harness.begin() is not None
    assert harness.pending is not None
    for outcome in harness.pending.slices:
        outcome.token_ids = [0] * len(outcome.token_ids)
    return harness.scheduler.apply(harness.pending, stops)


def test_slots_follow_sequences() -> None:
    harness = big(budget=64)
    harness.add(make_request("a", prompt_of(100), seed=5, n=3, max_tokens=4, ignore_eos=True))
    first, second = harness.step(), harness.step()
    assert first is not None and second is not None
    assert first.slot_opens == [] and len(second.slot_opens) == 3
    assert second.slices[0].sample_slots == [opened.slot for opened in second.slot_opens] and second.slices[0].num_samples == 3
    assert second.slot_opens[0].seed == 5 and len({opened.seed for opened in second.slot_opens}) == 3
    harness.run()
    harness.add(make_request("b", [0], max_tokens=1))
    closing = harness.step()
    assert closing is not None and len(closing.slot_closes) == 3 and len(closing.slot_opens) == 1


def test_prompt_logprobs_come_once_and_skip_the_cache() -> None:
    harness = big(budget=30)
    harness.run_all([make_request("warm", prompt_of(70), max_tokens=1)])
    harness.run_all([make_request("a", prompt_of(70), max_tokens=3, prompt_logprobs=1, n=2)])
    assert harness.num_cached["a", 0] == 0 and harness.backend.num_rows == 70 + 70 + 2 * 2
    harness.run_all([make_request("b", prompt_of(70), max_tokens=1)])
    assert harness.num_cached["b", 0] == 64


def test_fail_all_ends_everything_and_leaves_a_usable_scheduler() -> None:
    harness = big(max_num_seqs=3)
    for i in range(3):
        harness.add(make_request(f"r{i}", prompt_of(20, seed=i), n=2, max_tokens=20))
    harness.begin()
    harness.abort("r0")
    events = harness.scheduler.fail_all("out of memory")
    assert [(event.request_id, event.choice) for event in events] == [("r1", 0), ("r1", 1), ("r2", 0), ("r2", 1)]
    assert {(event.finish_reason, event.error) for event in events} == {(FinishReason.ERROR, "out of memory")}
    assert harness.scheduler.num_cached_blocks == 0  # nothing of the failed step is offered
    assert (harness.scheduler.stats.num_failed, harness.scheduler.stats.num_aborted) == (2, 1)
    harness.check_idle()
    harness.pending = None
    harness.add(make_request("after", prompt_of(20), max_tokens=5))
    harness.run()
    harness.check_text("after", 0)


def test_slots_that_a_failed_step_should_have_closed_are_closed_by_the_next() -> None:
    """The sequence of a failed step gets, later, a slot whose close never reached the backend."""
    harness = big(max_num_seqs=2)
    harness.run_all([make_request("a", prompt_of(5), max_tokens=2), make_request("b", prompt_of(6), max_tokens=2)])
    for name in ("c", "d"):
        harness.add(make_request(name, prompt_of(7), max_tokens=2))
        plan = harness.scheduler.plan()
        assert plan is not None and plan.slot_closes and harness.backend.slots
        harness.backend.fail(plan, num_slots=0)
        harness.scheduler.fail_all("broken")
    harness.run_all([make_request("e", prompt_of(8), max_tokens=3), make_request("f", prompt_of(9), max_tokens=3)])


# --- refusals -----------------------------------------------------------------------------------------------------------------------------


def test_add_refuses() -> None:
    harness = big()
    with pytest.raises(ParameterError, match="^prompt: 0 is not allowed; the prompt has no tokens"):
        harness.add(make_request("a", []))
    harness.add(make_request("a", [0]))
    with pytest.raises(ParameterError, match="^request_id: 'a' is not allowed"):
        harness.add(make_request("a", [0]))
    assert harness.scheduler.num_waiting == 1


def test_steps_out_of_turn_are_errors_and_change_nothing() -> None:
    harness = big()
    scheduler = harness.scheduler
    assert scheduler.plan() is None
    with pytest.raises(StepProtocolError, match="no step in flight"):
        scheduler.apply(StepResult(0, []))
    harness.add(make_request("a", [0, 1], max_tokens=2))
    plan = harness.begin()
    assert plan is not None and harness.pending is not None
    with pytest.raises(StepProtocolError, match="step 0 is still in flight"):
        scheduler.plan()
    with pytest.raises(StepProtocolError, match="result of step 7"):
        scheduler.apply(StepResult(7, harness.pending.slices))
    with pytest.raises(StepProtocolError, match="0 results for 1 slices"):
        scheduler.apply(StepResult(0, []))
    with pytest.raises(StepProtocolError, match="2 tokens for 1 samples"):
        scheduler.apply(StepResult(0, [SliceResult([0, 1])]))
    for stops in ({("a", 1): (1, "x")}, {("a", 0): (2, "x")}, {("a", 0): (-1, "x")}, {("b", 0): (0, "x")}):
        with pytest.raises(StepProtocolError, match="stop 'x'"):
            scheduler.apply(harness.pending, stops)
    harness.finish()
    harness.run()
    harness.check_texts()


def test_a_bound_on_gaps_needs_what_prices_them() -> None:
    for config, model in ((SchedulerConfig(max_itl_ms=50.0), None), (SchedulerConfig(), GapModel())):
        with pytest.raises(ValueError, match="^gap_cost: .* is not allowed with max_itl_ms"):
            Scheduler(config, CacheConfig(), 8, 64, gap_cost=model)


def test_unknown_policies_are_refused() -> None:
    allowed = "one of fcfs, static, priority, fair, srf, prefill_first"
    with pytest.raises(ValueError, match=f"scheduling_policy: 'lottery' is not allowed; {allowed}"):
        Scheduler(SchedulerConfig(scheduling_policy="lottery"), CacheConfig(), 8, 64)
