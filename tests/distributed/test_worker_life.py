"""What a worker has of its own while connections come and go: one engine at a time, and a heartbeat."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from octavo.config import EngineConfig
from octavo.distributed.messages import Welcome, config_bytes
from octavo.distributed.worker import WorkerOptions, WorkerServer
from octavo.engine.engine import Engine
from tests.distributed.test_worker import SECRET, answer, front_end, held_at_token, load, until, worker
from tests.engine.scripted import bigram_config


def test_an_engine_that_is_replaced_is_closed_though_its_front_end_goes_meanwhile() -> None:
    """That takes as long as its step does. Nothing else is loaded before, though the worker is connected again."""
    happened = list[str]()

    def noted(config: EngineConfig) -> Engine:
        happened.append(f"loads for {config.scheduler.max_num_seqs}")
        engine = load(config)
        close = engine.close

        def noted_close() -> None:
            happened.append(f"closes that for {config.scheduler.max_num_seqs}")
            close()

        engine.close = noted_close  # type: ignore[method-assign]
        return engine

    async def run() -> None:
        config = bigram_config()
        other = replace(config, scheduler=replace(config.scheduler, max_num_seqs=config.scheduler.max_num_seqs + 1))
        async with front_end() as first:
            server = WorkerServer(first.control.address, SECRET, WorkerOptions("w"), noted)
            task = asyncio.create_task(server.run())
            await first.ready()
            held = held_at_token(server, 1)
            asking = asyncio.create_task(answer(first, "r"))
            await until(held.reached.is_set)
            server._is_ready = False
            server._start(server._make_ready(Welcome(config_bytes(other))))
            await until(lambda: server.engine is None)
            assert server._channel is not None
            server._channel.abort("the network is cut")
            await until(lambda: server._channel is not None and any(not one.done() for one in server._tasks))  # it is there again
            await asyncio.sleep(0.02)
            assert len(happened) == 1, "there is a step yet"
            held.set()
            await first.ready()
            await until(lambda: server.engine is not None)
            assert await asking is not None
            server._end()
            await task
        size = config.scheduler.max_num_seqs
        assert happened == [f"loads for {size}", f"closes that for {size}"] * 2

    asyncio.run(run())


def test_a_heart_that_stops_is_told() -> None:
    """The front end would hear nothing, and nobody why: the worker ends, and says so."""

    async def run() -> None:
        async with front_end() as engine:
            server, task = worker(engine.control.address, "w")
            await engine.ready()
            assert server.engine is not None

            def no_beat() -> None:
                raise RuntimeError("its figures cannot be read")

            server.engine.beat = no_beat  # type: ignore[method-assign]
            with pytest.raises(RuntimeError, match="its figures cannot be read"):
                await asyncio.wait_for(task, 60.0)
            await until(lambda: engine.control.last_words.get("w") == "its figures cannot be read")

    asyncio.run(run())
