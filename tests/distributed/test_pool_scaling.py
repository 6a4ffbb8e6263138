"""Which pool grows, by what comes and what waits: prompts, tokens, room; and what is whose where workers are borrowed or do both."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.distributed.autoscale import ScaleAction, ScaleLimits, ScaleStep
from octavo.distributed.pool_scaling import ClusterLoad, PoolScaling, PoolWorker
from tests.distributed.scripted_pools import START_S, Pools

LIMITS = ScaleLimits(least=1, most=5, up_wait_s=1.0, down_load=0.6, down_after_s=20.0, start_s=START_S, rate_s=10.0)
BOTH_POOLS = {"prefill": LIMITS, "decode": LIMITS}
PAIR = {"prefill": 1, "decode": 1}


def numbers(pools: Pools) -> dict[str, int]:
    return {role: pools.num_on(role) for role in pools.numbers}


def test_a_load_that_a_pair_can_bear_changes_nothing() -> None:
    pools = Pools(BOTH_POOLS, PAIR)
    pools.run(300, 3.0)  # 300 of 1,000 prompt tokens a second, 300 of 500 output tokens
    assert not pools.steps and len(pools.done) > 800


def test_a_steady_load_ends_in_steady_numbers() -> None:
    pools = Pools(BOTH_POOLS, PAIR)
    pools.run(200, 12.0, num_prompt=200)  # 2.4 workers' worth of prompts, 2.4 of tokens
    settled = numbers(pools)
    assert 3 <= settled["prefill"] <= 5 and 3 <= settled["decode"] <= 5
    num_steps = len(pools.steps)
    pools.run(300, 12.0, num_prompt=200)
    assert len(pools.steps) == num_steps, pools.steps[num_steps:]
    assert not pools.without_room and len(pools.prompts) <= 12


def test_many_prompt_tokens_grow_the_prefill_pool_alone() -> None:
    pools = Pools(BOTH_POOLS, PAIR)
    pools.run(200, 2.5, num_prompt=1000, num_output=20)  # 2.5 workers' worth
    assert numbers(pools) == {"prefill": pools.num_on("prefill"), "decode": 1} and pools.num_on("prefill") in (3, 4, 5)
    assert set(pools.numbers["decode"]) == {1}


def test_many_output_tokens_grow_the_decode_pool_alone() -> None:
    pools = Pools(BOTH_POOLS, PAIR)
    pools.run(300, 3.0, num_prompt=50, num_output=400)  # 2.4 workers' worth
    assert pools.num_on("decode") in (3, 4, 5) and set(pools.numbers["prefill"]) == {1}
    assert not pools.without_room


def test_too_few_blocks_for_answers_grow_the_decode_pool_alone() -> None:
    """A decode worker has blocks for 4 answers, and could compute 40; the prompts that wait behind them are no work for others."""
    pools = Pools(BOTH_POOLS, PAIR, num_blocks=4 * 25)
    pools.run(100, 2.0, num_prompt=300, num_output=100)  # 200 tokens a second of 500; a prompt takes 0.3 s
    assert pools.num_on("decode") >= 3 and set(pools.numbers["prefill"]) == {1}
    pools.run(200, 2.0, num_prompt=300, num_output=100)
    settled = len(pools.steps)
    pools.run(200, 2.0, num_prompt=300, num_output=100)
    assert len(pools.steps) == settled and not pools.without_room and len(pools.prompts) <= 2


def test_blocks_that_suit_nobody_are_taken() -> None:
    """Answers of 60 % of a worker's blocks: the pool counts as full, though two fifths of it are free all the time."""
    pools = Pools(BOTH_POOLS, PAIR, num_blocks=100)
    pools.run(120, 0.6, num_prompt=600, num_output=360)  # one after another, 25 tokens a second: each takes 15 s
    assert pools.num_on("decode") == 5 and set(pools.numbers["prefill"]) == {1}


