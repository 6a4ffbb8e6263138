"""Requests whose workers are lost: which go on, where, before whom, and which of them end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from octavo.bench.stub_worker import StubWorker, token_of
from octavo.core.request import FinishReason, SamplingParams
from octavo.distributed.dispatcher import Backpressure
from octavo.distributed.messages import Event, Events, Load
from octavo.engine.event_stream import EventStream
from octavo.engine.outputs import OutputEvent
from tests.distributed.test_stub_worker import SECRET, TOKENIZER, expected, front_end, open_stream, read, stub, until


def test_of_a_lost_workers_requests_only_those_that_run_are_kept() -> None:
    async def run() -> None:
        engine = await front_end()
        (first, task), (second, other) = stub(engine, "first"), stub(engine, "second")
        await until(lambda: len(engine.open_links()) == 2)
        streams = [open_stream(engine, i, 3) for i in range(4)]
        await until(lambda: first.num_attempts and first.num_attempts + second.num_attempts == 4)
        boot_id = first.boot_id
        task.cancel()
        await until(lambda: second.num_attempts == 4)
        second.give(3)
        assert [await read(stream) for stream in streams] == [expected(i, 3) for i in range(4)]
        assert len(engine.flights._struck._processes[boot_id].request_ids) in range(1, 5)
        assert len(engine.flights._struck.expired(engine.clock.now())) in range(1, 5)  # of requests that are over
        assert boot_id not in engine.flights._struck._processes
        await engine.stop()
        await other

    asyncio.run(run())


def test_a_request_ends_when_the_workers_that_it_was_lost_with_are_known_to_be_gone() -> None:
    """Three in a row fall silent with it: it waits, until others have come in the place of all three."""

    async def run() -> None:
        engine = await front_end()
        worker, task = stub(engine, "a")
        await until(engine.open_links)
        stream = open_stream(engine, 0, 3)
        for name in ("b", "c", None):
            await until(lambda one=worker: one.num_attempts == 1)
            task.cancel()
            await until(lambda: not engine.open_links())
            if name is not None:
                worker, task = stub(engine, name)
        again = [stub(engine, name) for name in ("a", "b")]
        await until(lambda: len(engine.open_links()) == 2)
        other = open_stream(engine, 1, 3)
        await until(lambda: sum(worker.num_attempts for worker, _ in again) == 1)  # the other one's
        assert len(engine.flights) == 2
        stub(engine, "c")
        with pytest.raises(AssertionError, match="3 workers in a row died while they ran this request"):
            await read(stream)
        for worker, _ in again:
            worker.give(3)
        assert await read(other) == expected(1, 3)
        await engine.stop()

    asyncio.run(run())


def test_a_suspect_that_no_worker_for_prompts_could_hold_goes_to_one_that_can() -> None:
    """As it did before it was one. The worker that has died with it twice is the only one of its size."""

    async def run() -> None:
        engine = await front_end()
        small = StubWorker("p", "bigram", TOKENIZER.vocab_size, num_kv_blocks=4, role="prefill")
        tasks = [asyncio.create_task(small.run(engine.control.address, SECRET))]
        await until(engine.open_links)
        stream = None
        for i in range(3):
            large = StubWorker("d", "bigram", TOKENIZER.vocab_size, role="decode")
            tasks.append(asyncio.create_task(large.run(engine.control.address, SECRET)))
            await until(lambda: len(engine.open_links()) == 2)
            stream = stream or engine.submit([engine.prepare_checked([5] * 200, engine.check_params(SamplingParams(max_tokens=4)), "r")])
            await until(lambda one=large: one.num_attempts == 1)
            flight = engine.flights.find("r")
            assert flight is not None and flight.attempts.is_suspect == (i == 2)
            if i < 2:
                tasks.pop().cancel()
                await until(lambda: engine.control.find("d") is None)
        assert small.num_received == 0 and stream is not None
        large.give(4)
        assert await read(stream) == [token_of([5] * 200, k, TOKENIZER.vocab_size) for k in range(4)]
        await engine.stop()
        await asyncio.gather(*tasks)

    asyncio.run(run())


class Stalling(StubWorker):
    """Speaks, and has been at its step for ``step_age_s``."""

    step_age_s = 0.0

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(0.01)
            assert self._channel is not None
            self._channel.send(Load(step_age_s=self.step_age_s, num_received=self.num_received))


def test_a_request_that_stalls_its_workers_ends_though_they_go_on_afterwards() -> None:
    """Each makes its step in the end, as the process that it was: it had spoken all the time, and was not only stopped."""

    async def run() -> None:
        engine = await front_end()
        worker = Stalling("a", "bigram", TOKENIZER.vocab_size)
        task = asyncio.create_task(worker.run(engine.control.address, SECRET))
        await until(engine.open_links)
        stream = open_stream(engine, 0, 3)
        for _ in range(3):
            await until(lambda: worker.num_attempts == 1)
            worker.step_age_s = 1e6
            await until(lambda: not engine.open_links())
            assert worker.num_attempts == 1 and not engine.flights._struck._processes
            worker.step_age_s = 0.0
            await until(engine.open_links)
        with pytest.raises(AssertionError, match="3 workers in a row stalled while they ran this request"):
            await read(stream)
        assert engine.flights.num_lost == 3 and engine.flights.num_given_up == 1
        await engine.stop()
        await task

    asyncio.run(run())


def test_a_stream_whose_worker_was_lost_does_not_wait_behind_all_that_nobody_has_begun() -> None:
    async def run() -> None:
        engine = await front_end()
        engine.flights.dispatcher.limits = Backpressure(most_sequences=1)
        first, task = stub(engine, "first")
        await until(lambda: len(engine.open_links()) == 1)
        stream = open_stream(engine, 0, 3)
        await until(lambda: first.num_attempts == 1)
        others = [open_stream(engine, i, 3) for i in range(1, 9)]
        first.give(1)
        task.cancel()
        await until(lambda: not engine.open_links() and engine.flights.num_waiting == 9)
        assert engine.flights.dispatcher.queue.first(engine.clock.now()) == "r0"
        engine.flights.dispatcher.limits = Backpressure()
        second, other = stub(engine, "second")
        await until(lambda: second.num_attempts == 9)
        second.give(3)
        assert [await read(one) for one in (stream, *others)] == [expected(i, 3) for i in range(9)]
        await engine.stop()
        await other

    asyncio.run(run())


def test_a_worker_leaves_off_choices_that_were_over_before_it_had_them() -> None:
    """Both choices are made again from the start, of which one had ended elsewhere; when the other ends, nobody wants the rest."""

    async def run() -> None:
        engine = await front_end()
        first, task = stub(engine, "first")
        await until(engine.open_links)
        params = engine.check_params(SamplingParams(max_tokens=50, n=2, seed=1))
        stream = engine.submit([engine.prepare_checked([5, 7], params, "r")])
        await until(lambda: first.num_attempts == 1)
        assert first._channel is not None
        begun = next(iter(first._attempts))
        first._channel.send(Events([Event(begun, 1, "xy", [10, 11], FinishReason.STOP), Event(begun, 0, "z", [12])]))
        await until(lambda: (flight := engine.flights.find("r")) is not None and flight.attempts.num_sent_tokens == 3)
        task.cancel()
        await until(lambda: not engine.open_links())
        second, other = stub(engine, "second")
        await until(lambda: second.num_attempts == 1)
        assert second._channel is not None
        second._channel.send(Events([Event(next(iter(second._attempts)), 0, "zw", [12, 13], FinishReason.STOP)]))
        got = [event async for event in events_of(stream)]
        assert [(event.choice, event.token_ids) for event in got] == [(1, [10, 11]), (0, [12]), (0, [13])]
        await until(lambda: second.num_attempts == 0)
        assert not len(engine.flights) and not engine.open_links()[0].keys
        engine.flights.check_invariants()
        await engine.stop()
        await other

    asyncio.run(run())


async def events_of(stream: EventStream) -> AsyncIterator[OutputEvent]:
    while not stream.finished:
        for event in await asyncio.wait_for(stream.read(), 60):
            yield event
