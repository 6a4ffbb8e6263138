"""A worker's own part, in this process: front ends that go and come back, connections that are cut, requests that kill or break engines."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from octavo.config import ConfigError, EngineConfig
from octavo.core.request import SamplingParams
from octavo.core.step import StepPlan
from octavo.distributed import worker_engine
from octavo.distributed.channel import Address
from octavo.distributed.cluster_engine import ClusterEngine
from octavo.distributed.cluster_options import ClusterOptions
from octavo.distributed.role_router import RoleRouter
from octavo.distributed.soonest import SoonestDone
from octavo.distributed.worker import (
    HOPELESS_ERRORS,
    FrontEndLost,
    WorkerFailed,
    WorkerOptions,
    WorkerRefused,
    WorkerServer,
)
from octavo.engine.engine import Engine
from octavo.engine.outputs import RequestOutput
from tests.distributed import scripted_worker
from tests.distributed.clusters import PATIENT, WAIT_S, alone, run_alone
from tests.engine.scripted import Bigram, bigram_config, bigram_model, byte_tokenizer

SECRET = b"a secret of the tests"
PARAMS = SamplingParams(temperature=0.9, max_tokens=40, ignore_eos=True, seed=4)
PROMPT = [40, 41, 42, 43]
BAD_TOKEN = 99  # in a prompt: the step fails


def load(config: EngineConfig) -> Engine:
    """The scripted model; a step with ``BAD_TOKEN`` in a prompt fails."""
    engine = scripted_worker.load(config)
    assert isinstance(engine.backend, Bigram)
    engine.backend.delay_s = 0.002

    def break_down(plan: StepPlan) -> None:
        if any(BAD_TOKEN in piece.token_ids and piece.start == 0 for piece in plan.slices):
            raise RuntimeError("a step that cannot be computed")

    engine.backend.before_step = break_down
    return engine


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def front_end(address: Address = Address("127.0.0.1", 0), **options: object) -> AsyncIterator[ClusterEngine]:  # noqa: B008 - frozen
    model = bigram_model(byte_tokenizer(scripted_worker.PIECES))
    chosen = ClusterOptions(liveness=PATIENT, **options)  # type: ignore[arg-type]
    engine = ClusterEngine(model, bigram_config(), address, SECRET, chosen)
    engine.start()
    assert engine._opening is not None
    await engine._opening
    try:
        yield engine
        engine.flights.check_invariants()
    finally:
        await engine.stop()


def worker(address: Address, name: str, **options: object) -> tuple[WorkerServer, asyncio.Task[None]]:
    server = WorkerServer(address, SECRET, WorkerOptions(name, **options), load)  # type: ignore[arg-type]
    return server, asyncio.create_task(server.run())


class Held(threading.Event):
    """A step that waits until this is set; ``reached`` is when it does."""

    def __init__(self) -> None:
        super().__init__()
        self.reached = threading.Event()


def held_at_token(server: WorkerServer, number: int) -> Held:
    """Its engine waits before the step that draws it, until the event is set."""
    assert server.engine is not None
    backend, goes_on = server.engine.engine.backend, Held()
    assert isinstance(backend, Bigram)
    before_step = backend.before_step

    def wait(plan: StepPlan) -> None:
        if before_step is not None:
            before_step(plan)
        if any(piece.start + piece.num_tokens >= len(PROMPT) + number for piece in plan.slices):
            goes_on.reached.set()
            assert goes_on.wait(WAIT_S)

    backend.before_step = wait
    return goes_on


async def answer(engine: ClusterEngine, name: str, prompt: list[int] = PROMPT, params: SamplingParams = PARAMS) -> RequestOutput:
    prepared = engine.prepare_checked(prompt, engine.check_params(params), name)
    output, stream = RequestOutput.start(prepared.request, None, []), engine.submit([prepared])
    try:
        while not stream.finished:
            for event in await stream.read():
                output.apply(event)
    finally:
        engine.abort(stream)
    return output


def is_idle(server: WorkerServer) -> bool:
    assert server.engine is not None
    engine = server.engine.engine
    return server.engine.num_attempts == 0 and not engine.has_work and engine.scheduler.num_used_blocks == 0


@pytest.fixture(scope="module")
def expected() -> list[int]:
    return run_alone(alone(), PROMPT, PARAMS).outputs[0].token_ids


def test_a_worker_outlives_its_front_end_with_its_model_and_without_its_requests(expected: list[int], tmp_path: Path) -> None:
    address = Address(path=str(tmp_path / "workers"))  # nobody else can take it between two front ends

    async def run() -> None:
        async with front_end(address) as first:
            server, task = worker(address, "a")
            await until(lambda: len(first.open_links()) == 1)
            asking = asyncio.create_task(answer(first, "r1", params=replace(PARAMS, max_tokens=3000)))
            await until(lambda: server.engine is not None and server.engine.num_attempts == 1)
            engine = server.engine
            first.control._listener.close()
            for link in first.control:
                link.channel.abort("as if the process had died")
            await until(lambda: is_idle(server))
            asking.cancel()
        async with front_end(address) as second:
            await until(lambda: len(second.open_links()) == 1)
            assert server.engine is engine  # nothing is loaded again
            assert (await answer(second, "r2")).outputs[0].token_ids == expected
        await asyncio.wait_for(task, WAIT_S)  # told to end
        assert server.engine is None

    asyncio.run(run())


def test_a_worker_that_joins_tells_its_whole_cache_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_engine, "MAX_KEYS", 2)

    def num_keys(engine: ClusterEngine) -> int:
        router = engine.flights.dispatcher.router
        assert isinstance(router, RoleRouter) and isinstance(router._prompts, SoonestDone)
        return router._prompts.keys.num_keys(0)

    def num_cached(server: WorkerServer) -> int:
        index = None if server.engine is None else server.engine.engine.scheduler.kv.index
        return 0 if index is None else sum(index.is_full(node) for node in index.blocks().values())

    async def run() -> None:
        async with front_end() as engine:
            server, task = worker(engine.control.address, "a")
            await until(lambda: len(engine.open_links()) == 1)
            for i in range(3):
                await answer(engine, f"r{i}", [50 + i] * 40)
            await until(lambda: num_keys(engine) == num_cached(server) > 4)
            (link,) = engine.open_links()
            link.channel.abort("as if the network had failed")
            await until(lambda: bool(engine.open_links()) and engine.open_links() != [link])
            await until(lambda: num_keys(engine) == num_cached(server) > 4)
        await asyncio.wait_for(task, WAIT_S)

    asyncio.run(run())


def test_a_worker_whose_connection_is_cut_joins_again_while_its_request_goes_on_elsewhere(expected: list[int]) -> None:
    async def run() -> None:
        async with front_end() as engine:
            a, first = worker(engine.control.address, "a")
            await until(lambda: len(engine.open_links()) == 1)
            goes_on = held_at_token(a, 5)
            asking = asyncio.create_task(answer(engine, "r1"))
            await until(lambda: any(journey.num_output_tokens > 0 for journey in engine.journeys.all()))
            b, second = worker(engine.control.address, "b")
            await until(lambda: len(engine.open_links()) == 2)
            link = engine.control.find("a")
            assert link is not None
            link.channel.abort("as if the network had gone")
            await until(lambda: engine.control.find("a") is not link)
            goes_on.set()
            assert (await asking).outputs[0].token_ids == expected
            await until(lambda: len(engine.open_links()) == 2 and engine.control.find("a") is not link)
            await until(lambda: is_idle(a) and is_idle(b))
            assert {leg.worker for leg in engine.journeys.all()[0].legs} == {"a", "b"}
        await asyncio.wait((first, second))

    asyncio.run(run())


def test_clients_that_leave_free_their_workers(expected: list[int]) -> None:
    """While their requests wait at the worker, compute their prompts, or stream."""

    async def run() -> None:
        async with front_end() as engine:
            server, task = worker(engine.control.address, "a")
            await until(lambda: len(engine.open_links()) == 1)
            for i, num_tokens in enumerate((0, 1, 5)):
                params = replace(PARAMS, max_tokens=3000)
                asking = [asyncio.create_task(answer(engine, f"r{i}-{j}", params=params)) for j in range(80)]
                await until(lambda: len(engine.flights) == 80)
                await until(lambda least=num_tokens: max(j.num_output_tokens for j in engine.journeys.all() if j.ended_s is None) >= least)
                for one in asking:
                    one.cancel()
                await asyncio.wait(asking)
                assert len(engine.flights) == engine.flights.num_waiting == 0
                await until(lambda: is_idle(server))
            assert (await answer(engine, "last")).outputs[0].token_ids == expected
        await asyncio.wait((task,))

    asyncio.run(run())


def test_a_request_that_breaks_steps_ends_and_those_beside_it_do_not(expected: list[int]) -> None:
    async def run() -> None:
        async with front_end(router="round-robin") as engine:  # both have good ones, whatever steps are learned to take
            servers = [worker(engine.control.address, name) for name in ("a", "b")]
            await until(lambda: len(engine.open_links()) == 2)
            for i in range(5):
                held = {server.options.name: held_at_token(server, 5) for server, _ in servers}
                good = [asyncio.create_task(answer(engine, f"good-{i}-{j}")) for j in range(6)]
                await until(lambda: sum(len(link.keys) for link in engine.control) == 6)
                await until(lambda: all(held[link.name].reached.is_set() for link in engine.control if link.keys))  # noqa: B023
                breaking = asyncio.create_task(answer(engine, f"bad-{i}", [BAD_TOKEN, 5]))
                await until(lambda: breaking.done() or sum(len(link.keys) for link in engine.control) == 7)  # noqa: B023 - beside good ones
                for goes_on in held.values():
                    goes_on.set()
                bad = await breaking
                assert bad.error is not None and "a step that cannot be computed" in bad.error
                assert [output.outputs[0].token_ids for output in await asyncio.gather(*good)] == [expected] * 6
                assert engine.flights.num_given_up == i + 1
        await asyncio.wait([task for _, task in servers])

    asyncio.run(run())


def test_an_engine_that_makes_no_step_any_more_ends_its_worker() -> None:
    """Else it would draw all requests, since it is never busy. The last of them fails, or is lost with it and waits for another in vain."""

    async def run() -> None:
        async with front_end(worker_wait_s=0.5) as engine:
            server, task = worker(engine.control.address, "a")
            await until(lambda: len(engine.open_links()) == 1)
            for name in ("one", "two"):
                assert (await answer(engine, name, [BAD_TOKEN, 5])).error is not None
            with pytest.raises(WorkerFailed, match="the last 6 steps failed"):
                await asyncio.wait_for(task, WAIT_S)
            assert engine.control.last_words["a"] == "the last 6 steps failed"

    asyncio.run(run())


def test_a_worker_without_a_front_end_gives_up_when_it_is_to() -> None:
    async def run() -> None:
        _, task = worker(Address("127.0.0.1", 9), "a", give_up_s=0.2)
        with pytest.raises(FrontEndLost, match=r"0\.2 s"):
            await asyncio.wait_for(task, WAIT_S)

    asyncio.run(run())


def test_a_worker_ends_with_the_front_end_that_has_started_it_whoever_listens_there_now() -> None:
    async def run() -> None:
        async with front_end() as engine:
            _, task = worker(engine.control.address, "a", parent=os.getpid())  # which is not this process's parent
            with pytest.raises(FrontEndLost, match="that started it has ended"):
                await asyncio.wait_for(task, WAIT_S)
            server, task = worker(engine.control.address, "a", parent=os.getppid())
            await until(lambda: bool(engine.open_links()))
            server.leave("the test is over")
            await asyncio.wait_for(task, WAIT_S)

    asyncio.run(run())


def test_a_worker_that_wants_to_leave_says_so_and_looks_for_no_other_front_end(caplog: pytest.LogCaptureFixture) -> None:
    """That which was to let it go is gone, and everything that it had is given to others."""
    caplog.set_level(logging.INFO, "octavo.worker")

    async def run() -> None:
        async with front_end() as engine:
            server, task = worker(engine.control.address, "a")
            await until(lambda: bool(engine.open_links()))
            asking = asyncio.create_task(answer(engine, "r1", params=replace(PARAMS, max_tokens=3000)))
            await until(lambda: server.engine is not None and server.engine.num_attempts == 1)
            server.leave("it got signal 15")
            assert any(record.getMessage().startswith("worker a leaves: it got signal 15") for record in caplog.records)
            await until(lambda: not engine.open_links())
            next(iter(engine.control)).channel.abort("as if the process had died")
            await asyncio.wait_for(task, WAIT_S)
            asking.cancel()
            assert all(isinstance(ended, asyncio.CancelledError) for ended in await asyncio.gather(asking, return_exceptions=True))

    asyncio.run(run())


def test_an_engine_that_cannot_be_made_ends_the_worker_and_the_front_end_hears_why() -> None:
    def broken(config: EngineConfig) -> Engine:
        raise ConfigError("num_kv_blocks: 7 is not allowed")

    async def run() -> None:
        async with front_end() as engine:
            server = WorkerServer(engine.control.address, SECRET, WorkerOptions("a"), broken)
            with pytest.raises(ConfigError, match="num_kv_blocks"):
                await asyncio.wait_for(server.run(), WAIT_S)
            await until(lambda: "num_kv_blocks" in engine.control.last_words.get("a", ""))

    asyncio.run(run())


def test_a_worker_whose_port_for_kv_cannot_be_opened_says_so_and_closes_its_engine() -> None:
    made = list[Engine]()

    def remembered(config: EngineConfig) -> Engine:
        made.append(load(config))
        return made[-1]

    def no_port(*_: object) -> None:
        raise OSError("no port is free")

    async def body() -> None:
        async with front_end() as engine:
            server = WorkerServer(engine.control.address, SECRET, WorkerOptions("a"), remembered, no_port)
            with pytest.raises(OSError, match="no port is free"):
                await asyncio.wait_for(server.run(), WAIT_S)
            await until(lambda: engine.control.last_words.get("a") == "no port is free")

    asyncio.run(body())
    assert [engine.backend.closed for engine in made] == [True]  # type: ignore[attr-defined]


def test_a_worker_that_computes_otherwise_is_refused() -> None:
    def other(config: EngineConfig) -> Engine:
        engine = load(config)
        engine.backend.fingerprint = lambda: "another kernel path"  # type: ignore[method-assign]
        return engine

    async def run() -> None:
        async with front_end() as engine:
            _, task = worker(engine.control.address, "a")
            await until(lambda: len(engine.open_links()) == 1)
            server = WorkerServer(engine.control.address, SECRET, WorkerOptions("b"), other)
            with pytest.raises(WorkerRefused, match="answers would depend on who gives them"):
                await asyncio.wait_for(server.run(), WAIT_S)
            assert [link.name for link in engine.control] == ["a"]
        await asyncio.wait((task,))

    asyncio.run(run())


def test_a_worker_whose_model_is_not_there_says_that_another_try_is_of_no_use() -> None:
    async def run() -> None:
        async with front_end() as engine:
            server = WorkerServer(engine.control.address, SECRET, WorkerOptions("a", model="/nowhere/m.gguf"))
            with pytest.raises(HOPELESS_ERRORS, match="'/nowhere/m.gguf' is neither a file"):
                await asyncio.wait_for(server.run(), WAIT_S)
            await until(lambda: "/nowhere/m.gguf" in engine.control.last_words.get("a", ""))

    asyncio.run(run())


def test_workers_of_pools_of_their_own_say_so_and_work_together() -> None:
    async def run() -> None:
        async with front_end() as engine:
            workers = [worker(engine.control.address, name, num_kv_blocks=number)[1] for name, number in (("small", 4), ("large", 64))]
            await until(lambda: len(engine.open_links()) == 2)
            found = {link.name: link.ready.limits.num_kv_blocks for link in engine.control if link.ready is not None}
            assert found == {"small": 4, "large": 64}
            long = await answer(engine, "r", params=replace(PARAMS, max_tokens=100))  # more than four blocks
            assert long.error is None and len(long.outputs[0].token_ids) == 100
        await asyncio.gather(*workers)

    asyncio.run(run())
