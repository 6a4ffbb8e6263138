"""Requests that a front end holds back, in the order in which they may go. Pure: times are told.

    priority level ─▶ ring of keys (users, API keys), by deficit round robin ─▶ requests of a key, first come, first served
                                                                                  └─ set aside: passed over until they may go

Deficit round robin (Shreedhar and Varghese, SIGCOMM 1995): in each round a key may send ``quantum`` tokens more, and keeps what it
could not use as long as it has something to send. Between two keys that both have requests all the time the tokens sent never differ by
more than a quantum and twice the largest request (``fairness_bound``), however many requests one of them sends.

What is *set aside* (it may not go now, and others may) is still its key's: it costs that nothing until it goes, and goes by the same turns
as what was not set aside. A key whose requests may all not go keeps its place in the ring, and earns nothing meanwhile.

Lower levels of priority go first. Who waits for ``ageing_s`` rises by a level, but never above the most urgent level that requests were
sent at: so nobody waits for ever, and with one level alone age counts for nothing (a key with a long queue would overtake one with a short
one).
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count

from octavo.core.policies.order import PRIORITY_AGEING_S

QUANTUM = 2048  # tokens that a key may send in a round


@dataclass(slots=True, order=True)
class _Held:
    """A request that waits. In order of arrival."""

    arrived_s: float
    number: int
    request_id: str = field(compare=False)
    user: str | None = field(compare=False)
    cost: int = field(compare=False)
    sent_at: int = field(compare=False)  # the level that it came with
    level: int = field(compare=False)
    is_aside: bool = field(default=False, compare=False)
    is_gone: bool = field(default=False, compare=False)


@dataclass(slots=True)
class _Key:
    """A key's requests of one level. ``deficit``: tokens that it may send."""

    waiting: list[_Held] = field(default_factory=list)  # a heap
    aside: list[_Held] = field(default_factory=list)  # sorted
    deficit: int = 0

    def add(self, held: _Held) -> None:
        if held.is_aside:
            insort(self.aside, held)
        else:
            heapq.heappush(self.waiting, held)

    def head(self) -> _Held | None:
        """The first of those that are not set aside."""
        while self.waiting and self.waiting[0].is_gone:
            heapq.heappop(self.waiting)
        return self.waiting[0] if self.waiting else None

    def remove(self, held: _Held) -> None:
        """``held`` goes: the head, or any that is set aside."""
        if held.is_aside:
            del self.aside[bisect_left(self.aside, held)]
        else:
            assert heapq.heappop(self.waiting) is held

    def is_empty(self) -> bool:
        while self.aside and self.aside[0].is_gone:
            del self.aside[0]
        return not self.aside and self.head() is None


class MayGo:
    """Who of those that are set aside may go now, by ``may_go`` of their ids. Each key is asked once: for one moment, and until one goes.
    ``alone``: nobody else may."""

    __slots__ = ("_found", "_may_go", "alone")

    def __init__(self, may_go: Callable[[str], bool], alone: bool = False) -> None:
        self.alone = alone
        self._may_go = may_go
        self._found: dict[int, _Held | None] = {}  # by the key's identity

    def first(self, key: _Key) -> _Held | None:
        """The first of a key that may go."""
        name = id(key)
        if name not in self._found:
            self._found[name] = next((held for held in key.aside if not held.is_gone and self._may_go(held.request_id)), None)
        return self._found[name]


def _first_of(key: _Key, aside: MayGo | None) -> _Held | None:
    """Whom a key would send now."""
    if aside is None:
        return key.head()
    head, other = None if aside.alone else key.head(), aside.first(key)
    return head if other is None or (head is not None and head < other) else other


