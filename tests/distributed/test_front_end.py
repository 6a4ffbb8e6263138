"""The front end beside its streams: what it keeps, what its own faults cost, and how it starts, waits and ends."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter

import pytest

from octavo.distributed import cluster_engine, control
from octavo.distributed.channel import Address, Channel, connect
from octavo.distributed.cluster_engine import ClusterEngine
from octavo.distributed.cluster_options import ClusterOptions, HandoverOptions
from octavo.distributed.link import Link
from octavo.distributed.messages import PROTOCOL, Hello, ToWorker, to_worker
from tests.distributed.clusters import PATIENT
from tests.distributed.test_stub_worker import SECRET, TOKENIZER, cut_off, expected, front_end, open_stream, read, stub, until
from tests.engine.scripted import bigram_config, bigram_model


class Launcher:
    """Starts nobody: workers come when the test has them come."""

    def __init__(self, *names: str) -> None:
        self.kept = list(names)
        self.trouble: str | None = None
        self.is_at_end = self.is_ending = self.holds_start = self.was_stopped = False
        self.released, self.replaced = list[str](), list[str]()
        self.opened = asyncio.Event()

    @property
    def names(self) -> Sequence[str]:
        return self.kept

    async def start(self, address: Address) -> None:
        if self.holds_start:
            await asyncio.Event().wait()
        self.opened.set()

    def trouble_of(self, name: str) -> str | None:
        return self.trouble

    def ready(self, name: str) -> None:
        pass

    def release(self, name: str) -> None:
        self.kept.remove(name)
        self.released.append(name)

    def keep(self, name: str) -> bool:
        self.released.remove(name)
        self.kept.append(name)
        return not self.is_ending

    def role_of(self, name: str) -> str:
        return "both"

    def told_to_end(self, name: str, pid: int) -> None:
        pass

    async def replace(self, name: str) -> None:
        self.trouble, self.is_at_end = None, False
        self.replaced.append(name)

    async def stop(self) -> None:
        self.was_stopped = True


class EndsWhenTold(Launcher):
    """Its processes end when the test says so, and others follow them then unless they are released."""

    def __init__(self, *names: str) -> None:
        super().__init__(*names)
        self.is_ending, self.ends = True, asyncio.Event()

    async def replace(self, name: str) -> None:
        await self.ends.wait()
        if name in self.kept:
            await super().replace(name)


def engine_of(launcher: Launcher, options: ClusterOptions | None = None, others_may_join: bool = True) -> ClusterEngine:
    model, address, options = bigram_model(TOKENIZER, context=8192), Address("127.0.0.1", 0), options or ClusterOptions(liveness=PATIENT)
    return ClusterEngine(model, bigram_config(), address, SECRET, options, launcher, others_may_join=others_may_join)


def test_attempts_have_names_that_no_front_end_before_has_used() -> None:
    """A worker outlives its front end, and may still be at a step with attempts of that when the next one sends it others."""

    async def keys() -> list[int]:
        engine = await front_end()
        worker, task = stub(engine, "stub")
        await until(lambda: len(engine.open_links()) == 1)
        streams = [open_stream(engine, i, 3) for i in range(2)]
        await until(lambda: worker.num_attempts == 2)
        found = list(worker._attempts)
        worker.give(3)
        assert [await read(stream) for stream in streams] == [expected(i, 3) for i in range(2)]
        await engine.stop()
        await task
        return found

    assert len({*asyncio.run(keys()), *asyncio.run(keys())}) == 4


def test_whose_turn_it_is_among_workers_is_found_without_a_search_for_each() -> None:
    """Hundreds of workers, at every load that one of them tells."""

    class Unsearchable(list[Link]):
        def __contains__(self, link: object) -> bool:
            raise AssertionError("a search in a list")

    async def run() -> None:
        engine = await front_end()
        stubs = [stub(engine, name) for name in ("a", "b", "c")]
        await until(lambda: len(engine.open_links()) == 3)
        links = engine.open_links()
        engine.handovers.entries = lambda links: Unsearchable(links[1:])  # type: ignore[method-assign]
        assert engine.flights._places() == (links[1:], links[:1])
        await engine.stop()
        await asyncio.gather(*(task for _, task in stubs))

    asyncio.run(run())


def test_a_fault_in_looking_after_hand_offs_that_lasts_ends_no_other_duty_of_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_engine, "WATCH_S", 0.01)

    async def run() -> None:
        engine = await front_end(ClusterOptions(liveness=PATIENT, worker_wait_s=0.0))
        ticks = 0

        def faulty() -> None:
            nonlocal ticks
            ticks += 1
            raise KeyError("a fault")

        monkeypatch.setattr(engine.handovers, "tick", faulty)
        monkeypatch.setattr(engine.flights, "tick", faulty)
        worker, task = stub(engine, "stub")
        await until(lambda: engine._sizes.preparer is not None)
        task.cancel()
        await until(lambda: not engine.open_links())
        stream = open_stream(engine, 0, 3)
        (event,) = await asyncio.wait_for(stream.read(), 60)
        assert event.error_code == "no_worker"
        before = ticks
        await until(lambda: ticks >= before + 4)
        await engine.stop()

    asyncio.run(run())


def test_last_words_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers from elsewhere have a new name with each process, and may be refused for ever."""
    monkeypatch.setattr(control, "MAX_LAST_WORDS", 3)

    async def refused(engine: ClusterEngine, name: str) -> None:
        channel: Channel[ToWorker] = await connect(engine.control.address, SECRET, to_worker)
        channel.start(lambda messages: None, lambda reason: None)
        channel.send(Hello(PROTOCOL + 1, name, "both", "here", 1, "boot"))
        await until(lambda: channel.closed_for is not None)

    async def run() -> None:
        engine = await front_end()
        for i in range(6):
            await refused(engine, f"w{i}")
        assert list(engine.control.last_words) == ["w3", "w4", "w5"]
        await engine.stop()

    asyncio.run(run())


