"""What window layers give back, and what is still found: by hand, on blocks of 4 tokens, a window of 8, and parts of 1 and 5 pages."""

from __future__ import annotations

import random

import pytest

from octavo.core.kv_groups import GroupedKV, GroupedLimits
from octavo.core.match_report import MatchEnd
from octavo.core.preempting import Preemptor
from octavo.core.request import ParameterError, Sequence
from octavo.core.state import Draft
from octavo.core.step import StepPlan
from tests.core.harness import Harness, make_request

PAGES = (1, 5, 8)
FULL, WINDOW = 1, 5


def grouped(num_blocks: int = 40, budget: int = 16, **options: object) -> Harness:
    return Harness(num_blocks=num_blocks, budget=budget, max_model_len=400, pages=PAGES, **options)  # type: ignore[arg-type]


def kv_of(harness: Harness) -> GroupedKV:
    kv = harness.scheduler._state.kv
    assert isinstance(kv, GroupedKV)
    return kv


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3) for _ in range(length)]


def run_one(harness: Harness, name: str, prompt: list[int], max_tokens: int = 1) -> int:
    """Run a request alone and return how many tokens were found."""
    harness.add(make_request(name, prompt, max_tokens=max_tokens, ignore_eos=True))
    harness.run()
    harness.check_text(name, 0)
    return harness.num_cached[name, 0]


def drop_loose_parts(harness: Harness) -> None:
    """As if room had been short: all that may go goes, but no block."""
    pool = kv_of(harness).pool
    for block in range(pool.num_ids):
        if pool.is_loose(block):
            pool._tighten(block)
            pool._give_window(block)
    harness.check()


def test_a_running_sequence_holds_the_window_parts_that_it_reads() -> None:
    harness = grouped()
    harness.add(make_request("a", prompt_of(100), max_tokens=50, ignore_eos=True))
    pool, most = kv_of(harness).pool, 0
    while harness.step() is not None:
        for seq in harness.scheduler.running_sequences:
            num_blocks = len(seq.block_table)
            passed = max(0, seq.num_computed - 7) // 4
            assert pool.num_used_pages == FULL * num_blocks + WINDOW * (num_blocks - passed)
            if seq.num_output_tokens > 1:
                most = max(most, num_blocks - passed)
    assert most == 3  # a window of 8 lies in 3 blocks at most, the one that is written among them
    harness.check_texts()


def test_a_request_longer_than_the_pool_ofwhole_blocks_fits() -> None:
    harness = grouped(num_blocks=12, budget=8)  # 48 tokens in whole blocks
    limits = harness.scheduler.limits
    assert isinstance(limits, GroupedLimits)
    assert limits.num_pool_tokens == 4 * (72 - 5 * 5)  # a chunk of 8 and the window before it lie in 5 blocks at most
    run_one(harness, "a", prompt_of(limits.num_pool_tokens - 20), 21)
    with pytest.raises(ParameterError, match="context_length|KV pool"):
        harness.add(make_request("b", prompt_of(limits.num_pool_tokens + 1), max_tokens=1))
    run_one(harness, "c", prompt_of(limits.num_pool_tokens, seed=1), 1)


def test_several_long_requests_in_a_pool_that_holds_less_than_one() -> None:
    harness = grouped(num_blocks=16, budget=8)
    harness.run_all([make_request(f"r{i}", prompt_of(70 + i, i), max_tokens=20, ignore_eos=True) for i in range(6)])
    harness.check_idle()


def test_a_conversation_goes_on_when_its_old_window_parts_are_gone() -> None:
    harness = grouped()
    prompt = prompt_of(60)
    run_one(harness, "a", prompt, 21)
    drop_loose_parts(harness)
    told = prompt + harness.texts["a", 0].token_ids
    assert run_one(harness, "b", told + prompt_of(5, 1)) == 80  # all 80 tokens that were computed
    assert harness.reports["b"].end is not MatchEnd.WINDOW_GONE


def test_a_prompt_that_ends_early_finds_what_has_its_window() -> None:
    harness = grouped()
    prompt = prompt_of(60)
    run_one(harness, "a", prompt)  # with room for all, every part stays
    assert run_one(harness, "b", prompt[:30] + [2, 2, 2, 2, 2, 2], 1) >= 28
    drop_loose_parts(harness)
    assert run_one(harness, "c", prompt[:41]) == 0  # the blocks are there, and nothing behind them can be computed
    report = harness.reports["c"]
    assert (report.end, report.position) == (MatchEnd.WINDOW_GONE, 0)


def test_what_is_found_once_the_window_is_there_again() -> None:
    """Window parts before token 52 are gone, and a prompt that differs from 56 on reads them: it computes until what follows will do."""
    harness = grouped(budget=3)  # so that it has begun a block when it finds it
    prompt = prompt_of(60)
    run_one(harness, "a", prompt)
    drop_loose_parts(harness)
    before = harness.scheduler.stats.prefix_hit_tokens
    num_cached = run_one(harness, "b", [*prompt[:56], *((token + 1) % 3 for token in prompt[56:]), 2])
    report = harness.reports["b"]
    assert (report.end, report.position, report.computed_end) == (MatchEnd.DIFFERENT_TOKEN, 56, MatchEnd.WINDOW_GONE)
    assert num_cached + report.num_computed == 56 and num_cached > 0 and num_cached % 4 == 0
    assert harness.scheduler.stats.prefix_hit_tokens == before + num_cached


