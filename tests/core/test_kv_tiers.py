"""Evicted blocks come back from host memory and disk: cases by hand, a long random load, and what is counted."""

from __future__ import annotations

import random

import pytest

from octavo.core.kv_tiers import BlockRef, KVTiers
from octavo.core.match_report import MatchEnd
from octavo.core.request import FinishReason
from tests.core.harness import make_request
from tests.core.tier_harness import TierHarness, TokenCost, ToyDisk


def run_one(harness: TierHarness, name: str, prompt: list[int], max_tokens: int = 2) -> int:
    """Run a request alone; the prompt tokens that were not computed."""
    harness.add(make_request(name, prompt, max_tokens=max_tokens, ignore_eos=True))
    harness.run()
    harness.check_text(name, 0)
    return harness.num_cached[name, 0]


def prompt_of(seed: int, size: int) -> list[int]:
    return [random.Random(f"{seed} {i}").randrange(3) for i in range(size)]


A, B, C = prompt_of(0, 21), prompt_of(1, 21), prompt_of(2, 21)


def test_a_prompt_comes_back_from_host_memory() -> None:
    harness = TierHarness(num_blocks=6, num_tier_blocks=12)
    assert run_one(harness, "first", A) == 0
    assert run_one(harness, "other", B) == 0
    assert run_one(harness, "again", A) == 20
    stats = harness.tiers.stats
    assert (stats.host_hit_tokens, stats.disk_hit_tokens) == (20, 0)
    assert harness.scheduler.stats.prefix_hit_tokens == 20
    harness.check_idle()


def test_equal_prompts_that_come_together_are_loaded_once() -> None:
    harness = TierHarness(num_blocks=16, num_tier_blocks=24)
    run_one(harness, "first", A)
    for i in range(3):
        run_one(harness, f"other {i}", prompt_of(20 + i, 30))
    harness.run_all(make_request(f"again {i}", A, max_tokens=1, seed=i) for i in range(3))
    assert harness.tiers.stats.num_loaded_blocks == 5
    assert [harness.num_cached[f"again {i}", 0] for i in range(3)] == [20, 20, 20]


def test_a_prompt_comes_back_from_disk_after_a_restart() -> None:
    disk = ToyDisk(latency=1, failing=0.0, seed=0)
    harness = TierHarness(num_blocks=6, num_tier_blocks=4, disk=disk)
    for name, prompt in (("a", A), ("b", B), ("c", C)):
        assert run_one(harness, name, prompt) == 0
    harness.flush()
    for name, prompt in (("a", A), ("b", B), ("c", C)):
        again = TierHarness(num_blocks=6, num_tier_blocks=8, disk=disk)
        assert run_one(again, name, prompt) == 20
        assert (again.tiers.stats.disk_hit_tokens, again.tiers.stats.host_hit_tokens) == (20, 0)
        again.check_idle()


def test_a_small_host_memory_passes_a_long_prompt_through_in_pieces() -> None:
    disk = ToyDisk(latency=1, failing=0.0, seed=0)
    harness = TierHarness(num_blocks=12, num_tier_blocks=4, disk=disk)
    prompt = prompt_of(3, 41)
    run_one(harness, "first", prompt)
    harness.flush()
    again = TierHarness(num_blocks=12, num_tier_blocks=4, disk=disk)
    assert run_one(again, "again", prompt) == 40
    assert again.tiers.stats.disk_hit_tokens == 40


def test_a_report_tells_of_what_is_restored_after_it_was_made() -> None:
    """There is room for one prompt's blocks on their way from the disk: the other begins to compute, and the rest of it is restored."""
    disk, sizes = ToyDisk(latency=1, failing=0.0, seed=0), {"num_blocks": 48, "num_tier_blocks": 8, "budget": 4}
    harness = TierHarness(disk=disk, **sizes)
    prompts = [prompt_of(seed, 45) for seed in (4, 5)]
    for i, prompt in enumerate(prompts):
        run_one(harness, f"first {i}", prompt)
    harness.flush()
    again = TierHarness(disk=disk, **sizes)
    again.run_all(make_request(f"again {i}", prompt, max_tokens=1) for i, prompt in enumerate(prompts))
    assert again.tiers.stats.disk_hit_tokens == sum(again.num_cached.values())
    assert (again.reports["again 0"].position, again.num_cached["again 0", 0]) == (16, 16)  # what half of host memory holds
    report, num_cached = again.reports["again 1"], again.num_cached["again 1", 0]
    assert 0 < num_cached <= report.position and report.num_computed == report.position - num_cached > 0
    assert report.computed_end is MatchEnd.NOT_CACHED


