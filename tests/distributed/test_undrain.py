"""A worker that was drained comes back: at once while it drains, by another process of its launcher once it has ended."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from click import ClickException

from octavo.cli.cluster import _has_ended, _takes_requests, status_lines
from octavo.distributed.autoscale import ScaleLimits
from octavo.distributed.cluster_engine import ClusterEngine
from octavo.distributed.cluster_options import ClusterOptions
from octavo.distributed.messages import Goodbye
from octavo.distributed.operations import Operations
from octavo.engine.serving import UnknownWorker
from tests.distributed.clusters import PATIENT
from tests.distributed.test_front_end import Launcher, engine_of
from tests.distributed.test_stub_worker import SECRET, cut_off, expected, front_end, open_stream, read, stub, until


async def two(launcher: Launcher, options: ClusterOptions | None = None) -> tuple[ClusterEngine, Any, Any]:
    """A front end with "a" and "b", each with its stub and the task of that."""
    engine = engine_of(launcher, options)
    engine.start()
    await launcher.opened.wait()
    a = stub(engine, "a")
    await until(lambda: len(engine.open_links()) == 1)
    b = stub(engine, "b")
    await until(lambda: len(engine.open_links()) == 2)
    return engine, a, b


async def gone(engine: ClusterEngine, name: str) -> None:
    await until(lambda: engine.control.find(name) is None)


def absent(engine: ClusterEngine) -> list[tuple[str, str, str]]:
    return [(one["name"], one["state"], one["reason"]) for one in engine.cluster.status()["absent"]]


def test_while_it_drains_it_takes_requests_again_and_is_not_told_to_end() -> None:
    async def run() -> None:
        launcher = Launcher("a", "b")
        engine, (a, task), (_, other) = await two(launcher)
        stream = open_stream(engine, 0, 3)
        await until(lambda: a.num_attempts == 1)
        for _ in range(2):  # the second time comes at once: what was begun by the first has been left off
            drained = await engine.cluster.drain("a")
            assert drained["draining"] and launcher.kept == ["b"] and [link.name for link in engine.open_links()] == ["b"]
            assert not _has_ended(engine.cluster.status(), drained)
            entry = await engine.cluster.undrain("a")
            assert (entry["name"], entry["state"], entry["draining"], entry["attempts"]) == ("a", "ready", False, 1)
            assert launcher.kept == ["b", "a"] and not launcher.released and len(engine.open_links()) == 2
            with pytest.raises(ClickException, match="a is not drained any more"):
                _has_ended(engine.cluster.status(), drained)
        assert _takes_requests(engine.cluster.status(), entry)
        a.give(3)
        assert await read(stream) == expected(0, 3)
        await until(lambda: not engine.cluster._leaving)
        assert not task.done() and len(engine.open_links()) == 2

        await engine.cluster.drain("a")
        await asyncio.wait_for(task, 60)
        await gone(engine, "a")
        assert launcher.released == ["a"]
        await engine.stop()
        await other

    asyncio.run(run())


def test_what_waits_goes_to_it_at_once() -> None:
    async def run() -> None:
        launcher = Launcher("a", "b")
        engine, (a, task), (b, other) = await two(launcher)
        streams = [open_stream(engine, i, 3) for i in range(2)]
        await until(lambda: a.num_attempts == b.num_attempts == 1)
        await engine.cluster.drain("a")
        other.cancel()
        await gone(engine, "b")
        assert engine.flights.num_waiting == 1
        await engine.cluster.undrain("a")
        assert engine.flights.num_waiting == 0
        await until(lambda: a.num_attempts == 2)
        a.give(3)
        assert [await read(stream) for stream in streams] == [expected(i, 3) for i in range(2)]
        await engine.stop()
        await task

    asyncio.run(run())


@pytest.mark.parametrize("is_ending", [False, True])
def test_once_it_has_ended_its_launcher_starts_it_again(is_ending: bool) -> None:
    """Also while its process is not quite at its end."""

    async def run() -> None:
        launcher = Launcher("a", "b")
        launcher.is_ending = is_ending
        engine, (_, task), (_, other) = await two(launcher)
        await engine.cluster.drain("a")
        await asyncio.wait_for(task, 60)
        await gone(engine, "a")
        assert absent(engine) == [("a", "drained", "")]
        status = engine.cluster.status()
        assert status_lines(status)[-1] == "a is not there: drained; `octavo cluster undrain` starts it again"
        with pytest.raises(ClickException, match="a is drained again"):
            _takes_requests(status, {"name": "a"})
        entry = await engine.cluster.undrain("a")
        assert (entry["name"], entry["role"], entry["state"], entry["draining"], entry["pid"]) == ("a", "both", "starting", False, None)
        assert launcher.kept == ["b", "a"] and absent(engine) == [("a", "starting", "")]
        assert not _takes_requests(engine.cluster.status(), entry)
        if is_ending:
            with pytest.raises(ValueError, match="a is being started again; a restart can begin when that is done"):
                await engine.cluster.restart()
            await until(lambda: launcher.replaced == ["a"] and not engine.cluster._coming)
        assert launcher.replaced == (["a"] if is_ending else [])
        with pytest.raises(ValueError, match="a is not drained; it is being started"):
            await engine.cluster.undrain("a")
        launcher.trouble = "worker a cannot run; its message is above"
        engine.control.last_words["a"] = "the model's file is gone"
        with pytest.raises(ValueError, match="a is not drained; it cannot run: the model's file is gone"):
            await engine.cluster.undrain("a")
        assert absent(engine) == [("a", "failed", "the model's file is gone")]
        with pytest.raises(ClickException, match="a cannot run: the model's file is gone"):
            _takes_requests(engine.cluster.status(), entry)
        launcher.trouble = None
        again, last = stub(engine, "a")
        await until(lambda: len(engine.open_links()) == 2)
        assert not absent(engine) and not engine.control.find("a").worker.draining  # type: ignore[union-attr]
        await engine.stop()
        await asyncio.gather(other, last)

    asyncio.run(run())


def test_one_that_has_been_told_to_end_is_followed_by_another() -> None:
    async def run() -> None:
        launcher = Launcher("a", "b")
        launcher.is_ending = True
        engine, (a, task), (_, other) = await two(launcher)
        link = engine.control.find("a")
        assert link is not None
        await engine.cluster.drain("a")
        engine.control.shut_down(link)
        entry = await engine.cluster.undrain("a")
        assert entry["state"] == "starting" and launcher.kept == ["b", "a"] and not link.takes_requests
        await until(lambda: launcher.replaced == ["a"])
        await asyncio.wait_for(task, 60)
        await engine.stop()
        await other

    asyncio.run(run())


def test_a_worker_from_elsewhere_joins_again_by_itself_and_that_is_said() -> None:
    """Under its name as another process, which is a worker like any; the process that was drained goes on leaving, cut off or not."""

    async def run() -> None:
        engine = await front_end()
        (a, task), (_, other) = stub(engine, "a"), stub(engine, "b")
        await until(lambda: len(engine.open_links()) == 2)
        stream = open_stream(engine, 0, 3)
        await until(lambda: a.num_attempts == 1)
        await engine.cluster.drain("a")
        await cut_off(engine, a, task)
        await asyncio.wait_for(a.run(engine.control.address, SECRET), 60)  # it joins, and is told to end: it has not forgotten
        await gone(engine, "a")
        assert a.num_attempts == 0 and engine.flights.num_lost == 1
        with pytest.raises(ValueError, match="a came from elsewhere and has ended; start it there again .*: it joins by itself"):
            await engine.cluster.undrain("a")
        assert not isinstance(await refused(engine, "a"), UnknownWorker)
        again, last = stub(engine, "a")
        await until(lambda: len(engine.open_links()) == 2)
        with pytest.raises(ValueError, match="a is not being drained; it is ready"):
            await engine.cluster.undrain("a")
        engine.abort(stream)
        await engine.stop()
        await asyncio.gather(other, last)

    asyncio.run(run())


def test_one_from_elsewhere_that_still_drains_takes_requests_again() -> None:
    async def run() -> None:
        engine = await front_end()
        (a, task), (_, other) = stub(engine, "a"), stub(engine, "b")
        await until(lambda: len(engine.open_links()) == 2)
        stream = open_stream(engine, 0, 3)
        await until(lambda: a.num_attempts == 1)
        await engine.cluster.drain("a")
        await engine.cluster.undrain("a")
        await cut_off(engine, a, task)
        back = asyncio.create_task(a.run(engine.control.address, SECRET))
        await until(lambda: len(engine.open_links()) == 2)  # the same process: nobody holds the drain against it
        engine.abort(stream)
        await engine.stop()
        await asyncio.gather(other, back)

    asyncio.run(run())


def test_of_workers_from_elsewhere_that_were_drained_nothing_is_listed_or_kept() -> None:
    """They may each have a name of their own, or join again under it. The launcher's are listed while they are not here."""

    async def run() -> None:
        launcher = Launcher("mine", "b")
        engine = engine_of(launcher)
        engine.start()
        await launcher.opened.wait()
        (_, mine), (_, other) = stub(engine, "mine"), stub(engine, "b")
        await until(lambda: len(engine.open_links()) == 2)
        for name in ("x", "y", "x", "mine"):
            task = mine if name == "mine" else stub(engine, name)[1]
            await until(lambda name=name: any(link.name == name for link in engine.open_links()))  # type: ignore[misc]
            await engine.cluster.drain(name)
            await asyncio.wait_for(task, 60)
            await gone(engine, name)
        assert str(await refused(engine, "nobody")).endswith("there are: b; drained: mine") and list(engine.cluster._by_hand) == ["mine"]
        _, again = stub(engine, "mine")  # somebody has started one of that name elsewhere
        await until(lambda: len(engine.open_links()) == 2)
        assert str(await refused(engine, "nobody")).endswith("drained: none")
        await engine.stop()
        await asyncio.gather(other, again)

    asyncio.run(run())


