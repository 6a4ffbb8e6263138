"""A front end before stub workers: hundreds of idle streams, no token lost or doubled; resubmitted requests are spread."""

from __future__ import annotations

import asyncio

import pytest

from octavo.bench.stub_worker import StubWorker, token_of
from octavo.core.request import ParameterError, SamplingParams
from octavo.distributed.channel import Address
from octavo.distributed.cluster_engine import ClusterEngine
from octavo.distributed.cluster_options import ClusterOptions
from octavo.distributed.messages import Submit, ToWorker
from octavo.engine.event_stream import EngineUnavailable, EventStream
from octavo.engine.params import PreparedRequest
from tests.distributed.clusters import PATIENT
from tests.engine.scripted import bigram_config, bigram_model, byte_tokenizer

SECRET = b"a secret of the tests"
TOKENIZER = byte_tokenizer()


async def front_end(options: ClusterOptions | None = None) -> ClusterEngine:
    model = bigram_model(TOKENIZER, context=8192)
    engine = ClusterEngine(model, bigram_config(), Address("127.0.0.1", 0), SECRET, options or ClusterOptions(liveness=PATIENT))
    engine.start()
    assert engine._opening is not None
    await engine._opening
    return engine


def stub(engine: ClusterEngine, name: str) -> tuple[StubWorker, asyncio.Task[None]]:
    worker = StubWorker(name, "bigram", TOKENIZER.vocab_size)
    return worker, asyncio.create_task(worker.run(engine.control.address, SECRET))


async def cut_off(engine: ClusterEngine, worker: StubWorker, task: asyncio.Task[None]) -> None:
    """Its connection, with which its ``task`` ends."""
    assert worker._channel is not None
    worker._channel.abort("the test has cut it")
    await asyncio.wait_for(task, 60)
    await until(lambda: engine.control.find(worker.name) is None)


def open_stream(engine: ClusterEngine, i: int, num_tokens: int) -> EventStream:
    params = engine.check_params(SamplingParams(max_tokens=num_tokens, seed=i))
    return engine.submit([engine.prepare_checked([3 + i % 200, 7], params, f"r{i}")])


async def read(stream: EventStream) -> list[int]:
    tokens = list[int]()
    while not stream.finished:
        for event in await stream.read():
            assert event.error is None, event.error
            tokens += event.token_ids
    return tokens


async def until(condition: object) -> None:
    async with asyncio.timeout(120):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.005)


def expected(i: int, num_tokens: int) -> list[int]:
    return [token_of([3 + i % 200, 7], k, TOKENIZER.vocab_size) for k in range(num_tokens)]


def test_no_token_of_many_streams_is_lost() -> None:
    async def run() -> None:
        engine = await front_end()
        stubs = [stub(engine, f"stub-{i}") for i in range(4)]
        await until(lambda: len(engine.open_links()) == 4)
        streams = [open_stream(engine, i, 20) for i in range(400)]
        readers = [asyncio.create_task(read(stream)) for stream in streams]
        await until(lambda: sum(worker.num_attempts for worker, _ in stubs) == 400)
        assert all(worker.num_attempts > 0 for worker, _ in stubs)
        for _ in range(20):
            for worker, _ in stubs:
                worker.give()
            await asyncio.sleep(0)
        assert await asyncio.gather(*readers) == [expected(i, 20) for i in range(400)]
        engine.flights.check_invariants()
        await engine.stop()
        await asyncio.gather(*(task for _, task in stubs))

    asyncio.run(run())


def test_what_a_lost_worker_had_is_given_to_others_little_by_little() -> None:
    async def run() -> None:
        options = ClusterOptions(liveness=PATIENT, resubmit_per_s=1e-3, resubmit_burst=3)
        engine = await front_end(options)
        first, task = stub(engine, "first")
        await until(lambda: len(engine.open_links()) == 1)
        readers = [asyncio.create_task(read(open_stream(engine, i, 9))) for i in range(8)]
        await until(lambda: first.num_attempts == 8)
        first.give(4)
        second, other = stub(engine, "second")
        await until(lambda: len(engine.open_links()) == 2)
        task.cancel()
        await until(lambda: second.num_attempts == 3)  # the burst
        engine.flights.check_invariants()
        assert engine.flights.num_waiting == 5 and engine.flights.num_lost == 8
        assert engine.flights._lost._timer is not None and engine.flights._lost._timer.when() > asyncio.get_running_loop().time() + 900
        engine.flights._lost._timer.cancel()
        engine.flights._lost._pacer._per_s = 1e6  # as if time had passed
        engine.flights._lost._timed_out()
        await until(lambda: second.num_attempts == 8)
        second.give(5)
        assert await asyncio.gather(*readers) == [expected(i, 9) for i in range(8)]
        await engine.stop()
        await other

    asyncio.run(run())