def test_loads_take_half_of_the_gap_that_streams_may_see() -> None:
    harness = TierHarness(num_blocks=24, num_tier_blocks=48, budget=16, max_itl_ms=4.0)
    for i in range(8):
        run_one(harness, f"first {i}", prompt_of(30 + i, 21))
    harness.add(make_request("stream", B[:3], max_tokens=20, ignore_eos=True))
    harness.step()
    for i in range(2):
        harness.add(make_request(f"again {i}", prompt_of(30 + i, 21), max_tokens=1))
    loads = []
    while harness.scheduler.has_work:
        plan = harness.step()
        assert plan is not None and plan.slices, "the stream goes on"
        loads.append(len(plan.block_loads))
    harness.check_texts()
    assert max(loads) == 2 and sum(loads) == 10
    assert [harness.num_cached[f"again {i}", 0] for i in range(2)] == [20, 20]


def test_others_go_on_while_one_waits_for_the_disk() -> None:
    disk = ToyDisk(latency=1, failing=0.0, seed=0)
    harness = TierHarness(num_blocks=12, num_tier_blocks=12, disk=disk)
    run_one(harness, "first", A)
    harness.flush()
    again = TierHarness(num_blocks=12, num_tier_blocks=12, disk=disk)
    again.add(make_request("waits", A, max_tokens=2, ignore_eos=True))
    again.add(make_request("equal", A, max_tokens=2, ignore_eos=True))
    again.add(make_request("other", B[:4], max_tokens=9, ignore_eos=True))
    again.run()
    again.check_texts()
    computed = [piece.seq_id for plan in again.plans for piece in plan.slices]
    assert computed.index(2) < computed.index(0), "the third request is computed before the first"
    assert again.num_cached == {("waits", 0): 20, ("equal", 0): 20, ("other", 0): 0}
    assert again.tiers.stats.num_read_blocks == 5, "equal prompts are read once"


def test_a_slow_disk_is_given_up_after_the_time_that_computing_takes() -> None:
    disk = ToyDisk(latency=10**9, failing=0.0, seed=0)
    harness = TierHarness(num_blocks=12, num_tier_blocks=12, disk=disk)
    run_one(harness, "first", A)
    harness.flush()
    again = TierHarness(num_blocks=12, num_tier_blocks=12, disk=disk)
    began_s = again.now_s
    again.add(make_request("again", A, max_tokens=1))
    assert again.begin_once() is None and again.tiers.is_waiting
    again.begin()
    assert again.now_s - began_s == pytest.approx(0.021)  # a millisecond for each of its 20 tokens, and the tick that ends it
    again.finish()
    again.run()
    again.check_texts()
    assert again.tiers.stats.num_given_up == 1 and again.num_cached["again", 0] == 0


def test_reads_do_not_pile_up_behind_a_disk_that_hangs() -> None:
    disk = ToyDisk(latency=10**9, failing=0.0, seed=0)
    harness = TierHarness(num_blocks=40, num_tier_blocks=16, disk=disk)
    for i in range(4):
        run_one(harness, f"first {i}", prompt_of(40 + i, 21))
    harness.flush()
    again = TierHarness(num_blocks=40, num_tier_blocks=16, disk=disk)
    for i in range(4):
        assert run_one(again, f"again {i}", prompt_of(40 + i, 21)) == 0
    assert sum(map(len, disk._batches)) == 8, "half of host memory"
    assert again.tiers.stats.num_given_up == 2, "who finds no room for its reads computes at once"


