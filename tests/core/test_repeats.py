"""Steps taken at once leave to the bit what the same steps leave one by one, in every state that a scheduler gets into."""

from __future__ import annotations

import random
from dataclasses import asdict
from typing import Any

import pytest

from octavo.config import CacheConfig, SchedulerConfig
from octavo.core.request import ParameterError, Request, SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.core.step import SliceResult, StepPlan, StepResult

BLOCK = 4
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "no cache": ({"enable_prefix_caching": False}, {}),
    "by token": ({"prefix_granularity": "token"}, {}),
    "reserved": ({"enable_prefix_caching": False, "kv_reservation": "max"}, {}),
    "whole prompts": ({}, {"enable_chunked_prefill": False}),
    "static": ({}, {"scheduling_policy": "static"}),
    "prompts first": ({}, {"scheduling_policy": "prefill_first"}),
    "priority": ({}, {"scheduling_policy": "priority"}),
    "long lookahead": ({}, {"admission_lookahead": 64}),
}


class Twins:
    """Two schedulers that are told the same; ``steps`` goes step by step, ``jumps`` takes what repeats at once."""

    def __init__(self, rng: random.Random, cache: dict[str, Any], scheduler: dict[str, Any]) -> None:
        self.rng = rng
        lookahead = {"admission_lookahead": rng.choice((1, 4, 16))} | scheduler
        config = SchedulerConfig(max_num_seqs=rng.randint(1, 5), max_num_batched_tokens=rng.randint(6, 24), **lookahead)
        blocks = rng.randint(8, 40)
        self.steps, self.jumps = (Scheduler(config, CacheConfig(block_size=BLOCK, **cache), blocks, 28) for _ in range(2))
        self.tokens: dict[int, int] = {}  # by slot, of both
        self.num_jumped = self.num_plans = 0

    def both(self) -> tuple[Scheduler, Scheduler]:
        return self.steps, self.jumps

    def add(self, number: int) -> None:
        rng = self.rng
        prompt = [rng.randint(1, 2)] * rng.randint(1, 12) + [rng.randint(1, 2) for _ in range(rng.randint(0, 4))]
        params = SamplingParams(max_tokens=rng.randint(1, 14), ignore_eos=True)
        said, priority = rng.randint(1, 2), rng.randint(0, 1)
        for scheduler in self.both():
            try:
                scheduler.add(Request(str(number), list(prompt), params, said, arrival_s=float(number), priority=priority))
            except ParameterError:
                return

    def result_of(self, plan: StepPlan) -> StepResult:
        """Each sequence always says the token that its seed is."""
        for entry in plan.slot_opens:
            self.tokens[entry.slot] = entry.seed
        return StepResult(plan.step_index, [SliceResult([self.tokens[s] for s in piece.sample_slots]) for piece in plan.slices])

    def step(self) -> None:
        plans = [scheduler.plan() for scheduler in self.both()]
        assert repr(plans[0]) == repr(plans[1])
        for scheduler, plan in zip(self.both(), plans, strict=True):
            if plan is not None:
                scheduler.apply(self.result_of(plan))
        self.num_plans += 1

    def run(self) -> None:
        most = self.jumps.num_repeats()
        assert most == self.steps.num_repeats()
        if not most:
            self.step()
            return
        num_steps = self.rng.choice((most, self.rng.randint(1, most)))
        starts = {seq.seq_id: seq.num_computed for seq in self.jumps.running_sequences}
        used = dict(self.jumps.repeat(num_steps, [self.tokens[seq.slot] for seq in self.jumps.running_sequences]))
        tables = {seq.seq_id: seq.block_table for seq in self.jumps.running_sequences}
        used_now = used[1]
        for step in range(1, num_steps + 1):
            plan = self.steps.plan()
            assert plan is not None and not plan.slot_opens and not plan.slot_closes and not plan.block_copies and not plan.num_moves
            assert [(piece.seq_id, piece.start, piece.num_tokens) for piece in plan.slices] == [
                (seq_id, start + step - 1, 1) for seq_id, start in starts.items()
            ]
            for piece in plan.slices:  # all blocks so far, but one that the last step offers: then it may give way to an equal one
                num_blocks = piece.start // BLOCK + 1
                num_sure = min(num_blocks, (starts[piece.seq_id] + num_steps - 1) // BLOCK)
                assert piece.block_table[:num_sure] == tables[piece.seq_id][:num_sure]
            used_now = used.get(step, used_now)
            assert self.steps.num_used_blocks == used_now
            events = self.steps.apply(self.result_of(plan))
            assert all(event.finish_reason is None for event in events)
        self.num_jumped += num_steps

    def check(self) -> None:
        assert books_of(self.steps) == books_of(self.jumps)
        self.jumps.check_invariants()


def books_of(scheduler: Scheduler) -> Any:
    """Everything that the future of a scheduler depends on."""
    state = scheduler._state
    kv, pool = state.kv, state.kv.pool
    queues = [
        [(s.seq_id, s.token_ids, s.num_computed, list(s.block_table), s.slot, s.num_cached, s.num_preemptions, s.status) for s in queue]
        for queue in (state.running, state.waiting)
    ]
    nodes = [] if kv.index is None else sorted((b, n.key, n.tokens, [c.block for c in n.children]) for b, n in kv.index.blocks().items())
    evicted = [] if kv.index is None else list(kv.index._evicted)
    return (
        queues, pool.ref_counts, list(pool._free), list(pool._cached), nodes, evicted, sorted(kv._claims.items()),
        {seq_id: (chain.depth, chain.publishable) for seq_id, chain in kv._chains.items()}, asdict(state.stats), scheduler._num_plans,
    )  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_jumping_leaves_what_stepping_leaves(name: str) -> None:
    num_jumped = 0
    for seed in range(40):
        rng = random.Random(f"{name}:{seed}")
        twins = Twins(rng, *SETTINGS[name])
        for number in range(60):
            move = rng.random()
            if move < 0.3:
                twins.add(number)
            elif move < 0.35:
                request_id = str(rng.randrange(60))
                assert repr(twins.steps.abort(request_id)) == repr(twins.jumps.abort(request_id))
            else:
                twins.run()
            twins.check()
        num_jumped += twins.num_jumped
    assert num_jumped > 300, "hardly anything was jumped"


def decoding(num_blocks: int = 40, **config: Any) -> Scheduler:
    """A scheduler with two sequences that decode."""
    settings = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32, **config)
    scheduler = Scheduler(settings, CacheConfig(block_size=BLOCK), num_blocks, 64)
    for i, num_prompt in enumerate((5, 9)):
        scheduler.add(Request(str(i), [i + 1] * num_prompt, SamplingParams(max_tokens=10 + i, ignore_eos=True), i))
    plan = scheduler.plan()
    assert plan is not None
    scheduler.apply(StepResult(plan.step_index, [SliceResult([i]) for i in range(2)]))
    return scheduler


