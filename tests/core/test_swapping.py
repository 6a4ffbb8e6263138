"""Preemption by swapping: what is saved, what is loaded, what is shared, and what becomes of it when the request ends meanwhile."""

from __future__ import annotations

import random

import pytest

from octavo.config import CacheConfig, SchedulerConfig
from octavo.core import policy
from octavo.core.request import FinishReason, Sequence, SequenceStatus
from octavo.core.scheduler import Scheduler
from octavo.core.state import Draft
from octavo.core.step import StepPlan
from tests.core.harness import Harness, make_request
from tests.core.test_cases import prompt_of


def tight(**sizes: object) -> Harness:
    """Eight blocks of four tokens, and as many in host memory."""
    return Harness(**{"num_blocks": 8, "budget": 32, "num_host_blocks": 8, "preemption": "swap"} | sizes)  # type: ignore[arg-type]


def run_until_swapped(harness: Harness) -> list[Sequence]:
    for _ in range(100):
        harness.step()
        state = harness.scheduler._state
        saved = [seq for seq in state.waiting if state.swaps.holds(seq)]
        if saved:
            return saved
    raise AssertionError("nobody was swapped out")


def two_that_do_not_fit(harness: Harness, **second: object) -> None:
    harness.add(make_request("a", prompt_of(7), max_tokens=20, ignore_eos=True))
    harness.add(make_request("b", prompt_of(6, seed=1), seed=1, **{"max_tokens": 20, "ignore_eos": True, **second}))


@pytest.mark.parametrize("caching", [True, False])
def test_no_token_is_computed_twice(caching: bool) -> None:
    harness = tight(caching=caching)
    two_that_do_not_fit(harness)
    harness.run()
    harness.check_texts()
    harness.check_idle()
    stats = harness.scheduler.stats
    assert stats.num_swap_preemptions == stats.num_preemptions > 0
    assert harness.backend.num_rows == stats.num_computed_tokens == (7 + 19) + (6 + 19)
    assert 0 < stats.num_blocks_loaded <= stats.num_blocks_saved


def test_what_the_prefix_cache_still_has_is_not_loaded() -> None:
    harness = Harness(num_blocks=20, budget=32, num_host_blocks=8, preemption="swap")
    harness.add(make_request("a", prompt_of(10), max_tokens=20, ignore_eos=True))
    for _ in range(5):
        harness.step()
    (seq,) = harness.scheduler._state.running
    assert seq.num_computed == 14
    by_hand = Draft(StepPlan(-1), 32)
    harness.scheduler._planner._preemptor.preempt(by_hand.plan, [seq])
    harness.check()
    assert len(by_hand.plan.block_saves) == 4
    harness.backend.execute(by_hand.plan)
    plan = harness.step()
    assert plan is not None and [move.pool_block for move in plan.block_loads] == [seq.block_table[3]]
    harness.run()
    harness.check_texts()
    assert harness.backend.num_rows == 10 + 19


@pytest.mark.parametrize("num_host_blocks", [0, 2])
def test_without_room_in_host_memory_tokens_are_recomputed(num_host_blocks: int) -> None:
    harness = tight(num_host_blocks=num_host_blocks)
    two_that_do_not_fit(harness)
    harness.run()
    harness.check_texts()
    harness.check_idle()
    stats = harness.scheduler.stats
    assert stats.num_preemptions > 0 == stats.num_swap_preemptions == stats.num_blocks_saved


