"""Who comes first under each scheduling policy, who gives way, and that nobody waits for ever."""

from __future__ import annotations

import pytest

from octavo.core.policies.order import MAX_IDLE_KEYS, PRIORITY_AGEING_S, REMAINING_AGEING, FairByKey, queue_order
from octavo.core.request import Request
from tests.core.harness import Harness, make_request
from tests.core.test_cases import prompt_of


def first_seen(harness: Harness) -> list[str]:
    """Requests in the order in which they left the queue."""
    order: dict[str, None] = {}
    while harness.begin() is not None:
        for seq in harness.scheduler.in_flight_sequences:
            order.setdefault(seq.request.request_id)
        harness.finish()
    harness.check_texts()
    harness.check_idle()
    return list(order)


def one_at_a_time(policy: str) -> Harness:
    return Harness(num_blocks=64, max_num_seqs=1, budget=64, policy=policy)


def test_first_come() -> None:
    harness = one_at_a_time("fcfs")
    for name, priority in (("a", 2), ("b", -1), ("c", 0)):
        harness.add(make_request(name, prompt_of(5), priority=priority, max_tokens=2))
    assert first_seen(harness) == ["a", "b", "c"]


def test_priority_then_arrival() -> None:
    harness = one_at_a_time("priority")
    for name, priority in (("a", 1), ("b", 0), ("c", -3), ("d", 0), ("e", 1), ("f", -3)):
        harness.add(make_request(name, prompt_of(5), priority=priority, max_tokens=2))
    assert first_seen(harness) == ["c", "f", "b", "d", "a", "e"]


@pytest.mark.parametrize("waited_s, first", [(PRIORITY_AGEING_S * 3 - 1, "urgent"), (PRIORITY_AGEING_S * 3 + 1, "patient")])
def test_waiting_makes_up_for_priority(waited_s: float, first: str) -> None:
    harness = one_at_a_time("priority")
    for name, priority, arrival_s in (("patient", 3, 0.0), ("urgent", 0, waited_s)):
        request = make_request(name, prompt_of(5), priority=priority, max_tokens=2)
        request.arrival_s = arrival_s
        harness.add(request)
    assert first_seen(harness)[0] == first


def test_shortest_remaining_first_counts_prompt_output_and_choices() -> None:
    harness = Harness(num_blocks=200, max_num_seqs=4, budget=64, policy="srf")
    harness.add(make_request("running", prompt_of(4), max_tokens=3, n=4, ignore_eos=True))
    harness.step()
    for name, num_prompt, max_tokens, n in (("a", 20, 10, 1), ("b", 5, 20, 1), ("c", 2, 6, 4), ("d", 20, 2, 1)):
        harness.add(make_request(name, prompt_of(num_prompt), max_tokens=max_tokens, n=n, ignore_eos=True))
    assert [seq.request.request_id for seq in harness.scheduler._state.waiting] == ["d", "b", "c", "a"]  # 22, 25, 26, 30
    harness.run()
    harness.check_texts()


def test_a_long_request_among_short_ones_is_served_once_it_has_waited() -> None:
    """A short request comes every second and takes a second: without ageing the long one would never run."""
    harness = one_at_a_time("srf")
    scheduler, order = harness.scheduler, []
    long = make_request("long", prompt_of(6), max_tokens=40, ignore_eos=True)
    harness.add(long)
    for second in range(200):
        short = make_request(f"short{second}", prompt_of(3), max_tokens=1)
        short.arrival_s = float(second)
        harness.add(short)
        while True:
            plan = scheduler.plan(float(second))
            assert plan is not None
            name = scheduler.in_flight_sequences[0].request.request_id
            harness.pending = harness.backend.execute(plan)
            harness.finish()
            order.append(name)
            if name != "long" or not scheduler.has_work:
                break
        if "long" in order:
            break
    assert 0 < order.index("long") <= 46 / REMAINING_AGEING + 2


def test_victims_come_from_the_end_of_the_order() -> None:
    harness = Harness(num_blocks=12, max_num_seqs=4, budget=64, policy="priority")
    for name, priority in (("low", 5), ("high", 0)):
        harness.add(make_request(name, prompt_of(12), seed=priority, priority=priority, max_tokens=20, ignore_eos=True))
        harness.step()
    while harness.scheduler.stats.num_preemptions == 0:
        harness.step()
    assert [seq.request.request_id for seq in harness.scheduler._state.waiting] == ["low"]
    harness.run()
    harness.check_texts()


