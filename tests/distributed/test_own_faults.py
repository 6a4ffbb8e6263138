"""Faults of the front end's own end the request that they strike, with an error that says so, and cost no worker its channel."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from octavo.bench.stub_worker import StubWorker
from octavo.core.request import FinishReason
from octavo.distributed.channel import connect
from octavo.distributed.cluster_engine import ClusterEngine
from octavo.distributed.messages import PROTOCOL, Hello, Ready, to_worker
from octavo.engine.event_stream import EventStream
from tests.distributed.test_lying_workers import LIMITS
from tests.distributed.test_stub_worker import SECRET, expected, front_end, open_stream, stub, until

STRUCK = "r3"  # the request that the fault strikes


class Fault(RuntimeError):
    pass


def failing(function: Callable[..., Any], name: Callable[..., str]) -> Callable[..., Any]:
    """``function``, which fails for the request ``STRUCK`` alone. ``name(*args)``: the request that it is asked about."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if name(*args) == STRUCK:
            raise Fault("a fault of ours")
        return function(*args, **kwargs)

    return call


def strike(engine: ClusterEngine, place: str) -> None:
    flights, watcher = engine.flights, engine.flights.watcher
    router = flights.dispatcher.router
    if place == "router.choose":
        router.choose = failing(router.choose, lambda request, engines: request.request_id)  # type: ignore[method-assign]
    elif place == "handovers.ticket":
        engine.handovers.ticket = failing(engine.handovers.ticket, lambda flight, *rest: flight.request.request_id)  # type: ignore[method-assign]
    elif place == "watcher.opened":
        watcher.opened = failing(watcher.opened, lambda request: request.request_id)  # type: ignore
    else:
        name = place.removeprefix("watcher.")
        setattr(watcher, name, failing(getattr(watcher, name), lambda request_id, *rest: request_id))


async def outcome(stream: EventStream) -> list[int] | str:
    """The tokens, or the error that ended it."""
    tokens = list[int]()
    while not stream.finished:
        for event in await stream.read():
            if event.error is not None:
                assert event.finish_reason is FinishReason.ERROR
                return event.error
            tokens += event.token_ids
    return tokens


def check(outcomes: list[list[int] | str], num_tokens: int) -> None:
    for i, found in enumerate(outcomes):
        if f"r{i}" == STRUCK:
            assert found == "the server could not go on with this request: Fault: a fault of ours"
        else:
            assert found == expected(i, num_tokens)


async def serve(engine: ClusterEngine, workers: list[StubWorker], num_requests: int = 8) -> list[list[int] | str]:
    readers = [asyncio.create_task(outcome(open_stream(engine, i, 5))) for i in range(num_requests)]
    while not all(reader.done() for reader in readers):
        for worker in workers:
            worker.give(1)
        await asyncio.sleep(0.005)
    engine.flights.check_invariants()
    return [reader.result() for reader in readers]


