"""How long those stay away whose workers said what cannot be, by told times alone."""

from __future__ import annotations

from octavo.distributed.barred import MAX_KEPT, Barred


def test_each_lie_costs_twice_the_time_of_the_one_before_up_to_a_limit() -> None:
    barred, now, waits = Barred(first_s=1.0, most_s=10.0), 100.0, []
    assert barred.wait_s("a", now) == 0.0
    for _ in range(6):
        barred.lied("a", now)
        waits.append(barred.wait_s("a", now))
        now += waits[-1]
        assert barred.wait_s("a", now) == 0.0
    assert waits == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    assert barred.wait_s("b", now - 5.0) == 0.0  # another process


def test_the_time_runs_from_the_lie() -> None:
    barred = Barred(first_s=4.0)
    barred.lied("a", 10.0)
    assert [barred.wait_s("a", now) for now in (10.0, 11.0, 13.5, 14.0, 20.0)] == [4.0, 3.0, 0.5, 0.0, 0.0]


def test_whoever_behaved_for_long_enough_begins_again() -> None:
    for behaved_s, wait_s in ((10.0, 2.0), (10.1, 1.0)):
        barred = Barred(first_s=1.0, most_s=10.0)
        barred.lied("a", 0.0)
        barred.lied("a", 1.0 + behaved_s)
        assert barred.wait_s("a", 1.0 + behaved_s) == wait_s


def test_ids_that_liars_think_of_take_no_memory() -> None:
    barred = Barred()
    for i in range(3 * MAX_KEPT):
        barred.lied(f"{i}" + "x" * 10_000, 0.0)
    assert len(barred._kept) == MAX_KEPT and max(map(len, barred._kept)) < 100
    assert barred.wait_s("0" + "x" * 10_000, 0.0) == 0.0 and barred.wait_s(f"{3 * MAX_KEPT - 1}" + "x" * 10_000, 0.0) == 1.0