@pytest.mark.parametrize("caching", [True, False])
def test_choices_go_and_come_back_together_and_share_as_before(caching: bool) -> None:
    harness = Harness(num_blocks=12, budget=32, num_host_blocks=12, preemption="swap", max_num_seqs=8, caching=caching)
    harness.add(make_request("first", prompt_of(5), max_tokens=36, ignore_eos=True))
    harness.add(make_request("three", prompt_of(10, seed=3), seed=2, n=3, max_tokens=10, ignore_eos=True))
    saved = run_until_swapped(harness)
    assert [seq.choice for seq in saved] == [0, 1, 2]
    num_held = [len(harness.scheduler._state.swaps._saved[seq.seq_id].host_blocks) for seq in saved]
    assert harness.scheduler.num_used_host_blocks == 2 + sum(count - 2 for count in num_held)  # two full blocks of the prompt are common
    while all(seq.status is SequenceStatus.WAITING for seq in saved):
        harness.step()
    assert all(seq.status is SequenceStatus.RUNNING for seq in saved)
    common = set(saved[0].block_table[:2])
    assert len(common) == 2 and all(set(seq.block_table[:2]) == common for seq in saved)
    harness.run()
    harness.check_texts()
    harness.check_idle()
    assert harness.backend.num_rows == (5 + 35) + 10 + 3 * 9


def test_choices_that_no_pool_holds_together_take_turns() -> None:
    harness = Harness(num_blocks=8, budget=32, num_host_blocks=30, preemption="swap", max_num_seqs=8)
    harness.run_all([make_request("many", prompt_of(8), seed=4, n=6, max_tokens=20, ignore_eos=True)])
    harness.check_idle()
    assert harness.scheduler.stats.num_swap_preemptions > 0


@pytest.mark.parametrize("in_flight", [True, False])
def test_an_abort_frees_host_blocks(in_flight: bool) -> None:
    harness = tight()
    two_that_do_not_fit(harness)
    (seq,) = run_until_swapped(harness)
    assert harness.scheduler.num_swapped == 1 and harness.scheduler.num_used_host_blocks > 0
    if in_flight:
        harness.begin()
    events = harness.abort(seq.request.request_id)
    assert [event.finish_reason for event in events] == [FinishReason.ABORT]
    assert harness.scheduler.num_swapped == harness.scheduler.num_used_host_blocks == 0
    if in_flight:
        harness.finish()
    harness.run()
    harness.check_texts()
    harness.check_idle()


def test_an_abort_while_its_blocks_come_back_keeps_the_host_blocks_until_they_are_read() -> None:
    harness = tight()
    two_that_do_not_fit(harness)
    (seq,) = run_until_swapped(harness)
    while seq.status is SequenceStatus.WAITING:
        if harness.pending is not None:
            harness.finish()
        harness.begin()
    assert harness.plans[-1].block_loads
    harness.abort(seq.request.request_id)
    assert harness.scheduler.num_used_host_blocks > 0
    harness.finish()
    assert harness.scheduler.num_used_host_blocks == 0
    harness.run()
    harness.check_texts()
    harness.check_idle()


def test_a_failed_step_offers_nothing_that_it_should_have_loaded() -> None:
    harness = tight()
    two_that_do_not_fit(harness)
    (seq,) = run_until_swapped(harness)
    plan = None
    while seq.status is SequenceStatus.WAITING:
        plan = harness.scheduler.plan()
        assert plan is not None
        if seq.status is SequenceStatus.WAITING:
            harness.pending = harness.backend.execute(plan)
            harness.finish()
    assert plan is not None and plan.block_loads
    index = harness.scheduler._state.kv.index
    assert index is not None and not any(index.offers(move.pool_block) for move in plan.block_loads)
    harness._receive(harness.scheduler.fail_all("the device is gone"))
    harness.backend.failed = True
    harness.check_idle()
    harness.run_all([make_request("again", seq.request.prompt_token_ids + [1] * 9, max_tokens=4)])


class Prices:
    """A PreemptionCost of fixed prices, in tokens."""

    def __init__(self, tokens_per_block: float) -> None:
        self.tokens_per_block = tokens_per_block

    def recompute_seconds(self, num_tokens: int) -> float:
        return float(num_tokens)

    def swap_seconds(self, num_blocks: int) -> float:
        return num_blocks * self.tokens_per_block