@pytest.mark.parametrize("place", ["router.choose", "handovers.ticket", "watcher.opened", "watcher.placed", "watcher.tokens"])
def test_a_fault_ends_the_request_that_it_strikes_and_no_other(place: str, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        engine = await front_end()
        stubs = [stub(engine, name) for name in ("first", "second")]
        await until(lambda: len(engine.open_links()) == 2)
        links = engine.open_links()
        strike(engine, place)
        check(await asyncio.wait_for(serve(engine, [worker for worker, _ in stubs]), 120), 5)
        assert engine.open_links() == links and not len(engine.flights) and engine.flights.num_lost == 0
        await until(lambda: all(worker.num_attempts == 0 for worker, _ in stubs))  # they do not go on with it
        assert all(not link.keys for link in links)
        assert engine.flights.dispatcher.num_sent == 0
        await engine.stop()
        await asyncio.gather(*(task for _, task in stubs))

    asyncio.run(run())
    assert f"a fault of the front end's own ends request {STRUCK}: Fault: a fault of ours" in caplog.text


def test_a_fault_in_what_becomes_of_one_lost_request_keeps_no_other_from_going_on() -> None:
    async def run() -> None:
        engine = await front_end()
        first, task = stub(engine, "first")
        await until(lambda: len(engine.open_links()) == 1)
        readers = [asyncio.create_task(outcome(open_stream(engine, i, 5))) for i in range(6)]
        await until(lambda: first.num_attempts == 6)
        first.give(2)
        second, other = stub(engine, "second")
        await until(lambda: len(engine.open_links()) == 2)
        strike(engine, "watcher.lost")
        task.cancel()
        await until(lambda: second.num_attempts == 5)
        engine.flights.check_invariants()
        second.give(5)
        check(list(await asyncio.gather(*readers)), 5)
        assert [link.name for link in engine.open_links()] == ["second"]
        await engine.stop()
        await other

    asyncio.run(run())


def test_a_fault_in_the_end_of_a_request_ends_it_all_the_same() -> None:
    """Its books are half written then: it is nowhere afterwards, and its client has an error instead of a stream without an end."""

    async def run() -> None:
        engine = await front_end()
        worker, task = stub(engine, "first")
        await until(lambda: len(engine.open_links()) == 1)
        strike(engine, "watcher.ended")
        await asyncio.wait_for(serve(engine, [worker]), 120)
        await asyncio.wait_for(engine.flights.idle(), 60)
        streams = [open_stream(engine, i, 5) for i in range(8)]
        for stream in streams:
            engine.abort(stream)
        assert not len(engine.flights) and len(engine.open_links()) == 1
        await engine.stop()
        await task

    asyncio.run(run())


def test_a_fault_ends_its_request_though_it_cannot_be_told(caplog: pytest.LogCaptureFixture) -> None:
    """And what was only counted is told when the engine ends."""

    async def run() -> None:
        engine = await front_end()
        worker, task = stub(engine, "first")
        await until(lambda: len(engine.open_links()) == 1)
        stream, log = open_stream(engine, 3, 5), engine.flights.faults._log
        log._max_lines = 0

        def fail(*args: object) -> None:
            raise Fault("the log is full")

        log.say, say = fail, log.say  # type: ignore[method-assign]
        with pytest.raises(Fault, match="the log is full"):
            engine.flights.faults.found(Fault("a fault of ours"), engine.flights.find("r3"))
        assert await asyncio.wait_for(outcome(stream), 60) == "the server could not go on with this request: Fault: a fault of ours"
        log.say = say  # type: ignore[method-assign]
        for _ in range(3):
            engine.fault(Fault("another"))
        assert "another" not in caplog.text
        await engine.stop()
        await task

    asyncio.run(run())
    assert "a fault of the front end's own: 3 more within 10 s (3 times: Fault: another)" in caplog.text


@pytest.mark.parametrize("place", ["router.ended", "watcher.ended", "handovers.left", "stream.put"])
@pytest.mark.parametrize("way", ["it is answered", "its client leaves", "all end"])
def test_whatever_fails_in_the_end_of_a_request_the_rest_of_it_happens(place: str, way: str) -> None:
    """It is counted, nobody waits for it any more, and every other duty at its end is done."""

    async def run() -> None:
        engine = await front_end()
        flights, done = engine.flights, list[str]()
        worker, task = stub(engine, "first")
        await until(lambda: len(engine.open_links()) == 1)
        stream = open_stream(engine, 3, 2)
        await until(lambda: worker.num_attempts == 1)
        duties = {"router.ended": flights.dispatcher.router, "watcher.ended": flights.watcher}
        duties |= {"handovers.left": engine.handovers, "stream.put": stream}
        for duty, owner in duties.items():
            name = duty.partition(".")[2]
            function = getattr(owner, name)

            def call(*args: Any, duty: str = duty, function: Callable[..., Any] = function) -> Any:
                done.append(duty)
                if duty == place:
                    raise Fault("a fault of ours")
                return function(*args)

            setattr(owner, name, call)
        if way == "it is answered":
            worker.give(2)
        elif way == "its client leaves":
            engine.abort(stream)
        else:
            flights.fail_all("the server is shutting down")
        await asyncio.wait_for(flights.idle(), 60)
        assert (len(flights), flights.num_ended, flights.dispatcher.num_sent, len(flights._running)) == (0, 1, 0, 0)
        assert {"watcher.ended", "handovers.left"} <= set(done)
        flights.check_invariants()
        await until(lambda: worker.num_attempts == 0)
        await engine.stop()
        await task

    asyncio.run(run())


def test_a_fault_that_is_about_no_request_is_told_and_costs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Looking after hand-offs, at every load that a worker tells; and choosing among workers, until it is mended."""

    async def run() -> None:
        engine = await front_end()
        worker, task = stub(engine, "first")
        await until(lambda: len(engine.open_links()) == 1)
        links = engine.open_links()

        def fail(*args: object) -> None:
            raise Fault("a fault of ours")

        engine.handovers.told = fail  # type: ignore[method-assign]
        assert await asyncio.wait_for(serve(engine, [worker]), 120) == [expected(i, 5) for i in range(8)]
        entries, engine.handovers.entries = engine.handovers.entries, fail  # type: ignore
        with pytest.raises(Fault):
            open_stream(engine, 0, 5)  # whoever submits is told
        for handle in (engine.told, engine.worker_ready):
            handle(links[0])  # and whoever speaks is not
        engine.handovers.entries = entries  # type: ignore[method-assign]
        assert await asyncio.wait_for(serve(engine, [worker]), 120) == [expected(i, 5) for i in range(8)]
        assert engine.open_links() == links
        await engine.stop()
        await task

    asyncio.run(run())
    assert "a fault of the front end's own: Fault: a fault of ours" in caplog.text


@pytest.mark.parametrize("place", ["worker_ready", "flights.returned", "_sizes.take"])
def test_a_worker_that_a_fault_strikes_as_it_joins_is_turned_away_whole(place: str) -> None:
    """It would be here by half else: asked for nothing, and in the way of its own successor. It may come again."""

    async def run() -> None:
        engine = await front_end()
        worker, task = stub(engine, "honest")
        await until(lambda: len(engine.open_links()) == 1)
        owner, name = {"flights": engine.flights, "_sizes": engine._sizes}.get(place.partition(".")[0], engine), place.rpartition(".")[2]
        whole = getattr(owner, name)

        def fail(*args: object) -> None:
            raise Fault("a fault of ours")

        setattr(owner, name, fail)
        other, joining = stub(engine, "other")
        await asyncio.wait_for(joining, 60)  # its channel is closed
        await until(lambda: engine.control.find("other") is None)
        setattr(owner, name, whole)
        other, joining = stub(engine, "other")
        await until(lambda: len(engine.open_links()) == 2)
        assert await asyncio.wait_for(serve(engine, [worker, other]), 120) == [expected(i, 5) for i in range(8)]
        await engine.stop()
        await asyncio.gather(task, joining)

    asyncio.run(run())


def test_what_costs_a_worker_its_channel_is_its_own_doing(caplog: pytest.LogCaptureFixture) -> None:
    """Pages that no pool can have are a lie of the worker, though it is our arithmetic that fails on them."""

    async def run(layout: dict[str, object]) -> None:
        engine = await front_end()
        worker, task = stub(engine, "honest")
        await until(lambda: len(engine.open_links()) == 1)
        channel = await connect(engine.control.address, SECRET, to_worker)
        channel.start(lambda messages: None, lambda reason: None)
        channel.send(Hello(PROTOCOL, "liar", "both", "here", 1, "boot"))
        limits = msgspec.structs.replace(LIMITS, num_kv_blocks=7, kv_layout=layout)
        channel.send(Ready("stub", "bigram/stub", limits))
        await until(lambda: channel.closed_for is not None and engine.control.find("liar") is None)
        assert await asyncio.wait_for(serve(engine, [worker]), 120) == [expected(i, 5) for i in range(8)]
        await engine.stop()
        await task

    for layout in ({"pages": 3}, {"layers": 5}, {"layers": []}):
        asyncio.run(run(layout))
    assert "no KV pool is like that" in caplog.text and "could not be dealt with" in caplog.text
    assert "a fault of the front end's own" not in caplog.text