async def refused(engine: ClusterEngine, name: str) -> Exception:
    try:
        await engine.cluster.undrain(name)
    except ValueError as error:
        return error
    raise AssertionError(f"{name} was taken back")


def test_what_cannot_be_is_refused_with_the_reason() -> None:
    async def run() -> None:
        launcher = Launcher("a", "b")
        engine, (a, task), (b, other) = await two(launcher)
        assert str(await refused(engine, "c")) == "'c' is not here; there are: a, b; drained: none"
        assert isinstance(await refused(engine, "c"), UnknownWorker)
        for change in (engine.cluster.drain, engine.cluster.undrain):
            with pytest.raises(UnknownWorker) as unknown:
                await change("x" * 100_000)
            assert len(str(unknown.value)) < 300, "a name that is none is not given back whole"
        assert str(await refused(engine, "a")) == "a is not being drained; it is ready"
        stream = open_stream(engine, 0, 3)
        await until(lambda: a.num_attempts == 1)

        a._channel.send(Goodbye("it got signal 15"))
        await until(lambda: len(engine.open_links()) == 1)
        assert str(await refused(engine, "a")) == "a ends of its own accord (it got signal 15): another takes its place"
        await engine.cluster.drain("a")  # that is for good, whatever it said itself
        assert launcher.released == ["a"]
        assert str(await refused(engine, "a")).endswith("start it again where it runs")
        a.give(3)
        assert await read(stream) == expected(0, 3)
        await asyncio.wait_for(task, 60)
        await gone(engine, "a")
        assert str(await refused(engine, "c")).endswith("there are: b; drained: a")

        await engine.cluster.restart()
        for change in (engine.cluster.drain, engine.cluster.undrain):
            with pytest.raises(ValueError, match="a restart is going on"):
                await change("b")
        await asyncio.wait_for(other, 60)
        await engine.stop()
        assert str(await refused(engine, "a")) == "the server is shutting down"

    asyncio.run(run())


