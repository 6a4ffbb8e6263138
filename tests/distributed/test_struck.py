"""Processes that were lost: whose return forgives what, and what counts when they stay away."""

from __future__ import annotations

from octavo.distributed.struck import MAX_STRUCK, Struck


def test_who_comes_back_forgives_what_it_had_and_whoever_comes_in_its_place_does_not() -> None:
    struck = Struck()
    assert struck.lost("a", "a1", ["r", "s"], 0.0) == struck.lost("b", "b1", ["t"], 1.0) == []
    assert struck.lost("a", "a1", ["r"], 2.0) == []  # it had come back meanwhile, and takes no requests yet
    assert struck.returned("a", "a1") == (["r", "s", "r"], [])
    assert struck.returned("a", "a1") == ([], [])
    assert struck.returned("b", "b2") == ([], ["t"])
    assert struck.returned("b", "b1") == ([], [])


def test_who_stays_away_for_too_long_is_gone() -> None:
    struck = Struck()
    struck.lost("a", "a1", ["r"], 0.0)
    struck.lost("b", "b1", ["s"], 5.0)
    struck.lost("a", "a1", ["t"], 9.0)  # its time runs from the first loss
    assert [struck.expired(since_s) for since_s in (-0.1, 0.0, 4.9, 5.0, 99.0)] == [[], ["r", "t"], [], ["s"], []]


def test_of_more_than_are_remembered_the_first_is_taken_to_be_gone() -> None:
    struck = Struck()
    for i in range(MAX_STRUCK):
        assert struck.lost(f"w{i}", f"{i}", [f"r{i}"], float(i)) == []
    assert struck.lost("more", "more", ["s"], 99.0) == ["r0"]
    assert struck.returned("w0", "0") == ([], []) and struck.returned("w1", "1") == (["r1"], [])


def test_those_that_had_nothing_push_nobody_out() -> None:
    struck = Struck()
    struck.lost("a", "a1", ["r"], 0.0)
    for i in range(3 * MAX_STRUCK):
        assert struck.lost(f"w{i}", f"{i}", [], 1.0) == []
    assert struck.returned("a", "a1") == (["r"], []) and not struck._processes