def test_a_hosts_name_is_shown_without_what_terminals_obey() -> None:
    async def run() -> None:
        engine = await front_end()
        channel: Channel[ToWorker] = await connect(engine.control.address, SECRET, to_worker)
        channel.start(lambda messages: None, lambda reason: None)
        channel.send(Hello(PROTOCOL, "w", "both", "\x1b[2J" + "h" * 9999, 1, "boot"))
        await until(lambda: engine.control.find("w") is not None)
        (entry,) = engine.cluster.status()["workers"]
        assert entry["host"].isprintable() and len(entry["host"]) == 1000
        channel.abort("the test is over")
        await engine.stop()

    asyncio.run(run())


def test_requests_wait_for_the_successor_of_the_last_worker_however_long_it_drains() -> None:
    async def run() -> None:
        launcher = Launcher("a")
        engine = engine_of(launcher, ClusterOptions(liveness=PATIENT, worker_wait_s=0.0))
        engine.start()
        await launcher.opened.wait()
        worker, task = stub(engine, "a")
        await engine.ready()
        running = open_stream(engine, 0, 3)
        await until(lambda: worker.num_attempts == 1)
        await engine.cluster.restart()
        await until(lambda: not engine.open_links())
        waiting = open_stream(engine, 1, 3)
        for _ in range(3):
            engine._look()  # as if time had passed: nobody is to be waited for
        assert len(engine.flights) == 2
        engine.outlook.wait_s = 600.0
        worker.give(3)
        assert await read(running) == expected(0, 3)
        await asyncio.wait_for(task, 60)
        await until(lambda: engine.control.find("a") is None)
        second, other = stub(engine, "a")
        await until(lambda: second.num_attempts == 1)
        second.give(3)
        assert await read(waiting) == expected(1, 3)
        await until(lambda: engine.cluster.status()["restart"] is None)
        assert launcher.replaced == ["a"]
        launcher.release("a")  # nobody comes after it
        with pytest.raises(ValueError, match="there is none to replace"):
            await engine.cluster.restart()
        engine.control.fleet.drain(next(iter(engine.control)).worker)
        assert not any(engine.outlook.has_successor(link) for link in engine.control)
        await engine.stop()
        await other

    asyncio.run(run())


@pytest.mark.parametrize(
    ("launcher", "others_may_join", "words"),
    [(None, True, "waiting for workers at"), (Launcher("a"), True, "more workers may connect to"), (Launcher("a"), False, None)],
)
def test_where_workers_may_connect_to_is_said_when_they_can(launcher: Launcher | None, others_may_join: bool, words: str | None) -> None:
    async def run() -> None:
        model, told = bigram_model(TOKENIZER, context=8192), list[str]()
        address = Address("127.0.0.1", 0)
        engine = ClusterEngine(model, bigram_config(), address, SECRET, launcher=launcher, others_may_join=others_may_join)
        engine.announce = told.append
        engine.start()
        assert engine._opening is not None and not told
        await engine._opening
        assert told == ([] if words is None else [f"{words} {engine.control.address}"]) and engine.control.address.port
        await engine.stop()

    asyncio.run(run())


@pytest.mark.parametrize(("kv_dtype", "wire_dtype", "says"), [("auto", "int8", True), ("int8", "int8", False), ("auto", "auto", False)])
def test_rounded_kv_between_workers_is_said_at_the_start(kv_dtype: str, wire_dtype: str, says: bool) -> None:
    async def run() -> None:
        config, told = bigram_config(), list[str]()
        config = replace(config, cache=replace(config.cache, kv_cache_dtype=kv_dtype))
        options = ClusterOptions(handover=HandoverOptions(wire_dtype=wire_dtype))
        model, address = bigram_model(TOKENIZER, context=8192), Address("127.0.0.1", 0)
        engine = ClusterEngine(model, config, address, SECRET, options, Launcher("a"), others_may_join=False)
        engine.announce = told.append
        engine.start()
        assert engine._opening is not None
        await engine._opening
        assert told == ["kv_wire_dtype int8: KV is rounded on its way between workers, and answers behind it may differ"] * says
        await engine.stop()

    asyncio.run(run())


