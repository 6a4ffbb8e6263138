"""Requests wait for a worker as long as one may come, and not a moment longer: whoever they wait in vain for is named."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from octavo.bench.stub_worker import StubWorker
from octavo.distributed import cluster_engine
from octavo.distributed.cluster_engine import ClusterEngine
from octavo.distributed.cluster_options import ClusterOptions
from octavo.distributed.outlook import ALL_DRAINED, CANNOT_RUN
from octavo.engine.event_stream import EngineUnavailable, EventStream
from octavo.engine.serving import NO_WORKER
from tests.distributed.clusters import PATIENT
from tests.distributed.test_front_end import Launcher, engine_of
from tests.distributed.test_stub_worker import expected, open_stream, read, stub, until

OPTIONS = ClusterOptions(liveness=PATIENT, worker_wait_s=3600.0)
WHY = "no worker can run: a: model: '/models/m.gguf' is not there"  # for the log alone


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_engine, "WATCH_S", 0.005)


@asynccontextmanager
async def one_lost(launcher: Launcher, others_may_join: bool = False) -> AsyncIterator[tuple[ClusterEngine, EventStream]]:
    """A front end whose only worker, "a", has just died with a request of which a token has been sent."""
    engine = engine_of(launcher, OPTIONS, others_may_join)
    engine.start()
    await launcher.opened.wait()
    worker, task = stub(engine, "a")
    await engine.ready()
    stream = open_stream(engine, 0, 3)
    await until(lambda: worker.num_attempts == 1)
    worker.give(1)
    (event,) = await stream.read()
    assert event.token_ids == expected(0, 1)
    task.cancel()
    await until(lambda: not len(engine.control.fleet))
    yield engine, stream
    engine.flights.check_invariants()
    await engine.stop()


async def comes(engine: ClusterEngine) -> tuple[StubWorker, asyncio.Task[None]]:
    worker, task = stub(engine, "a")
    await until(lambda: engine.open_links())
    return worker, task


async def stays(engine: ClusterEngine, num_looks: int = 8) -> None:
    """What waits is not ended by so many looks."""
    number = len(engine.flights)
    for _ in range(num_looks):
        engine._look()
    assert len(engine.flights) == number


def test_while_the_front_end_is_stopped_itself_no_time_runs() -> None:
    """Its workers have left it meanwhile, and come back: what they had was not waiting in vain."""

    async def run() -> None:
        async with one_lost(Launcher("a"), others_may_join=True) as (engine, stream):
            await stays(engine)
            skipped_s, begin_s = 0.0, engine.clock.now()
            engine.outlook._now = lambda: begin_s + skipped_s
            for _ in range(3):
                skipped_s += 1e6  # it was stopped
                await stays(engine)
            for _ in range(3590):
                skipped_s += 1.0
                engine._look()
            await stays(engine)
            while len(engine.flights):
                skipped_s += 1.0
                engine._look()
            (event,) = await stream.read()
            assert (event.error_code, event.error) == (NO_WORKER, "no worker has been there for 3600 s")

    asyncio.run(run())


def test_what_waits_ends_at_once_when_no_worker_can_run_any_more_and_new_requests_are_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Clients learn no path of a worker's host; the log has what it said, once."""

    async def run() -> None:
        async with one_lost(launcher := Launcher("a")) as (engine, stream):
            other = open_stream(engine, 1, 3)
            await stays(engine)
            engine.control.last_words |= {"a": "model: '/models/m.gguf' is not there", "b": "of no interest: nobody is to be called so"}
            launcher.trouble, launcher.is_at_end = "worker a cannot run; its message is above", True
            for waiting in (stream, other):
                (event,) = await asyncio.wait_for(waiting.read(), 60)
                assert (event.error_code, event.error) == (NO_WORKER, CANNOT_RUN)
            with pytest.raises(EngineUnavailable, match=CANNOT_RUN):
                open_stream(engine, 2, 3)
            await stays(engine)
            assert [one.getMessage() for one in caplog.records].count(WHY) == 1
            assert engine.cluster.status()["absent"] == [{"name": "a", "state": "failed", "reason": "model: '/models/m.gguf' is not there"}]
            health = engine.health()
            assert (health.live, health.ready, health.detail) == (False, False, "no worker can come any more: none is there")
            engine.control.last_words.clear()
            engine.outlook._logged = None
            engine._look()
            assert caplog.records[-1].getMessage() == f"no worker can run: {launcher.trouble}"

            await launcher.replace("a")  # it is tried again
            waiting = open_stream(engine, 3, 3)
            await stays(engine)
            worker, task = await comes(engine)
            await until(lambda: worker.num_attempts == 1)
            worker.give(3)
            assert await read(waiting) == expected(3, 3)
        await task

    asyncio.run(run())


def test_whoever_starts_workers_that_cannot_run_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """By what is raised, however often the front end looks before and after that; the log, which the same person reads, says nothing."""

    async def run() -> None:
        engine = engine_of(launcher := Launcher("a"), OPTIONS, others_may_join=False)
        engine.start()
        await launcher.opened.wait()
        ready = asyncio.create_task(engine.ready())
        await asyncio.sleep(0)
        engine.control.last_words["a"] = "no memory"
        launcher.is_at_end = True
        for _ in range(3):
            engine._look()
        launcher.trouble = "worker a cannot run; its message is above"
        with pytest.raises(EngineUnavailable, match="the workers cannot be started: a: no memory"):
            await ready
        for _ in range(3):
            engine._look()
        await engine.stop()
        assert not caplog.records

    asyncio.run(run())


def test_while_others_may_join_requests_wait_for_them() -> None:
    async def run() -> None:
        async with one_lost(launcher := Launcher("a"), others_may_join=True) as (engine, stream):
            launcher.trouble, launcher.is_at_end = "worker a cannot run; its message is above", True
            await stays(engine)
            other, task = stub(engine, "from-elsewhere")
            await until(lambda: other.num_attempts == 1)
            other.give(2)
            assert await read(stream) == expected(0, 3)[1:]
        await task

    asyncio.run(run())


def test_a_worker_that_is_there_may_take_requests_unless_it_is_on_its_way_out() -> None:
    """One that drains takes none, and where nobody is kept running no other follows; what it has it goes on with."""

    async def run() -> None:
        async with one_lost(launcher := Launcher("a")) as (engine, stream):
            worker, task = await comes(engine)
            await until(lambda: worker.num_attempts == 1)
            launcher.is_at_end = True
            (link,) = engine.control
            assert engine.outlook.hopeless() is None
            launcher.release("a")
            engine.control.fleet.drain(link.worker)
            await stays(engine)
            with pytest.raises(EngineUnavailable, match=ALL_DRAINED):
                open_stream(engine, 1, 3)
            health = engine.health()
            assert (health.live, health.ready, health.detail) == (True, False, "no worker can come any more: a is draining")
            worker.give(2)
            assert await read(stream) == expected(0, 3)[1:]
            engine.control.fleet.keep(link.worker)
            again = open_stream(engine, 2, 3)
            await until(lambda: worker.num_attempts == 1)
            worker.give(3)
            assert await read(again) == expected(2, 3)
        await task

    asyncio.run(run())


def test_where_the_number_of_workers_is_scaled_another_is_started_for_the_last_that_was_drained() -> None:
    async def run() -> None:
        async with one_lost(launcher := Launcher("a")) as (engine, _):
            launcher.release("a")
            launcher.is_at_end = True
            assert engine.outlook.hopeless() == ALL_DRAINED
            engine.outlook._grows = True
            assert engine.outlook.hopeless() is None

    asyncio.run(run())
