"""The workers of a front end: who there is, and which of them may be trusted with a request. Pure: times are told.

                 ┌───────ready, and it hangs──┐
    hello ─▶ starting ──ready──▶ ready ⇄ suspect ──gone_s─▶ gone
                 │                 │         │
                 └─────closed──────┴─────────┘

A *suspect* has said nothing for ``suspect_s``, or it speaks and its loop has made no step for ``stall_s`` with work to do
(``Change.STALLED``). What it was doing is given to others at once; when it speaks, or steps, again, it has to begin anew
(``Change.RECOVERED``) and is ready. A worker that is *draining*
keeps what it has and gets nothing new; that is beside its state, since a draining worker can hang as any other.

Silence is counted only while this process looks: a front end that was itself stopped for a while does not blame its workers for it.

Owns the records and their states. Sends nothing, and knows no request.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

HEARTBEAT_S = 0.2  # between two heartbeats of a worker
LEAST_SUSPECT_S = 0.6  # three of them: who merely comes late would be suspected again and again, and all of its streams be moved
MAX_LOOK_S = 0.25  # between two looks at the fleet; what is longer was this process's own pause


class WorkerState(str, Enum):
    STARTING = "starting"
    READY = "ready"
    SUSPECT = "suspect"
    GONE = "gone"


class Change(Enum):
    """What a look at the fleet found of a worker, for whoever deals with its requests."""

    SUSPECTED = "suspected"  # it is silent: give what it has to others
    STALLED = "stalled"  # it speaks and makes no step: likewise
    RECOVERED = "recovered"  # have it drop what it has; it takes requests again
    GONE = "gone"  # close its channel


@dataclass(frozen=True, slots=True)
class LivenessLimits:
    """Seconds. ``suspect_s``: of silence, at least ``LEAST_SUSPECT_S``; ``stall_s``: without a step while there is work; ``gone_s``: of
    silence, after which a worker is given up."""

    suspect_s: float = 1.0
    stall_s: float = 60.0
    gone_s: float = 30.0

    def __post_init__(self) -> None:
        for name in ("suspect_s", "stall_s", "gone_s"):
            value = getattr(self, name)
            if not 0.0 < value < math.inf:
                raise ValueError(f"{name}: {value!r} is not allowed; a finite number of seconds above 0")
        if self.suspect_s < LEAST_SUSPECT_S:
            limit = f"at least {LEAST_SUSPECT_S:g}, since workers are heard every {HEARTBEAT_S:g} s"
            raise ValueError(f"suspect_s: {self.suspect_s!r} is not allowed; {limit}")
        if self.gone_s <= self.suspect_s:
            raise ValueError(f"gone_s: {self.gone_s!r} is not allowed; above suspect_s ({self.suspect_s:g})")


@dataclass(slots=True, eq=False)
class Worker:
    """One life of a worker: a process that comes back is another. ``index``: its number among those that there are, the smallest free one
    when it came. ``step_age_s``: as told, without what has passed since ``heard_s``."""

    index: int
    name: str
    role: str
    host: str
    pid: int
    boot_id: str
    heard_s: float
    since_s: float  # of its state
    state: WorkerState = WorkerState.STARTING
    draining: bool = False
    reason: str = ""  # for its state, where there is more to say
    step_age_s: float = 0.0
    num_steps: int = 0

    @property
    def takes_requests(self) -> bool:
        return self.state is WorkerState.READY and not self.draining


@dataclass(slots=True)
class Fleet:
    limits: LivenessLimits = field(default_factory=LivenessLimits)
    _workers: dict[str, Worker] = field(default_factory=dict)  # by name; none of them is gone
    _looked_s: float | None = None

    def __iter__(self) -> Iterator[Worker]:
        """By index."""
        return iter(sorted(self._workers.values(), key=lambda worker: worker.index))

    def __len__(self) -> int:
        return len(self._workers)

    def find(self, name: str) -> Worker | None:
        return self._workers.get(name)

    # --- what workers say ---------------------------------------------------------------------------------------------------------------

    def hello(self, name: str, role: str, host: str, pid: int, boot_id: str, now: float) -> Worker:
        """A worker has come. Raises ValueError when there is one of that name: that has to be ``closed`` first."""
        if name in self._workers:
            raise ValueError(f"name: {name!r} is not allowed; a worker of that name is here")
        taken = {worker.index for worker in self._workers.values()}
        index = next(i for i in range(len(taken) + 1) if i not in taken)
        worker = self._workers[name] = Worker(index, name, role, host, pid, boot_id, now, now)
        return worker

    def ready(self, worker: Worker, now: float) -> None:
        """It has loaded its model. One whose loop hangs, since before it came, is suspect at once, and recovers as any."""
        assert worker.state is WorkerState.STARTING, f"{worker.name} is {worker.state.value} and says that it is ready"
        worker.heard_s = now
        fault = self._fault(worker, now)
        worker.reason = worker.reason if fault is None else fault[1]
        self._enter(worker, WorkerState.READY if fault is None else WorkerState.SUSPECT, now)

    def heard(self, worker: Worker, now: float) -> None:
        """It has said something."""
        worker.heard_s = max(worker.heard_s, now)

    def told_steps(self, worker: Worker, num_steps: int, step_age_s: float, now: float) -> None:
        """It has said how many steps it has made, and how long its loop has been at the last thing."""
        worker.num_steps, worker.step_age_s = num_steps, step_age_s
        self.heard(worker, now)

    def drain(self, worker: Worker) -> None:
        """It gets nothing new from now on."""
        worker.draining = True

    def keep(self, worker: Worker) -> None:
        """It was draining, and gets requests again."""
        worker.draining = False

    def closed(self, worker: Worker, reason: str, now: float) -> None:
        """Its channel is closed. Idempotent."""
        if worker.state is not WorkerState.GONE:
            worker.reason = reason
            self._enter(worker, WorkerState.GONE, now)
            del self._workers[worker.name]

    # --- time ---------------------------------------------------------------------------------------------------------------------------

    def look(self, now: float) -> list[tuple[Worker, Change]]:
        """Who has become suspect, has come back, or is to be given up, since the last look. To be called every ``MAX_LOOK_S`` at least."""
        if self._looked_s is not None and now - self._looked_s > MAX_LOOK_S:
            paused_s = now - self._looked_s - MAX_LOOK_S
            for worker in self._workers.values():
                worker.heard_s = min(now, worker.heard_s + paused_s)
        self._looked_s = now
        return [(worker, change) for worker in self if (change := self._look_at(worker, now)) is not None]

    def _look_at(self, worker: Worker, now: float) -> Change | None:
        silent_s, fault = now - worker.heard_s, self._fault(worker, now)
        if silent_s > self.limits.gone_s:
            worker.reason = f"it has said nothing for {self.limits.gone_s:g} s"
            return Change.GONE
        if worker.state is WorkerState.READY and fault is not None:
            change, worker.reason = fault
            self._enter(worker, WorkerState.SUSPECT, now)
            return change
        if worker.state is WorkerState.SUSPECT and fault is None:
            worker.reason = ""
            self._enter(worker, WorkerState.READY, now)
            return Change.RECOVERED
        return None

    def _fault(self, worker: Worker, now: float) -> tuple[Change, str] | None:
        if now - worker.heard_s > self.limits.suspect_s:
            return Change.SUSPECTED, f"it has said nothing for {self.limits.suspect_s:g} s"
        if worker.step_age_s > self.limits.stall_s:
            return Change.STALLED, f"it has made no step for {self.limits.stall_s:g} s"
        return None

    def _enter(self, worker: Worker, state: WorkerState, now: float) -> None:
        worker.state, worker.since_s = state, now

    def check_invariants(self) -> None:
        """AssertionError unless names, numbers and states agree."""
        assert all(worker.name == name and worker.state is not WorkerState.GONE for name, worker in self._workers.items())
        indices = [worker.index for worker in self._workers.values()]
        assert len(set(indices)) == len(indices), "two workers share a number"