def test_where_it_cannot_listen_is_told_as_the_flag() -> None:
    async def run() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            here, nowhere = Address("127.0.0.1", port), Address(path="/nowhere/at/all")
            for address, words in ((here, "Address already in use"), (nowhere, "No such file")):
                engine = ClusterEngine(bigram_model(TOKENIZER, context=8192), bigram_config(), address, SECRET)
                engine.start()
                with pytest.raises(OSError, match=f"workers_listen: cannot listen at {address}: {words}"):
                    await engine.ready()
                await engine.stop()

    asyncio.run(run())


def test_a_restart_waits_for_a_worker_that_is_just_being_started() -> None:
    """It is not ended before it could be told to: what it got meanwhile would be lost with it."""

    async def run() -> None:
        launcher = Launcher("a")
        engine = engine_of(launcher)
        engine.start()
        await launcher.opened.wait()
        await engine.cluster.restart()
        await asyncio.sleep(0.2)
        assert launcher.replaced == [] and engine.cluster.status()["restart"] == {"done": 0, "of": 1}
        _, task = stub(engine, "a")
        await asyncio.wait_for(task, 60)  # it was told to end
        await until(lambda: launcher.replaced == ["a"] and engine.control.find("a") is None)
        _, other = stub(engine, "a")
        await until(lambda: engine.cluster.status()["restart"] is None)
        await engine.stop()
        await other

    asyncio.run(run())


def test_a_worker_that_is_cut_off_while_a_restart_drains_it_comes_back_to_end() -> None:
    """Its process is waited for, and killed after a while: what it got meanwhile would be lost with it."""

    async def run() -> None:
        launcher = EndsWhenTold("a")
        engine = engine_of(launcher)
        engine.start()
        await launcher.opened.wait()
        worker, task = stub(engine, "a")
        await engine.ready()
        stream = open_stream(engine, 0, 3)
        await until(lambda: worker.num_attempts == 1)
        await engine.cluster.restart()
        await until(lambda: not engine.open_links())
        await cut_off(engine, worker, task)
        await asyncio.wait_for(worker.run(engine.control.address, SECRET), 60)  # it is told to end
        assert worker.num_received == 0 and engine.flights.num_lost == 1 and engine.flights.num_waiting == 1
        launcher.ends.set()
        second, other = stub(engine, "a")
        await until(lambda: second.num_attempts == 1)
        second.give(3)
        assert await read(stream) == expected(0, 3)
        await until(lambda: engine.cluster.status()["restart"] is None)
        assert launcher.replaced == ["a"]
        await engine.stop()
        await other

    asyncio.run(run())


def test_an_engine_that_is_stopped_while_it_opens_starts_nobody_afterwards() -> None:
    async def run() -> None:
        launcher = Launcher("a")
        launcher.holds_start = True
        engine = engine_of(launcher)
        engine.start()
        await until(lambda: engine.control.address.port)
        await engine.stop()
        assert engine._opening is not None and engine._opening.cancelled()

    asyncio.run(run())


PARTS = ("flights.fail_all", "cluster.stop", "control.close", "handovers.close", "launcher.stop", "flights.faults.flush")


@pytest.mark.parametrize("part", PARTS)
def test_of_the_end_nothing_is_left_out_whatever_fails(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else processes, a folder, or whoever waits for the end as well would be left."""

    async def run() -> None:
        launcher, cleaned = Launcher("a"), list[bool]()
        engine = engine_of(launcher)
        engine._clean_up = lambda: cleaned.append(True)
        engine.start()
        await launcher.opened.wait()
        _, task = stub(engine, "a")
        await engine.ready()
        address = engine.control.address
        owner, _, name = part.rpartition(".")
        of, ends = attrgetter(owner)(engine), attrgetter(part)(engine)

        def fails(*args: object) -> None:
            raise RuntimeError(f"{part} fails")

        async def fails_later() -> None:
            await ends()
            raise RuntimeError(f"{part} fails")

        monkeypatch.setattr(of, name, fails_later if asyncio.iscoroutinefunction(ends) else fails)
        with pytest.raises(RuntimeError, match=f"{part} fails"):
            await engine.stop()
        assert cleaned == [True] and launcher.was_stopped and engine._ended.is_set()
        assert all(task.done() for task in engine._tasks)
        await engine.stop()
        assert cleaned == [True]
        if part != "control.close":
            await asyncio.wait_for(task, 60)  # told to end
            with pytest.raises(ConnectionRefusedError):
                await connect(address, SECRET, to_worker)
        task.cancel()
        monkeypatch.undo()
        engine.control.close()

    asyncio.run(run())


def test_an_engine_that_was_never_started_cleans_up_once() -> None:
    async def run() -> None:
        cleaned = list[bool]()
        model = bigram_model(TOKENIZER, context=8192)
        engine = ClusterEngine(model, bigram_config(), Address("127.0.0.1", 0), SECRET, clean_up=lambda: cleaned.append(True))
        await engine.stop()
        await engine.stop()
        assert cleaned == [True]

    asyncio.run(run())
