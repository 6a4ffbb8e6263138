"""Whom the desk of hand-offs has asked for room, and who is late with the answer. Pure: times are told.

    asked ──answered──▶ gone
      └──nothing for ``answer_s``──▶ late ──answered──▶ gone

A worker answers between two steps, and a step may be long: late is not lost. A late answer counts like any other as long as nobody else has
found room meanwhile. What is no longer wanted (``take_back``) may be answered all the same; of a late worker that is waited for, so that
no answer is taken for that to a later question about the same key. Every question of a worker that is there is answered some time.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet


class Questions:
    """Keys of hand-offs by worker. ``most_each``: so many questions of a worker wait for an answer at a time; ``most_in_all``: of all
    workers, None: any number. Late ones do not count: who has any is not to be asked (``silent``)."""

    def __init__(self, answer_s: float, most_each: int, most_in_all: int | None = None) -> None:
        self._answer_s, self._most_each, self._most_in_all = answer_s, most_each, most_in_all
        self._since: dict[int, dict[int, float]] = {}  # by worker: keys that it was asked about, in that order, and when
        self._late: dict[int, set[int]] = {}  # by worker: keys, some of them not wanted any more
        self._wanted: dict[int, set[int]] = {}  # by key: workers whose answers count

    @property
    def silent(self) -> AbstractSet[int]:
        """Workers that are late with an answer."""
        return self._late.keys()

    @property
    def is_full(self) -> bool:
        return self._most_in_all is not None and sum(map(len, self._since.values())) >= self._most_in_all

    @property
    def next_late_s(self) -> float:
        """When the next answer is late; infinity when none is waited for."""
        return min((next(iter(since.values())) for since in self._since.values()), default=float("inf")) + self._answer_s

    def of(self, key: int) -> AbstractSet[int]:
        """Workers that may yet say that they have room for it, late ones among them."""
        return self._wanted.get(key, set())

    def waits(self, key: int) -> bool:
        """Somebody has been asked who is not late."""
        return any(key in self._since.get(worker, ()) for worker in self.of(key))

    def ask(self, key: int, worker: int, now: float) -> bool:
        """False: ``worker`` has been asked enough."""
        since = self._since.get(worker, {})
        if len(since) >= self._most_each:
            return False
        self._since.setdefault(worker, since)[key] = now
        self._wanted.setdefault(key, set()).add(worker)
        return True

    def answered(self, key: int, worker: int) -> tuple[bool, bool]:
        """(whether the answer counts, whether with it the worker is silent no more)."""
        speaks = self._drop_late(key, worker)
        self._drop_asked(key, worker)
        return self._drop_wanted(key, worker), speaks

    def take_back(self, key: int) -> list[int]:
        """It is not to be answered any more; returns the workers that were asked."""
        workers = sorted(self._wanted.pop(key, ()))
        for worker in workers:
            self._drop_asked(key, worker)
        return workers

    def gone(self, worker: int) -> list[int]:
        """``worker`` answers nothing any more; returns the keys that it was asked about, and that are wanted."""
        self._late.pop(worker, None)
        self._since.pop(worker, None)
        return [key for key in list(self._wanted) if self._drop_wanted(key, worker)]

    def tick(self, now: float) -> bool:
        """Whether somebody has come to be late by ``now``."""
        is_new = False
        while self.next_late_s <= now:
            worker, key = next((worker, key) for worker, since in self._since.items() for key, asked_s in since.items()
                               if asked_s + self._answer_s <= now)  # fmt: skip
            self._drop_asked(key, worker)
            self._late.setdefault(worker, set()).add(key)
            is_new = True
        return is_new

    def _drop_asked(self, key: int, worker: int) -> None:
        since = self._since.get(worker, {})
        if since.pop(key, None) is not None and not since:
            del self._since[worker]

    def _drop_late(self, key: int, worker: int) -> bool:
        late = self._late.get(worker, set())
        if key not in late:
            return False
        late.remove(key)
        if not late:
            del self._late[worker]
        return not late

    def _drop_wanted(self, key: int, worker: int) -> bool:
        workers = self._wanted.get(key, set())
        if worker not in workers:
            return False
        workers.remove(worker)
        if not workers:
            del self._wanted[key]
        return True

    def check_invariants(self) -> None:
        """AssertionError unless the books agree. For tests."""
        assert all(self._late.values()) and all(self._wanted.values())
        assert all(0 < len(since) <= self._most_each for since in self._since.values())
        asked = {(key, worker) for worker, since in self._since.items() for key in since}
        late = {(key, worker) for worker, keys in self._late.items() for key in keys}
        wanted = {(key, worker) for key, workers in self._wanted.items() for worker in workers}
        assert asked <= wanted <= asked | late and not asked & late
