"""A process that was told to end, and that another is to follow: cut off, hung, back again, drained and undrained over and over."""

from __future__ import annotations

import asyncio

import pytest
from click import ClickException

from octavo.cli.cluster import _takes_requests
from octavo.distributed.launcher import KeptWorker, KeptWorkers, cancelled
from tests.distributed.test_front_end import EndsWhenTold
from tests.distributed.test_stub_worker import SECRET, cut_off, open_stream, stub, until
from tests.distributed.test_undrain import absent, gone, refused, two


@pytest.mark.parametrize("num_cuts", [1, 3])
def test_a_process_that_connects_again_does_not_take_back_that_it_is_followed(num_cuts: int) -> None:
    """It was cut off while it drained, another was asked for, and it comes back before it has ended: it goes on leaving."""

    async def run() -> None:
        launcher = EndsWhenTold("a", "b")
        engine, (a, task), (_, other) = await two(launcher)
        stream = open_stream(engine, 0, 3)
        await until(lambda: a.num_attempts == 1)
        await engine.cluster.drain("a")
        await cut_off(engine, a, task)
        assert (await engine.cluster.undrain("a"))["state"] == "starting"
        for _ in range(num_cuts):
            await asyncio.wait_for(a.run(engine.control.address, SECRET), 60)
            await gone(engine, "a")
            assert launcher.kept == ["b", "a"] and absent(engine) == [("a", "starting", "")]
        launcher.ends.set()
        await until(lambda: not engine.cluster._coming)
        assert launcher.replaced == ["a"]
        engine.abort(stream)
        await engine.stop()
        await other

    asyncio.run(run())


@pytest.mark.parametrize("is_cut", [False, True])
def test_whoever_waits_for_a_worker_passes_over_the_process_that_it_follows(is_cut: bool) -> None:
    """It drains, for as long as it takes to end; what it is followed by does not. Drained once more it is waited for in vain."""

    async def run() -> None:
        launcher = EndsWhenTold("a", "b")
        engine, (a, task), (_, other) = await two(launcher)
        stream = open_stream(engine, 0, 3)
        await until(lambda: a.num_attempts == 1)
        link = engine.control.find("a")
        assert link is not None
        await engine.cluster.drain("a")
        if is_cut:
            await cut_off(engine, a, task)
        else:
            link.is_leaving = True  # it has been told to end, and hangs
        entry = await engine.cluster.undrain("a")
        assert entry["follows"] == a.boot_id and entry["boot_id"] is None
        assert _takes_requests(engine.cluster.status(), entry) is False
        if not is_cut:
            await cut_off(engine, a, task)
        assert _takes_requests(engine.cluster.status(), entry) is False
        launcher.ends.set()
        again, last = stub(engine, "a")
        await until(lambda: len(engine.open_links()) == 2)
        assert _takes_requests(engine.cluster.status(), entry)
        open_stream(engine, 1, 3)
        open_stream(engine, 2, 3)
        await until(lambda: again.num_attempts > 0)
        await engine.cluster.drain("a")
        with pytest.raises(ClickException, match="a is drained again"):
            _takes_requests(engine.cluster.status(), entry)
        engine.abort(stream)
        await engine.stop()
        await asyncio.gather(other, last)

    asyncio.run(run())


def test_one_follows_a_process_however_often_it_is_drained_and_undrained() -> None:
    async def run() -> None:
        launcher = EndsWhenTold("a", "b")
        engine, (a, _), (_, other) = await two(launcher)
        open_stream(engine, 0, 3)
        await until(lambda: a.num_attempts == 1)
        link = engine.control.find("a")
        assert link is not None
        link.is_leaving = True  # it has been told to end, and hangs
        follows = set[asyncio.Task[None]]()
        for _ in range(3):
            await engine.cluster.drain("a")
            await engine.cluster.undrain("a")
            follows.add(engine.cluster._coming["a"])
            link.is_leaving = False  # it has come back, and is not told to end yet; it will be ended all the same
            assert str(await refused(engine, "a")) == "a is not drained; it is being started"
            link.is_leaving = True
            with pytest.raises(ValueError, match="a is being started again"):
                await engine.cluster.restart()
        launcher.ends.set()
        assert [await follow for follow in follows] == [None] and launcher.replaced == ["a"] and not engine.cluster._coming
        await engine.stop()
        await other

    asyncio.run(run())


def test_ending_a_keeper_leaves_alone_one_that_begins_meanwhile() -> None:
    """Somebody else, who has seen the first one end, has begun another."""

    class Kept(KeptWorkers[KeptWorker]):
        async def _keep(self, worker: KeptWorker) -> None:
            await asyncio.Event().wait()

    async def run() -> None:
        worker = KeptWorker("a", "both")
        kept = Kept({"a": worker})
        await kept._end_keeper(worker, 60.0)  # there is none
        kept.keep("a")
        first = worker.keeper
        assert first is not None
        first.add_done_callback(lambda _: kept.keep("a"))
        await kept._end_keeper(worker, 0.01)  # a hung one is cancelled
        second = worker.keeper
        assert first.cancelled() and second is not None and second is not first and not second.done()

        second.add_done_callback(lambda _: kept.keep("a"))
        ending = asyncio.create_task(kept._end_keeper(worker, 60.0))
        await asyncio.sleep(0)
        second.cancel()
        await ending
        third = worker.keeper
        assert third is not None and third is not second and not third.done()
        await cancelled(third)

    asyncio.run(run())
