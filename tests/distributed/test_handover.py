"""The desk of hand-offs with workers that answer late, fail and vanish: each hand-off ends in exactly one way, and nothing is left over."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import pytest

from octavo.distributed.handoff import HandoffLimits
from octavo.distributed.handover import HandoverDesk, Moving, Order, OrderKind

LIMITS = HandoffLimits(reserve_s=5.0, copy_s=4.0, prompt_s=50.0)
SENDER, RECEIVERS = 0, (1, 2)


def desk_of(receivers: tuple[int, ...] = RECEIVERS, most_asked: int = 8) -> HandoverDesk[str]:
    def choose(moving: Moving[str], away: AbstractSet[int]) -> int | None:
        return next((worker for worker in receivers if worker not in away), None)

    return HandoverDesk(LIMITS, choose, most_asked)


def told(orders: list[Order[str]]) -> list[tuple[str, int, int]]:
    return [(order.kind.value, order.worker, order.moving.key) for order in orders]


def offered(desk: HandoverDesk[str], key: int, now: float, tokens: list[int] | None = None) -> list[tuple[str, int, int]]:
    desk.offered(key, f"load {key}", SENDER, 100, 1000, now, tokens)
    return told(desk.tick(now))


def test_kv_goes_while_the_prompt_is_computed() -> None:
    desk = desk_of()
    assert offered(desk, 7, 1.0) == [("reserve", 1, 7)]
    assert told(desk.reserved(7, 1, 1.1)) == [("send", SENDER, 7)]
    assert desk.copied(7, 2.0) == [], "the first token is not drawn"
    assert told(desk.drew(7, [42], 2.5)) == [("begin", 1, 7), ("release", SENDER, 7)]
    assert len(desk) == 0 and desk.next_s == float("inf")
    assert (desk.stats.num_handed_over, desk.stats.num_bytes) == (1, 1000)
    assert desk.drew(7, [42], 3.0) == desk.copied(7, 3.0) == desk.failed(7, "late", 3.0) == [], "nothing that is late does anything"


def test_the_token_may_come_first() -> None:
    desk = desk_of()
    offered(desk, 7, 1.0)
    desk.reserved(7, 1, 1.1)
    assert desk.drew(7, [42], 2.5) == []
    (begin, release) = desk.copied(7, 3.0)
    assert (begin.kind, begin.moving.output_token_ids, release.kind) == (OrderKind.BEGIN, [42], OrderKind.RELEASE)


def test_the_next_is_asked_and_then_room_is_waited_for() -> None:
    desk = desk_of()
    offered(desk, 7, 1.0)
    assert told(desk.no_room(7, 1, 1.1)) == [("reserve", 2, 7)]
    assert desk.no_room(7, 2, 1.2) == []
    assert offered(desk, 8, 1.3) == [], "a newcomer is not asked for before the first"
    desk.room_may_be_there()
    assert told(desk.tick(2.0)) == [("reserve", 1, 7), ("reserve", 1, 8)]
    assert told(desk.no_room(7, 1, 2.1, never=True)) == [("reserve", 2, 7)]
    assert desk.no_room(7, 2, 2.2) == []
    desk.room_may_be_there()
    assert told(desk.tick(2.9)) == [("reserve", 2, 7)]
    desk.check_invariants()


def test_so_many_are_asked_for_at_a_time() -> None:
    desk = desk_of(most_asked=1)
    offered(desk, 7, 1.0)
    assert offered(desk, 8, 1.0) == []
    assert told(desk.reserved(7, 1, 1.1)) == [("send", SENDER, 7), ("reserve", 1, 8)]


@pytest.mark.parametrize(
    ("tokens", "way", "due_s", "orders", "failure"),
    [
        ([42], "asked", 6.0, [("cancel", 1, 7), ("cancel", 2, 7), ("resume", SENDER, 7)], "a receiver with room took longer than 5 s"),
        ([42], "full", 6.0, [("resume", SENDER, 7)], "a receiver with room took longer than 5 s"),
        ([42], "reserved", 6.0, [("cancel", 1, 7), ("resume", SENDER, 7)], "the copy took longer than 4 s"),
        (None, "reserved", 51.0, [("cancel", 1, 7), ("resume", SENDER, 7)], "the first token took longer than 50 s"),
        (None, "reserved copied", 51.0, [("cancel", 1, 7), ("resume", SENDER, 7)], "the first token took longer than 50 s"),
        (None, "reserved drew", 7.0, [("cancel", 1, 7), ("resume", SENDER, 7)], "the copy took longer than 4 s"),
        (None, "full drew", 8.0, [("resume", SENDER, 7)], "a receiver with room took longer than 5 s"),
    ],
)
def test_every_edge_has_an_end(tokens: list[int] | None, way: str, due_s: float, orders: list, failure: str) -> None:
    desk = desk_of()
    offered(desk, 7, 1.0, tokens)
    for step in way.split():
        if step == "asked":  # by turns, and nobody answers
            assert told(desk.tick(2.0)) == [("reserve", 2, 7)] and desk.tick(3.0) == []
        elif step == "full":
            desk.no_room(7, 1, 1.5)
            desk.no_room(7, 2, 1.5)
        elif step == "reserved":
            desk.reserved(7, 1, 2.0)
        elif step == "copied":
            desk.copied(7, 2.5)
        else:
            desk.drew(7, [42], 3.0)
    assert desk.next_s == due_s and desk.tick(due_s - 1e-9) == []
    assert told(desk.tick(due_s)) == orders
    assert desk.stats.first_failure == failure and len(desk) == 0


def test_a_withdrawn_one_is_cancelled_wherever_it_is() -> None:
    desk = desk_of()
    offered(desk, 7, 1.0)
    assert told(desk.withdraw(7, 1.1)) == [("cancel", 1, 7)], "asked: the answer may be yes"
    assert desk.reserved(7, 1, 1.2) == []
    offered(desk, 8, 2.0)
    desk.reserved(8, 1, 2.1)
    assert told(desk.withdraw(8, 2.2)) == [("cancel", 1, 8)]
    offered(desk, 9, 3.0)
    desk.no_room(9, 1, 3.1)
    desk.no_room(9, 2, 3.1)
    assert desk.withdraw(9, 3.2) == [] and desk.withdraw(9, 3.2) == []
    assert desk.stats.num_withdrawn == 3 and len(desk) == 0
    desk.check_invariants()


def test_a_worker_that_is_gone() -> None:
    desk = desk_of()
    for key in (7, 8, 9):
        offered(desk, key, 1.0)
    desk.reserved(7, 1, 1.1)
    desk.no_room(8, 1, 1.1)
    assert told(desk.worker_gone(1, 2.0)) == [("resume", SENDER, 7), ("reserve", 2, 9)]
    desk.reserved(8, 2, 2.1)
    assert told(desk.worker_gone(SENDER, 3.0)) == [("cancel", 2, 8), ("cancel", 2, 9)]
    assert len(desk) == 0
    desk.check_invariants()


def test_what_nobody_is_left_for_is_its_senders_again() -> None:
    desk = desk_of(receivers=(1,))
    offered(desk, 7, 1.0, [42])
    desk.no_room(7, 1, 1.1)
    offered(desk, 8, 1.2)
    desk.room_may_be_there()
    assert told(desk.tick(1.3)) == [("reserve", 1, 7), ("reserve", 1, 8)]
    desk.no_room(7, 1, 1.4)
    assert desk.give_up(lambda moving: True, 1.5) == []
    assert told(desk.give_up(lambda moving: False, 1.5)) == [("resume", SENDER, 7)], "8 has been asked about, and its answer is to come"
    assert desk.stats.first_failure == "nobody is there to take it"
    desk.check_invariants()


def test_a_key_is_on_its_way_once() -> None:
    desk = desk_of()
    offered(desk, 7, 1.0)
    with pytest.raises(ValueError, match="key: 7 is not allowed"):
        offered(desk, 7, 1.0)


@dataclass
class Worker:
    """What a worker holds, by key, and what it has not read yet."""

    room: int = 3
    inbox: deque[Order[str]] = field(default_factory=deque)
    reserved: set[int] = field(default_factory=set)
    running: set[int] = field(default_factory=set)
    held: set[int] = field(default_factory=set)  # sender: has its first token
    prompts: set[int] = field(default_factory=set)


class Cluster:
    """Orders and answers take their time, and any worker may vanish or any copy fail. ``fate``: how each key ended."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.desk: HandoverDesk[str] = HandoverDesk(LIMITS, self.choose, self.rng.choice((1, 3)), self.rng.choice((None, 1, 4)))
        self.workers = {place: Worker(self.rng.randint(1, 3)) for place in range(5)}  # two senders, three receivers
        self.answers: deque[tuple[str, int, int]] = deque()
        self.copies: dict[int, int] = {}  # key -> receiver
        self.fate: dict[int, list[str]] = {}
        self.now, self.num_keys = 0.0, 0
        self.in_a_long_step: int | None = None

    def choose(self, moving: Moving[str], away: AbstractSet[int]) -> int | None:
        return next((w for w in (2, 3, 4) if w in self.workers and w not in away), None)

    def follow(self, orders: list[Order[str]]) -> None:
        for order in orders:
            if order.worker in self.workers:
                self.workers[order.worker].inbox.append(order)

    def carry_out(self, place: int) -> None:
        worker = self.workers[place]
        if not worker.inbox:
            return
        order = worker.inbox.popleft()
        key = order.moving.key
        if order.kind is OrderKind.RESERVE:
            has_room = len(worker.reserved) + len(worker.running) < worker.room
            if has_room:
                worker.reserved.add(key)
            self.answers.append(("reserved" if has_room else "no_room", key, place))
        elif order.kind is OrderKind.SEND and key in worker.prompts | worker.held:
            receiver = order.moving.handoff.receiver
            if receiver is not None:
                self.copies[key] = receiver
        elif order.kind is OrderKind.BEGIN:
            assert key in worker.reserved, "begun where it was not reserved"
            worker.reserved.remove(key)
            worker.running.add(key)
            self.fate[key].append("begun")
        elif order.kind is OrderKind.RELEASE:
            assert key in worker.held or "withdrawn" in self.fate[key], "its first token is not drawn"
            worker.held.discard(key)
        elif order.kind is OrderKind.CANCEL:
            worker.reserved.discard(key)
        elif order.kind is OrderKind.RESUME and key in worker.prompts | worker.held:
            worker.prompts.discard(key)
            worker.held.discard(key)
            self.fate[key].append("resumed")

    def move(self) -> None:
        rng, what = self.rng, self.rng.random()
        self.now += rng.random() * 0.7
        if what < 0.12:
            sender = rng.choice((0, 1))
            if sender in self.workers:
                self.num_keys += 1
                self.fate[self.num_keys] = []
                self.workers[sender].prompts.add(self.num_keys)
                self.desk.offered(self.num_keys, "load", sender, 10, 100, self.now)
        elif what < 0.3:
            place = rng.choice((0, 1))
            if place in self.workers and self.workers[place].prompts:
                key = rng.choice(sorted(self.workers[place].prompts))
                self.workers[place].prompts.remove(key)
                self.workers[place].held.add(key)
                self.follow(self.desk.drew(key, [1], self.now))
        elif what < 0.4 and self.copies:
            key = rng.choice(sorted(self.copies))
            receiver = self.copies.pop(key)
            if receiver in self.workers and key in self.workers[receiver].reserved:
                failed = rng.random() < 0.2
                self.follow(self.desk.failed(key, "lost", self.now) if failed else self.desk.copied(key, self.now))
        elif what < 0.45 and self.fate:
            self.withdraw(rng.choice(sorted(self.fate)))
        elif what < 0.455 and self.num_keys > 20 and len(self.workers) > 2:
            self.lose(rng.choice(sorted(self.workers)))
        elif what < 0.6:
            self.end_one()
        elif what < 0.75 and self.answers:
            kind, key, place = self.answers.popleft()
            if place in self.workers:
                self.follow(getattr(self.desk, kind)(key, place, self.now))
        else:
            self.read_one()
        self.follow(self.desk.tick(self.now))
        self.desk.check_invariants()

    def read_one(self) -> None:
        """A worker reads what it was told, unless it is in a long step."""
        place = self.rng.choice(sorted(self.workers))
        if self.rng.random() < 0.2:
            self.in_a_long_step = self.rng.choice((None, *sorted(self.workers)))
        elif place != self.in_a_long_step:
            self.carry_out(place)

    def withdraw(self, key: int) -> None:
        if not self.fate[key]:
            self.fate[key].append("withdrawn")
            self.follow(self.desk.withdraw(key, self.now))
            for worker in self.workers.values():  # whoever withdraws it aborts it as well, by the same channel
                worker.prompts.discard(key)
                worker.held.discard(key)

    def end_one(self) -> None:
        place = self.rng.choice((2, 3, 4))
        if place in self.workers and self.workers[place].running:
            self.workers[place].running.pop()
            self.desk.room_may_be_there()

    def lose(self, place: int) -> None:
        worker = self.workers.pop(place)
        handed_over = {order.moving.key for order in worker.inbox if order.kind is OrderKind.RELEASE}
        for key in (worker.prompts | worker.held) - handed_over:
            self.fate[key].append("sender lost")
        for order in worker.inbox:
            if order.kind is OrderKind.BEGIN:
                self.fate[order.moving.key].append("receiver lost")  # which would have begun it
        self.follow(self.desk.worker_gone(place, self.now))

    def settle(self) -> None:
        """No more comes, and copies hang: time alone has to end it all."""
        for _ in range(2000):
            for place in sorted(self.workers):
                self.carry_out(place)
            while self.answers:
                kind, key, place = self.answers.popleft()
                if place in self.workers:
                    self.follow(getattr(self.desk, kind)(key, place, self.now))
            self.now += 0.5
            self.follow(self.desk.tick(self.now))
            self.desk.check_invariants()
            if not len(self.desk) and not any(worker.inbox for worker in self.workers.values()):
                return
        raise AssertionError("a hand-off has not ended")


