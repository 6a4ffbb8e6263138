"""The fleet: who is trusted when, by told times alone."""

from __future__ import annotations

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from octavo.distributed.fleet import HEARTBEAT_S, LEAST_SUSPECT_S, MAX_LOOK_S, Change, Fleet, LivenessLimits, Worker, WorkerState

LIMITS = LivenessLimits(suspect_s=1.0, stall_s=5.0, gone_s=8.0)


def fleet_of(*names: str) -> tuple[Fleet, list[Worker]]:
    fleet = Fleet(LIMITS)
    workers = [fleet.hello(name, "both", "here", i, f"boot-{name}", 0.0) for i, name in enumerate(names)]
    for worker in workers:
        fleet.ready(worker, 0.0)
    return fleet, workers


def look_until(fleet: Fleet, begin_s: float, end_s: float, heard: tuple[Worker, ...] = (), age: float = 0.0) -> list[tuple[str, Change]]:
    """Look ten times a second; those in ``heard`` speak each time."""
    found = []
    for i in range(round((end_s - begin_s) * 10) + 1):
        now = begin_s + i / 10
        for worker in heard:
            fleet.told_steps(worker, i, age, now)
        found += [(worker.name, change) for worker, change in fleet.look(now)]
        fleet.check_invariants()
    return found


def test_who_speaks_stays_and_who_is_silent_is_suspected_and_then_given_up() -> None:
    fleet, (a, b) = fleet_of("a", "b")
    assert look_until(fleet, 0.0, 1.0, heard=(a,)) == []
    assert look_until(fleet, 1.1, 1.1, heard=(a,)) == [("b", Change.SUSPECTED)]
    assert (a.state, b.state, b.takes_requests) == (WorkerState.READY, WorkerState.SUSPECT, False)
    assert look_until(fleet, 1.2, 8.0, heard=(a,)) == []
    assert look_until(fleet, 8.1, 8.1, heard=(a,)) == [("b", Change.GONE)]
    fleet.closed(b, b.reason, 8.1)
    assert [worker.name for worker in fleet] == ["a"] and b.state is WorkerState.GONE and "8 s" in b.reason


def test_a_suspect_that_speaks_again_is_ready_again() -> None:
    fleet, (a,) = fleet_of("a")
    assert look_until(fleet, 0.0, 3.0) == [("a", Change.SUSPECTED)]
    assert look_until(fleet, 3.1, 3.1, heard=(a,)) == [("a", Change.RECOVERED)]
    assert a.takes_requests and a.reason == ""


def test_a_loop_that_makes_no_step_is_suspected_although_its_worker_speaks() -> None:
    fleet, (a,) = fleet_of("a")
    assert look_until(fleet, 0.0, 2.0, heard=(a,), age=4.9) == []
    assert look_until(fleet, 2.1, 2.1, heard=(a,), age=5.1) == [("a", Change.STALLED)]
    assert "no step for 5 s" in a.reason
    assert look_until(fleet, 2.2, 4.0, heard=(a,), age=6.0) == []  # and neither recovers nor is given up
    assert look_until(fleet, 4.1, 4.1, heard=(a,), age=0.0) == [("a", Change.RECOVERED)]


def test_who_was_silent_first_is_not_found_stalled_as_well() -> None:
    fleet, (a,) = fleet_of("a")
    assert look_until(fleet, 0.0, 2.0) == [("a", Change.SUSPECTED)]
    assert look_until(fleet, 2.1, 3.0, heard=(a,), age=6.0) == []
    assert look_until(fleet, 3.1, 3.1, heard=(a,), age=0.0) == [("a", Change.RECOVERED)]


def test_a_pause_of_this_process_is_no_ones_silence() -> None:
    fleet, (a,) = fleet_of("a")
    look_until(fleet, 0.0, 0.5, heard=(a,))
    assert fleet.look(60.0) == []
    assert look_until(fleet, 60.1, 60.5) == []
    assert look_until(fleet, 60.6, 61.5) == [("a", Change.SUSPECTED)]


def test_a_worker_that_starts_may_take_its_time_to_be_ready_but_not_be_silent() -> None:
    fleet = Fleet(LIMITS)
    a = fleet.hello("a", "both", "here", 1, "x", 0.0)
    b = fleet.hello("b", "both", "here", 2, "y", 0.0)
    assert look_until(fleet, 0.0, 60.0, heard=(a,))[0] == ("b", Change.GONE)
    assert a.state is WorkerState.STARTING and not a.takes_requests and b.state is WorkerState.STARTING
    fleet.ready(a, 60.0)
    assert a.takes_requests


