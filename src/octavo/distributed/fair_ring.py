"""Whose turn it is among the keys of one priority level (see ``fair_queue``), and who of those that are set aside may go. Pure.

    keys, by their turns:  1  2  3  4  5  6  7
      with heads:          ·     ·        ·       what ``first`` walks over
      with set-aside ones:    ·  ·  ·  ·          and these too with a ``MayGo``, each once
      vacant:                             ·       lose their turns when those come

A key keeps its turn whichever of these lists it is in. So thousands of keys that have nothing but set-aside requests cost nothing as long
as none of these may go. Owns the turns and deficits of keys; which request waits where is ``FairQueue``'s.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from operator import itemgetter

FEW = 16  # in a list of so many times as many entries, keys are looked up one by one


@dataclass(slots=True, order=True)
class Held:
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


@dataclass(slots=True, eq=False)
class Key:
    """A key's requests of one level. ``turn``: a number; ``has_quantum``: this turn's was given; ``deficit``: tokens that it may send."""

    user: str | None
    turn: int
    waiting: list[Held] = field(default_factory=list)  # a heap
    aside: list[Held] = field(default_factory=list)  # sorted
    has_quantum: bool = False
    deficit: int = 0

    def add(self, held: Held) -> None:
        if held.is_aside:
            insort(self.aside, held)
        else:
            heapq.heappush(self.waiting, held)

    def head(self) -> Held | None:
        """The first of those that are not set aside."""
        while self.waiting and self.waiting[0].is_gone:
            heapq.heappop(self.waiting)
        return self.waiting[0] if self.waiting else None

    def has_aside(self) -> bool:
        while self.aside and self.aside[0].is_gone:
            del self.aside[0]
        return bool(self.aside)

    def remove(self, held: Held) -> None:
        """``held`` goes: the head, or any that is set aside."""
        if held.is_aside:
            del self.aside[bisect_left(self.aside, held)]
        else:
            assert heapq.heappop(self.waiting) is held

    def is_empty(self) -> bool:
        return self.head() is None and not self.has_aside()


class _Turns:
    """Keys by their turns."""

    __slots__ = ("_entries", "_keys")

    def __init__(self) -> None:
        self._entries: list[tuple[int, Key]] = []  # sorted
        self._keys: set[Key] = set()

    def keep(self, key: Key, belongs: bool) -> None:
        """Have it here, or not."""
        if belongs and key not in self._keys:
            self._keys.add(key)
            insort(self._entries, (key.turn, key), key=itemgetter(0))
        elif not belongs and key in self._keys:
            self._keys.remove(key)
            del self._entries[bisect_left(self._entries, key.turn, key=itemgetter(0))]

    def discard(self, keys: Iterable[Key]) -> None:
        """Those of them that are here."""
        found = [key for key in keys if key in self._keys]
        if FEW * len(found) < len(self._entries):
            for key in found:
                self.keep(key, False)
        elif found:
            self._keys.difference_update(found)
            self._entries = [entry for entry in self._entries if entry[1] in self._keys]

    def walk(self, turn: int = 0) -> Iterator[tuple[int, Key]]:
        """From that turn on. Nothing may change meanwhile."""
        for i in range(bisect_left(self._entries, turn, key=itemgetter(0)), len(self._entries)):
            yield self._entries[i]

    def before(self, turn: int) -> list[Key]:
        """Whose turns were before that one."""
        return [key for _, key in self._entries[: bisect_left(self._entries, turn, key=itemgetter(0))]]

    @property
    def members(self) -> set[Key]:
        return self._keys

    def is_sorted(self) -> bool:
        return self._entries == sorted(((key.turn, key) for key in self._keys), key=itemgetter(0))


class MayGo:
    """Who of those that are set aside may go now, by ``may_go`` of their ids. Each key is asked once: for one moment, in which nobody comes
    or leaves, and until one goes. ``alone``: nobody else may. ``only``: it is no for all but these."""

    __slots__ = ("_found", "_may_go", "_none_before", "alone", "groups", "only")

    def __init__(self, may_go: Callable[[str], bool], alone: bool = False, only: Iterable[str] | None = None) -> None:
        self.alone, self.only = alone, only
        self.groups: dict[Key, list[Held]] | None = None  # those of ``only`` by their keys, sorted; the queue finds them
        self._may_go = may_go
        self._found: dict[Key, Held | None] = {}
        self._none_before: dict[Ring, int] = {}  # no key has anybody before that turn

    def first(self, key: Key) -> Held | None:
        """The first of a key that may go."""
        if key not in self._found:
            among = key.aside if self.groups is None else self.groups.get(key, ())
            self._found[key] = next((held for held in among if not held.is_gone and self._may_go(held.request_id)), None)
        return self._found[key]

    def walk(self, ring: Ring, asides: _Turns) -> Iterator[tuple[int, Key]]:
        """By their turns: all keys of a ring that may have somebody."""
        if self.groups is None:
            return asides.walk(self._none_before.get(ring, 0))
        some = [key for key in self.groups if key in asides.members and self._found.get(key, key) is not None]
        return iter(sorted(((key.turn, key) for key in some), key=itemgetter(0)))

    def have_none(self, ring: Ring, turn: int) -> None:
        """All before that turn have been asked."""
        self._none_before[ring] = turn


def _first_of(key: Key, aside: MayGo | None) -> Held | None:
    """Whom a key would send now."""
    if aside is None:
        return key.head()
    head, other = None if aside.alone else key.head(), aside.first(key)
    return head if other is None or (head is not None and head < other) else other


class Ring:
    """The keys of one level that have requests, and whose turn it is."""

    __slots__ = ("_asides", "_heads", "_keys", "_next_turn", "_vacant")

    def __init__(self) -> None:
        self._keys: dict[str | None, Key] = {}
        self._heads, self._asides, self._vacant = _Turns(), _Turns(), _Turns()
        self._next_turn = 0

    def add(self, held: Held) -> None:
        key = self._keys.get(held.user)
        if key is None:
            key = self._keys[held.user] = Key(held.user, self._turn())
        key.add(held)
        self._place(key)

    def _turn(self) -> int:
        """After all others."""
        self._next_turn += 1
        return self._next_turn - 1

    def _place(self, key: Key) -> None:
        """Into the lists where it belongs by what it has."""
        has_head, has_aside = key.head() is not None, key.has_aside()
        self._heads.keep(key, has_head)
        self._asides.keep(key, has_aside)
        self._vacant.keep(key, not (has_head or has_aside))

    def _drop(self, key: Key) -> None:
        for turns in (self._heads, self._asides, self._vacant):
            turns.keep(key, False)
        del self._keys[key.user]

    def key_of(self, held: Held) -> Key:
        return self._keys[held.user]

    def first(self, quantum: int, aside: MayGo | None) -> Held | None:
        """Whose turn it is, its quantum given; None: nobody may go. Asked again without ``take``, it answers the same."""
        while True:
            found, passed = None, list[tuple[Key, Held]]()
            for key in self._by_turns(aside):
                held = _first_of(key, aside)
                if held is None:
                    continue  # who may all not go keep their turn, and earn nothing
                if not key.has_quantum:
                    key.has_quantum = True
                    key.deficit += quantum
                if held.cost <= key.deficit:
                    found = held
                    break
                passed.append((key, held))
            end = self._next_turn if found is None else self._keys[found.user].turn
            for key in self._vacant.before(end):  # an idle key earns nothing
                self._drop(key)
            if aside is not None:
                aside.have_none(self, end)
            self._pass([key for key, _ in passed])
            if found is not None or not passed:
                return found
            self._skip_rounds(quantum, passed)

    def _by_turns(self, aside: MayGo | None) -> Iterator[Key]:
        """Keys that may have somebody to go."""
        if aside is None:
            yield from map(itemgetter(1), self._heads.walk())
            return
        heads = iter(()) if aside.alone else self._heads.walk()
        last: Key | None = None
        for _, key in heapq.merge(heads, aside.walk(self, self._asides), key=itemgetter(0)):
            if key is not last:
                yield key
            last = key

    def _pass(self, keys: list[Key]) -> None:
        """Their turns come again after those of all others."""
        for turns in (self._heads, self._asides):
            turns.discard(keys)
        for key in keys:
            key.turn, key.has_quantum = self._turn(), False
            self._place(key)

    def _skip_rounds(self, quantum: int, passed: list[tuple[Key, Held]]) -> None:
        """A whole round gave nobody enough: as many at once as will, less the last."""
        rounds = max(0, -(-min(held.cost - key.deficit for key, held in passed) // quantum) - 1)
        for key, _ in passed:
            key.deficit += rounds * quantum

    def take(self, held: Held) -> None:
        """``held`` is what ``first`` answered: it goes."""
        key = self._keys[held.user]
        key.remove(held)
        key.deficit -= held.cost
        if key.is_empty():
            self._drop(key)
        else:
            self._place(key)

    def set_aside(self, held: Held) -> None:
        """The head of its key."""
        key = self._keys[held.user]
        key.remove(held)
        held.is_aside = True
        key.add(held)
        self._place(key)

    def left(self, held: Held) -> None:
        """It is gone, and was not taken. A key that has nothing any more keeps its turn until that comes."""
        self._place(self._keys[held.user])

    def is_empty(self) -> bool:
        return not self._keys

    def sweep(self) -> None:
        """Keep nothing of those who have left."""
        for key in list(self._keys.values()):
            key.waiting = [held for held in key.waiting if not held.is_gone]
            key.aside = [held for held in key.aside if not held.is_gone]
            heapq.heapify(key.waiting)
            if key.is_empty():
                self._drop(key)

    def check_invariants(self, level: int) -> list[str]:
        """The ids of all that wait here. AssertionError unless each key is in the lists of what it has, by its turn."""
        found = list[str]()
        for user, key in self._keys.items():
            assert key.deficit >= 0 and key.user == user and key.turn < self._next_turn
            assert key.aside == sorted(key.aside)
            for held in (*key.waiting, *key.aside):
                if not held.is_gone:
                    assert (held.level, held.user) == (level, user)
                    found.append(held.request_id)
            assert all(held.is_aside for held in key.aside) and not any(held.is_aside for held in key.waiting)
        keys = self._keys.values()
        assert len({key.turn for key in keys}) == len(keys), "two keys have one turn"
        assert self._heads.members == {key for key in keys if key.head() is not None}
        assert self._asides.members == {key for key in keys if key.has_aside()}
        assert self._vacant.members == {key for key in keys if key.is_empty()}
        assert all(turns.is_sorted() for turns in (self._heads, self._asides, self._vacant))
        return found