def test_a_run_ends_before_the_first_sequence_does() -> None:
    scheduler = decoding()
    assert scheduler.num_repeats() == 8  # the last of its ten tokens ends the first one
    scheduler.repeat(8, [0, 1])
    assert scheduler.num_repeats() == 0
    with pytest.raises(ValueError, match="num_steps: 1 is not allowed"):
        scheduler.repeat(1, [0, 1])


def test_a_run_ends_before_the_pool_does() -> None:
    config = {"admission_lookahead": 1}
    assert decoding(num_blocks=9, **config).num_repeats() == 8
    scheduler = decoding(num_blocks=7, **config)  # five are taken, two more in the fourth step; the eighth wants two that are not there
    assert scheduler.num_repeats() == 7
    scheduler.repeat(7, [0, 1])
    assert scheduler.num_repeats() == 0 and scheduler.num_free_blocks == 0


def test_nothing_repeats_while_a_step_is_in_flight_or_somebody_may_come_in() -> None:
    scheduler = decoding()
    scheduler.add(Request("new", [7], SamplingParams(max_tokens=2, ignore_eos=True), 0))
    assert scheduler.num_repeats() == 0
    scheduler.abort("new")
    assert scheduler.num_repeats() == 8
    scheduler.plan()
    assert scheduler.num_repeats() == 0


def test_who_may_end_by_a_token_is_not_repeated() -> None:
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32), CacheConfig(block_size=BLOCK), 40, 64)
    scheduler.add(Request("a", [1], SamplingParams(max_tokens=10), 0, eos_token_ids=frozenset({2})))
    plan = scheduler.plan()
    assert plan is not None
    scheduler.apply(StepResult(0, [SliceResult([1])]))
    assert scheduler.num_repeats() == 0
