"""When workers were there: what looks at them make of it."""

from __future__ import annotations

import asyncio

import pytest

from octavo.core.cluster_window import WindowAbsence
from octavo.distributed.attendance import Attendance, Presence, Seen
from tests.distributed.test_front_end import Launcher
from tests.distributed.test_stub_worker import cut_off, stub, until
from tests.distributed.test_undrain import two


def seen(name: str = "w", boot_id: str = "a", presence: Presence = Presence.OPEN) -> Seen:
    return Seen(name, "both", boot_id, presence, 100, 4096)


def looked(*looks: tuple[float, str]) -> Attendance:
    """Looks at one worker: a small letter is a process that takes requests, a capital one that it drains, "-" that it is away."""
    attendance = Attendance(600.0)
    for now, what in looks:
        presence = Presence.CLOSED if what.isupper() else Presence.OPEN
        attendance.look([] if what == "-" else [seen(boot_id=what.lower(), presence=presence)], now)
    return attendance


def absences(begin_s: float, *looks: tuple[float, str]) -> tuple[WindowAbsence, ...]:
    worker = looked(*looks).find("w")
    assert worker is not None
    return worker.absences(begin_s)


def test_absences_are_from_a_look_to_the_next_that_differs() -> None:
    assert absences(5.0, (1.0, "a"), (2.0, "a"), (9.0, "a")) == ()
    assert absences(5.0, (1.0, "a"), (7.0, "-"), (8.0, "-"), (9.0, "b")) == (WindowAbsence(2.0, 4.0),)
    assert absences(5.0, (1.0, "a"), (7.0, "-"), (9.0, "a")) == (WindowAbsence(2.0, 4.0, is_new=False),)
    assert absences(5.0, (1.0, "a"), (7.0, "A"), (8.0, "-"), (9.0, "b")) == (WindowAbsence(2.0, 4.0, drained=True),)
    assert absences(5.0, (1.0, "a"), (7.0, "A"), (9.0, "a")) == (WindowAbsence(2.0, 4.0, drained=True, is_new=False),)
    assert absences(5.0, (1.0, "a"), (7.0, "-")) == (WindowAbsence(2.0, None),)
    assert absences(5.0, (1.0, "a"), (6.0, "-"), (7.0, "b"), (8.0, "B")) == (WindowAbsence(1.0, 2.0), WindowAbsence(3.0, None, True))


def test_who_came_later_was_away_before_and_what_was_before_the_window_is_cut() -> None:
    assert absences(5.0, (8.0, "a")) == (WindowAbsence(0.0, 3.0),)
    assert absences(5.0, (1.0, "a"), (2.0, "-"), (3.0, "b")) == ()
    assert absences(5.0, (1.0, "a"), (2.0, "-"), (7.0, "b")) == (WindowAbsence(0.0, 2.0),)
    assert absences(5.0, (1.0, "a"), (2.0, "-")) == (WindowAbsence(0.0, None),)


def test_who_never_took_requests_has_not_come() -> None:
    attendance = looked((1.0, "A"), (2.0, "-"))
    assert attendance.find("w") is None and attendance.since(0.0) == {}
    attendance.look([seen("other")], 3.0)
    attendance.look([seen("other", presence=Presence.CLOSED), seen("late")], 5.0)
    assert list(attendance.since(4.0)) == ["other", "late"] and list(attendance.since(5.5)) == ["late"]


def test_what_is_long_past_is_forgotten() -> None:
    attendance = Attendance(600.0)
    for i in range(5000):
        attendance.look([seen(boot_id=str(i))] if i % 2 else [], float(i))
    worker = attendance.find("w")
    assert worker is not None and len(worker.spells) <= 602
    assert len(worker.absences(4999.0 - 600.0)) == pytest.approx(300, abs=1)
    attendance.look([], 5000.0)
    attendance.look([], 5601.0)
    assert attendance.find("w") is None


def test_what_is_lost_by_an_absence() -> None:
    lost, drained, gone = WindowAbsence(2.0, 4.0), WindowAbsence(2.0, 4.0, drained=True), WindowAbsence(2.0, None)
    assert [lost.lost_at(moment_s) for moment_s in (1.9, 2.0, 4.0, 4.1)] == [False, True, True, False]
    assert not drained.lost_at(3.0) and gone.lost_at(1e6)


def test_a_front_end_sees_who_drains_and_who_is_cut_off() -> None:
    async def run() -> None:
        engine, (_, task), (b, other) = await two(Launcher("a", "b"))

        def presences(name: str) -> list[Presence]:
            worker = engine.attendance.find(name)
            return [] if worker is None else [spell.presence for spell in worker.spells]

        assert presences("a") == presences("b") == [Presence.OPEN]
        stays = engine.control.find("a")
        assert stays is not None
        engine.control.fleet.drain(stays.worker)
        await until(lambda: presences("a") == [Presence.OPEN, Presence.CLOSED])
        engine.control.fleet.keep(stays.worker)
        await until(lambda: presences("a") == [Presence.OPEN, Presence.CLOSED, Presence.OPEN])
        await cut_off(engine, b, other)
        assert presences("b") == [Presence.OPEN, Presence.AWAY]
        _, other = stub(engine, "b")
        await until(lambda: presences("b") == [Presence.OPEN, Presence.AWAY, Presence.OPEN])
        worker = engine.attendance.find("b")
        assert worker is not None and len(worker.absences(worker.spells[0].begin_s)) == 1
        await engine.stop()
        await asyncio.gather(task, other)

    asyncio.run(run())
