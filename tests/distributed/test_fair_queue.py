"""Who goes next: by round robin of tokens, priority and age; nobody waits for ever and nobody is lost."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.distributed.fair_queue import FairQueue
from octavo.distributed.fair_ring import MayGo

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


# --- set aside ----------------------------------------------------------------------------------------------------------------------------


def set_all_aside(queue: FairQueue, now: float = 0.0) -> None:
    while (name := queue.first(now)) is not None:
        queue.set_aside(name)
        queue.check_invariants()


def drain_aside(queue: FairQueue, now: float = 0.0) -> list[str]:
    order = []
    while (name := queue.first(now, aside := MayGo(lambda name: True, alone=True))) is not None:
        assert queue.first(now, aside) == name, "asking again changes nothing"
        queue.send(name)
        queue.check_invariants()
        order.append(name)
    return order


def test_what_is_set_aside_goes_by_turns_as_well() -> None:
    queue = FairQueue(quantum=10)
    for i in range(20):
        queue.add(f"much-{i}", "much", 0, 10, 0.0)
    queue.add("little", "little", 0, 10, 5.0)
    set_all_aside(queue)
    assert queue.take(6.0) is None and len(queue) == 21 and queue.num_tokens == 210
    order = drain_aside(queue, 6.0)
    assert order.index("little") <= 1 and [name for name in order if name != "little"] == [f"much-{i}" for i in range(20)]


def test_who_is_set_aside_is_passed_over_and_goes_before_what_came_later() -> None:
    queue = FairQueue(quantum=100)
    for name, cost in (("large", 50), ("small", 5), ("smaller", 2)):
        queue.add(name, "a", 0, cost, 0.0)
    assert queue.first(0.0) == "large"
    queue.set_aside("large")
    with pytest.raises(AssertionError, match="set aside twice"):
        queue.set_aside("large")
    assert queue.take(0.0) == "small" and list(queue.set_aside_ids()) == ["large"]
    assert queue.first(0.0, MayGo(lambda name: False)) == "smaller"
    assert queue.first(0.0, MayGo(lambda name: True)) == "large"
    assert queue.first(0.0, MayGo(lambda name: False, alone=True)) is None
    assert queue.remove("large") and queue.first(0.0, MayGo(lambda name: True)) == "smaller"
    assert drain(queue) == ["smaller"] and not len(queue)


def test_who_is_set_aside_rises_and_gives_way_to_lower_levels() -> None:
    queue = FairQueue(quantum=10, ageing_s=12.0)
    queue.add("late", None, 1, 1, 0.0)
    queue.add("urgent", None, 0, 1, 1.0)
    set_all_aside(queue, 1.0)
    assert drain_aside(queue, 2.0) == ["urgent", "late"]
    queue.add("late", None, 1, 1, 3.0)
    queue.add("urgent", None, 0, 1, 4.0)
    set_all_aside(queue, 4.0)
    assert drain_aside(queue, 20.0) == ["late", "urgent"], "it has risen, and came first"


def test_asking_who_may_go_asks_each_key_once() -> None:
    """Thousands may be set aside, of whom the first that may go is found without a look at the others."""
    queue, asked = FairQueue(quantum=1), list[str]()
    for i in range(100):
        queue.add(f"a{i}", "a", 0, 50, 0.0)
        queue.add(f"b{i}", "b", 0, 40, 0.0)
    set_all_aside(queue)
    aside = MayGo(lambda name: bool(asked.append(name)) or True)
    assert queue.first(0.0, aside) == queue.first(0.0, aside) == "b0"
    assert len(asked) == len(set(asked)) and set(asked) <= {"a0", "b0"}


@given(
    st.lists(st.tuples(COSTS, st.booleans()), min_size=20, max_size=60),
    st.lists(st.tuples(COSTS, st.booleans()), min_size=20, max_size=60),
    st.lists(st.booleans(), max_size=150),
    st.integers(1, 80),
)
def test_what_may_go_only_now_and_then_changes_nothing_between_keys(
    a: list[tuple[int, bool]], b: list[tuple[int, bool]], moments: list[bool], quantum: int
) -> None:
    """The same bound, as long as both keys have something that may go; within a key what may go goes by arrival."""
    queue, costs, large, left = FairQueue(quantum), dict[str, int](), set[str](), Counter[str]()
    for user, requests in (("a", a), ("b", b)):
        for i, (cost, is_large) in enumerate(requests):
            name = f"{user}/{i:02}"
            queue.add(name, user, 0, cost, 0.0)
            costs[name] = cost
            if is_large:
                large.add(name)
            else:
                left[user] += 1
    sent, gone = Counter[str](), list[str]()
    for may_large_go in moments:
        if not (left["a"] and left["b"]):
            break
        aside = MayGo(lambda name: True) if may_large_go else None
        while (name := queue.first(0.0, aside)) in large and not may_large_go:
            queue.set_aside(str(name))
        assert name is not None
        queue.send(name)
        queue.check_invariants()
        user = name[0]
        assert name == min(one for one in costs if one not in gone and one[0] == user and (may_large_go or one not in large))
        gone.append(name)
        left[user] -= name not in large
        sent[user] += costs[name]
        assert abs(sent["a"] - sent["b"]) <= queue.fairness_bound(50)
    rest = {name for name, _ in queue.waiting()}
    assert rest == set(costs) - set(gone)


def test_who_is_set_aside_and_leaves_takes_no_memory() -> None:
    queue = FairQueue()
    queue.add("stays", "a", 0, 5, 0.0)
    queue.first(0.0)
    queue.set_aside("stays")
    for i in range(2000):
        queue.add(str(i), "ab"[i % 2], 0, 5, 1.0)
        assert queue.first(1.0) == str(i)
        queue.set_aside(str(i))
        assert queue.remove(str(i))
        assert sum(len(key.aside) for ring in queue._rings.values() for key in ring._keys.values()) <= 70
    queue.check_invariants()
    assert drain_aside(queue, 2.0) == ["stays"]