def test_where_the_number_is_scaled_it_comes_back_into_a_place_that_is_free() -> None:
    """What the scaler drains itself has kept its place."""

    async def run() -> None:
        launcher = Launcher("a", "b")
        engine, (_, task), (_, other) = await two(launcher)
        operations: Operations = engine.cluster
        operations._scale = {"both": ScaleLimits(most=2)}
        link = engine.control.find("a")
        assert link is not None
        engine.control.fleet.drain(link.worker)
        assert (await operations.undrain("a"))["draining"] is False
        await operations.drain("a")
        await asyncio.wait_for(task, 60)
        await gone(engine, "a")
        assert absent(engine) == []  # it is followed, and not lacking
        with pytest.raises(ValueError, match="a has been drained already, and has ended"):
            await operations.drain("a")
        launcher.kept.append("c")  # the scaler has started another
        found = str(await refused(engine, "a"))
        assert found == "a would be one worker more than --max-workers (2): others have taken its place; drain one of them"
        launcher.release("c")
        await operations.undrain("a")
        assert launcher.kept == ["b", "a"]
        await engine.stop()
        await other

    asyncio.run(run())


def test_processes_that_are_remembered_are_few() -> None:
    async def run() -> None:
        engine = await front_end()
        _, other = stub(engine, "b")
        await until(lambda: len(engine.open_links()) == 1)
        operations = engine.cluster
        operations._sent_away.update({f"boot-{i}": (f"w{i}", True) for i in range(256)})
        one, running = stub(engine, "one")
        await until(lambda: len(engine.open_links()) == 2)
        await operations.drain("one")
        assert len(operations._sent_away) == 256 and list(operations._sent_away)[-1] == one.boot_id
        await asyncio.wait_for(running, 60)
        await engine.stop()
        await other

    asyncio.run(run())


def test_options_of_the_engine_say_how_many_there_may_be() -> None:
    class Growing(Launcher):
        def add(self, role: str) -> str:
            raise AssertionError("nobody is to be started")

    options = ClusterOptions(liveness=PATIENT, scale={"both": ScaleLimits(most=3)})
    engine = engine_of(Growing("a"), options)
    assert engine.cluster._scale["both"].most == 3 and not engine_of(Launcher("a")).cluster._scale
