"""Requests that only some workers can hold wait for these by the order in which all wait: users take turns, whatever they ask for."""

from __future__ import annotations

from tests.distributed.test_worker_sizes import Sized, dispatcher, drain
from tests.distributed.views import route


def test_users_whose_requests_are_set_aside_take_turns_with_those_whose_are_not() -> None:
    """A user with a long queue of large requests has no more of the large worker than one with a single one, or one with small ones."""
    desk, small, big = dispatcher(quantum=50), Sized(0, size=10, num_sequences=1), Sized(1, size=100, num_sequences=1)
    for i in range(20):
        desk.submit(route(f"much-{i}", 50, user="much"), [small, big], 0.0)
    desk.submit(route("large", 50, user="one"), [small, big], 1.0)
    small.num_sequences = 0
    drain(desk, [small, big])
    assert len(desk.set_aside()) == 21 and not small.had
    small.num_sequences = 1
    for i in range(40):
        desk.submit(route(f"small-{i}", 10, user="small"), [small, big], 2.0)
    for _ in range(12):
        big.num_sequences = 0
        drain(desk, [small, big])
    users = [name.split("-")[0] for name in big.had]
    assert users.index("large") <= 6, "each of three users has had its turn"
    assert users.count("much") in (2, 3) and users.count("small") >= 5
    small.num_sequences = 0
    drain(desk, [small, big])
    assert small.had[0].startswith("small"), "it keeps nobody waiting that others can serve"


def test_lower_priority_goes_first_of_what_is_set_aside_and_who_leaves_is_gone() -> None:
    desk, small, big = dispatcher(quantum=50), Sized(0, size=10), Sized(1, size=100, num_sequences=1)
    for name, priority in (("late", 1), ("urgent", 0), ("other", 1)):
        desk.submit(route(name, 50, priority=priority), [small, big], 0.0)
    drain(desk, [small, big])
    assert len(desk.set_aside()) == 3
    for expected in ("urgent", "late"):
        big.num_sequences = 0
        drain(desk, [small, big])
        assert big.had[-1] == expected
    assert desk.withdraw("other") and not len(desk) and not desk.set_aside()
    desk.check_invariants()
