"""Workers that borrow each other: by hand, and for any load."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.distributed.roles import MixedLimits, Placement, RolePools
from octavo.distributed.router import ShortestQueue
from tests.distributed.views import View, route

LIMITS = MixedLimits(borrow_s=1.0, return_s=0.25, return_free=0.2, hold_s=5.0)


def pools(*roles: str, limits: MixedLimits = LIMITS, **options: bool) -> tuple[RolePools, list[View]]:
    made = RolePools(ShortestQueue(by_seconds=True), limits, **options)
    for index, role in enumerate(roles):
        made.add(index, role, 100)
    return made, [View(index, num_available_blocks=100) for index in range(len(roles))]


def test_phases_go_to_their_pools() -> None:
    made, engines = pools("prefill", "prefill", "decode", "decode")
    engines[0].pending_s, engines[2].num_available_blocks = 0.5, 90
    assert made.place(route("a", num_output=60), engines, 0.0) == Placement(1, 3)
    assert made.place(route("b", num_output=60), engines, 0.0) == Placement(1, 2)  # 10 blocks are promised on 3, and 10 taken on 2
    assert made.place(route("c", num_output=60), engines, 0.0) == Placement(1, 3)
    made.arrived("a")
    assert made.worker(3).num_promised == 10 and made.mixed() == []
    made.check_invariants()


def test_answers_of_unknown_length_are_as_long_as_they_may_be_and_were() -> None:
    """A guess that no pool can hold kept every answer where its prompt was: decode workers idled."""
    small = RolePools(ShortestQueue(), LIMITS)
    small.add(0, "prefill", 12)
    small.add(1, "decode", 12)
    engines = [View(0, num_available_blocks=12), View(1, num_available_blocks=12)]
    for i in range(6):  # of 2 blocks each: by their limit, not by the guess of 16
        assert small.place(route(f"short {i}", 20, most_output=10), engines, 0.0) == Placement(0, 1)
    assert small.place(route("too many", 20, most_output=10), engines, 0.0) == Placement(0, 0)  # all blocks are promised
    for name in [f"short {i}" for i in range(6)] + ["too many"]:
        small.ended(name, 8)
    assert small.place(route("long", 100, most_output=500), engines, 9.0) == Placement(0, 1)  # in a pool that is all free
    small.ended("long")
    for i in range(400):
        small.place(route(str(i), 20), engines, 20.0 + i)
        small.ended(str(i), 8)
    assert [small.place(route(f"learned {i}", 20, most_output=500), engines, 1000.0) for i in range(6)] == [Placement(0, 1)] * 6
    small.check_invariants()


def test_a_prefill_worker_without_room_keeps_no_answer() -> None:
    """Its prompts would wait behind answers, and decode workers in vain for their turn. The decode worker has 10 blocks, the other 25."""
    made, engines = pools("prefill", "decode")
    engines[1].num_available_blocks, engines[0].num_available_blocks = 10, 25
    assert made.place(route("a", num_output=60), engines, 0.0) == Placement(0, 1)  # 10 blocks
    assert [made.place(route(name, num_output=60), engines, 10.0) for name in "bc"] == [Placement(0, 0)] * 2
    assert made.place(route("d", num_output=60), engines, 10.0) == Placement(0, 1), "it waits for room there"
    made.arrived("b")
    engines[0].num_available_blocks = 15
    assert made.place(route("e", num_output=60), engines, 10.0) == Placement(0, 1)
    made.ended("c")
    assert made.place(route("f", num_output=60), engines, 10.0) == Placement(0, 0)
    made.check_invariants()


def test_one_role_alone_stays_where_it_is() -> None:
    made, engines = pools("both", "both")
    engines[0].pending_s = 5.0
    placed = made.place(route("a"), engines, 0.0)
    assert placed == Placement(1, 1) and not placed.is_split
    made, engines = pools("prefill")
    assert made.place(route("a"), engines, 0.0) == Placement(0, 0)
    made.check_invariants()
    made, engines = pools("decode", may_borrow=False)
    assert made.place(route("a"), engines, 0.0) is None


def test_pressure_borrows_a_decode_worker_and_rest_gives_it_back() -> None:
    made, engines = pools("prefill", "decode", "decode")
    engines[0].pending_s, engines[1].pending_s = 1.1, 0.3
    placed = made.place(route("a"), engines, 10.0)
    assert placed == Placement(2, 2) and made.mixed() == [2]
    engines[0].pending_s = 0.5  # between the marks: whoever is mixed stays so, and its pool gets no new prompts
    assert made.place(route("b"), engines, 20.0) == Placement(0, 1) and made.mixed() == [2]
    engines[0].pending_s = 0.2
    assert made.settle(engines, 21.0) == [] and made.mixed() == [2]  # its prompt is not computed yet
    made.prefilled("a")
    assert made.settle(engines, 14.9) == []  # not for long enough
    assert made.settle(engines, 21.0) == [2] and made.mixed() == []
    made.check_invariants()


def test_a_worker_that_is_mixed_takes_more_before_another_is_borrowed() -> None:
    made, engines = pools("prefill", "decode", "decode")
    engines[0].pending_s = 3.0
    first = made.place(route("a"), engines, 0.0)
    assert first is not None and first.prefill == 1
    engines[1].pending_s = 0.9
    second = made.place(route("b"), engines, 0.0)
    assert second is not None and second.prefill == 1
    engines[1].pending_s = 1.5
    third = made.place(route("c"), engines, 0.0)
    assert third is not None and third.prefill == 2 and made.mixed() == [1, 2]
    engines[2].pending_s = 2.0
    fourth = made.place(route("d"), engines, 0.0)
    assert fourth is not None and fourth.prefill == 1  # all are under pressure: the least of them


def test_no_room_for_decoding_borrows_the_worker_that_has_the_prompt() -> None:
    made, engines = pools("prefill", "prefill", "decode")
    engines[0].pending_s, engines[2].num_available_blocks = 0.1, 5
    assert made.place(route("a", num_output=60), engines, 0.0) == Placement(1, 1) and made.mixed() == [1]
    engines[2].num_available_blocks = 19
    made.ended("a")
    assert made.settle(engines, 6.0) == []
    engines[2].num_available_blocks = 20
    assert made.settle(engines, 6.0) == [1]
    made.check_invariants()


def test_who_may_not_be_borrowed_leaves_it_to_wait() -> None:
    made, engines = pools("prefill", "decode", may_borrow=False)
    engines[0].pending_s, engines[1].num_available_blocks = 50.0, 0
    assert made.place(route("a"), engines, 0.0) == Placement(0, 1) and made.mixed() == []


def test_a_handoff_that_failed_leaves_the_answer_with_the_prompt() -> None:
    made, engines = pools("prefill", "decode")
    made.place(route("a", num_output=60), engines, 0.0)
    made.stayed("a")
    assert made.worker(1).num_promised == 0
    made.ended("a")
    made.ended("a")
    made.check_invariants()


def test_what_is_reserved_is_not_promised_beside() -> None:
    """The view shows it as taken; of 10 blocks the answer will take 3 more."""
    made, engines = pools("prefill", "decode", "decode")
    engines[1].num_available_blocks = engines[2].num_available_blocks = 19
    assert made.place(route("a", num_output=60), engines, 0.0) == Placement(0, 1)
    engines[1].num_available_blocks -= 7
    made.reserved("a", 1, 101)
    assert made.worker(1).num_promised == 3
    assert made.place(route("b", num_output=60), engines, 0.0) == Placement(0, 2)
    made.reserved("b", 1, 101)  # it is 2 that had no room after all
    assert (made.worker(1).num_promised, made.worker(2).num_promised) == (6, 0) and made.placement("b") == Placement(0, 1)
    for gone in ("reserved of nobody", "a"):
        made.ended(gone)
        made.reserved(gone, 1, 101)
    made.arrived("b")
    assert made.worker(1).num_promised == 0
    made.check_invariants()


def test_a_worker_that_is_gone_takes_its_requests_along() -> None:
    made, engines = pools("prefill", "decode", "decode")
    made.place(route("a", num_output=60), engines, 0.0)
    made.place(route("b", num_output=60), engines, 0.0)
    assert made.remove(1) == ["a"] and made.remove(7) == []
    made.check_invariants()
    assert made.remove(0) == ["b"] and made.place(route("c"), engines[2:], 0.0) == Placement(2, 2)  # prompts need somebody
    with pytest.raises(ValueError, match="role: 'x'"):
        made.add(5, "x", 1)
    with pytest.raises(ValueError, match="index: 2 is not allowed"):
        made.add(2, "both", 1)


LOADS = st.lists(
    st.tuples(st.sampled_from(["place", "prefilled", "arrived", "stayed", "end", "load", "room"]), st.integers(0, 60), st.floats(0.0, 3.0)),
    max_size=80,
)


@given(LOADS)
def test_states_change_no_more_often_than_the_time_allows_and_nothing_is_lost(moves: list[tuple[str, int, float]]) -> None:
    made, engines = pools("prefill", "prefill", "decode", "decode", "both")
    now, placed = 0.0, list[str]()
    for number, (what, value, amount) in enumerate(moves):
        now += amount
        if what == "place":
            where = made.place(route(str(number), 1 + 20 * value, num_output=value + 1), engines, now)
            assert where is not None
            placed.append(str(number))
        elif what == "load":
            engines[value % 5].pending_s = amount
        elif what == "room":
            engines[value % 5].num_available_blocks = value
        elif placed and what == "end":
            made.ended(placed.pop(value % len(placed)))
        elif placed:
            getattr(made, what)(placed[value % len(placed)])
        made.settle(engines, now)
        made.check_invariants()
    assert all(made.worker(index).num_moves <= LIMITS.most_moves(now) for index in range(5))
    for name in placed:
        made.ended(name)
    for engine in engines:
        engine.pending_s, engine.num_available_blocks = 0.0, 100
    made.settle(engines, now + LIMITS.hold_s)
    assert made.mixed() == []  # everybody goes home in the end
    made.check_invariants()


@given(st.floats(0.26, 1.0), st.lists(st.floats(0.0, 1.0), min_size=5, max_size=50))
def test_pressure_between_the_marks_changes_nothing(pressure: float, steps: list[float]) -> None:
    for begins_mixed in (False, True):
        made, engines = pools("prefill", "decode")
        if begins_mixed:
            engines[0].pending_s = 2.0
            made.place(route("first"), engines, 0.0)
            made.ended("first")
        engines[0].pending_s, now = pressure, 100.0
        for number, step in enumerate(steps):
            now += step
            made.place(route(str(number)), engines, now)
            made.ended(str(number))
        assert made.worker(1).num_moves == int(begins_mixed) and bool(made.mixed()) == begins_mixed


def test_limits_are_checked() -> None:
    for options, message in (
        ({"return_s": 1.0, "borrow_s": 1.0}, "return_s: 1.0 is not allowed; from 0 and below borrow_s"),
        ({"return_free": 0.0}, "return_free: 0.0"),
        ({"hold_s": -1.0}, "hold_s: -1.0"),
        ({"guess_output": 0}, "guess_output: 0"),
    ):
        with pytest.raises(ValueError, match=message):
            MixedLimits(**options)  # type: ignore[arg-type]
