"""A worker that may not join comes again and again: logs have few lines of it, and it comes more and more seldom."""

from __future__ import annotations

import asyncio
import itertools
import logging
from functools import partial
from typing import Any

import msgspec
import pytest

from octavo.distributed import control
from octavo.distributed import worker as worker_module
from octavo.distributed.flood_log import MAX_LINES, FloodLog
from octavo.distributed.messages import Ready
from octavo.distributed.worker import WorkerOptions, WorkerRefused, next_wait_s
from octavo.distributed.worker_engine import WorkerEngine
from tests.distributed.test_worker import PARAMS, WAIT_S, answer, front_end, load, until, worker

NUM_TRIES = MAX_LINES + 6


def test_refused_it_waits_longer_each_time_and_not_for_ever() -> None:
    def waits(was_refused: bool) -> list[float]:
        return list(itertools.accumulate(range(12), lambda wait_s, _: next_wait_s(wait_s, was_refused), initial=0.1))[1:]

    assert waits(True)[:8] == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6]) and set(waits(True)[8:]) == {30.0}
    assert set(waits(False)[4:]) == {2.0}
    assert next_wait_s(30.0, False) == 2.0, "when the front end is gone it looks for one as always"


def test_with_another_secret_it_comes_more_and_more_seldom_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody listens it does not: a front end that comes again is to be found soon."""
    told = list[bool]()
    monkeypatch.setattr(worker_module, "next_wait_s", lambda wait_s, was_refused: told.append(was_refused) or 0.001)
    monkeypatch.setattr(worker_module, "RETRY_S", (0.001, 0.001))

    async def run() -> None:
        async with front_end() as engine:
            address = engine.control.address
            server = worker_module.WorkerServer(address, b"no secret of theirs", WorkerOptions("a"), load)
            task = asyncio.create_task(server.run())
            await until(lambda: len(told) >= 3)
            assert set(told) == {True}
        told.clear()
        await until(lambda: len(told) >= 3 and not told[-1])
        server._end()
        await task

    asyncio.run(run())


def lines(caplog: pytest.LogCaptureFixture, logger: str, level: int) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == logger and record.levelno >= level]


@pytest.fixture
def tries(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of all workers: whether each connection served. They wait no time between two."""
    found = list[bool]()
    serve = worker_module.WorkerServer._serve

    async def counted(self: Any, channel: Any) -> bool:
        found.append(await serve(self, channel))
        return found[-1]

    monkeypatch.setattr(worker_module.WorkerServer, "_serve", counted)
    monkeypatch.setattr(worker_module, "next_wait_s", lambda wait_s, was_refused: 0.001)
    monkeypatch.setattr(worker_module, "RETRY_S", (0.001, 0.001))
    monkeypatch.setattr(control, "FloodLog", partial(FloodLog, period_s=3600.0))  # however slow this machine is
    return found


def test_of_two_workers_of_one_name_the_second_says_once_why_it_waits(caplog: pytest.LogCaptureFixture, tries: list[bool]) -> None:
    caplog.set_level(logging.DEBUG, "octavo")

    async def run() -> None:
        async with front_end() as engine:
            first, task = worker(engine.control.address, "a")
            await until(lambda: bool(engine.open_links()))
            second, other = worker(engine.control.address, "a")
            await until(lambda: len(tries) >= NUM_TRIES)
            first.leave("the test is over")
            await asyncio.wait_for(task, WAIT_S)
            await until(lambda: any(link.worker.boot_id == second.options.boot_id for link in engine.open_links()))
            assert len((await answer(engine, "r")).outputs[0].token_ids) == 40
        await other

    asyncio.run(run())
    why = "name: 'a' is not allowed; a worker of that name is here, from "
    told = [line for line in lines(caplog, "octavo.worker", logging.INFO) if "refuses" in line]
    assert len(told) == 1 and f"refuses this worker for now, and it tries again: {why}" in told[0]
    refused = [line for line in lines(caplog, "octavo.cluster", logging.WARNING) if line.startswith("refused worker")]
    assert len(refused) == MAX_LINES + 1 and all(line.startswith(f"refused worker a: {why}") for line in refused[:-1])
    assert refused[-1].startswith("refused worker: ") and why in refused[-1], "the others are counted"
    assert len(lines(caplog, "octavo.worker", logging.INFO)) <= 5, "what both of them say in all"


def test_a_worker_that_differs_comes_seldom_while_answers_are_begun(
    caplog: pytest.LogCaptureFixture, tries: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It loads its model, is refused when it says that it is ready, and may come when those answers are over: once it did so without a
    pause."""
    ready_of = worker_module.ready_of
    caplog.set_level(logging.DEBUG, "octavo")

    def other(engine: WorkerEngine) -> Ready:
        ready = ready_of(engine)
        return msgspec.structs.replace(ready, fingerprint=f"{ready.fingerprint}:other")

    async def run() -> None:
        async with front_end() as engine:
            _, task = worker(engine.control.address, "a")
            await until(lambda: bool(engine.open_links()))
            begun = engine.prepare_checked([40, 41], engine.check_params(PARAMS), "begun")
            stream = engine.submit([begun])
            await stream.read()
            task.cancel()
            await until(lambda: not len(engine.control.fleet))
            assert engine.is_amid_answers()
            monkeypatch.setattr(worker_module, "ready_of", other)
            del tries[:]
            _, waiting = worker(engine.control.address, "b")
            await until(lambda: len(tries) >= NUM_TRIES)
            assert not any(tries), "none of these was a connection that served"
            engine.abort(stream)
            await until(lambda: bool(engine.open_links()))
        await waiting

    asyncio.run(run())
    told = [line for line in lines(caplog, "octavo.worker", logging.INFO) if "refuses" in line or "is ready" in line]
    assert [line.split(",")[0].split(":")[0] for line in told] == [
        "worker a is ready", "the front end refuses this worker for now", "worker b is ready",
    ]
    of_b = [line for line in lines(caplog, "octavo.cluster", logging.INFO) if " b" in line and "ready" not in line]
    assert sum(line.startswith("refused worker b: it computes otherwise") for line in of_b) == MAX_LINES
    assert len(of_b) <= 2 * MAX_LINES + 4 and not any("is gone" in line and "refused" in line for line in of_b)


@pytest.mark.parametrize("another_is_there", [True, False])
def test_a_worker_that_is_refused_for_good_does_not_say_that_it_is_ready(
    another_is_there: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its model is loaded by then, and it has told the front end so: whoever watches its terminal took it for one that serves."""
    ready_of = worker_module.ready_of
    caplog.set_level(logging.INFO, "octavo.worker")
    told = partial(lines, caplog, "octavo.worker", logging.INFO)

    def other(engine: WorkerEngine) -> Ready:
        ready = ready_of(engine)
        return msgspec.structs.replace(ready, fingerprint=f"{ready.fingerprint}:other") if another_is_there else (
            msgspec.structs.replace(ready, fingerprint="another/model"))  # fmt: skip

    async def run() -> None:
        async with front_end() as engine:
            if another_is_there:
                worker(engine.control.address, "a")
                await until(lambda: any("worker a is ready, for the front end at " in line for line in told()))
            monkeypatch.setattr(worker_module, "ready_of", other)
            _, task = worker(engine.control.address, "b")
            with pytest.raises(WorkerRefused, match="it computes otherwise" if another_is_there else "is another"):
                await asyncio.wait_for(task, WAIT_S)

    asyncio.run(run())
    assert not any("worker b is ready" in line for line in told())
