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
from collections.abc import Iterable, Iterator
from itertools import count

from octavo.core.policies.order import PRIORITY_AGEING_S
from octavo.distributed.fair_ring import Held, Key, MayGo, Ring

QUANTUM = 2048  # tokens that a key may send in a round


class FairQueue:
    """``quantum``: tokens for each key and round; ``ageing_s``: seconds of waiting that make up for one level of priority."""

    def __init__(self, quantum: int = QUANTUM, ageing_s: float = PRIORITY_AGEING_S) -> None:
        if quantum < 1:
            raise ValueError(f"quantum: {quantum!r} is not allowed; at least 1 token")
        if not ageing_s > 0.0:
            raise ValueError(f"ageing_s: {ageing_s!r} is not allowed; above 0 seconds")
        self._quantum = quantum
        self._ageing_s = ageing_s
        self._held: dict[str, Held] = {}
        self._rings: dict[int, Ring] = {}
        self._sent_at: dict[int, int] = {}  # level -> waiting requests that came with it
        self._risings: list[tuple[float, int, Held]] = []  # when who rises by a level
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
        held = Held(now, next(self._numbers), request_id, user, cost, priority, priority)
        self._held[request_id] = held
        self._sent_at[priority] = self._sent_at.get(priority, 0) + 1
        self._ring(priority).add(held)
        heapq.heappush(self._risings, (now + self._ageing_s, held.number, held))

    def first(self, now: float, aside: MayGo | None = None) -> str | None:
        """Who is next of those that are not set aside and, with ``aside``, of those of whom that says so; None: nobody may go. It stays
        until it is taken or removed, and asking again changes nothing."""
        self._rise(now)
        if aside is not None and aside.only is not None and aside.groups is None:
            aside.groups = self._by_key(aside.only)
        for level in sorted(self._rings):
            ring = self._rings[level]
            held = ring.first(self._quantum, aside)
            if held is not None:
                return held.request_id
            if ring.is_empty():
                del self._rings[level]
        return None

    def _by_key(self, request_ids: Iterable[str]) -> dict[Key, list[Held]]:
        """Those that are set aside, by arrival."""
        groups = dict[Key, list[Held]]()
        for held in sorted(self._held[request_id] for request_id in request_ids):
            if held.is_aside:
                groups.setdefault(self._rings[held.level].key_of(held), []).append(held)
        return groups

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
        self._rings[held.level].left(held)
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

    def _leave(self, held: Held) -> None:
        held.is_gone = True
        del self._held[held.request_id]
        self._sent_at[held.sent_at] -= 1
        if not self._sent_at[held.sent_at]:
            del self._sent_at[held.sent_at]

    def _ring(self, level: int) -> Ring:
        return self._rings.setdefault(level, Ring())

    def _rise(self, now: float) -> None:
        while self._risings and (self._risings[0][0] <= now or self._risings[0][2].is_gone):
            due_s, number, held = heapq.heappop(self._risings)
            if held.is_gone:
                continue
            if held.level > min(self._sent_at):
                moved = Held(held.arrived_s, number, held.request_id, held.user, held.cost, held.sent_at, held.level - 1, held.is_aside)
                held.is_gone = True
                self._rings[held.level].left(held)
                self._held[held.request_id] = held = moved
                self._ring(moved.level).add(moved)
            heapq.heappush(self._risings, (due_s + self._ageing_s, number, held))

    def check_invariants(self) -> None:
        """AssertionError unless every request waits once, in the ring of its level."""
        found = list[str]()
        for level, ring in self._rings.items():
            found += ring.check_invariants(level)
        assert sorted(found) == sorted(self._held), "a request waits twice, or nowhere"
        for held in self._held.values():
            assert held.level <= held.sent_at, "a request has sunk"
        levels = [held.sent_at for held in self._held.values()]
        assert {level: levels.count(level) for level in levels} == self._sent_at
