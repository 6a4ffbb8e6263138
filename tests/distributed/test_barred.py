"""How long those stay away who have failed, by told times alone."""

from __future__ import annotations

from octavo.distributed.barred import MAX_KEPT, Barred


def test_each_lie_costs_twice_the_time_of_the_one_before_up_to_a_limit() -> None:
    barred, now, waits = Barred[str](first_s=1.0, most_s=10.0), 100.0, []
    assert barred.wait_s("a", now) == 0.0
    for _ in range(6):
        barred.failed("a", now)
        waits.append(barred.wait_s("a", now))
        now += waits[-1]
        assert barred.wait_s("a", now) == 0.0
    assert waits == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    assert barred.wait_s("b", now - 5.0) == 0.0  # another process


def test_the_time_runs_from_the_lie() -> None:
    barred = Barred[str](first_s=4.0)
    barred.failed("a", 10.0)
    assert [barred.wait_s("a", now) for now in (10.0, 11.0, 13.5, 14.0, 20.0)] == [4.0, 3.0, 0.5, 0.0, 0.0]


def test_whoever_behaved_for_long_enough_begins_again() -> None:
    for behaved_s, wait_s in ((10.0, 2.0), (10.1, 1.0)):
        barred = Barred[str](first_s=1.0, most_s=10.0)
        barred.failed("a", 0.0)
        barred.failed("a", 1.0 + behaved_s)
        assert barred.wait_s("a", 1.0 + behaved_s) == wait_s


def test_whoever_is_forgiven_begins_again() -> None:
    barred = Barred[str]()
    for now in (0.0, 1.0):
        barred.failed("a", now)
    assert "a" in barred and barred.wait_s("a", 1.0) == 2.0
    barred.forgive("a")
    barred.forgive("b")
    assert "a" not in barred and barred.wait_s("a", 1.0) == 0.0
    barred.failed("a", 2.0)
    assert barred.wait_s("a", 2.0) == 1.0


def test_of_many_who_failed_the_last_are_known() -> None:
    barred = Barred[str]()
    for i in range(3 * MAX_KEPT):
        barred.failed(str(i), 0.0)
    assert len(barred._kept) == MAX_KEPT
    assert [barred.wait_s(str(i), 0.0) for i in (0, 3 * MAX_KEPT - 1)] == [0.0, 1.0]