def test_one_that_hangs_since_before_it_came_is_suspect_at_once() -> None:
    fleet = Fleet(LIMITS)
    a = fleet.hello("a", "both", "here", 1, "x", 0.0)
    fleet.told_steps(a, 0, 5.1, 0.0)
    fleet.ready(a, 0.0)
    assert a.state is WorkerState.SUSPECT and not a.takes_requests and "no step for 5 s" in a.reason
    assert look_until(fleet, 0.1, 1.0, heard=(a,), age=6.0) == []
    assert look_until(fleet, 1.1, 1.1, heard=(a,), age=0.0) == [("a", Change.RECOVERED)]


def test_a_draining_worker_takes_nothing_and_can_hang_as_any_other() -> None:
    fleet, (a,) = fleet_of("a")
    fleet.drain(a)
    assert a.state is WorkerState.READY and not a.takes_requests
    assert look_until(fleet, 0.0, 2.0) == [("a", Change.SUSPECTED)]
    assert look_until(fleet, 2.1, 2.1, heard=(a,)) == [("a", Change.RECOVERED)]
    assert not a.takes_requests


def test_numbers_are_used_again_and_names_are_not_shared() -> None:
    fleet, (a, b, c) = fleet_of("a", "b", "c")
    with pytest.raises(ValueError, match="'b' is not allowed"):
        fleet.hello("b", "both", "here", 9, "other", 1.0)
    fleet.closed(b, "cut", 1.0)
    fleet.closed(b, "cut again", 2.0)
    assert b.reason == "cut" and fleet.find("b") is None
    again = fleet.hello("b", "both", "here", 9, "other", 1.0)
    assert [worker.index for worker in fleet] == [0, 1, 2] and again.index == 1 and again is not b
    assert (a.index, c.index) == (0, 2)


def test_who_speaks_at_each_heartbeat_but_one_is_never_suspected() -> None:
    """Whatever limit is allowed: of three heartbeats one may be late."""
    limits = LivenessLimits(suspect_s=LEAST_SUSPECT_S)
    fleet = Fleet(limits)
    a = fleet.hello("a", "both", "here", 1, "x", 0.0)
    fleet.ready(a, 0.0)
    for beat in range(1, 50):
        for tick in range(4):  # a look every 0.1 s
            assert fleet.look(2 * HEARTBEAT_S * (beat - 1 + tick / 4)) == []
        fleet.heard(a, 2 * HEARTBEAT_S * beat)
    with pytest.raises(ValueError, match=r"suspect_s: 0\.59 is not allowed; at least 0\.6, since workers are heard every 0\.2 s"):
        LivenessLimits(suspect_s=0.59)


@pytest.mark.parametrize(
    "limits", [{"suspect_s": 0.0}, {"suspect_s": 0.15}, {"stall_s": math.inf}, {"gone_s": math.nan}, {"suspect_s": 3.0, "gone_s": 3.0}]
)
def test_limits_are_checked(limits: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="not allowed"):
        LivenessLimits(**limits)


class AnyFleet(RuleBasedStateMachine):
    """Workers come, speak, fall silent and go, in any order; what is said of them follows from when they last spoke."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet, self.now, self.num = Fleet(LIMITS), 0.0, 0
        self.fleet.look(0.0)
        self.spoke: dict[Worker, float] = {}

    @rule()
    def comes(self) -> None:
        self.num += 1
        worker = self.fleet.hello(f"w{self.num % 5}x{self.num}", "both", "here", self.num, str(self.num), self.now)
        self.fleet.ready(worker, self.now)
        self.spoke[worker] = self.now

    @precondition(lambda self: self.spoke)
    @rule(data=st.data(), age=st.sampled_from([0.0, 4.0, 6.0]))
    def speaks(self, data: st.DataObject, age: float) -> None:
        worker = data.draw(st.sampled_from(sorted(self.spoke, key=lambda w: w.pid)))
        self.fleet.told_steps(worker, 1, age, self.now)
        self.spoke[worker] = self.now

    @precondition(lambda self: self.spoke)
    @rule(data=st.data())
    def goes(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.spoke, key=lambda w: w.pid)))
        self.fleet.closed(worker, "gone", self.now)
        del self.spoke[worker]

    @rule(ticks=st.integers(1, 40))
    def time_passes(self, ticks: int) -> None:
        for _ in range(ticks):
            self.now += MAX_LOOK_S
            for worker, change in self.fleet.look(self.now):
                if change is Change.GONE:
                    assert self.now - self.spoke[worker] > LIMITS.gone_s
                    self.fleet.closed(worker, worker.reason, self.now)
                    del self.spoke[worker]
        for worker, spoke_s in self.spoke.items():
            silent_s = self.now - spoke_s
            hangs = silent_s > LIMITS.suspect_s or worker.step_age_s > LIMITS.stall_s
            assert worker.state is (WorkerState.SUSPECT if hangs else WorkerState.READY)
            assert silent_s <= LIMITS.gone_s

    @invariant()
    def is_sound(self) -> None:
        self.fleet.check_invariants()
        assert set(self.fleet) == set(self.spoke)


TestAnyFleet = AnyFleet.TestCase
TestAnyFleet.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