class _Ring:
    """The keys of one level that have requests, and whose turn it is."""

    __slots__ = ("_keys", "_turns")

    def __init__(self) -> None:
        self._keys: dict[str | None, _Key] = {}
        self._turns: dict[str | None, bool] = {}  # in order of their turns -> whether this turn's quantum was given

    def add(self, held: _Held) -> None:
        key = self._keys.get(held.user)
        if key is None:
            key = self._keys[held.user] = _Key()
            self._turns[held.user] = False
        key.add(held)

    def first(self, quantum: int, aside: MayGo | None) -> _Held | None:
        """Whose turn it is, its quantum given; None: nobody may go. Asked again without ``take``, it answers the same."""
        while True:
            found, empty, passed = None, list[str | None](), list[tuple[_Key, _Held]]()
            for user, has_quantum in self._turns.items():
                key = self._keys[user]
                held = _first_of(key, aside)
                if held is None:
                    if key.is_empty():
                        empty.append(user)  # an idle key earns nothing
                    continue
                if not has_quantum:
                    self._turns[user] = True
                    key.deficit += quantum
                if held.cost <= key.deficit:
                    found = held
                    break
                passed.append((key, held))
            for user in empty:
                del self._turns[user], self._keys[user]
            for _, other in passed:
                del self._turns[other.user]
                self._turns[other.user] = False
            if found is not None or not passed:
                return found
            self._skip_rounds(quantum, passed)

    def _skip_rounds(self, quantum: int, passed: list[tuple[_Key, _Held]]) -> None:
        """A whole round gave nobody enough: as many at once as will, less the last."""
        rounds = max(0, -(-min(held.cost - key.deficit for key, held in passed) // quantum) - 1)
        for key, _ in passed:
            key.deficit += rounds * quantum

    def take(self, held: _Held) -> None:
        """``held`` is what ``first`` answered: it goes."""
        key = self._keys[held.user]
        key.remove(held)
        key.deficit -= held.cost
        if key.is_empty():
            del self._turns[held.user], self._keys[held.user]

    def set_aside(self, held: _Held) -> None:
        """The head of its key."""
        key = self._keys[held.user]
        key.remove(held)
        held.is_aside = True
        key.add(held)

    def is_empty(self) -> bool:
        return not self._turns

    def sweep(self) -> None:
        """Keep nothing of those who have left."""
        for user, key in list(self._keys.items()):
            key.waiting = [held for held in key.waiting if not held.is_gone]
            key.aside = [held for held in key.aside if not held.is_gone]
            heapq.heapify(key.waiting)
            if key.is_empty():
                del self._turns[user], self._keys[user]


class FairQueue:
    """``quantum``: tokens for each key and round; ``ageing_s``: seconds of waiting that make up for one level of priority."""

    def __init__(self, quantum: int = QUANTUM, ageing_s: float = PRIORITY_AGEING_S) -> None:
        if quantum < 1:
            raise ValueError(f"quantum: {quantum!r} is not allowed; at least 1 token")
        if not ageing_s > 0.0:
            raise ValueError(f"ageing_s: {ageing_s!r} is not allowed; above 0 seconds")
        self._quantum = quantum
        self._ageing_s = ageing_s
        self._held: dict[str, _Held] = {}
        self._rings: dict[int, _Ring] = {}
        self._sent_at: dict[int, int] = {}  # level -> waiting requests that came with it
        self._risings: list[tuple[float, int, _Held]] = []  # when who rises by a level
        self._numbers = count()
        self._num_removed = 0  # since the last sweep: they are still in the heaps

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._held

    @property
    def num_tokens(self) -> int:
        """Cost of all that wait."""
        return sum(held.cost for held in self._held.values())

    def fairness_bound(self, largest: int) -> int:
        """Most tokens by which one key that always waits may be ahead of another, when no request costs more than ``largest``."""
        return self._quantum + 2 * largest

    def add(self, request_id: str, user: str | None, priority: int, cost: int, now: float) -> None:
        """A request of ``cost`` tokens comes. ValueError when its id waits already, or it costs nothing."""
        if request_id in self._held:
            raise ValueError(f"request_id: {request_id!r} is not allowed; it waits already")
        if cost < 1:
            raise ValueError(f"cost: {cost!r} is not allowed; at least 1 token")
        held = _Held(now, next(self._numbers), request_id, user, cost, priority, priority)
        self._held[request_id] = held
        self._sent_at[priority] = self._sent_at.get(priority, 0) + 1
        self._ring(priority).add(held)
        heapq.heappush(self._risings, (now + self._ageing_s, held.number, held))

    def first(self, now: float, aside: MayGo | None = None) -> str | None:
        """Who is next of those that are not set aside and, with ``aside``, of those of whom that says so; None: nobody may go. It stays
        until it is taken or removed, and asking again changes nothing."""
        self._rise(now)
        for level in sorted(self._rings):
            ring = self._rings[level]
            held = ring.first(self._quantum, aside)
            if held is not None:
                return held.request_id
            if ring.is_empty():
                del self._rings[level]
        return None

    def take(self, now: float) -> str | None:
        """As ``first``, and it goes."""
        request_id = self.first(now)
        if request_id is not None:
            self.send(request_id)
        return request_id

    def send(self, request_id: str) -> None:
        """It goes: ``first`` has just answered it."""
        held = self._held[request_id]
        self._rings[held.level].take(held)
        self._leave(held)

    def set_aside(self, request_id: str) -> None:
        """It may not go, though its turn is: ``first`` has just answered it. Whoever is behind it may."""
        held = self._held[request_id]
        assert not held.is_aside, f"{request_id} is set aside twice"
        self._rings[held.level].set_aside(held)

    def remove(self, request_id: str) -> bool:
        """It does not want to wait any more; False: it does not wait."""
        held = self._held.get(request_id)
        if held is None:
            return False
        self._leave(held)
        self._num_removed += 1
        if self._num_removed > 64 + len(self._held):  # while nobody goes, nothing else clears them away
            self._sweep()
        return True

    def _sweep(self) -> None:
        self._num_removed = 0
        self._risings = [rising for rising in self._risings if not rising[2].is_gone]
        heapq.heapify(self._risings)
        for ring in self._rings.values():
            ring.sweep()

    def waiting(self) -> Iterator[tuple[str, float]]:
        """(request, when it came) of all that wait, by arrival."""
        return ((held.request_id, held.arrived_s) for held in self._held.values())

    def set_aside_ids(self) -> Iterator[str]:
        """Of those that are set aside."""
        return (held.request_id for held in self._held.values() if held.is_aside)

    def _leave(self, held: _Held) -> None:
        held.is_gone = True
        del self._held[held.request_id]
        self._sent_at[held.sent_at] -= 1
        if not self._sent_at[held.sent_at]:
            del self._sent_at[held.sent_at]

    def _ring(self, level: int) -> _Ring:
        return self._rings.setdefault(level, _Ring())

    def _rise(self, now: float) -> None:
        while self._risings and (self._risings[0][0] <= now or self._risings[0][2].is_gone):
            due_s, number, held = heapq.heappop(self._risings)
            if held.is_gone:
                continue
            if held.level > min(self._sent_at):
                moved = _Held(held.arrived_s, number, held.request_id, held.user, held.cost, held.sent_at, held.level - 1, held.is_aside)
                held.is_gone = True
                self._held[held.request_id] = held = moved
                self._ring(moved.level).add(moved)
            heapq.heappush(self._risings, (due_s + self._ageing_s, number, held))

    def check_invariants(self) -> None:
        """AssertionError unless every request waits once, in the ring of its level."""
        found = list[str]()
        for level, ring in self._rings.items():
            for user, key in ring._keys.items():
                assert key.deficit >= 0
                assert key.aside == sorted(key.aside)
                for held in (*key.waiting, *key.aside):
                    if not held.is_gone:
                        assert (held.level, held.user) == (level, user)
                        found.append(held.request_id)
                assert all(held.is_aside for held in key.aside) and not any(held.is_aside for held in key.waiting)
            assert set(ring._keys) == set(ring._turns)
        assert sorted(found) == sorted(self._held), "a request waits twice, or nowhere"
        for held in self._held.values():
            assert held.level <= held.sent_at, "a request has sunk"
        levels = [held.sent_at for held in self._held.values()]
        assert {level: levels.count(level) for level in levels} == self._sent_at
