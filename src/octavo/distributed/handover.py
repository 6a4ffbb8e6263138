"""The desk of hand-offs: hears what workers say of them, and says what workers are to do. Pure: it is told times, and sends nothing.

    prompt begins ─▶ RESERVE ─▶ (room) ─▶ SEND ─▶ copied, and first token drawn ─▶ BEGIN, RELEASE
                       │ no room: the next receiver, or wait      └─ anything fails, or takes too long ─▶ CANCEL, RESUME
                       │ no answer: the next one too; the first that has room is the receiver ─▶ CANCEL to the others

Workers answer between two steps, so a long step looks like none. Who is *late* is asked nothing more before it has answered, and holds up
nobody who could go elsewhere.

Owns every ``Handoff`` on its way, the order in which those without a receiver are served, and what has been asked of whom. Which worker is
to receive is asked of ``choose``; who moves bytes, and how, is the workers' business. The same class serves a cluster, whose orders are
messages and whose answers come later, and a simulation, where they are calls.

Whatever happens, each hand-off ends in one of three ways: the receiver begins, the sender goes on, or its request has been withdrawn (its
client has gone, or its sender, and then somebody else's attempt goes on). Nothing that a worker says late, of a hand-off that is over, does
anything. An order that is void in the meantime does no harm: workers ignore what they do not have.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import Enum
from itertools import count
from typing import Generic, TypeVar

from octavo.distributed.handoff import Action, Handoff, HandoffLimits, HandoffState
from octavo.distributed.questions import Questions

Load = TypeVar("Load")
"""What the desk's owner keeps with a hand-off: a request, an attempt."""


class OrderKind(str, Enum):
    RESERVE = "reserve"  # receiver: blocks and a place, and say whether there are
    SEND = "send"  # sender: bring the KV to ``receiver``
    BEGIN = "begin"  # receiver: run it
    RELEASE = "release"  # sender: give its blocks back
    CANCEL = "cancel"  # receiver: it does not come
    RESUME = "resume"  # sender: go on with it yourself


_ORDERS = {
    Action.COPY: OrderKind.SEND,
    Action.BEGIN: OrderKind.BEGIN,
    Action.RELEASE: OrderKind.RELEASE,
    Action.CANCEL: OrderKind.CANCEL,
    Action.RESUME: OrderKind.RESUME,
}
_TO_SENDER = frozenset({OrderKind.SEND, OrderKind.RELEASE, OrderKind.RESUME})


@dataclass(slots=True)
class Moving(Generic[Load]):
    """A hand-off with what it hands over."""

    key: int
    handoff: Handoff
    load: Load
    num_tokens: int  # whose KV goes over
    output_token_ids: list[int] = field(default_factory=list)  # once they are drawn
    full: set[int] = field(default_factory=set)  # workers without room, until some may have it
    unfit: set[int] = field(default_factory=set)  # workers that never will

    @property
    def sender(self) -> int:
        return self.handoff.sender

    @property
    def refused_by(self) -> set[int]:
        """Workers that are not to be asked now."""
        return self.full | self.unfit


@dataclass(frozen=True, slots=True)
class Order(Generic[Load]):
    """What ``worker`` is to do."""

    kind: OrderKind
    worker: int
    moving: Moving[Load]


@dataclass(slots=True)
class DeskStats:
    """Counters: they only grow."""

    num_offered: int = 0
    num_handed_over: int = 0
    num_failed: int = 0  # the sender went on itself
    num_withdrawn: int = 0
    num_bytes: int = 0  # of those handed over
    waited_s: float = 0.0  # for a receiver, summed over all that found one
    first_failure: str | None = None