def test_what_is_computed_again_completes_the_block_that_is_offered() -> None:
    harness = grouped()
    prompt = prompt_of(60)
    run_one(harness, "a", prompt)
    drop_loose_parts(harness)
    kv = kv_of(harness)
    assert kv.index is not None
    blocks = set(kv.index.blocks())
    run_one(harness, "b", prompt[:41])
    assert set(kv.index.blocks()) == blocks  # no block is there twice
    assert run_one(harness, "c", prompt[:41]) == 40


def test_the_match_that_goes_on_far_enough_is_found() -> None:
    """Blocks 0 .. 9 offered, the parts of 0 .. 4 gone: 5 and 6 are what a row behind block 6 reads."""
    harness = grouped()
    prompt = prompt_of(41)
    run_one(harness, "a", prompt)
    kv = kv_of(harness)
    harness.add(make_request("b", prompt, max_tokens=1))
    (seq,) = harness.scheduler._state.waiting
    nodes = kv.find_prefix(seq).nodes
    assert len(nodes) == 10
    for have, usable in [(0, 10), (1, 10), (5, 10), (8, 10), (9, 0), (10, 0)]:
        for i, node in enumerate(nodes):
            kv.pool.has_window[node.block] = i >= have
        match = kv.find_prefix(seq)
        assert (len(match.nodes), match.num_unusable) == (usable, 10 - usable)
    for gap, usable in [(4, 10), (7, 10), (8, 8), (9, 9)]:
        for i, node in enumerate(nodes):
            kv.pool.has_window[node.block] = i != gap
        assert len(kv.find_prefix(seq).nodes) == usable


def test_the_last_use_decides_what_goes_first() -> None:
    """A prefix that is asked for again and again keeps its window parts beside blocks that nobody asks for any more."""
    harness = grouped(num_blocks=40)
    system = prompt_of(40)
    run_one(harness, "old", prompt_of(44, seed=9))
    for i in range(12):
        found = run_one(harness, f"r{i}", system + prompt_of(40, seed=100 + i))
        assert i == 0 or found >= 40
    assert run_one(harness, "older", prompt_of(44, seed=9)) < 40


def test_choices_share_until_each_has_passed() -> None:
    harness = grouped()
    harness.run_all([make_request("a", prompt_of(33), n=3, max_tokens=30, ignore_eos=True)])
    harness.check_idle()


def swapped_siblings() -> tuple[Harness, list[Sequence]]:
    """Two choices of a prompt in host memory, one of which has passed a block that the other still reads."""
    harness = grouped(num_host_blocks=60, preemption="swap", budget=32)
    harness.add(make_request("a", prompt_of(24), n=2, max_tokens=30, ignore_eos=True))
    while not harness.scheduler.running_sequences or harness.scheduler.running_sequences[0].num_output_tokens < 1:
        harness.step()
    first, second = harness.scheduler.running_sequences
    state = harness.scheduler._state
    state.running.remove(second)  # it sits out four steps
    kept = [second]
    in_running = harness.scheduler.check_invariants
    harness.scheduler.check_invariants = lambda: None  # type: ignore[method-assign]
    for _ in range(4):
        harness.step()
    harness.scheduler.check_invariants = in_running  # type: ignore[method-assign]
    state.running += kept
    harness.check()
    by_hand = Draft(StepPlan(-1, pages=kv_of(harness).pages), 32)
    Preemptor(state).preempt(by_hand.plan, [first, second])
    harness.check()
    harness.backend.execute(by_hand.plan)
    return harness, [first, second]


def test_a_shared_block_comes_back_with_its_window_part_for_who_reads_it() -> None:
    harness, (first, second) = swapped_siblings()
    kv = kv_of(harness)
    saved = harness.scheduler._state.swaps
    assert saved.num_computed(first) == saved.num_computed(second) + 4
    assert kv.needs.num_passed(saved.num_computed(first)) == kv.needs.num_passed(saved.num_computed(second)) + 1
    kv.index = None  # nothing is found in the cache: all comes from host memory
    plan = harness.step()
    assert plan is not None and plan.block_loads
    completed = [move for move in plan.block_loads if list(move.pages[:FULL]) == [-1] * FULL]
    assert len(completed) == 1  # the block between the two windows: its full part came with the first choice
    harness.run()
    harness.check_texts()


@pytest.mark.parametrize("seed", [19, 29, 86, 147, 180])
def test_blocks_of_which_no_page_is_left_are_counted_when_somebody_is_let_in(seed: int) -> None:
    """All layers have a window: long sequences hold many blocks and few pages, so that ids are what runs out."""
    rng = random.Random(seed)
    size, budget, window = rng.choice([3, 4]), rng.randint(4, 9), rng.randint(2, 6)
    least = (budget + window - 2) // size + 2
    num_blocks, caching, num_host_blocks = rng.randint(least, least + 2), rng.random() < 0.5, rng.choice([0, 100])
    harness = Harness(num_blocks, size, 200, 6, budget, caching=caching, pages=(0, 1, window), num_host_blocks=num_host_blocks)
    most = harness.scheduler.limits.max_total_tokens - 2
    for i in range(8):
        prompt = [rng.randrange(3) for _ in range(rng.randint(1, min(150, most)))]
        harness.add(make_request(f"r{i}", prompt, max_tokens=rng.randint(1, 100), ignore_eos=True))
    harness.run()
    harness.check_texts()
    harness.check_idle()
