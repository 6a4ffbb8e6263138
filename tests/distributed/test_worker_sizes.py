"""Workers with KV pools of different sizes: who can hold a request gets it, and it is refused when nobody that is there ever could."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.config import EngineConfig
from octavo.core.request import ParameterError, Request, SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.distributed.channel import Address
from octavo.distributed.cluster_engine import ClusterEngine
from octavo.distributed.cluster_options import ClusterOptions
from octavo.distributed.dispatcher import Backpressure, Dispatcher
from octavo.distributed.fair_queue import QUANTUM, FairQueue
from octavo.distributed.messages import Ready, WorkerLimits
from octavo.distributed.router import RoundRobin
from octavo.distributed.views import RouteRequest
from octavo.distributed.worker import WorkerOptions, WorkerServer
from octavo.distributed.worker_sizes import WorkerSizes, lack
from octavo.engine.engine import Engine
from octavo.engine.event_stream import EventStream
from octavo.engine.outputs import RequestOutput
from octavo.engine.serving import NO_WORKER
from tests.distributed import scripted_worker
from tests.distributed.clusters import PATIENT, WAIT_S, alone, run_alone
from tests.distributed.test_worker import SECRET, answer, front_end, until
from tests.distributed.views import View, route
from tests.engine.scripted import bigram_config, bigram_model, byte_tokenizer

BLOCK = bigram_config().cache.block_size
SMALL, BIG = 4, 64  # blocks
PARAMS = SamplingParams(temperature=0.9, max_tokens=100, ignore_eos=True, seed=4)  # more than four blocks
PROMPT = [40, 41, 42, 43]


def sized(num_blocks: int) -> EngineConfig:
    config = bigram_config()
    return replace(config, cache=replace(config.cache, num_kv_blocks=num_blocks))


def worker(address: Address, name: str, num_blocks: int) -> asyncio.Task[None]:
    """A real one, whatever the front end says of its pool."""

    def load(config: EngineConfig) -> Engine:
        return scripted_worker.load(replace(config, cache=replace(config.cache, num_kv_blocks=num_blocks)))

    return asyncio.create_task(WorkerServer(address, SECRET, WorkerOptions(name), load).run())


async def there(engine: ClusterEngine, *names: str) -> None:
    await until(lambda: {link.name for link in engine.open_links()} == set(names))


async def taken_off(engine: ClusterEngine, name: str, task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await until(lambda: engine.control.find(name) is None)


@pytest.fixture(scope="module")
def expected() -> list[int]:
    return run_alone(alone(), PROMPT, PARAMS).outputs[0].token_ids


# --- what a worker holds ------------------------------------------------------------------------------------------------------------------


@given(st.integers(1, 40), st.integers(1, 300), st.integers(0, 300), st.booleans())
def test_what_a_worker_lacks_is_what_it_would_say_itself(num_blocks: int, num_prompt: int, max_tokens: int, reserves: bool) -> None:
    config = bigram_config()
    limits = WorkerLimits(256, 256, 4, 300, BLOCK, num_blocks, 1)
    lengths = WorkerSizes(bigram_model(byte_tokenizer()), config).take(Ready("m", "f", limits))
    own = Scheduler(config.scheduler, config.cache, num_blocks, 256)
    request = Request("r", [5] * num_prompt, SamplingParams(max_tokens=max_tokens), seed=0)
    try:
        own.add(request)
        fits = own.clamped_max_tokens(request) is None
    except ParameterError:
        fits = False
    found = lack(request, lengths)
    assert (found is None) == fits
    if found is not None:
        assert found.param in ("prompt", "max_tokens") and str(found.value) in str(found)


# --- who gets it --------------------------------------------------------------------------------------------------------------------------


@dataclass
class Sized(View):
    size: int = 0
    had: list[str] = field(default_factory=list)


def dispatcher(most_sequences: int = 1, quantum: int = QUANTUM) -> Dispatcher:
    def holds(request: RouteRequest, engine: object) -> bool:
        assert isinstance(engine, Sized)
        return request.num_prompt <= engine.size

    return Dispatcher(RoundRobin(), Backpressure(most_sequences=most_sequences), FairQueue(quantum), holds)


def drain(desk: Dispatcher, engines: list[Sized], spare: list[Sized] | None = None) -> None:
    while (found := desk.next(engines, 0.0, spare or [])) is not None:
        request, place = found
        engine = [*engines, *(spare or [])][place]
        engine.num_sequences += 1
        engine.had.append(request.request_id)
        desk.check_invariants()


def test_those_behind_one_that_only_a_busy_engine_can_hold_go_on_and_it_is_the_next_there() -> None:
    desk, small, big = dispatcher(), Sized(0, size=10), Sized(1, size=100, num_sequences=1)
    for name, num_prompt in (("large", 50), ("a", 5), ("b", 5), ("large too", 60)):
        desk.submit(route(name, num_prompt), [small, big], 0.0)
    drain(desk, [small, big])
    assert small.had == ["a"] and [request.request_id for request in desk.set_aside()] == ["large"] and len(desk) == 3
    big.num_sequences = 0
    drain(desk, [small, big])
    assert big.had == ["large"]
    for engine in (small, big):
        engine.num_sequences = 0
        drain(desk, [small, big])
    assert (small.had, big.had) == (["a", "b"], ["large", "large too"]) and not len(desk)


def test_what_is_set_aside_is_looked_at_again_when_somebody_takes_more_who_did_not_before() -> None:
    """Not at each pump: thousands may wait for one engine while others work."""
    num_asked = 0

    def holds(request: RouteRequest, engine: object) -> bool:
        nonlocal num_asked
        num_asked += 1
        assert isinstance(engine, Sized)
        return request.num_prompt <= engine.size

    desk = Dispatcher(RoundRobin(), Backpressure(most_sequences=1), holds=holds)
    small, others, big = Sized(0, size=5), Sized(1, num_sequences=1, size=5), Sized(2, num_sequences=1, size=50)
    engines = [small, others, big]
    for i in range(100):
        desk.submit(route(f"big-{i}", 20), engines, 0.0)
    drain(desk, engines)
    assert len(desk.set_aside()) == 100

    def asked() -> int:
        nonlocal num_asked
        num_asked = 0
        drain(desk, engines)
        return num_asked

    assert asked() == 0
    small.num_sequences, others.num_sequences = 1, 0  # another that takes more: each is asked about it, once
    assert asked() > 0
    assert asked() == 0
    small.num_sequences = 0
    desk.submit(route("big-100", 20), engines, 0.0)
    assert 0 < asked() < 10  # the one that is new
    engines[1] = Sized(1, size=50)  # in its place another has come
    assert asked() > 0 and engines[1].had == ["big-0"]
    big.num_sequences = 0
    assert asked() > 0 and big.had == ["big-1"]
    desk.check_invariants()


def test_spare_engines_get_what_no_other_could_ever_hold_and_nothing_else() -> None:
    desk, small, big = dispatcher(9), Sized(0, size=10, num_sequences=9), Sized(1, size=100)
    for name, num_prompt in (("a", 5), ("large", 50)):
        desk.submit(route(name, num_prompt), [small], 0.0)
    drain(desk, [small], [big])
    assert big.had == [] and len(desk) == 2, "nobody has had a turn yet"
    small.num_sequences = 8
    drain(desk, [small], [big])
    small.num_sequences = 8
    drain(desk, [small], [big])
    assert (small.had, big.had) == (["a"], ["large"])


@given(
    st.lists(st.tuples(st.integers(1, 40), st.sampled_from(["x", "y"])), max_size=25),
    st.lists(st.integers(5, 40), min_size=1, max_size=4),
    st.lists(st.integers(0, 3), max_size=60),
)
def test_nobody_gets_what_it_cannot_hold_and_nothing_waits_beside_who_can(
    requests: list[tuple[int, str]], sizes: list[int], ends: list[int]
) -> None:
    desk, engines = dispatcher(2), [Sized(i, size=size) for i, size in enumerate(sizes)]
    for i, (num_prompt, user) in enumerate(requests):
        desk.submit(route(f"{i}", num_prompt, user=user), engines, float(i))
    drain(desk, engines)
    for place in [*ends, *range(len(sizes)), *(list(range(len(sizes))) * len(requests))]:
        engine = engines[place % len(engines)]
        engine.num_sequences = max(0, engine.num_sequences - 1)
        drain(desk, engines)
        for request in desk.waiting_requests():
            assert not any(engine.num_sequences < 2 and request.num_prompt <= engine.size for engine in engines)
    for engine in engines:
        assert all(requests[int(name)][0] <= engine.size for name in engine.had)
    served = {name for engine in engines for name in engine.had}
    assert served == {f"{i}" for i, (num_prompt, _) in enumerate(requests) if num_prompt <= max(sizes)}
    assert {request.request_id for request in desk.set_aside()} == {f"{i}" for i in range(len(requests))} - served
    for request in desk.set_aside():
        assert desk.withdraw(request.request_id)
    desk.check_invariants()
    assert not len(desk)


# --- a cluster ----------------------------------------------------------------------------------------------------------------------------


def test_a_request_that_only_one_worker_can_hold_goes_there_and_comes_out_right(expected: list[int]) -> None:
    async def run() -> None:
        async with front_end() as engine:
            tasks = [worker(engine.control.address, name, size) for name, size in (("big", BIG), ("small", SMALL), ("tiny", SMALL))]
            await there(engine, "big", "small", "tiny")
            found = await asyncio.gather(*(answer(engine, f"r{i}", params=PARAMS) for i in range(6)))
            assert [output.outputs[0].token_ids for output in found] == [expected] * 6
            short = replace(PARAMS, max_tokens=5)
            assert (await answer(engine, "short", params=short)).outputs[0].token_ids == expected[:5]
        await asyncio.gather(*tasks)

    asyncio.run(run())


def test_what_is_asked_for_openly_is_what_every_worker_has_and_more_is_given_where_somebody_has_it() -> None:
    async def run() -> None:
        async with front_end() as engine:
            small = worker(engine.control.address, "small", SMALL)
            await there(engine, "small")
            room = SMALL * BLOCK + 1 - len(PROMPT)
            assert engine.room(len(PROMPT)) == room
            prepared = engine.prepare_checked(PROMPT, PARAMS, "r0")
            assert prepared.request.params.max_tokens == room and "was reduced to" in prepared.warnings[0]
            with pytest.raises(ParameterError, match=f"prompt has {2 * SMALL * BLOCK} tokens and the KV pool holds {SMALL * BLOCK} tokens"):
                engine.prepare_checked([5] * (2 * SMALL * BLOCK), PARAMS, "r1")
            big = worker(engine.control.address, "big", BIG)
            await there(engine, "small", "big")
            prepared = engine.prepare_checked(PROMPT, PARAMS, "r2")
            assert prepared.request.params.max_tokens == PARAMS.max_tokens and not prepared.warnings
            openly = engine.prepare_checked(PROMPT, replace(PARAMS, max_tokens=None), "r3")
            assert openly.request.params.max_tokens == room, "any worker can go on with it"
            assert engine.prepare_checked([5] * (2 * SMALL * BLOCK), PARAMS, "r4").request.params.max_tokens == PARAMS.max_tokens
        await asyncio.gather(small, big)

    asyncio.run(run())


def ready_of(num_blocks: int, *methods: str) -> Ready:
    return Ready("m", "f", WorkerLimits(256, min(256, num_blocks * BLOCK + 1), 4, 300, BLOCK, num_blocks, 1, list(methods)))


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.integers(1, 20)), max_size=30))
def test_the_least_is_that_of_those_that_are_there(moves: list[tuple[bool, int, int]]) -> None:
    sizes, there, last = WorkerSizes(bigram_model(byte_tokenizer()), bigram_config()), dict[int, Ready](), None
    for comes, worker_index, num_blocks in moves:
        if comes and worker_index not in there:
            there[worker_index] = ready_of(num_blocks)
            sizes.take(there[worker_index])
        elif not comes and there.pop(worker_index, None) is not None:
            sizes.gone(there.values())
        last = min(there.values(), key=lambda ready: ready.limits.num_kv_blocks, default=last)
        assert (sizes.least and sizes.least.limits) == (last and last.limits)
        if last is not None:
            assert sizes.preparer is not None and sizes.preparer.limits.max_total_tokens == last.limits.max_total_tokens


def test_what_drafts_there_are_is_said_by_the_least_that_is_there() -> None:
    sizes = WorkerSizes(bigram_model(byte_tokenizer()), bigram_config())
    sizes.take(big := ready_of(BIG, "ngram"))
    sizes.take(ready_of(SMALL))
    assert sizes.methods == set()
    sizes.gone([big])
    assert sizes.methods == {"ngram"}


def test_a_small_worker_that_has_left_cuts_no_answer() -> None:
    async def run() -> None:
        async with front_end() as engine:
            small, big = worker(engine.control.address, "small", SMALL), worker(engine.control.address, "big", BIG)
            await there(engine, "small", "big")
            assert engine.room(4) == SMALL * BLOCK - 3
            await taken_off(engine, "small", small)
            assert engine.room(4) == BIG * BLOCK - 3
            openly = engine.prepare_checked(PROMPT, replace(PARAMS, max_tokens=None), "r0")
            assert openly.request.params.max_tokens == BIG * BLOCK - 3
            await taken_off(engine, "big", big)
            assert engine.room(4) == BIG * BLOCK - 3, "as far as is known"
            small = worker(engine.control.address, "small", SMALL)
            await there(engine, "small")
            assert engine.room(4) == SMALL * BLOCK - 3
        await small

    asyncio.run(run())


async def read(stream: EventStream, output: RequestOutput) -> tuple[str | None, str | None]:
    """All of it; code and message of the error that ended it."""
    found: tuple[str | None, str | None] = None, None
    while not stream.finished:
        for event in await stream.read():
            output.apply(event)
            found = event.error_code, event.error
    return found


@pytest.mark.parametrize("comes_back", [True, False])
def test_when_the_only_worker_that_can_hold_it_is_lost_it_waits_for_another_and_not_for_ever(
    expected: list[int], comes_back: bool
) -> None:
    async def run() -> None:
        async with front_end(worker_wait_s=WAIT_S if comes_back else 0.0) as engine:
            address = engine.control.address
            big, small = worker(address, "big", BIG), worker(address, "small", SMALL)
            await there(engine, "big", "small")
            prepared = engine.prepare_checked(PROMPT, engine.check_params(PARAMS), "large")
            await taken_off(engine, "big", big)
            output, stream = RequestOutput.start(prepared.request, None, []), engine.submit([prepared])
            reading = asyncio.create_task(read(stream, output))
            short = await answer(engine, "short", params=replace(PARAMS, max_tokens=5))  # it keeps nobody waiting
            assert short.outputs[0].token_ids == expected[:5]
            if comes_back:
                assert [route.request_id for route in engine.flights.dispatcher.set_aside()] == ["large"]
                engine.flights.check_invariants()
                big = worker(address, "big", BIG)
                assert await reading == (None, None) and output.outputs[0].token_ids == expected
            else:
                code, error = await reading
                room = SMALL * BLOCK + 1 - len(PROMPT)
                message = f"max_tokens: {PARAMS.max_tokens} is not allowed; at most {room} behind this prompt"
                assert code == NO_WORKER and error is not None and error.startswith(message)
            assert engine.flights.num_lost == 0
        await asyncio.gather(small, *([big] if comes_back else []))

    asyncio.run(run())


def test_a_worker_that_is_replaced_is_waited_for_however_long_it_drains() -> None:
    """``fail_unheld`` counts those that drain before a successor; it is asked for nothing while nobody is there."""
    options = ClusterOptions(liveness=PATIENT, worker_wait_s=0.0)

    async def run() -> None:
        async with front_end(worker_wait_s=WAIT_S) as engine:
            small = worker(engine.control.address, "small", SMALL)
            big = worker(engine.control.address, "big", BIG)
            await there(engine, "small", "big")
            prepared = engine.prepare_checked(PROMPT, engine.check_params(PARAMS), "large")
            sizes = {link.name: link.view.lengths for link in engine.open_links()}
            await taken_off(engine, "big", big)
            stream = engine.submit([prepared])
            flight = engine.flights.find("large")
            assert flight is not None and sizes["small"] is not None and sizes["big"] is not None
            for there_now in ([sizes["small"], sizes["big"]], [], [sizes["big"]]):
                for _ in range(3):
                    engine.flights.fail_unheld(there_now, options.worker_wait_s)
                assert flight.unheld_s is None and len(engine.flights) == 1
            engine.flights.fail_unheld([sizes["small"]], WAIT_S)
            assert flight.unheld_s is not None and len(engine.flights) == 1
            engine.flights.fail_unheld([sizes["small"]], options.worker_wait_s)
            assert not len(engine.flights)
            assert [event.error_code for event in await stream.read()] == [NO_WORKER]
        await small

    asyncio.run(run())


def test_the_last_worker_that_holds_what_waits_is_not_drained() -> None:
    """The other one takes requests, but not those: they would wait for nobody, and fail."""
    prompt, params = [5 + i % 60 for i in range(SMALL * BLOCK)], replace(PARAMS, max_tokens=8)
    expected = run_alone(alone(), prompt, params).outputs[0].token_ids

    async def run() -> None:
        async with front_end() as engine:
            small = worker(engine.control.address, "small", SMALL)
            big = worker(engine.control.address, "big", BIG)
            await there(engine, "small", "big")
            streams = []
            while engine.flights.num_waiting == 0:  # the loop runs nothing else meanwhile, so that none of them ends
                assert len(streams) < 500
                streams.append(engine.submit([engine.prepare_checked(prompt, engine.check_params(params), f"large-{len(streams)}")]))
            with pytest.raises(ValueError, match="big is needed for 1 waiting request that no other worker can hold"):
                await engine.cluster.drain("big")
            for stream in streams:
                tokens: list[int] = []
                while not stream.finished:
                    for event in await stream.read():
                        assert event.error is None
                        tokens += event.token_ids
                assert tokens == expected
            await until(lambda: len(engine.flights) == 0)
            await engine.cluster.drain("big")
            await until(lambda: engine.control.find("big") is None)
        await asyncio.gather(small, big)

    asyncio.run(run())