class HandoverDesk(Generic[Load]):
    """``choose(moving, away)``: the worker to ask for room next, none of ``away``; None: none of the others may have some now.

    ``most_asked``: so many hand-offs wait for an answer of a worker at a time; ``most_in_all``: of all workers. Those without a receiver
    are served in the order in which they were offered: while nobody has room for the first, nobody is asked for the others. What waits for
    an answer, or for its turn to ask, is passed by those that others may take.
    """

    def __init__(
        self,
        limits: HandoffLimits,
        choose: Callable[[Moving[Load], AbstractSet[int]], int | None],
        most_asked: int = 4,
        most_in_all: int | None = None,
    ) -> None:
        self.stats = DeskStats()
        self._limits = limits
        self._choose = choose
        self._questions = Questions(limits.answer_s, most_asked, most_in_all)
        self._moving: dict[int, Moving[Load]] = {}
        self._waiting: deque[Moving[Load]] = deque()  # offered, in order; those that are over are dropped when they are met
        self._due: list[tuple[float, int, Moving[Load]]] = []
        self._numbers = count()
        self._room_may_be_there = self._is_new = False

    # --- what is known ------------------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._moving)

    def find(self, key: int) -> Moving[Load] | None:
        """The hand-off of that key, while it is on its way."""
        return self._moving.get(key)

    def without_room(self, now: float) -> tuple[int, float]:
        """(hand-offs that have their first token and no receiver yet, seconds that the first of them has waited)"""
        drawn = [one.handoff for one in self._moving.values() if one.handoff.drawn and one.handoff.state is HandoffState.OFFERED]
        since_s = min((handoff.deadline_s - self._limits.reserve_s for handoff in drawn), default=now)
        return len(drawn), max(0.0, now - since_s)

    def num_coming(self, worker: int) -> int:
        """Hand-offs that ``worker`` has room for, or has been asked about."""
        return sum(worker == one.handoff.receiver or worker in self._questions.of(one.key) for one in self._moving.values())

    @property
    def next_s(self) -> float:
        """When ``tick`` has something to do at the latest; infinity when nothing is timed."""
        return min(self._next_due_s(), self._questions.next_late_s)

    def _next_due_s(self) -> float:
        while self._due and self._is_stale(self._due[0]):
            heapq.heappop(self._due)
        return self._due[0][0] if self._due else float("inf")

    # --- what workers say ---------------------------------------------------------------------------------------------------------------

    def offered(
        self, key: int, load: Load, sender: int, num_tokens: int, num_bytes: int, now: float, output_token_ids: list[int] | None = None
    ) -> None:
        """A request's prompt has begun on ``sender``, or, with ``output_token_ids``, is computed. ``tick`` asks for room for it.

        ValueError for a key that is on its way.
        """
        if key in self._moving:
            raise ValueError(f"key: {key} is not allowed; its hand-off is on its way")
        drawn = output_token_ids is not None
        handoff = Handoff(str(key), sender, num_bytes, now, self._limits, drawn)
        moving = self._moving[key] = Moving(key, handoff, load, num_tokens, list(output_token_ids or ()))
        self._waiting.append(moving)
        self._time(moving)
        self.stats.num_offered += 1
        self._is_new = True

    def drew(self, key: int, output_token_ids: list[int], now: float) -> list[Order[Load]]:
        """Its first token is drawn, and its sender holds it."""
        moving = self._moving.get(key)
        if moving is None or moving.handoff.drawn:
            return []
        moving.output_token_ids = list(output_token_ids)
        return self._act(moving, moving.handoff.drew(now), now)

    def reserved(self, key: int, worker: int, now: float) -> list[Order[Load]]:
        """``worker`` has room."""
        moving = self._answered(key, worker)
        if moving is None:
            return []
        self.stats.waited_s += now - moving.handoff.offered_s
        orders = self._take_back(moving)
        orders += self._act(moving, moving.handoff.reserved(worker, now), now)
        return orders + self._ask(now)

    def no_room(self, key: int, worker: int, now: float, never: bool = False) -> list[Order[Load]]:
        """``worker`` has none now, or, for this request, ``never``."""
        moving = self._answered(key, worker)
        if moving is None:
            return []
        (moving.unfit if never else moving.full).add(worker)
        return self._ask(now)

    def copied(self, key: int, now: float) -> list[Order[Load]]:
        """Its receiver has all of its KV."""
        moving = self._moving.get(key)
        if moving is None or moving.handoff.state is not HandoffState.RESERVED or moving.handoff.arrived:
            return []
        return self._act(moving, moving.handoff.copied(now), now)

    def failed(self, key: int, reason: str, now: float) -> list[Order[Load]]:
        """The copy has failed, or the receiver cannot have it: the sender goes on, unless it is too late for that."""
        moving = self._moving.get(key)
        if moving is None or moving.handoff.state not in (HandoffState.OFFERED, HandoffState.RESERVED):
            return []
        return self._act(moving, moving.handoff.fail(reason), now)

    # --- what else happens --------------------------------------------------------------------------------------------------------------

    def withdraw(self, key: int, now: float) -> list[Order[Load]]:
        """The request has ended, or its sender is gone: nobody goes on with this hand-off. The sender is told by whoever knows why."""
        moving = self._moving.get(key)
        if moving is None:
            return []
        self.stats.num_withdrawn += 1
        orders = self._take_back(moving)
        if moving.handoff.receiver is not None:
            orders.append(Order(OrderKind.CANCEL, moving.handoff.receiver, moving))
        if moving.handoff.state in (HandoffState.OFFERED, HandoffState.RESERVED):
            moving.handoff.fail("withdrawn")
        self._forget(moving)
        self._room_may_be_there = self._room_may_be_there or bool(orders)
        return orders

    def worker_gone(self, worker: int, now: float) -> list[Order[Load]]:
        """Nothing is to be expected of ``worker`` any more. Hand-offs from it are withdrawn; those to it are the senders' again."""
        orders = list[Order[Load]]()
        for key in (asked := self._questions.gone(worker)):
            self._moving[key].full.add(worker)
        for moving in list(self._moving.values()):
            if moving.sender == worker:
                orders += self.withdraw(moving.key, now)
            elif moving.handoff.receiver == worker:
                orders += self.failed(moving.key, "its receiver is gone", now)
        orders += self._ask(now) if asked else []
        return [order for order in orders if order.worker != worker]

    def give_up(self, may_be_taken: Callable[[Moving[Load]], bool], now: float) -> list[Order[Load]]:
        """Those without a receiver for which ``may_be_taken`` sees none to come are their senders' again, at once."""
        offered = [one for one in self._moving.values() if one.handoff.state is HandoffState.OFFERED and not self._questions.of(one.key)]
        orders = list[Order[Load]]()
        for moving in offered:
            if not may_be_taken(moving):
                orders += self.failed(moving.key, "nobody is there to take it", now)
        return orders

    def room_may_be_there(self) -> None:
        """Some worker may have room that had none: ``tick`` asks again."""
        self._room_may_be_there = True

    def tick(self, now: float) -> list[Order[Load]]:
        """All that is due by ``now``: what has taken too long, and offers that may find room."""
        orders = list[Order[Load]]()
        while self._next_due_s() <= now:
            moving = heapq.heappop(self._due)[2]
            orders += self._act(moving, moving.handoff.expire(now), now)
        self._is_new |= self._questions.tick(now)
        if self._room_may_be_there:
            for moving in self._waiting:
                moving.full.clear()
        if self._room_may_be_there or self._is_new:
            self._room_may_be_there = self._is_new = False
            orders += self._ask(now)
        return orders

    # --- inside -------------------------------------------------------------------------------------------------------------------------

    def _answered(self, key: int, worker: int) -> Moving[Load] | None:
        """The hand-off whose question ``worker`` has answered; None when it does not matter any more."""
        counts, may_be_asked = self._questions.answered(key, worker)
        self._is_new |= may_be_asked
        return self._moving[key] if counts else None

    def _take_back(self, moving: Moving[Load]) -> list[Order[Load]]:
        """All that was asked for ``moving`` is void: whoever may find room is not to keep it."""
        return [Order(OrderKind.CANCEL, worker, moving) for worker in self._questions.take_back(moving.key)]

    def _ask(self, now: float) -> list[Order[Load]]:
        """Ask for room for those that have waited longest."""
        while self._waiting and self._waiting[0].handoff.state is not HandoffState.OFFERED:
            self._waiting.popleft()
        orders, questions = list[Order[Load]](), self._questions
        for moving in list(self._waiting):
            if questions.is_full:
                break
            if moving.handoff.state is not HandoffState.OFFERED or questions.waits(moving.key):
                continue
            worker = self._choose(moving, moving.refused_by | questions.silent)
            if worker is not None and questions.ask(moving.key, worker, now):
                orders.append(Order(OrderKind.RESERVE, worker, moving))
            if worker is None and (not questions.silent or self._choose(moving, moving.refused_by) is None):
                break
        return orders

    def _act(self, moving: Moving[Load], actions: Iterable[Action], now: float) -> list[Order[Load]]:
        """The orders of a move that ``moving`` has just made."""
        handoff, orders = moving.handoff, list[Order[Load]]()
        if handoff.state is HandoffState.FAILED:
            self.stats.num_failed += 1
            self.stats.first_failure = self.stats.first_failure or handoff.failure
            orders += self._take_back(moving)
        for action in actions:
            kind = _ORDERS[action]
            worker = handoff.sender if kind in _TO_SENDER else handoff.receiver
            assert worker is not None, f"{action.value} before there is a receiver"
            orders.append(Order(kind, worker, moving))
        if handoff.state is HandoffState.COPIED:  # a worker that is told to release does so, or is gone with all that it held
            handoff.released()
            self.stats.num_handed_over += 1
            self.stats.num_bytes += handoff.num_bytes
        if any(order.kind is OrderKind.CANCEL for order in orders):
            self._room_may_be_there = True
        if handoff.is_over:
            self._forget(moving)
        else:
            self._time(moving)
        return orders

    def _forget(self, moving: Moving[Load]) -> None:
        del self._moving[moving.key]
        self._questions.take_back(moving.key)

    def _time(self, moving: Moving[Load]) -> None:
        heapq.heappush(self._due, (moving.handoff.deadline_s, next(self._numbers), moving))
        if len(self._due) > 64 + 4 * len(self._moving):  # what is over would be kept, with its request, until it would have been due
            self._due = [entry for entry in self._due if not self._is_stale(entry)]
            heapq.heapify(self._due)

    def _is_stale(self, entry: tuple[float, int, Moving[Load]]) -> bool:
        due_s, _, moving = entry
        return moving.handoff.is_over or due_s != moving.handoff.deadline_s

    def check_invariants(self) -> None:
        """AssertionError unless the books agree. For tests."""
        self._questions.check_invariants()
        waiting = {moving.key for moving in self._waiting if not moving.handoff.is_over}
        for key, moving in self._moving.items():
            handoff = moving.handoff
            assert key == moving.key and not handoff.is_over and handoff.state is not HandoffState.COPIED
            assert (handoff.state is HandoffState.OFFERED) == (handoff.receiver is None)
            assert not self._questions.of(key) or handoff.state is HandoffState.OFFERED, f"{key} has a receiver and asks another"
            assert handoff.receiver is not None or key in waiting, f"{key} waits for room and is forgotten"
            assert handoff.drawn or not moving.output_token_ids
            assert any(due == handoff.deadline_s and other is moving for due, _, other in self._due), f"{key} is not timed"