def test_load_that_goes_takes_workers_along_draining_first() -> None:
    pools = Pools(BOTH_POOLS, PAIR)
    pools.run(200, 12.0, num_prompt=200)
    before = numbers(pools)
    num_steps = len(pools.steps)
    pools.run(400, 0.5)
    assert min(before.values()) >= 3 and numbers(pools) == PAIR
    for role in PAIR:
        actions = [action for _, one, action in pools.steps[num_steps:] if one == role]
        assert actions == [ScaleAction.DRAIN, ScaleAction.STOP] * (before[role] - 1)
    assert len({worker.role for worker in pools.workers}) == len(pools.workers) == 2


def test_one_pool_may_be_scaled_alone() -> None:
    pools = Pools({"decode": LIMITS}, PAIR)
    pools.run(60, 12.0, num_prompt=200)
    assert pools.num_on("prefill") == 1 and {role for _, role, _ in pools.steps} <= {"decode"}


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.floats(0.0, 6.0), st.integers(20, 800), st.integers(2, 300)), min_size=1, max_size=6), st.integers(60, 4000))
def test_for_any_load_limits_hold_and_changes_are_few(loads: list[tuple[float, int, int]], num_blocks: int) -> None:
    pools = Pools(BOTH_POOLS, PAIR, max(num_blocks, 80))
    for per_s, num_prompt, num_output in loads:
        pools.run(20, per_s, num_prompt, num_output)
    for role, found in pools.numbers.items():
        assert set(found) <= set(range(LIMITS.least, LIMITS.most + 1))
        drains = sum(action is ScaleAction.DRAIN for _, one, action in pools.steps if one == role)
        assert drains <= pools.now // LIMITS.down_after_s + 1  # it does not flap
    while pools.prompts or pools.without_room or any(worker.answers for worker in pools.workers):
        pools.run(20, 0.0)
    pools.run(400, 0.0)
    assert numbers(pools) == PAIR and len(pools.workers) == 2


# --- whose work it is ---------------------------------------------------------------------------------------------------------------------

PRICES = {"prompt_token_s": 1e-3, "output_token_s": 2e-3}


def starts(workers: list[PoolWorker], load: ClusterLoad, *roles: str) -> list[str]:
    """Roles of which workers are started at once."""
    found = PoolScaling(dict.fromkeys(roles, LIMITS)).decide(workers, load, 0.0)
    assert all(step == ScaleStep(ScaleAction.START) for _, step in found)
    return sorted({role for role, _ in found})


def test_prompts_of_a_borrowed_decode_worker_are_the_prefill_pools() -> None:
    prefill = PoolWorker(0, "prefill", "ready", 3, 1.2, 1.2, **PRICES)
    borrowed = PoolWorker(1, "decode", "ready", 3, 30.0, 30.0, num_waiting=5, is_mixed=True, **PRICES)
    load = ClusterLoad(num_output_tokens=1000, num_open=2)
    assert starts([prefill, borrowed], load, "prefill", "decode") == ["prefill"]
    at_home = PoolWorker(1, "decode", "ready", 3, 30.0, 30.0, num_waiting=5, **PRICES)  # it computes again what it had to drop
    assert starts([prefill, at_home], load, "prefill", "decode") == ["decode"]


def test_answers_that_prefill_workers_keep_are_the_decode_pools() -> None:
    """One decode worker is full, and as much again is at two prefill workers."""
    workers = [PoolWorker(i, "prefill", "ready", 4, room=0.6, lent_room=0.5, **PRICES) for i in range(2)]
    workers.append(PoolWorker(2, "decode", "ready", 8, room=1.0, **PRICES))
    scaler, asked = PoolScaling(BOTH_POOLS), list[tuple[str, ScaleStep]]()
    for now in range(10):
        asked += scaler.decide(workers, ClusterLoad(num_open=16), float(now))
    assert asked and {(role, step.action) for role, step in asked} == {("decode", ScaleAction.START)}


