"""The engine behind an event loop, without a server: readers that fall behind, health after a rest, stopping early."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from octavo import SamplingParams
from octavo.core.request import Request
from octavo.core.step import TokenEvent
from octavo.engine import engine_thread
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.event_stream import EngineUnavailable, EventStream, StreamOverflow, _size_bytes
from octavo.engine.outputs import OutputEvent
from tests.engine.scripted import Bigram, bigram_engine


async def until(condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("num_tokens", [1, 2])
def test_a_stream_that_overflows_is_forgotten_whichever_event_it_was(num_tokens: int) -> None:
    """With one token the event that is too much is the last one."""

    async def main() -> None:
        engine = AsyncEngine(bigram_engine(), stream_limit_bytes=1)
        engine.start()
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        stream = engine.submit([engine.engine.prepare([5], params)])
        await until(lambda: engine.num_open_requests == 0)
        with pytest.raises(StreamOverflow):
            await stream.read()
        async with asyncio.timeout(120.0):
            await engine.stop(drain_s=600.0)

    asyncio.run(main())


def test_a_reader_that_is_behind_reads_in_pieces_and_lets_others_go_first() -> None:
    """What it has not read still counts as waiting, so that it is cut off when it falls further behind."""

    async def main() -> None:
        request = Request("r", [5], SamplingParams(), 0)
        event = OutputEvent.of(TokenEvent("r", 0, [7]), "x")
        stream = EventStream([request], limit_bytes=200 * _size_bytes(event))
        for _ in range(200):
            assert stream.put(event)
        turns: list[str] = []

        async def other() -> None:
            for _ in range(4):
                turns.append("other")
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        for size in (64, 64, 64, 8):
            assert len(await stream.read()) == size
            turns.append("reader")
        await task
        assert turns == ["other", "reader"] * 4
        for _ in range(200):
            assert stream.put(event)
        assert len(await stream.read()) == 64
        for _ in range(64):
            assert stream.put(event)
        assert not stream.put(event)
        with pytest.raises(StreamOverflow):
            await stream.read()

    asyncio.run(main())


def test_work_after_a_long_rest_is_no_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0  # the clock of the health is the test's: a machine that is held up does not stall
    monkeypatch.setattr(engine_thread, "time", SimpleNamespace(monotonic=lambda: now_s))

    async def main() -> None:
        nonlocal now_s
        engine = AsyncEngine(bigram_engine(), stall_s=0.05)
        engine.start()
        await asyncio.sleep(0.01)
        now_s += 1000.0
        stream = engine.submit([engine.engine.prepare([5], SamplingParams(max_tokens=1))])
        health = engine.health()  # before the loop thread can have woken
        assert health.live and health.ready
        events: list[OutputEvent] = []
        while not stream.finished:
            events += await stream.read()
        assert events[-1].finish_reason is not None
        await engine.stop()

    asyncio.run(main())


def test_stopping_before_the_start_closes_the_engine() -> None:
    async def main() -> None:
        engine = AsyncEngine(bigram_engine())
        await engine.stop()
        await engine.stop()
        assert isinstance(engine.engine.backend, Bigram) and engine.engine.backend.closed
        with pytest.raises(EngineUnavailable):
            engine.submit([])

    asyncio.run(main())
