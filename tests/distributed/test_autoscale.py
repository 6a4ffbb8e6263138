"""How many workers there should be, told in seconds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.distributed.autoscale import Autoscaler, ScaleAction, ScaledWorker, ScaleLimits, ScaleStep

LIMITS = ScaleLimits(least=1, most=6, up_wait_s=1.0, down_load=0.6, down_after_s=20.0, start_s=5.0, rate_s=10.0)


class Cluster:
    """Workers that start in ``start_s`` and do a second of work a second, evenly; who drains finishes what it has."""

    def __init__(self, limits: ScaleLimits = LIMITS, num_workers: int = 1) -> None:
        self.scaler, self.now, self.queue_s = Autoscaler(limits), 0.0, 0.0
        self.ready, self.starting, self.draining = list(range(num_workers)), dict[int, float](), dict[int, float]()
        self.next, self.steps = num_workers, list[ScaleStep]()

    def second(self, work_s: float) -> list[ScaleStep]:
        self.now += 1.0
        self.scaler.arrived(work_s)
        self.queue_s = max(0.0, self.queue_s + work_s - len(self.ready))
        self.ready += [index for index, due_s in self.starting.items() if due_s <= self.now]
        self.starting = {index: due_s for index, due_s in self.starting.items() if due_s > self.now}
        share = self.queue_s / max(1, len(self.ready))
        views = [ScaledWorker(index, "ready", share, int(share > 0)) for index in self.ready]
        views += [ScaledWorker(index, "starting") for index in self.starting]
        views += [ScaledWorker(index, "draining", 0.0, int(due_s > self.now)) for index, due_s in self.draining.items()]
        steps = self.scaler.decide(views, 0.0, self.now)
        for step in steps:
            self.apply(step)
        self.steps += steps
        return steps

    def apply(self, step: ScaleStep) -> None:
        if step.action is ScaleAction.START:
            self.starting[self.next] = self.now + self.scaler.limits.start_s
            self.next += 1
            return
        assert step.index is not None
        if step.action is ScaleAction.DRAIN:
            self.ready.remove(step.index)
            self.draining[step.index] = self.now + 3.0
        elif step.action is ScaleAction.KEEP:
            del self.draining[step.index]
            self.ready.append(step.index)
        else:
            assert self.draining.pop(step.index) <= self.now, "a worker is stopped with work on it"

    @property
    def num_on(self) -> int:
        return len(self.ready) + len(self.starting)


def test_a_steady_load_ends_in_a_steady_number() -> None:
    for work_s, expected in ((0.3, {1}), (2.4, {3, 4, 5}), (4.5, {5, 6})):
        cluster = Cluster()
        for _ in range(200):
            cluster.second(work_s)
        assert cluster.num_on in expected and cluster.queue_s == 0.0
        settled = len(cluster.steps)
        for _ in range(200):
            cluster.second(work_s)
        assert len(cluster.steps) == settled, cluster.steps[settled:]


def test_load_that_goes_takes_workers_along_one_by_one_draining_first() -> None:
    cluster = Cluster()
    for _ in range(100):
        cluster.second(4.5)
    before = cluster.num_on
    actions = [step.action for _ in range(300) for step in cluster.second(0.1)]
    assert before >= 5 and cluster.num_on == 1 and not cluster.draining
    assert actions == [ScaleAction.DRAIN, ScaleAction.STOP] * (before - 1)


def test_a_worker_that_drains_is_kept_before_another_is_started() -> None:
    scaler = Autoscaler(LIMITS)
    scaler.decide([], 0.0, 0.0)
    workers = [ScaledWorker(0, "ready", 9.0, 5), ScaledWorker(1, "draining", 0.1, 1), ScaledWorker(2, "draining", 0.2, 2)]
    steps = scaler.decide(workers, 3.0, 1.0)
    assert steps[:2] == [ScaleStep(ScaleAction.KEEP, 2), ScaleStep(ScaleAction.KEEP, 1)]
    assert all(step.action is ScaleAction.START for step in steps[2:])


def test_what_is_held_back_counts() -> None:
    workers = [ScaledWorker(0, "ready")]
    assert Autoscaler(LIMITS).decide(workers, 0.0, 0.0) == []
    assert ScaleStep(ScaleAction.START) in Autoscaler(LIMITS).decide(workers, 30.0, 0.0)


def test_room_that_waits_counts_up_to_what_holds_all_at_once() -> None:
    """An answer of two minutes waits for a tenth of a worker: another worker is room enough, and twelve would be no quicker."""
    workers = [ScaledWorker(0, "ready", 0.0, 10), ScaledWorker(1, "ready", 0.0, 10)]
    start = ScaleStep(ScaleAction.START)
    assert Autoscaler(LIMITS).decide(workers, 0.0, 0.0, held_room_s=30.0, room_of_all=2.1) == [start]
    assert Autoscaler(LIMITS).decide(workers, 0.0, 0.0, held_room_s=30.0, room_of_all=9.0) == [start] * 4
    assert Autoscaler(LIMITS).decide(workers, 0.0, 0.0, held_room_s=30.0, room_of_all=2.0) == []


def test_who_waits_for_room_for_long_shows_that_there_is_none() -> None:
    """The average of an idle minute says that three seconds of room will be had before a start is through. Then they wait still."""
    workers, start = [ScaledWorker(0, "ready", 0.0, 10)], ScaleStep(ScaleAction.START)
    scaler = Autoscaler(LIMITS)
    assert [scaler.decide(workers, 0.0, float(now), 3.0, 9.0) for now in range(5)] == [[]] * 5
    assert scaler.decide(workers, 0.0, 5.0, 3.0, 9.0) == [start] * 2
    coming = [*workers, ScaledWorker(1, "starting"), ScaledWorker(2, "starting")]
    assert scaler.decide(coming, 0.0, 6.0, 3.0, 9.0) == []
    assert scaler.decide(workers, 0.0, 7.0, 0.0, 1.0) == [], "nobody waits"
    assert [scaler.decide(workers, 0.0, 8.0 + now, 3.0, 9.0) for now in range(5)] == [[]] * 5


def test_a_pool_that_is_held_is_as_busy_as_one_that_computes() -> None:
    """Three workers of which two thirds are held: two would be held whole."""
    workers = [ScaledWorker(index, "ready", 0.0, 1) for index in range(3)]
    for room_s, actions in ((2.0, set()), (0.5, {ScaleAction.DRAIN})):
        scaler = Autoscaler(LIMITS)
        for now in range(30):  # until it has been learned
            scaler.arrived(0.1, room_s)
            scaler.decide(workers, 0.0, float(now))
        steps = list[ScaleStep]()
        for now in range(30, 70):
            scaler.arrived(0.1, room_s)
            steps += scaler.decide(workers, 0.0, float(now))
        assert {step.action for step in steps} == actions


def test_the_least_busy_drains_and_the_last_never_does() -> None:
    scaler = Autoscaler(LIMITS)
    workers = [ScaledWorker(0, "ready", 0.0, 3), ScaledWorker(1, "ready", 0.0, 1), ScaledWorker(2, "ready", 0.0, 2)]
    steps = [step for now in range(30) for step in scaler.decide(workers, 0.0, float(now))]
    assert steps == [ScaleStep(ScaleAction.DRAIN, 1)]
    alone = [ScaledWorker(0, "ready"), ScaledWorker(1, "draining", 0.0, 1)]
    assert [step for now in range(30, 300) for step in scaler.decide(alone, 0.0, float(now))] == []


def test_a_start_that_is_on_its_way_counts() -> None:
    scaler = Autoscaler(LIMITS)
    workers = [ScaledWorker(0, "ready", 8.0, 3)]  # 3 s are left when a start is through
    steps = scaler.decide(workers, 0.0, 0.0)
    assert steps and all(step.action is ScaleAction.START for step in steps)
    workers += [ScaledWorker(1 + i, "starting") for i in range(len(steps))]
    assert scaler.decide(workers, 0.0, 0.5) == []


@given(st.lists(st.floats(0.0, 9.0), min_size=1, max_size=25), st.integers(1, 6))
def test_for_any_load_the_limits_hold_and_changes_are_bounded(loads: list[float], num_workers: int) -> None:
    cluster = Cluster(num_workers=num_workers)
    for work_s in loads:
        for _ in range(8):
            steps = cluster.second(work_s)
            assert LIMITS.least <= cluster.num_on <= LIMITS.most and cluster.ready
            directions = {step.action for step in steps} - {ScaleAction.STOP}
            assert not ({ScaleAction.START, ScaleAction.KEEP} & directions and ScaleAction.DRAIN in directions)
    drains = sum(step.action is ScaleAction.DRAIN for step in cluster.steps)
    assert drains <= cluster.now // LIMITS.down_after_s + 1  # it does not flap
    for _ in range(400):
        cluster.second(0.0)
    assert (cluster.num_on, len(cluster.draining)) == (LIMITS.least, 0)


def test_limits_are_checked() -> None:
    for options, message in (
        ({"least": 0}, "least: 0"), ({"least": 3, "most": 2}, "least: 3 is not allowed; from 1 to most"),
        ({"down_load": 1.0}, "down_load: 1.0"), ({"start_s": 0.0}, "start_s: 0.0"), ({"rate_s": float("inf")}, "rate_s: inf"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            ScaleLimits(**options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="state: 'gone'"):
        ScaledWorker(0, "gone")
    with pytest.raises(ValueError, match="work_s: -1"):
        Autoscaler().arrived(-1.0)
    with pytest.raises(ValueError, match="room_s: inf"):
        Autoscaler().arrived(0.0, float("inf"))


def test_more_of_others_than_there_may_be_of_ones_own_stay() -> None:
    """Two of its own are busy, which is as many as there may be; two that came from elsewhere have nothing to do yet."""
    workers = [ScaledWorker(i, "ready", 5.0, 50) for i in range(2)] + [ScaledWorker(i, "ready", is_own=False) for i in (2, 3)]
    scaler = Autoscaler(ScaleLimits(least=1, most=2))
    assert [scaler.decide(workers, 0.0, float(now)) for now in range(3)] == [[], [], []]


def test_others_are_counted_on() -> None:
    """Four seconds wait at its own one, which is too long for that alone and not for four; without work only its own second one goes."""
    own, others = [ScaledWorker(0, "ready", 4.0, 4)], [ScaledWorker(i, "ready", 0.0, 0, is_own=False) for i in (1, 2, 3)]
    limits = ScaleLimits(least=1, most=6, up_wait_s=1.0, start_s=1.0, down_after_s=5.0)
    assert Autoscaler(limits).decide([*own, *others], 0.0, 0.0) == []
    assert Autoscaler(limits).decide(own, 0.0, 0.0)[0].action is ScaleAction.START
    scaler, steps = Autoscaler(limits), list[ScaleStep]()
    idle = [ScaledWorker(0, "ready", 0.0, 0), *others, ScaledWorker(4, "ready", 0.0, 0)]
    for now in range(7):
        steps += scaler.decide(idle, 0.0, float(now))
    assert steps == [ScaleStep(ScaleAction.DRAIN, 4)]


@given(
    st.lists(st.tuples(st.sampled_from(["starting", "ready", "draining"]), st.floats(0, 60), st.integers(0, 9), st.booleans()), max_size=9),
    st.lists(st.tuples(st.floats(0, 20), st.floats(0, 60)), min_size=1, max_size=30),
)
def test_nobody_elses_worker_is_ever_ended_or_kept(told: list[tuple[str, float, int, bool]], loads: list[tuple[float, float]]) -> None:
    scaler = Autoscaler(LIMITS)
    workers = [ScaledWorker(i, *one) for i, one in enumerate(told)]
    own = {worker.index for worker in workers if worker.is_own}
    num_on = sum(worker.is_own and worker.state != "draining" for worker in workers)
    for now, (work_s, held_s) in enumerate(loads):
        scaler.arrived(work_s)
        steps = scaler.decide(workers, held_s, 10.0 * now)
        assert {step.index for step in steps if step.index is not None} <= own
        num_more = sum(step.action in (ScaleAction.START, ScaleAction.KEEP) for step in steps)
        assert num_on + num_more <= max(LIMITS.most, num_on)