def test_a_lost_block_ends_the_wait_and_what_came_before_it_is_used() -> None:
    disk = ToyDisk(latency=1, failing=0.0, seed=0)
    harness = TierHarness(num_blocks=12, num_tier_blocks=12, disk=disk)
    run_one(harness, "first", A)
    third = harness.scheduler.evictable_blocks()[-3][0]
    harness.flush()
    again = TierHarness(num_blocks=12, num_tier_blocks=12, disk=disk)
    disk.blocks[third.key] = (third._replace(tokens=bytes(16)), disk.blocks[third.key][1])
    assert run_one(again, "again", A) == 8
    assert again.tiers.stats.num_given_up == 1


def test_an_abort_while_the_disk_reads() -> None:
    disk = ToyDisk(latency=2, failing=0.0, seed=0)
    harness = TierHarness(num_blocks=12, num_tier_blocks=12, disk=disk)
    run_one(harness, "first", A)
    harness.flush()
    again = TierHarness(num_blocks=12, num_tier_blocks=12, disk=disk)
    again.add(make_request("leaves", A, max_tokens=1))
    again.add(make_request("stays", A, max_tokens=1))
    for _ in range(3):
        assert again.begin_once() is None
    assert [event.finish_reason for event in again.abort("leaves")] == [FinishReason.ABORT]
    again.run()
    again.check_texts()
    again.check_idle()
    assert again.num_cached["stays", 0] == 20


def test_an_abort_while_blocks_are_loaded() -> None:
    harness = TierHarness(num_blocks=6, num_tier_blocks=12)
    run_one(harness, "first", A)
    run_one(harness, "other", B)
    harness.add(make_request("leaves", A, max_tokens=1))
    plan = harness.begin()
    assert plan is not None and plan.block_loads and not plan.slices
    harness.abort("leaves")
    harness.finish()
    harness.check_idle()
    assert run_one(harness, "again", A) == 20


def test_nothing_of_a_failed_step_is_kept() -> None:
    harness = TierHarness(num_blocks=6, num_tier_blocks=12)
    run_one(harness, "first", A)
    run_one(harness, "other", B)
    harness.add(make_request("fails", A, max_tokens=1))
    plan = harness.scheduler.plan()
    assert plan is not None and plan.block_saves and plan.block_loads
    num_held = harness.tiers.num_used_host_blocks
    harness.backend.fail(plan, 0)
    harness._receive(harness.scheduler.fail_all("the device is gone"))
    assert harness.tiers.num_used_host_blocks == num_held - len(plan.block_saves)
    harness.check_idle()
    assert run_one(harness, "again", A) == 20


def test_restoring_that_does_not_pay_is_left_alone() -> None:
    harness = TierHarness(num_blocks=6, num_tier_blocks=12, min_tokens=24)
    run_one(harness, "first", A)
    run_one(harness, "other", B)
    assert run_one(harness, "again", A) < 20 and harness.tiers.stats.num_loaded_blocks == 0


def test_salts_are_kept_apart_in_every_tier() -> None:
    disk = ToyDisk(latency=1, failing=0.0, seed=0)
    harness = TierHarness(num_blocks=6, num_tier_blocks=4, disk=disk)
    for salt in ("x", "y", None):
        harness.add(make_request(f"first {salt}", A, max_tokens=1, salt=salt))
        harness.run()
        assert harness.num_cached[f"first {salt}", 0] == 0
    for salt in ("x", "y", None):
        harness.add(make_request(f"again {salt}", A, max_tokens=1, salt=salt))
        harness.run()
        assert harness.num_cached[f"again {salt}", 0] == 20
    harness.check_texts()


def test_a_block_needs_the_same_tokens_and_parent_besides_the_key() -> None:
    tiers = KVTiers(4, 4, TokenCost())
    ref = BlockRef(b"key", b"parent", bytes(16))
    tiers.save(ref, 0)
    assert len(tiers.match(0, iter([ref]), 0).entries) == 1
    assert not tiers.match(0, iter([ref._replace(tokens=bytes(15) + b"1")]), 0)
    assert not tiers.match(0, iter([ref._replace(parent_key=b"another")]), 0)