@pytest.mark.parametrize("seed", range(40))
def test_whatever_happens_each_ends_once(seed: int) -> None:
    cluster = Cluster(seed)
    for _ in range(600):
        cluster.move()
    cluster.settle()
    assert cluster.num_keys > 20
    for key, fate in cluster.fate.items():
        assert len([one for one in fate if one != "withdrawn"]) <= 1, f"{key} ended twice: {fate}"
        assert fate or any(key in worker.prompts for worker in cluster.workers.values()), f"{key} has been forgotten"
    for worker in cluster.workers.values():
        assert not worker.reserved and not worker.held, "blocks have leaked"


def test_what_is_over_is_not_kept_until_it_would_have_been_due() -> None:
    """Requests hang on it: at a steady rate hand-offs of ten minutes would be remembered."""
    desk: HandoverDesk[object] = HandoverDesk(HandoffLimits(), lambda moving, away: 1)
    desk.offered(0, object(), 0, 10, 10, 0.0, [5])  # it stays, and is due before all others
    desk.tick(0.0)
    desk.reserved(0, 1, 0.0)
    for key in range(1, 2000):
        now = key / 1000
        desk.offered(key, object(), 0, 10, 10, now)
        assert [order.kind for order in desk.tick(now)] == [OrderKind.RESERVE]
        desk.reserved(key, 1, now)
        desk.copied(key, now)
        assert [order.kind for order in desk.drew(key, [5], now)] == [OrderKind.BEGIN, OrderKind.RELEASE]
        assert len(desk) == 1 and len(desk._due) <= 80
    desk.check_invariants()
    assert desk.next_s == HandoffLimits().copy_s
