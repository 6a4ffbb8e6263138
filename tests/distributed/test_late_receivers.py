"""Receivers that do not answer the desk of hand-offs, or late: they hold up what nobody else can take, and nothing else."""

from __future__ import annotations

from collections import deque
from collections.abc import Set as AbstractSet

from octavo.distributed.handover import HandoverDesk, Moving, OrderKind
from tests.distributed.test_handover import LIMITS, RECEIVERS, SENDER, desk_of, offered, told


def wanted_by(wants: dict[int, int], receivers: tuple[int, ...] = RECEIVERS, **limits: int) -> HandoverDesk[str]:
    """Each key wants a receiver of its own, and goes to another only if that one is not to be asked."""

    def choose(moving: Moving[str], away: AbstractSet[int]) -> int | None:
        return next((worker for worker in (wants[moving.key], *receivers) if worker not in away), None)

    return HandoverDesk(LIMITS, choose, **limits)


def test_a_receiver_that_does_not_answer_stops_nobody() -> None:
    """Eight want it, and twelve behind them another one: these go at once, and those when its answer is late."""
    desk = wanted_by({key: 1 if key < 8 else 2 for key in range(20)})
    for key in range(20):
        desk.offered(key, "load", SENDER, 100, 1000, 0.0, [5])
    begun: dict[int, float] = {}
    now, todo = 0.0, deque(desk.tick(0.0))
    while now < 4.0:
        while todo:
            order = todo.popleft()
            if order.kind is OrderKind.RESERVE and order.worker == 2:  # answers at once, where 1 never does
                todo.extend(desk.reserved(order.moving.key, 2, now))
                todo.extend(desk.copied(order.moving.key, now))
            elif order.kind is OrderKind.BEGIN:
                begun[order.moving.key] = now
        now += 0.25
        todo.extend(desk.tick(now))
        desk.check_invariants()
    assert begun == {key: 1.0 if key < 8 else 0.0 for key in range(20)}, "late after a second"


def test_a_late_answer_counts_as_long_as_nobody_else_has_room() -> None:
    """Where every step takes longer than a second all answers are late."""
    desk = desk_of()
    offered(desk, 7, 1.0)
    assert told(desk.tick(2.0)) == [("reserve", 2, 7)]
    assert offered(desk, 8, 2.1) == [("reserve", 2, 8)], "who is late is not asked for others either"
    assert told(desk.reserved(7, 1, 2.5)) == [("cancel", 2, 7), ("send", SENDER, 7)]
    assert desk.reserved(7, 2, 2.6) == [], "the other one has been told"
    assert told(desk.no_room(8, 2, 2.7)) == [("reserve", 1, 8)], "it has answered all"
    assert desk.num_coming(1) == 2 and desk.num_coming(2) == 0
    desk.check_invariants()


def test_who_is_late_is_asked_again_when_it_has_answered_all() -> None:
    """Also what nobody wants to know any more: the answer to it is not taken for that to the next question."""
    desk = desk_of(receivers=(1,))
    for key in (7, 8):
        offered(desk, key, 1.0)
    assert desk.tick(2.0) == []
    assert told(desk.withdraw(7, 2.1)) == [("cancel", 1, 7)]
    assert told(desk.withdraw(8, 2.1)) == [("cancel", 1, 8)]
    assert offered(desk, 8, 2.2) == offered(desk, 9, 2.2) == []
    assert desk.reserved(8, 1, 2.3) == [], "of the one that was withdrawn"
    assert desk.reserved(7, 1, 2.3) == []
    assert told(desk.tick(2.3)) == [("reserve", 1, 8), ("reserve", 1, 9)]
    desk.worker_gone(1, 5.0)
    assert told(desk.tick(5.0)) == [], "the gone one is remembered as full"
    desk.room_may_be_there()
    assert told(desk.tick(5.1)) == [("reserve", 1, 8), ("reserve", 1, 9)], "it is back"
    desk.check_invariants()


def test_who_may_go_to_the_late_one_alone_holds_up_nobody() -> None:
    """And who waits for room does: it was there before."""

    def choose(moving: Moving[str], away: AbstractSet[int]) -> int | None:
        able = (1,) if moving.key < 3 else (2,)
        return next((worker for worker in able if worker not in away), None)

    desk: HandoverDesk[str] = HandoverDesk(LIMITS, choose)
    for key in (1, 2):
        offered(desk, key, 1.0)
    desk.tick(2.0)
    assert offered(desk, 3, 2.0) == [("reserve", 2, 3)], "1 and 2 wait for an answer"
    desk.no_room(1, 1, 2.1)
    desk.no_room(2, 1, 2.1)
    assert offered(desk, 4, 2.2) == [], "1 and 2 wait for room"
    desk.check_invariants()


def test_so_many_questions_wait_for_each() -> None:
    desk = wanted_by({key: 1 if key < 6 else 2 for key in range(12)}, most_asked=3)
    asked = [order for key in range(12) for order in offered(desk, key, 0.0)]
    assert asked == [("reserve", 1 if key < 6 else 2, key) for key in (0, 1, 2, 6, 7, 8)]
    assert told(desk.no_room(1, 1, 0.1)) == [("reserve", 1, 3)], "1 now wants 2, and that has been asked enough"
    assert told(desk.reserved(6, 2, 0.2)) == [("send", SENDER, 6), ("reserve", 2, 1)]
    desk.check_invariants()
