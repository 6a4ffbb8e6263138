"""Who goes next: by round robin of tokens, priority and age; nobody waits for ever and nobody is lost."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.distributed.fair_queue import FairQueue

COSTS = st.integers(1, 50)


def drain(queue: FairQueue, now: float = 0.0) -> list[str]:
    order = []
    while (taken := queue.take(now)) is not None:
        queue.check_invariants()
        order.append(taken)
    return order


def test_one_key_is_first_come_first_served() -> None:
    queue = FairQueue(quantum=1)
    for i, cost in enumerate((30, 1, 7)):
        queue.add(str(i), None, 0, cost, float(i))
    assert queue.first(3.0) == queue.first(3.0) == "0" and len(queue) == 3 and queue.num_tokens == 38
    assert drain(queue) == ["0", "1", "2"] and queue.take(4.0) is None


def test_a_long_queue_of_one_key_does_not_hold_up_another() -> None:
    queue = FairQueue(quantum=10)
    for i in range(20):
        queue.add(f"much-{i}", "much", 0, 10, 0.0)
    queue.add("little", "little", 0, 10, 5.0)
    assert drain(queue, 6.0)[:2] == ["much-0", "little"]


@given(st.lists(COSTS, min_size=20, max_size=60), st.lists(COSTS, min_size=20, max_size=60), st.integers(1, 80), st.integers(1, 6))
def test_keys_that_wait_all_the_time_get_the_same(a: list[int], b: list[int], quantum: int, num_others: int) -> None:
    """The bound of the paper, at every moment at which both still wait."""
    queue, costs = FairQueue(quantum), dict[str, int]()
    for user, sizes in [("a", a), ("b", b), *((f"other-{i}", a) for i in range(num_others))]:
        for i, cost in enumerate(sizes):
            costs[f"{user}/{i}"] = cost
            queue.add(f"{user}/{i}", user, 0, cost, 0.0)
    sent, left = Counter[str](), Counter(name.split("/")[0] for name in costs)
    while left["a"] and left["b"]:
        taken = queue.take(0.0)
        assert taken is not None
        user = taken.split("/")[0]
        sent[user] += costs[taken]
        left[user] -= 1
        assert abs(sent["a"] - sent["b"]) <= queue.fairness_bound(50)


def test_a_large_request_has_its_turn_among_small_ones() -> None:
    queue = FairQueue(quantum=10)
    queue.add("large", "a", 0, 1000, 0.0)
    num_before = 0
    for i in range(500):
        queue.add(f"small-{i}", "b", 0, 10, 0.0)
        if queue.take(0.0) == "large":
            break
        num_before += 1
    assert 90 <= num_before <= 101  # 100 rounds


def test_idleness_earns_nothing() -> None:
    queue = FairQueue(quantum=100)
    for i in range(50):
        queue.add(f"a{i}", "a", 0, 100, 0.0)
        assert queue.take(0.0) == f"a{i}"
    for i in range(6):
        queue.add(f"a-{i}", "a", 0, 100, 0.0)
        queue.add(f"b-{i}", "b", 0, 100, 0.0)
    assert [name[0] for name in drain(queue)] == ["a", "b"] * 6


def test_lower_priority_goes_first_and_who_waits_rises() -> None:
    queue = FairQueue(quantum=10, ageing_s=12.0)
    queue.add("late", None, 2, 1, 0.0)
    for i in range(5):
        queue.add(f"early-{i}", None, 0, 1, 5.0 * i)
        assert queue.take(5.0 * i) == f"early-{i}"
    queue.add("early-5", None, 0, 1, 25.0)
    assert queue.take(25.0) == "late"  # it has risen by two, and came first
    queue.check_invariants()


def test_nobody_rises_above_what_was_asked_for() -> None:
    """A key with a long queue, all of it old, does not overtake one whose requests are new."""
    queue = FairQueue(quantum=1, ageing_s=1.0)
    for i in range(10):
        queue.add(f"old-{i}", "old", 0, 1, 0.0)
    queue.add("new", "new", 0, 1, 100.0)
    assert "new" in (queue.take(100.0), queue.take(100.0))
    queue.check_invariants()


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(-2, 3), COSTS, st.booleans()), max_size=40),
    st.integers(1, 60),
    st.floats(0.5, 20.0),
)
def test_everybody_goes_once_unless_removed(arrivals: list[tuple[str, int, int, bool]], quantum: int, ageing_s: float) -> None:
    queue, waiting, gone = FairQueue(quantum, ageing_s), set[str](), list[str]()
    for now, (user, priority, cost, acts) in enumerate(arrivals):
        name = f"r{now}"
        queue.add(name, user, priority, cost, float(now))
        waiting.add(name)
        if acts and now % 3 == 0:
            victim = sorted(waiting)[now % len(waiting)]
            assert queue.remove(victim) and not queue.remove(victim)
            waiting.discard(victim)
        elif acts:
            taken = queue.take(float(now))
            assert taken in waiting
            gone.append(taken)
            waiting.discard(taken)
        queue.check_invariants()
        assert {name for name, _ in queue.waiting()} == waiting and len(queue) == len(waiting)
    gone += (rest := drain(queue, 1000.0))
    assert set(rest) == waiting and len(set(gone)) == len(gone)


@given(st.integers(1, 5), st.integers(1, 40))
def test_no_priority_starves(priority: int, quantum: int) -> None:
    """Urgent requests come without end, as fast as requests go: the other one goes when it has risen to them, in the next round."""
    queue = FairQueue(quantum, ageing_s=10.0)
    queue.add("patient", "p", priority, 20, 0.0)
    for step in range(1000):
        queue.add(f"urgent-{step}", "u", 0, 20, float(step))
        if queue.take(float(step)) == "patient":
            break
    assert step <= 10 * priority + 2 * (20 // quantum + 2)


def test_what_is_no_request_is_refused() -> None:
    queue = FairQueue()
    queue.add("a", None, 0, 1, 0.0)
    with pytest.raises(ValueError, match="'a' is not allowed; it waits already"):
        queue.add("a", None, 0, 1, 0.0)
    with pytest.raises(ValueError, match="cost: 0"):
        queue.add("b", None, 0, 0, 0.0)
    with pytest.raises(ValueError, match="quantum: 0"):
        FairQueue(0)
    with pytest.raises(ValueError, match="ageing_s: 0"):
        FairQueue(ageing_s=0.0)


def test_who_leaves_while_nobody_goes_takes_no_memory() -> None:
    """Clients that give up and come again, for hours, while all workers are busy."""
    queue = FairQueue()
    queue.add("stays", "a", 0, 5, 0.0)
    for i in range(5000):
        queue.add(str(i), "ab"[i % 2], i % 3, 5, 0.0)
        assert queue.remove(str(i)) and not queue.remove(str(i))
        assert len(queue._risings) <= 70 and sum(len(key.waiting) for ring in queue._rings.values() for key in ring._keys.values()) <= 70
    queue.check_invariants()
    assert drain(queue) == ["stays"]
