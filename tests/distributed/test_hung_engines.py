"""A worker whose engine's thread hangs while its event loop speaks: it is found at any moment of its connection, and gets nothing; told to
end, it does."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from octavo.config import EngineConfig
from octavo.core.request import SamplingParams
from octavo.distributed import process_worker
from octavo.distributed.channel import Address
from octavo.distributed.cluster_engine import ClusterEngine
from octavo.distributed.cluster_options import ClusterOptions
from octavo.distributed.control import Link
from octavo.distributed.fleet import LivenessLimits, WorkerState
from octavo.distributed.process_worker import LocalProcesses
from octavo.distributed.worker import WorkerOptions, WorkerServer
from octavo.engine.engine import Engine
from octavo.engine.engine_thread import EngineThread
from octavo.engine.event_stream import EventStream
from octavo.engine.outputs import OutputEvent
from tests.distributed import scripted_worker
from tests.distributed.clusters import WAIT_S, cluster
from tests.engine.scripted import bigram_config, bigram_engine, bigram_model, byte_tokenizer

SECRET = b"a secret of the tests"
LIMITS = LivenessLimits(suspect_s=20.0, stall_s=0.5, gone_s=60.0)  # a busy machine may be slow to speak; whoever steps recovers


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.01)


class Hanging:
    """A front end, and the real worker "w", whose steps hang while ``gate`` is closed."""

    def __init__(self) -> None:
        model = bigram_model(byte_tokenizer(scripted_worker.PIECES))
        self.engine = ClusterEngine(model, bigram_config(), Address("127.0.0.1", 0), SECRET, ClusterOptions(liveness=LIMITS))
        self.gate = threading.Event()
        self.num_submitted = 0
        self.tasks: list[asyncio.Task[None]] = []

    def load(self, config: EngineConfig) -> Engine:
        engine = scripted_worker.load(config)
        step = engine.step

        def gated() -> list[OutputEvent]:
            self.gate.wait()
            return step()

        engine.step = gated  # type: ignore[method-assign]
        return engine

    async def __aenter__(self) -> Hanging:
        self.engine.start()
        assert self.engine._opening is not None
        await self.engine._opening
        self.server = WorkerServer(self.engine.control.address, SECRET, WorkerOptions("w"), self.load)
        self.tasks.append(asyncio.create_task(self.server.run()))
        return self

    async def __aexit__(self, *error: object) -> None:
        self.gate.set()
        self.engine.flights.check_invariants()
        await self.engine.stop()
        await asyncio.wait_for(asyncio.gather(*self.tasks), WAIT_S)

    def link(self) -> Link | None:
        return self.engine.control.find("w")

    def is_in(self, state: WorkerState) -> bool:
        return (link := self.link()) is not None and link.worker.state is state

    def submit(self) -> EventStream:
        self.num_submitted += 1
        params = self.engine.check_params(SamplingParams(max_tokens=5, seed=1, ignore_eos=True))
        return self.engine.submit([self.engine.prepare_checked([5, 7], params, f"r{self.num_submitted}")])


async def answered(stream: EventStream) -> int:
    """How many tokens there are."""
    number = 0
    while not stream.finished:
        for event in await asyncio.wait_for(stream.read(), WAIT_S):
            assert event.error is None, event.error
            number += len(event.token_ids)
    return number


def test_one_that_hangs_since_before_its_connection_was_cut_gets_nothing_until_it_steps_again(caplog: pytest.LogCaptureFixture) -> None:
    """Nor does it say that it is ready before that."""
    caplog.set_level(logging.INFO, "octavo.worker")

    def num_ready() -> int:
        return sum("worker w is ready" in record.getMessage() for record in caplog.records if record.name == "octavo.worker")

    async def run() -> None:
        async with Hanging() as hanging:
            hanging.gate.set()
            await until(hanging.engine.open_links)
            assert await answered(hanging.submit()) == 5
            await until(lambda: hanging.is_in(WorkerState.READY))  # a busy machine may have kept it from its steps for a while
            hanging.gate.clear()
            streams = [hanging.submit()]
            await until(lambda: hanging.is_in(WorkerState.SUSPECT))
            assert hanging.engine.flights.num_waiting == 1
            before, lost = hanging.link(), hanging.engine.flights.num_lost
            assert before is not None and num_ready() == 1
            before.channel.abort("as if the network had blinked")
            await until(lambda: hanging.link() not in (None, before) and hanging.is_in(WorkerState.SUSPECT))
            streams.append(hanging.submit())
            assert (entry := hanging.engine.cluster.status()["workers"][0])["reason"] == "it has made no step for 0.5 s"
            assert entry["attempts"] == 0 and hanging.engine.flights.num_waiting == 2
            assert hanging.engine.flights.num_lost == lost, "nobody was sent to it"
            await until(lambda: (link := hanging.link()) is not None and link.ready is not None)
            await hanging.engine.ask("w", "metrics", b"{}")  # what it had been told before that has come
            assert num_ready() == 1
            hanging.gate.set()
            assert [await answered(stream) for stream in streams] == [5, 5]
            await until(lambda: num_ready() == 2)

    asyncio.run(run())


def test_one_that_hangs_at_the_first_thing_that_it_is_given_is_found() -> None:
    """No figures of its engine have been told on this connection, and none ever will be."""

    async def run() -> None:
        async with Hanging() as hanging:
            await until(hanging.engine.open_links)
            stream = hanging.submit()
            await until(lambda: hanging.is_in(WorkerState.SUSPECT))
            assert hanging.engine.flights.num_waiting == 1 and hanging.engine.flights.num_lost == 1
            hanging.gate.set()
            assert await answered(stream) == 5

    asyncio.run(run())


@pytest.mark.parametrize("hangs_at", ["what was posted", "what follows on a step"])
def test_a_thread_that_hangs_beside_its_steps_is_silent_too(hangs_at: str) -> None:
    """There is nothing to step at then, and nothing left in its inbox."""
    gate, reached = threading.Event(), threading.Event()

    def hang(*_: Any) -> list[OutputEvent]:
        reached.set()
        gate.wait()
        return []

    async def run() -> None:
        is_after = hangs_at == "what follows on a step"
        thread = EngineThread(bigram_engine(), lambda events: None, hang if is_after else None)
        thread.start()
        assert thread.silent_s == 0.0
        thread.post((lambda: []) if is_after else hang)
        await until(reached.is_set)
        silent_s = thread.silent_s
        assert silent_s > 0.0
        thread.post(lambda: [])  # which does not make it any younger
        assert thread.silent_s > silent_s
        gate.set()
        await until(lambda: thread.silent_s == 0.0)
        await thread.stop()

    asyncio.run(run())


@pytest.mark.parametrize("how", ["drain", "SIGTERM"])
def test_a_process_that_hangs_does_not_outlive_its_end(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told to end and cannot: its memory would be gone for good and, where another is to take its place, that worker with it."""
    monkeypatch.setattr(process_worker, "END_S", 0.1)

    async def run() -> None:
        async with cluster(2, options=ClusterOptions(liveness=LIMITS)) as two:
            two.gate.allow(0)
            prepared = two.prepare([3, 4, 5], SamplingParams(max_tokens=5))
            stream, request_id = two.engine.submit([prepared]), prepared.request.request_id
            await two.until(lambda: two.holder(request_id) is not None)
            name = two.holder(request_id)
            assert name is not None
            pid = two.processes.pids[name]
            await two.until(lambda: two.holder(request_id) != name)
            if how == "drain":
                await two.engine.cluster.drain(name)
                await two.until(lambda: name not in two.processes.pids)
            else:
                two.signal(name, signal.SIGTERM)
                await two.until(lambda: two.processes.pids.get(name) not in (None, pid))
            two.gate.open()
            tokens = 0
            while not stream.finished:
                tokens += sum(len(event.token_ids) for event in await stream.read())
            assert tokens == 5

    asyncio.run(run())


def test_a_worker_of_elsewhere_ends_no_process_whose_name_it_has_taken() -> None:
    async def run() -> None:
        processes = LocalProcesses({"worker-0": "both"}, "secret", command=(sys.executable, "-c", "import time; time.sleep(600)"))
        await processes.start(Address("127.0.0.1", 1))
        await until(lambda: processes.pids)
        pid = processes.pids["worker-0"]
        for name, other in (("worker-0", pid + 1), ("worker-1", pid)):
            processes.told_to_end(name, other)
        assert not processes._ends
        processes.told_to_end("worker-0", pid)
        (seeing,) = processes._ends
        os.kill(pid, signal.SIGKILL)
        await seeing
        await processes.stop()
        assert not processes.pids and not processes._ends

    asyncio.run(run())