@pytest.mark.parametrize("price, swaps", [(0.1, True), (1.9, True), (2.1, False), (9.0, False)])  # a block of 4 tokens moves twice
def test_auto_takes_what_is_cheaper(price: float, swaps: bool) -> None:
    harness = tight(preemption="auto")
    harness.scheduler._state.preemption_cost = Prices(price)
    harness.add(make_request("a", prompt_of(7), max_tokens=20, ignore_eos=True))
    harness.add(make_request("b", prompt_of(8, seed=1), seed=1, max_tokens=2, ignore_eos=True))
    harness.step()
    state = harness.scheduler._state
    seq = state.running[1]
    assert seq.num_computed == 8
    assert harness.scheduler._planner._preemptor.swaps_out([seq]) is swaps


def test_who_comes_back_makes_a_token_before_it_is_preempted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under an admission that lets in whatever fits at the moment."""
    monkeypatch.setattr(policy, "expected_growth", lambda *_: 0)
    harness = tight(max_num_seqs=6, num_host_blocks=40)
    requests = [make_request(f"r{i}", prompt_of(5 + i, seed=i), seed=i, max_tokens=18, ignore_eos=True) for i in range(8)]
    returns: dict[int, int] = {}
    for request in requests:
        harness.add(request)
    while harness.step() is not None:
        state = harness.scheduler._state
        for seq in state.running:
            if seq.num_preemptions:
                returns[seq.seq_id] = seq.num_tokens_at_return
        for seq in state.waiting:
            if seq.seq_id in returns:
                assert len(seq.token_ids) > returns.pop(seq.seq_id)
    assert harness.scheduler.stats.num_preemptions > 5
    harness.check_texts()


def test_admission_looks_ahead() -> None:
    """Two that will not fit at full length: one after the other without a preemption, or together with some."""
    for lookahead, preempts in ((64, False), (1, True)):
        harness = tight(lookahead=lookahead)
        two_that_do_not_fit(harness)
        harness.run()
        harness.check_texts()
        assert (harness.scheduler.stats.num_preemptions > 0) == preempts


def test_a_lone_sequence_is_admitted_whatever_it_may_grow_to() -> None:
    harness = tight(lookahead=1000)
    harness.run_all([make_request("a", prompt_of(30), max_tokens=None, ignore_eos=True)])
    assert len(harness.texts["a", 0].token_ids) == 3  # 32 tokens of KV, and one that needs none


def test_requests_with_a_host_pool_have_the_same_limits() -> None:
    scheduler = Scheduler(SchedulerConfig(), CacheConfig(block_size=4), 8, 64, num_host_blocks=100)
    assert scheduler.limits.max_total_tokens == 33


@pytest.mark.parametrize("seed", [141, 290, 620, 685, 690, 734, 808, 894])
def test_choices_that_come_back_in_a_tight_pool(seed: int) -> None:
    """Loads whose blocks a plan also copies from, and groups of which some are saved and others are computed again."""
    rng = random.Random(seed)
    harness = Harness(
        num_blocks=rng.randint(5, 9),
        block_size=4,
        max_num_seqs=rng.randint(5, 10),
        budget=rng.randint(10, 16),
        chunked=rng.random() < 0.5,
        granularity=rng.choice(["token", "block"]),
        lookahead=rng.choice([1, 1, 3, 8]),
        num_host_blocks=rng.choice([4, 12, 40]),
        policy=rng.choice(["fcfs", "priority", "fair", "srf"]),
        preemption="swap",
    )
    num_requests, prompts = 0, [[0]]
    for _ in range(120):
        if rng.random() < 0.3 and num_requests < 12:
            prompt = rng.choice(prompts)[: rng.randint(0, 10)]
            prompt = (prompt + [rng.randint(0, 2) for _ in range(rng.randint(0 if prompt else 1, 8))])[:11]
            prompts.append(prompt)
            order = {"priority": rng.randint(-2, 2), "user": rng.choice([None, "a", "b"]), "ignore_eos": rng.random() < 0.8}
            n, max_tokens = rng.randint(1, 3), rng.randint(4, 24)
            harness.add(make_request(f"r{num_requests}", prompt, rng.randint(0, 3), n=n, max_tokens=max_tokens, **order))
            num_requests += 1
        else:
            harness.step()
    harness.run()
    harness.check_texts()
    harness.check_idle()