class Listening(StubWorker):
    """Keeps what it was sent."""

    heard: list[Submit]

    def _take(self, messages: list[ToWorker]) -> None:
        self.heard += [message for message in messages if isinstance(message, Submit)]
        super()._take(messages)


def test_a_request_that_is_moved_says_since_when_workers_have_had_it() -> None:
    """So it keeps its place at the next one. A first attempt has none to keep: its place is the one that it was given here."""

    async def run() -> None:
        engine = await front_end()
        workers = [Listening(name, "bigram", TOKENIZER.vocab_size) for name in ("first", "second")]
        for worker in workers:
            worker.heard = []
        tasks = [asyncio.create_task(workers[0].run(engine.control.address, SECRET))]
        await until(lambda: len(engine.open_links()) == 1)
        begun_s = engine.clock.now()
        readers = [asyncio.create_task(read(open_stream(engine, i, 5))) for i in range(3)]
        await until(lambda: workers[0].num_attempts == 3)
        placed_s = engine.clock.now()
        workers[0].give(2)
        tasks.append(asyncio.create_task(workers[1].run(engine.control.address, SECRET)))
        await until(lambda: len(engine.open_links()) == 2)
        lost_s = engine.clock.now()
        tasks[0].cancel()
        await until(lambda: workers[1].num_attempts == 3)
        for submit in workers[0].heard:
            assert submit.request.age_s == 0.0
        for submit in workers[1].heard:
            assert lost_s - placed_s < submit.request.age_s < engine.clock.now() - begun_s
        workers[1].give(5)
        assert await asyncio.gather(*readers) == [expected(i, 5) for i in range(3)]
        await engine.stop()
        await tasks[1]

    asyncio.run(run())


def test_a_worker_of_another_model_or_name_is_refused() -> None:
    async def run() -> None:
        engine = await front_end()
        good, task = stub(engine, "good")
        await until(lambda: len(engine.open_links()) == 1)
        for other, words in (
            (StubWorker("other", "another model", TOKENIZER.vocab_size), "its model"),
            (StubWorker("good", "bigram", TOKENIZER.vocab_size), "a worker of that name"),
        ):
            await asyncio.wait_for(other.run(engine.control.address, SECRET), 60)
            assert words in engine.control.last_words[other.name]
        assert [link.name for link in engine.open_links()] == ["good"]
        await engine.stop()
        await task

    asyncio.run(run())


def test_what_is_wrong_with_a_request_is_said_before_a_worker_sees_it() -> None:
    async def run() -> None:
        engine = await front_end()

        def prepare(prompt: list[int], params: SamplingParams) -> PreparedRequest:
            return engine.prepare_checked(prompt, engine.check_params(params), "r")

        with pytest.raises(EngineUnavailable, match="no worker has been ready"):
            prepare([5], SamplingParams())
        worker, task = stub(engine, "stub")
        await until(lambda: len(engine.open_links()) == 1)
        for prompt, params, param in (
            ([], SamplingParams(), "prompt"),
            ([10**6], SamplingParams(), "prompt"),
            ([5], SamplingParams(n=65), "n"),
            ([5] * 9000, SamplingParams(), "prompt"),
        ):
            with pytest.raises(ParameterError) as error:
                prepare(prompt, params)
            assert error.value.param == param
        assert prepare([5], SamplingParams(max_tokens=10**6)).warnings
        engine.draining = True
        with pytest.raises(EngineUnavailable, match="shutting down"):
            prepare([5], SamplingParams())
        await engine.stop()
        await task

    asyncio.run(run())


def test_a_worker_that_comes_back_was_not_killed_by_what_it_had() -> None:
    """A connection that is cut again and again costs no request its tries; as many deaths would."""

    async def run() -> None:
        engine = await front_end()
        worker = StubWorker("a", "bigram", TOKENIZER.vocab_size)
        reader = None
        for _ in range(8):
            task = asyncio.create_task(worker.run(engine.control.address, SECRET))
            await until(lambda: len(engine.open_links()) == 1)
            reader = reader or asyncio.create_task(read(open_stream(engine, 0, 5)))
            await until(lambda: worker.num_attempts == 1)
            engine.open_links()[0].channel.abort("as if the network had gone")
            await task
        back = asyncio.create_task(worker.run(engine.control.address, SECRET))
        await until(lambda: len(engine.open_links()) == 1)
        await until(lambda: worker.num_attempts == 1)
        worker.give(5)
        assert reader is not None and await reader == expected(0, 5)
        assert engine.flights.num_lost == 8 and engine.flights.num_given_up == 0
        await engine.stop()
        await back

    asyncio.run(run())