def asked_for(num_seconds: int, waiting: ClusterLoad, prefill: PoolWorker, decode: PoolWorker) -> list[tuple[str, ScaleAction]]:
    """What is wanted while nothing changes, and an answer ends every two seconds."""
    scaler, wanted = PoolScaling(dict.fromkeys(PAIR, replace(LIMITS, most=20))), list[tuple[str, ScaleAction]]()
    for now in range(num_seconds):
        load = replace(waiting, num_ended=now // 2, num_output_tokens=50 * now)
        wanted = [(role, step.action) for role, step in scaler.decide([prefill, decode], load, float(now))]
    return wanted


def test_what_is_free_is_of_no_use_to_those_that_wait() -> None:
    """Answers of three fifths of a worker, one after another, two seconds each: with two that wait a third would wait four seconds. By what
    they hold it would be 2.4, less what two free fifths do in the five seconds of a start."""
    prefill = PoolWorker(0, "prefill", "ready", 2, **PRICES)
    decode = PoolWorker(1, "decode", "ready", 1, room=0.6, **PRICES)
    waits = ClusterLoad(num_open=3, num_without_room=2, without_room_s=1.5)
    assert set(asked_for(60, waits, prefill, decode)) == {("decode", ScaleAction.START)}
    assert asked_for(60, replace(waits, without_room_s=0.5), prefill, decode) == [], "it does not wait long"


def test_who_waits_behind_answers_without_room_waits_for_decode_workers() -> None:
    """Prompts of 50 s at the front end and 2 s at the prefill worker, which keeps answers that have nowhere to go."""
    prefill = PoolWorker(0, "prefill", "ready", 5, 2.0, 2.0, num_waiting=2, **PRICES)
    decode = PoolWorker(1, "decode", "ready", 1, room=1.0, **PRICES)
    waits = ClusterLoad(num_open=4, num_without_room=1, without_room_s=1.5)
    few = asked_for(60, waits, replace(prefill, num_waiting=0), decode)
    queued = replace(waits, num_waiting=3, num_waiting_tokens=50_000)
    at_worker, at_front_end = (asked_for(60, one, prefill, decode) for one in (waits, queued))
    assert {role for role, _ in (*few, *at_worker, *at_front_end)} == {"decode"}
    assert len(few) < len(at_worker) < len(at_front_end)
    assert {role for role, _ in asked_for(2, replace(queued, without_room_s=0.5), prefill, decode)} == {"prefill"}


def test_answers_that_were_dropped_for_room_wait_for_it() -> None:
    """They are in the queue of their decode worker, which has two fifths of its blocks free; there is nothing at the front end."""
    prefill = PoolWorker(0, "prefill", "ready", 1, **PRICES)
    decode = PoolWorker(1, "decode", "ready", 3, room=0.6, num_waiting=2, **PRICES)
    assert set(asked_for(60, ClusterLoad(num_open=4), prefill, decode)) == {("decode", ScaleAction.START)}
    borrowed = replace(decode, is_mixed=True)  # these are prompts
    assert asked_for(60, ClusterLoad(num_open=4), prefill, borrowed) == []


def test_prompts_behind_answers_that_their_worker_keeps_wait_for_decode_workers() -> None:
    """The decode worker has room now, and had none when these came: they are in the queue of the prefill worker, which is full of answers.
    Its prompts are 20 s of work; once it keeps no answers they are what it lacks others for."""
    prefill = PoolWorker(0, "prefill", "ready", 16, 20.0, 20.0, num_waiting=12, room=0.9, lent_room=0.8, **PRICES)
    decode = PoolWorker(1, "decode", "ready", 1, room=0.4, **PRICES)
    assert set(asked_for(60, ClusterLoad(num_open=17), prefill, decode)) == {("decode", ScaleAction.START)}
    assert set(asked_for(60, ClusterLoad(num_open=17), replace(prefill, lent_room=0.0), decode)) == {("prefill", ScaleAction.START)}


def test_while_answers_wait_what_comes_is_counted_where_it_begins() -> None:
    """A full worker ends an answer every two seconds; three begin meanwhile, which it cannot hold, and the seconds show it."""
    scaler = PoolScaling({"decode": LIMITS})
    workers = [PoolWorker(0, "prefill", "ready", **PRICES), PoolWorker(1, "decode", "ready", 3, room=1.0, num_waiting=2, **PRICES)]
    for now in range(120):
        scaler.decide(workers, ClusterLoad(num_begun=3 * now // 2, num_ended=now // 2), float(now))
    assert scaler.scalers["decode"].room_rate == pytest.approx(3.0, rel=0.15)
    workers[1] = replace(workers[1], num_waiting=0)
    for now in range(120, 240):
        scaler.decide(workers, ClusterLoad(num_begun=3 * now // 2, num_ended=now // 2), float(now))
    assert scaler.scalers["decode"].room_rate == pytest.approx(1.0, rel=0.01), "what has room is what it holds"


def test_who_is_at_work_knows_the_prices() -> None:
    busy, idle = (PoolWorker(i, "decode", "ready", 1 - i, output_token_s=price) for i, price in enumerate((0.001, 0.1)))
    rates = []
    for workers in ([busy], [busy, idle], [idle]):
        scaler = PoolScaling({"decode": LIMITS})
        scaler.decide(workers, ClusterLoad(), 0.0)
        scaler.decide(workers, ClusterLoad(num_output_tokens=100), 1.0)
        rates.append(scaler.scalers["decode"].rate)
    assert rates[0] == rates[1] == pytest.approx(rates[2] / 100)


def test_prices_are_those_of_a_pools_own_workers() -> None:
    """Prompts of 2 s at the prefill worker's price would take 200 s at the other's; who has told nothing counts for nothing."""
    workers = [
        PoolWorker(0, "prefill", "ready", prompt_token_s=1e-5, output_token_s=9.0),
        PoolWorker(1, "prefill", "ready"),
        PoolWorker(2, "decode", "ready", prompt_token_s=1e-2, output_token_s=1e-5),
    ]
    load = ClusterLoad(num_waiting=1, num_waiting_tokens=150_000)  # 1.5 s, for two workers
    assert starts(workers, load, "prefill", "decode") == []
    assert starts(workers[1:], load, "prefill", "decode") == ["prefill"], "those of others, before its own are known"


def test_workers_of_both_take_their_share() -> None:
    """One of four that compute prompts is a prefill worker: a quarter of what waits is its pool's, and one decode worker's answers."""
    workers = [PoolWorker(i, "both", "ready", 1, **PRICES) for i in range(3)]
    workers += [PoolWorker(3, "prefill", "ready", 1, **PRICES), PoolWorker(4, "decode", "ready", 1, **PRICES)]
    few = ClusterLoad(num_waiting=4, num_waiting_tokens=14_000)  # 14 s: 3.5 s each, of which 5 have been done when another is there
    many = ClusterLoad(num_waiting=4, num_waiting_tokens=40_000)
    every = ("both", "prefill", "decode")
    assert starts(workers, few, *every) == [] and starts(workers, many, *every) == ["both", "prefill"]
    assert starts(workers, few, "prefill") == [] and starts(workers[3:], few, "prefill") == ["prefill"]

    scaler = PoolScaling(dict.fromkeys(every, LIMITS))
    scaler.decide(workers, ClusterLoad(), 0.0)
    scaler.decide(workers, ClusterLoad(num_prompt_tokens=4000, num_output_tokens=400), 1.0)
    rates = {role: one.rate for role, one in scaler.scalers.items()}
    assert rates["prefill"] == pytest.approx(rates["both"] * 1.0 / (3.0 + 3 * 0.2))
    assert rates["decode"] == pytest.approx(0.2 * rates["prefill"])


def test_where_nobody_decodes_those_that_do_both_have_all_answers() -> None:
    workers = [PoolWorker(0, "both", "ready", **PRICES), PoolWorker(1, "prefill", "ready", **PRICES)]
    scaler = PoolScaling({"both": LIMITS, "prefill": LIMITS})
    scaler.decide(workers, ClusterLoad(), 0.0)
    scaler.decide(workers, ClusterLoad(num_prompt_tokens=1000, num_output_tokens=1000), 1.0)
    assert scaler.scalers["both"].rate == pytest.approx(scaler.scalers["prefill"].rate * (0.5 + 2.0) / 0.5)
    waits = ClusterLoad(num_output_tokens=3000, num_open=3, num_without_room=4, without_room_s=1.5)  # 8 s of tokens
    assert starts(workers, waits, "both", "prefill") == ["both"]
    assert starts([*workers, PoolWorker(2, "decode", "ready")], waits, "both", "prefill") == []


def test_what_a_silent_worker_held_is_not_held() -> None:
    """It has been given to others."""
    rates = []
    for state in ("ready", "draining", "starting"):
        workers = [PoolWorker(0, "decode", "ready", room=0.2), PoolWorker(1, "decode", state, room=0.6)]
        scaler = PoolScaling({"decode": LIMITS})
        for now in range(100):
            scaler.decide(workers, ClusterLoad(), float(now))
        rates.append(round(scaler.scalers["decode"].room_rate, 3))
    assert rates == [0.8, 0.8, 0.2]


def test_a_pool_whose_workers_are_all_gone_gets_one() -> None:
    prefill = PoolWorker(0, "prefill", "ready", **PRICES)
    assert starts([prefill], ClusterLoad(), "prefill", "decode") == ["decode"]
    assert starts([], ClusterLoad(), "prefill", "decode") == ["decode", "prefill"]


def test_time_in_which_nothing_may_change_counts() -> None:
    """As while a restart goes on: what came then is not forgotten, nor is the time."""
    workers = [PoolWorker(0, "prefill", "ready", **PRICES), PoolWorker(1, "decode", "ready", room=0.5, **PRICES)]
    asked, waited = PoolScaling(BOTH_POOLS), PoolScaling(BOTH_POOLS)
    for scaler in (asked, waited):
        scaler.decide(workers, ClusterLoad(), 0.0)
    waited.came(workers, ClusterLoad(600, 30), 1.0)
    for scaler in (asked, waited):
        scaler.decide(workers, ClusterLoad(1000, 50), 2.0)
    assert [one.rate for one in asked.scalers.values()] == pytest.approx([one.rate for one in waited.scalers.values()])
    assert asked.scalers["decode"].room_rate == pytest.approx(waited.scalers["decode"].room_rate)
    assert waited.scalers["decode"].room_rate > 0.0


def test_of_prompts_only_what_is_not_cached_is_work() -> None:
    """Nine tenths of what begins is cached: a tenth of what comes, and of what waits, is to be computed."""
    prefill, decode = PoolWorker(0, "prefill", "ready", **PRICES), PoolWorker(1, "decode", "ready", **PRICES)
    whole, cached = PoolScaling(BOTH_POOLS), PoolScaling(BOTH_POOLS)
    for now in range(3):
        came = ClusterLoad(num_prompt_tokens=1000 * now, num_begun=now, num_begun_tokens=1000 * now)
        whole.decide([prefill, decode], came, float(now))
        cached.decide([prefill, decode], replace(came, num_cached_tokens=900 * now), float(now))
    assert cached.scalers["prefill"].rate == pytest.approx(0.1 * whole.scalers["prefill"].rate) and whole.scalers["prefill"].rate > 0.0
    waits = replace(came, num_waiting=9, num_waiting_tokens=50_000)
    num = [len(one.decide([prefill, decode], replace(waits, num_cached_tokens=num), 3.0)) for one, num in ((whole, 0), (cached, 1800))]
    assert num == [LIMITS.most - 1, 0]


def test_roles_are_checked() -> None:
    for limits in ({}, {"mixed": LIMITS}):
        with pytest.raises(ValueError, match="are not allowed; some of both, prefill, decode"):
            PoolScaling(limits)
    with pytest.raises(ValueError, match="role: 'mixed' is not allowed"):
        PoolWorker(0, "mixed", "ready")
