"""How many workers there should be: more before the queue grows long, fewer when one less would do, draining first. Pure: times are told.

    arrivals, what waits ─▶ predicted wait when a worker started now would be ready ─▶ START
    long enough little to do ─▶ DRAIN the least busy ─▶ it is empty ─▶ STOP        load is back before that ─▶ KEEP (it drains no more)

The prediction is a fluid one: work comes at the rate at which it came lately, n workers do n seconds of work a second, and what waits
after the start-up time of a worker is shared by all of them. Up goes at once, down only after ``down_after_s`` of little load without a
break, and the two marks lie apart, so that a steady load ends in a steady number of workers. One scaler looks after one pool (of one role).

Work is told in two ways, and the scarcer one decides: seconds of computing, and seconds of *room*, in which a request holds a worker's KV
blocks: a share s of them for t seconds is s t. A worker has one second of each a second. By Little's law the room that comes in a second is
what is held, in workers, so whoever measures the one knows the other. But what has room does not wait, however long it stays: no more
workers are wanted for room than would hold all at once. And where somebody has waited for room all through the time that a start takes,
the workers that are there have none to spare, whatever the average says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from enum import Enum


class ScaleAction(str, Enum):
    START = "start"  # one more worker
    DRAIN = "drain"  # it gets no more requests
    KEEP = "keep"  # it was draining and gets requests again
    STOP = "stop"  # it has drained


@dataclass(frozen=True, slots=True)
class ScaleStep:
    """``index``: of the worker; None for one that is to be started."""

    action: ScaleAction
    index: int | None = None


@dataclass(frozen=True, slots=True)
class ScaleLimits:
    """``least`` and ``most`` workers, those that start counted and those that drain not. ``up_wait_s``: predicted wait beyond which one
    more is started. ``down_load``: load of one worker less below which one is drained, as a share of what those could do. ``start_s``:
    what a start takes. ``rate_s``: over how long the rate of work is averaged."""

    least: int = 1
    most: int = 8
    up_wait_s: float = 1.0
    down_load: float = 0.6
    down_after_s: float = 60.0
    start_s: float = 10.0
    rate_s: float = 30.0

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise ValueError(f"least: {self.least!r} is not allowed; from 1 to most ({self.most!r})")
        if not 0.0 < self.down_load < 1.0:
            raise ValueError(f"down_load: {self.down_load!r} is not allowed; above 0 and below 1")
        for name in ("up_wait_s", "down_after_s", "start_s", "rate_s"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}: {getattr(self, name)!r} is not allowed; a finite number of seconds above 0")


@dataclass(frozen=True, slots=True)
class ScaledWorker:
    """``state``: starting, ready or draining. ``num_sequences``: waiting and running there. ``is_own``: it may be ended; others, which
    somebody else has started, are counted on, and not among those that there may be."""

    index: int
    state: str
    pending_s: float = 0.0
    num_sequences: int = 0
    is_own: bool = True

    def __post_init__(self) -> None:
        if self.state not in ("starting", "ready", "draining"):
            raise ValueError(f"state: {self.state!r} is not allowed; starting, ready or draining")


@dataclass(slots=True)
class Autoscaler:
    """Asked now and then (once a second, say) what to do. ``rate``: seconds of work that come per second, ``room_rate``: of room."""

    limits: ScaleLimits = field(default_factory=ScaleLimits)
    rate: float = 0.0
    room_rate: float = 0.0
    _asked_s: float | None = None
    _work_s: float = 0.0
    _room_s: float = 0.0
    _low_since_s: float | None = None
    _crowded_since_s: float | None = None  # somebody waits for room

    def arrived(self, work_s: float, room_s: float = 0.0) -> None:
        """A request has come that will take a worker ``work_s`` seconds of its own (its share of steps that it shares with others), and
        so many seconds of its room."""
        for name, value in (("work_s", work_s), ("room_s", room_s)):
            if not 0.0 <= value < math.inf:
                raise ValueError(f"{name}: {value!r} is not allowed; a finite number of seconds from 0")
        self._work_s += work_s
        self._room_s += room_s

    def decide(
        self, workers: Seq[ScaledWorker], held_back_s: float, now: float, held_room_s: float = 0.0, room_of_all: float = 0.0
    ) -> list[ScaleStep]:
        """What is to be done now. ``held_back_s``: seconds of work that wait for a worker, beside what waits at the workers;
        ``held_room_s``: seconds of room that wait; ``room_of_all``: workers that would hold all that run and wait, at once.

        Draining workers that are empty are stopped; else there is a change in one direction only.
        """
        self._learn(now)
        ready = [worker for worker in workers if worker.state == "ready"]
        own_draining = (worker for worker in workers if worker.state == "draining" and worker.is_own)
        draining = sorted(own_draining, key=lambda worker: -worker.num_sequences)
        num_on = len(ready) + sum(worker.state == "starting" for worker in workers)
        limits = self._limits_with(sum(worker.state != "draining" and not worker.is_own for worker in workers))
        waiting_s = held_back_s + sum(worker.pending_s for worker in ready)
        room = (max(self.room_rate, len(ready)) if self._is_crowded(held_room_s, now) else self.room_rate, held_room_s)
        wanted = self._wanted(limits, max(1, num_on), waiting_s, room, room_of_all)
        if num_on < wanted:
            self._low_since_s = None
            kept = draining[: wanted - num_on]
            steps = [ScaleStep(ScaleAction.KEEP, worker.index) for worker in kept]
            steps += [ScaleStep(ScaleAction.START)] * (wanted - num_on - len(kept))
            return steps + _stops(draining[len(kept) :])
        return self._less(limits, ready, num_on, max(waiting_s, held_room_s), now) + _stops(draining)

    def _limits_with(self, num_others: int) -> ScaleLimits:
        """Of all, where so many are somebody else's."""
        return replace(self.limits, least=self.limits.least + num_others, most=self.limits.most + num_others)

    def _is_crowded(self, held_room_s: float, now: float) -> bool:
        """Somebody has waited for room for as long as a start takes, without a break."""
        if held_room_s <= 0.0:
            self._crowded_since_s = None
        elif self._crowded_since_s is None:
            self._crowded_since_s = now
        return self._crowded_since_s is not None and now - self._crowded_since_s >= self.limits.start_s

    def _wanted(
        self, limits: ScaleLimits, num_on: int, waiting_s: float, room: tuple[float, float], room_of_all: float
    ) -> int:  # fmt: skip
        """At least as many as now, and enough that the predicted wait is short when the last of them is ready. ``room``: its rate, and what
        waits for it."""
        num = num_on
        while num < limits.most:
            wait_s = self._wait_with(num, num_on, self.rate, waiting_s)
            if num < room_of_all:
                wait_s = max(wait_s, self._wait_with(num, num_on, *room))
            if wait_s <= limits.up_wait_s:
                break
            num += 1
        return min(max(num, limits.least), max(limits.most, num_on))

    def _wait_with(self, num: int, num_on: int, rate: float, waiting_s: float) -> float:
        """Predicted wait when those that are started now are ready, and all do their share from then on."""
        left_s = max(0.0, waiting_s + (rate - num_on) * self.limits.start_s)
        growing = max(0.0, rate - num) * self.limits.start_s  # what would still pile up, as long again
        return (left_s + growing) / num

    def _less(self, limits: ScaleLimits, ready: Seq[ScaledWorker], num_on: int, waiting_s: float, now: float) -> list[ScaleStep]:
        """One less, after a while in which one less would have done."""
        own = [worker for worker in ready if worker.is_own]
        may_drain = len(ready) > 1 and bool(own)
        fits = num_on - 1 >= limits.least and may_drain
        if num_on > limits.most and may_drain:
            return self._drain(own)
        rate = max(self.rate, self.room_rate)
        if not fits or rate > limits.down_load * (num_on - 1) or waiting_s / max(1, num_on - 1) > 0.5 * limits.up_wait_s:
            self._low_since_s = None
            return []
        if self._low_since_s is None:
            self._low_since_s = now
        if now - self._low_since_s < limits.down_after_s:
            return []
        self._low_since_s = now  # the next one not before as long again
        return self._drain(own)

    def _drain(self, own: Seq[ScaledWorker]) -> list[ScaleStep]:
        idlest = min(own, key=lambda worker: (worker.num_sequences, worker.pending_s, -worker.index))
        return [ScaleStep(ScaleAction.DRAIN, idlest.index)]

    def _learn(self, now: float) -> None:
        if self._asked_s is None:
            self._asked_s = now
            return
        passed_s = now - self._asked_s
        if passed_s <= 0.0:
            return
        share = 1.0 - math.exp(-passed_s / self.limits.rate_s)
        self.rate += share * (self._work_s / passed_s - self.rate)
        self.room_rate += share * (self._room_s / passed_s - self.room_rate)
        self._asked_s, self._work_s, self._room_s = now, 0.0, 0.0


def _stops(draining: Seq[ScaledWorker]) -> list[ScaleStep]:
    return [ScaleStep(ScaleAction.STOP, worker.index) for worker in draining if not worker.num_sequences]
