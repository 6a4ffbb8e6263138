"""Lines that anybody can bring about: a few as they come, the rest counted, and every one of them told."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable

import pytest

from octavo.distributed.channel import Address, Listener, connect
from octavo.distributed.flood_log import MAX_LINES, MAX_REASONS, FloodLog
from octavo.distributed.messages import from_worker, to_worker

logger = logging.getLogger("octavo.tests")


class Timers:
    """Timers that are over when the test says so."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []
        self.running: list[Timer] = []

    def __call__(self, seconds: float, call: Callable[[], None]) -> Timer:
        assert seconds == 10.0
        timer = Timer(self, call)
        return timer

    def pass_time(self) -> None:
        (timer,) = self.running
        self.running.clear()
        timer.call()


class Timer:
    daemon = False

    def __init__(self, timers: Timers, call: Callable[[], None]) -> None:
        self.timers, self.call = timers, call

    def start(self) -> None:
        assert self.daemon, "it must not keep the process"
        self.timers.running.append(self)

    def cancel(self) -> None:
        if self in self.timers.running:
            self.timers.running.remove(self)


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return found


def test_a_few_are_lines_and_the_rest_a_count(caplog: pytest.LogCaptureFixture) -> None:
    timers = Timers()
    log = FloodLog(logger, "turned away", timer=timers)
    for i in range(MAX_LINES):
        log.say("no secret", f"from {i}")
    assert told(caplog) == [f"turned away from {i}: no secret" for i in range(MAX_LINES)]
    for i in range(7):
        log.say("no secret" if i % 2 else "too late")
    assert told(caplog) == []
    timers.pass_time()
    assert told(caplog) == ["turned away: 7 more within 10 s (4 times: too late, 3 times: no secret)"]
    log.say("no secret")  # it goes on: a few lines again
    assert told(caplog) == ["turned away: no secret"]
    timers.pass_time()
    assert told(caplog) == [] and not timers.running, "nothing more came: nothing is told, and no timer runs"
    log.say("late")
    assert told(caplog) == ["turned away: late"] and len(timers.running) == 1


def test_what_was_counted_is_told_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    timers = Timers()
    log = FloodLog(logger, "turned away", timer=timers)
    for _ in range(MAX_LINES + 3):
        log.say("no secret")
    told(caplog)
    stale = timers.running[0]
    log.flush()
    assert told(caplog) == ["turned away: 3 more within 10 s (3 times: no secret)"] and not timers.running
    log.say("no secret")
    stale.call()  # it had been under way when it was cancelled
    assert told(caplog) == ["turned away: no secret"] and len(timers.running) == 1
    log.flush()
    assert told(caplog) == []


def test_without_a_timer_each_is_a_line(caplog: pytest.LogCaptureFixture) -> None:
    """A process that can start no more threads is told so, and whoever says it goes on."""
    timers = Timers()

    class NoThreads(Timer):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    log = FloodLog(logger, "turned away", timer=lambda seconds, call: (Timer if i >= 20 else NoThreads)(timers, call))
    for i in range(20):
        log.say("no secret", f"from {i}")
    assert told(caplog) == [f"turned away from {i}: no secret" for i in range(20)]
    for i in range(20, 20 + MAX_LINES + 2):
        log.say("no secret", f"from {i}")
    assert len(told(caplog)) == MAX_LINES
    timers.pass_time()
    assert told(caplog) == ["turned away: 2 more within 10 s (2 times: no secret)"]


def test_without_a_timer_that_goes_on_what_was_counted_is_told_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    """A period is over, and no other can begin."""
    timers = Timers()
    log = FloodLog(logger, "turned away", timer=timers)
    for _ in range(MAX_LINES + 3):
        log.say("no secret")
    told(caplog)

    def no_threads(seconds: float, call: Callable[[], None]) -> Timer:
        raise RuntimeError("can't start new thread")

    log._make_timer = no_threads
    timers.pass_time()
    assert told(caplog) == ["turned away: 3 more within 10 s (3 times: no secret)"]
    log.say("no secret")
    assert told(caplog) == ["turned away: no secret"]


def test_reasons_that_strangers_think_of_take_no_memory(caplog: pytest.LogCaptureFixture) -> None:
    timers = Timers()
    log = FloodLog(logger, "turned away", timer=timers, max_lines=0)
    for i in range(1000):
        log.say(f"reason {i}")
    assert len(log._counts) == MAX_REASONS + 1
    timers.pass_time()
    (line,) = told(caplog)
    assert line.startswith(f"turned away: 1000 more within 10 s ({1000 - MAX_REASONS} times: other reasons, 1 times: reason ")


def test_strangers_at_the_door_are_all_counted_and_few_are_lines(caplog: pytest.LogCaptureFixture) -> None:
    """Over real sockets: connections that prove nothing."""

    async def run() -> int:
        listener = Listener(b"a secret of the tests", from_worker, lambda channel: pytest.fail("it has been let in"))
        await listener.open(Address("127.0.0.1", 0))
        for _ in range(40):
            with pytest.raises(ConnectionError):
                await connect(listener.address, b"another secret of the tests", to_worker)
        while listener._unproven:
            await asyncio.sleep(0.001)
        listener.close()
        return 40

    with caplog.at_level(logging.WARNING, "octavo.distributed"):
        number = asyncio.run(run())
    lines = told(caplog)
    counts = [int(found[1]) for line in lines if (found := re.search(r"turned away: (\d+) more", line)) is not None]
    shown = [line for line in lines if line.startswith("a connection was turned away from ")]
    assert sum(counts) + len(shown) == number == 40
    assert len(shown) < 40 and all("does not know the secret" in line for line in lines)