def test_the_budget_goes_by_the_order() -> None:
    """A long prompt is being computed; one with a better priority comes and takes its share first."""
    harness = Harness(num_blocks=100, max_model_len=200, max_num_seqs=4, budget=16, policy="priority")
    harness.add(make_request("low", prompt_of(100), priority=1, max_tokens=2))
    harness.step()
    harness.add(make_request("high", prompt_of(40, seed=1), priority=0, max_tokens=2))
    harness.step()  # it is let in behind those that run
    harness.step()
    names = [seq.request.request_id for seq in harness.scheduler._state.running]
    assert names in (["low"], ["high", "low"])
    while harness.scheduler._state.running[0].request.request_id == "low" and harness.scheduler.num_running == 1:
        harness.step()
    harness.run()
    harness.check_texts()


# --- fair ---------------------------------------------------------------------------------------------------------------------------------


def test_users_get_equal_service_however_many_requests_they_send() -> None:
    """One user floods, two send now and then: while all three have work, what they are served differs by one request at most."""
    harness = Harness(num_blocks=64, max_num_seqs=2, budget=32, policy="fair")
    for i in range(60):
        harness.add(make_request(f"flood{i}", prompt_of(6, seed=i), seed=i, user="flood", max_tokens=6, ignore_eos=True))
    for i in range(10):
        for user in ("a", "b"):
            harness.add(make_request(f"{user}{i}", prompt_of(6, seed=100 + i), seed=i, user=user, max_tokens=6, ignore_eos=True))
    order, per_request = harness.scheduler._state.order, 6 + 2 * 6
    assert isinstance(order, FairByKey)
    while harness.step() is not None:
        served = [order.served(user) for user in ("flood", "a", "b")]
        if None in served:
            break
        counters = [value for value in served if value is not None]
        assert max(counters) - min(counters) <= 2 * per_request
    done = [key[0] for key, text in harness.texts.items() if text.finish_reason is not None]
    assert sum(name.startswith("flood") for name in done) <= 14  # the others' twenty are (nearly) done
    harness.run()
    harness.check_texts()
    harness.check_idle()


def test_within_a_user_the_shortest_comes_first() -> None:
    harness = one_at_a_time("fair")
    for name, max_tokens in (("a", 9), ("b", 2), ("c", 5)):
        harness.add(make_request(name, prompt_of(4), user="u", max_tokens=max_tokens, ignore_eos=True))
    assert first_seen(harness) == ["b", "c", "a"]


def request_of(user: str | None, num_prompt: int = 10) -> Request:
    return make_request("x", [0] * num_prompt, user=user)


def test_idleness_earns_no_credit_and_forgives_nothing() -> None:
    order = FairByKey()
    busy, idle = request_of("busy"), request_of("idle")
    order.added(busy)
    order.started(busy)
    order.drew(busy, 45)
    assert order.served("busy") == 100
    order.added(idle)
    assert order.served("idle") == 100  # lifted
    order.started(idle)
    order.ended(idle)
    assert order.served("idle") is None
    order.added(idle)
    assert order.served("idle") == 110
    order.ended(busy)
    order.ended(idle)
    order.added(request_of("new"))
    assert order.served("new") == 110  # of the one that went idle last


def test_counters_of_users_that_are_gone_are_bounded() -> None:
    order = FairByKey()
    for i in range(MAX_IDLE_KEYS + 50):
        request = request_of("user" * 100 + str(i), num_prompt=1 + i)
        order.added(request)
        order.started(request)
        order.ended(request)
    assert len(order._idle) == MAX_IDLE_KEYS and all(key is not None and len(key) == 64 for key in order._idle)


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair", "srf"])
def test_everybody_is_served_in_a_tight_pool(policy: str) -> None:
    harness = Harness(num_blocks=9, max_num_seqs=5, budget=12, policy=policy, num_host_blocks=6)
    requests = [
        make_request(
            f"r{i}", prompt_of(3 + i % 9, seed=i), seed=i, user="abc"[i % 3], priority=i % 4, n=1 + i % 2, max_tokens=3 + i % 15,
            ignore_eos=True,
        )
        for i in range(40)
    ]  # fmt: skip
    harness.run_all(requests)
    harness.check_idle()
    assert harness.scheduler.stats.num_preemptions > 0


def test_a_policy_that_is_none() -> None:
    with pytest.raises(ValueError, match="scheduling_policy: 'x' is not allowed; one of fcfs, static, priority, fair, srf, prefill_first"):
        queue_order("x")