@pytest.mark.parametrize("granularity", ["block", "token"])
@pytest.mark.parametrize("num_swap_blocks", [0, 12])
@pytest.mark.parametrize("seed", range(3))
def test_a_long_load_in_little_memory(seed: int, num_swap_blocks: int, granularity: str) -> None:
    """Five conversations, concurrency, aborts and failing steps: texts are right, and every way up and down is taken."""
    rng = random.Random(seed)
    disk = ToyDisk(latency=rng.randint(1, 3), failing=0.03, seed=seed)
    sizes = {"max_num_seqs": 4, "budget": 16, "max_model_len": 60, "num_host_blocks": num_swap_blocks, "granularity": granularity}
    harness = TierHarness(num_blocks=16, num_tier_blocks=10, disk=disk, **sizes)
    stems = [prompt_of(10 * seed + i, size) for i, size in enumerate((9, 16, 24, 25, 33))]
    for i in range(120):
        stem = rng.choice(stems)
        prompt = stem + [rng.randrange(3) for _ in range(rng.choice((0, 1, 5)))]
        harness.add(make_request(f"r{i}", prompt, seed=rng.randrange(3), max_tokens=rng.choice((1, 4, 12)), n=rng.choice((1, 1, 2))))
        for _ in range(rng.choice((0, 1, 3, 20))):
            if harness.begin_once() is not None:
                harness.finish()
        if rng.random() < 0.1:
            harness.abort(f"r{rng.randrange(i + 1)}")
        if rng.random() < 0.03:
            plan = harness.scheduler.plan(harness.now_s)
            if plan is not None:
                harness.spill()
                harness.backend.fail(plan, 0)
                harness._receive(harness.scheduler.fail_all("the device is gone"))
    harness.run()
    harness.check_idle()
    harness.check_texts()
    stats = harness.tiers.stats
    ways = (stats.num_saved_blocks, stats.num_spilled_blocks, stats.num_read_blocks, stats.num_loaded_blocks, stats.host_hit_tokens)
    assert min(*ways, stats.disk_hit_tokens) > 10


def chain_of(num_blocks: int) -> list[BlockRef]:
    return [BlockRef(b"%d" % (i + 1), b"%d" % i, bytes([i] * 16)) for i in range(num_blocks)]


def test_what_was_loaded_is_evicted_from_its_end() -> None:
    tiers, refs = KVTiers(3, 4, TokenCost()), chain_of(6)
    for block in (2, 1, 0):
        tiers.save(refs[block], block)
    assert [move.pool_block for move in tiers.take_saves()] == [2, 1, 0]
    tiers.end_plan()
    tiers.load(0, tiers.match(0, iter(refs), 0).entries)
    tiers.save(refs[3], 3)
    assert tiers.stats.num_lost_blocks == 1, "what a plan loads is not evicted by it"
    tiers.end_plan()
    for num_left, ref in ((2, refs[4]), (1, refs[5])):
        tiers.save(ref, 9)
        assert len(tiers.match(1, iter(refs), 0).entries) == num_left


def test_what_a_plan_is_to_save_is_not_in_host_memory_yet() -> None:
    tiers = KVTiers(num_host_blocks=2, block_size=4, cost=TokenCost())
    tiers.begin_plan(0.0)
    tiers.save(BlockRef(b"key", b"parent", b"tokens"), 3)
    (entry,) = tiers.entries()
    assert not tiers.holds(entry)
    tiers.end_plan()  # of a plan before
    assert not tiers.holds(entry)
    assert len(tiers.take_saves()) == 1 and not tiers.holds(entry)
    tiers.end_plan()
    assert tiers.holds(entry)
    tiers.vacate(2)
    assert not tiers.holds(entry)


def test_a_second_wait_ends_the_first() -> None:
    disk = ToyDisk(latency=1, failing=0.0, seed=0)
    tiers, refs = KVTiers(8, 4, TokenCost(), disk), chain_of(2)
    for ref in refs:
        tiers.begin_read(0, [ref], 0)
        assert tiers.take_reads() == [[ref]] and tiers.match(0, iter(refs), 0).waits
        assert tiers.arrived(ref) is not None
        tiers.check_invariants({0})
    tiers.leave(0)
    tiers.check_invariants(set())
