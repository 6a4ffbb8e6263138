"""Keys that have nothing but set-aside requests are not walked over, and the order is that of a queue that walks over all of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.distributed import fair_ring
from octavo.distributed.fair_queue import FairQueue
from octavo.distributed.fair_ring import Held, Key, MayGo, Ring
from tests.distributed.test_worker_sizes import Sized, dispatcher, drain
from tests.distributed.views import route


class PlainRing(Ring):
    """Deficit round robin as it is written down: every key is walked over, whatever it has."""

    def __init__(self) -> None:
        super().__init__()
        self._turns: list[Key] = []

    def add(self, held: Held) -> None:
        key = self._keys.get(held.user)
        if key is None:
            key = self._keys[held.user] = Key(held.user, 0)
            self._turns.append(key)
        key.add(held)

    def first(self, quantum: int, aside: MayGo | None) -> Held | None:
        while True:
            found, passed = None, list[tuple[Key, Held]]()
            for key in list(self._turns):
                held = fair_ring._first_of(key, aside)
                if held is None:
                    if key.is_empty():
                        self._drop(key)
                    continue
                key.deficit += 0 if key.has_quantum else quantum
                key.has_quantum = True
                if held.cost <= key.deficit:
                    found = held
                    break
                passed.append((key, held))
            for key, _ in passed:
                key.has_quantum = False
                self._turns.remove(key)
                self._turns.append(key)
            if found is not None or not passed:
                return found
            self._skip_rounds(quantum, passed)

    def _place(self, key: Key) -> None:
        pass

    def _drop(self, key: Key) -> None:
        self._turns.remove(key)
        del self._keys[key.user]


class PlainQueue(FairQueue):
    def _ring(self, level: int) -> Ring:
        return self._rings.setdefault(level, PlainRing())


KINDS = ["add"] * 5 + ["take", "aside", "aside", "some", "alone", "only", "remove", "leave", "leave"]
Moves = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 2**32)), min_size=40, max_size=120)


@given(Moves, st.integers(1, 40), st.floats(0.5, 30.0))
def test_the_order_is_that_of_a_walk_over_all_keys(moves: list[tuple[str, int]], quantum: int, ageing_s: float) -> None:
    """And who is asked whether they may go, in which order."""
    queues = FairQueue(quantum, ageing_s), PlainQueue(quantum, ageing_s)
    for now, (what, draw) in enumerate(moves):
        found = [_moved(queue, what, draw, now) for queue in queues]
        assert found[0] == found[1]
        queues[0].check_invariants()
    for queue in queues:
        _all_aside(queue, 1e3, None)
    while queues[0]:
        found = [_first(queue, 1e3, lambda name: True, alone=True) for queue in queues]
        assert found[0] == found[1]
        for queue in queues:
            queue.send(found[0][-1])


def _moved(queue: FairQueue, what: str, draw: int, now: float) -> list[str]:
    """What a move has come to."""
    names = [name for name, _ in queue.waiting()]
    if what == "add":
        queue.add(f"r{now}", "abcd"[draw % 4], draw // 4 % 5 // 4, draw // 24 % 50 + 1, now)
    elif what == "remove" and names:
        queue.remove(names[draw % len(names)])
    elif what == "leave":  # a user, with all that it has
        for name in names:
            if queue._held[name].user == "abcd"[draw % 4]:
                queue.remove(name)
    elif what == "take":
        return [str(queue.take(now))]
    elif what == "aside":
        return _all_aside(queue, now, draw % 4)
    elif what in ("some", "alone", "only"):
        chosen = [name for name in queue.set_aside_ids() if (int(name[1:]) ^ draw) % 3 == 0]
        only = chosen if what == "only" else None
        found = _first(queue, now, lambda name: name in chosen and int(name[1:]) * 7919 % 5 < 3, what == "alone", only)
        if found and found[-1] in names and draw % 2:
            queue.send(found[-1])
        return found
    return []


def _all_aside(queue: FairQueue, now: float, most: int | None) -> list[str]:
    found = list[str]()
    while (most is None or len(found) < most) and (name := queue.first(now)) is not None:
        queue.set_aside(name)
        found.append(name)
    return found


def _first(queue: FairQueue, now: float, may_go: Callable[[str], bool], alone: bool, only: list[str] | None = None) -> list[str]:
    """Who is asked, and at last who goes; up to three whose turn it is before are set aside."""
    asked = list[str]()
    aside = MayGo(lambda name: asked.append(name) is None and (only is None or name in only) and may_go(name), alone, only)
    set_aside = set(queue.set_aside_ids())
    for _ in range(4):
        name = queue.first(now, aside)
        if name is None or name in set_aside:
            break
        queue.set_aside(name)
    asked = [one for one in asked if only is None or one in only]
    return [*asked, str(name)]


@pytest.fixture
def visits(monkeypatch: pytest.MonkeyPatch) -> list[Key]:
    """Keys that are looked at."""
    found, first_of = list[Key](), fair_ring._first_of

    def counted(key: Key, aside: MayGo | None) -> Held | None:
        found.append(key)
        return first_of(key, aside)

    monkeypatch.setattr(fair_ring, "_first_of", counted)
    return found


def test_setting_aside_looks_at_each_key_a_few_times_however_many_rest(visits: list[Key]) -> None:
    number = 200
    desk, small, big = dispatcher(quantum=100), Sized(0, size=10), Sized(1, size=100, num_sequences=1)
    for i in range(number):
        desk.submit(route(f"large-{i}", 50, user=f"u{i}"), [small, big], 0.0)
    drain(desk, [small, big])
    assert len(desk.set_aside()) == number and len(visits) <= 2 * number
    visits.clear()
    for i in range(number):  # beside those that rest already, and of the same users
        desk.submit(route(f"again-{i}", 50, user=f"u{i}"), [small, big], 1.0)
        drain(desk, [small, big])
    assert len(desk.set_aside()) == 2 * number and len(visits) <= 2 * number
    visits.clear()
    drain(desk, [small, big])
    assert not visits, "what only rests is not looked at"
    third = Sized(2, size=20)  # an engine more, at which none can go either: all are asked, once
    for i in range(number):
        desk.submit(route(f"new-{i}", 50, user=f"v{i}"), [small, big], 2.0)
    drain(desk, [small, big, third])
    assert len(desk.set_aside()) == 3 * number and len(visits) <= 4 * number
    visits.clear()
    for _ in range(20):
        big.num_sequences = 0
        drain(desk, [small, big, third])
    assert len(big.had) == 20 and len(visits) <= 20 + 3 * number
    desk.check_invariants()
