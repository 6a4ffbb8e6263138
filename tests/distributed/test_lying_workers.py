"""Workers that know the secret and say what cannot be: they lose their channel, and nobody loses a token by it."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec
import pytest

from octavo.bench.stub_worker import StubWorker, token_of
from octavo.core.request import SamplingParams
from octavo.core.step import TokenLogprobs
from octavo.distributed.barred import Barred
from octavo.distributed.channel import Address, connect
from octavo.distributed.cluster_engine import ClusterEngine
from octavo.distributed.cluster_options import ClusterOptions
from octavo.distributed.frames import MAX_FRAME_BYTES
from octavo.distributed.messages import (
    MAX_BOOT_ID_CHARS,
    PROTOCOL,
    Event,
    Events,
    Goodbye,
    Hello,
    Keys,
    Load,
    Message,
    Offered,
    Ready,
    Refuse,
    Submit,
    ToWorker,
    Welcome,
    WorkerLimits,
    to_worker,
)
from octavo.distributed.worker_account import WorkerAccount
from octavo.engine.event_stream import EventStream
from tests.distributed.clusters import PATIENT
from tests.engine.scripted import bigram_config, bigram_model, byte_tokenizer

SECRET = b"a secret of the tests"
TOKENIZER = byte_tokenizer()
VOCAB = TOKENIZER.vocab_size
LIMITS = WorkerLimits(8192, 8192, 64, VOCAB, 16, 1024, 1)
LAYOUT = {"page_bytes": 64, "num_full": 0, "num_window": 1, "window": 8, "layers": [[0, 0]]}  # of the bigram's one layer


class Cluster:
    """A front end with an honest worker and one that says what a test has it say."""

    def __init__(self) -> None:
        model = bigram_model(TOKENIZER, context=8192)
        self.engine = ClusterEngine(model, bigram_config(), Address("127.0.0.1", 0), SECRET, ClusterOptions(liveness=PATIENT))
        self.honest, self.liar = (StubWorker(name, "bigram", VOCAB) for name in ("honest", "liar"))
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Cluster:
        self.engine.start()
        assert self.engine._opening is not None
        await self.engine._opening
        self._tasks = [asyncio.create_task(worker.run(self.engine.control.address, SECRET)) for worker in (self.honest, self.liar)]
        await until(lambda: len(self.engine.open_links()) == 2)
        return self

    async def __aexit__(self, *error: object) -> None:
        self.engine.flights.check_invariants()
        await self.engine.stop()
        await asyncio.gather(*self._tasks)

    def open(self, i: int, num_tokens: int = 6) -> EventStream:
        params = self.engine.check_params(SamplingParams(max_tokens=num_tokens, seed=i))
        return self.engine.submit([self.engine.prepare_checked([3 + i, 7], params, f"r{i}")])

    def say(self, *messages: Message) -> None:
        assert self.liar._channel is not None
        for message in messages:
            self.liar._channel.send(message)

    def write(self, data: bytes) -> None:
        assert self.liar._channel is not None and self.liar._channel._transport is not None
        self.liar._channel._transport.write(data)


async def until(condition: Any) -> None:
    async with asyncio.timeout(120):
        while not condition():
            await asyncio.sleep(0.005)


async def read(stream: EventStream) -> list[int]:
    tokens = list[int]()
    while not stream.finished:
        for event in await stream.read():
            assert event.error is None and event.choice == 0, event
            tokens += event.token_ids
    return tokens


def expected(i: int, num_tokens: int = 6) -> list[int]:
    return [token_of([3 + i, 7], k, VOCAB) for k in range(num_tokens)]


def lies(key: int) -> dict[str, list[Message]]:
    """``key``: of an attempt that the liar has."""
    return {
        "a choice below the first": [Events([Event(key, choice=-1, token_ids=[5])])],
        "a choice that was not asked for": [Events([Event(key, choice=3, token_ids=[5])])],
        "more tokens than were asked for": [Events([Event(key, token_ids=[5] * 5)])],  # two have been given
        "a token beyond the vocabulary": [Events([Event(key, token_ids=[VOCAB])])],
        "a negative token": [Events([Event(key, token_ids=[-1])])],
        "log-probabilities of no token": [Events([Event(key, token_ids=[5], logprobs=[TokenLogprobs(5, -1.0, 1, [VOCAB], [-1.0])])])],
        "log-probabilities of more tokens than it gave": [Events([Event(key, logprobs=[TokenLogprobs(5, -1.0, 1, [], [])])])],
        "tokens without log-probabilities": [Events([Event(key, token_ids=[5], logprobs=[TokenLogprobs(5, -1.0, 1, [6], [])])])],
        "more requests than it was sent": [Load(num_received=1 << 40)],
        "work that is no number": [Load(pending_s=float("nan"))],
        "work below nothing": [Load(pending_s=-1.0)],
        "prices that are no numbers": [Load(prompt_token_s=float("inf"))],
        "prices below nothing": [Load(output_token_s=-1e-9)],
        "work beyond all measure": [Load(pending_tokens=1, pending_s=1e308)],
        "a step in the future": [Load(step_age_s=-1.0)],
        "fewer requests than none": [Load(num_running=-1)],
        "fewer waiting than none": [Load(num_waiting=-(1 << 40))],
        "tokens below nothing": [Load(pending_tokens=-5)],
        "blocks below nothing": [Load(num_available_blocks=-1)],
        "used blocks below nothing": [Load(num_used_blocks=-1)],
        "steps below nothing": [Load(num_steps=-1)],
        "less cached than nothing": [Events([Event(key, token_ids=[5], num_cached_tokens=-1)])],
        "an account of no number": [Events([Event(key, account=WorkerAccount("a", float("nan"), "finished"))])],
        "an account of what it never had": [Events([Event(1, account=WorkerAccount("a", -1.0, "finished"))])],
        "an account with a hand-off": [Offered(key, [5, 6], WorkerAccount("a", 1.0, "finished", details={"decode": "\x1b[2J"}))],
        "hello again": [Hello(PROTOCOL, "liar", "both", "here", 1, "boot")],
        "ready again": [Ready("stub", "bigram/stub", LIMITS)],
        "a heartbeat from the future": [Keys(step_age_s=-1.0)],
        "a heartbeat at no time": [Keys(step_age_s=float("nan"))],
        "keys anew again": [Keys(anew=True), Keys(anew=True)],
    }


@pytest.mark.parametrize("lie", lies(1))
def test_a_lie_costs_the_liar_its_channel_and_nobody_a_token(lie: str) -> None:
    async def run() -> None:
        async with Cluster() as cluster:
            streams = [cluster.open(i) for i in range(12)]
            readers = [asyncio.create_task(read(stream)) for stream in streams]
            await until(lambda: cluster.honest.num_attempts + cluster.liar.num_attempts == 12 and cluster.liar.num_attempts)
            cluster.liar.give(2)
            cluster.honest.give(1)
            cluster.say(*lies(next(iter(cluster.liar._attempts)))[lie])
            await until(lambda: cluster.engine.control.find("liar") is None)
            await until(lambda: cluster.honest.num_attempts == 12)
            cluster.honest.give(6)
            assert await asyncio.gather(*readers) == [expected(i) for i in range(12)]

    asyncio.run(run())


TOO_LONG = (MAX_FRAME_BYTES + 1).to_bytes(4, "big")


@pytest.mark.parametrize("data", [TOO_LONG, b"\xff\xff\xff\xff", b"\x00\x00\x00\x02\x81\xa1", b"\x00\x00\x00\x00"])
def test_frames_that_are_none_cost_it_too(data: bytes) -> None:
    async def run() -> None:
        async with Cluster() as cluster:
            stream = cluster.open(1)
            cluster.write(data)
            await until(lambda: cluster.engine.control.find("liar") is None)
            await until(lambda: cluster.honest.num_attempts == 1)
            cluster.honest.give(6)
            assert await read(stream) == expected(1)

    asyncio.run(run())


def test_what_a_worker_says_of_the_attempts_of_others_is_dropped() -> None:
    async def run() -> None:
        async with Cluster() as cluster:
            streams = [cluster.open(i) for i in range(12)]
            await until(lambda: cluster.honest.num_attempts + cluster.liar.num_attempts == 12 and cluster.honest.num_attempts)
            others = [*cluster.honest._attempts, 10_000]
            cluster.say(*(Events([Event(key, text="lie", token_ids=[9])]) for key in others), Load(num_received=cluster.liar.num_received))
            cluster.honest.give(6)
            cluster.liar.give(6)
            assert [await read(stream) for stream in streams] == [expected(i) for i in range(12)]
            assert cluster.engine.control.find("liar") is not None

    asyncio.run(run())


def test_keys_that_a_worker_does_not_have_make_no_answer_wrong() -> None:
    """It is sent more than its share, or keys that nobody asks for: what is answered does not change, and what is kept of it is bounded."""

    async def run() -> None:
        async with Cluster() as cluster:
            rubbish = [i.to_bytes(8, "big") for i in range(5000)]
            strange = Keys([b"short", b"much longer than a key is"], [], True)
            cluster.say(Keys(), strange, Keys(rubbish, [b"", b"x" * 100]), Keys(rubbish, rubbish))
            streams = [cluster.open(i) for i in range(12)]
            await until(lambda: cluster.honest.num_attempts + cluster.liar.num_attempts == 12)
            cluster.honest.give(6)
            cluster.liar.give(6)
            assert [await read(stream) for stream in streams] == [expected(i) for i in range(12)]
            assert cluster.engine.control.find("liar") is not None

    asyncio.run(run())


class Broken(StubWorker):
    """Answers everything with a token that there is not, and comes back at once."""

    num_lies: int = 0

    def _take(self, messages: list[ToWorker]) -> None:
        super()._take(messages)
        assert self._channel is not None
        for message in messages:
            if isinstance(message, Submit):
                self.num_lies += 1
                self._channel.send(Events([Event(message.key, token_ids=[VOCAB])]))

    async def come_again_and_again(self, address: Address) -> None:
        while True:
            await self.run(address, SECRET)
            await asyncio.sleep(0.02)


def test_lies_that_come_back_end_the_request_that_they_answer_and_wait_at_the_door() -> None:
    """The processes live on: what they do to a request is not forgiven for that, and they cut no others' streams without end."""

    async def run() -> None:
        async with Cluster() as cluster:
            control = cluster.engine.control
            for link in cluster.engine.open_links():
                control.fleet.drain(link.worker)
            control._barred = Barred(first_s=0.05, most_s=600.0)
            workers = [Broken(name, "bigram", VOCAB) for name in ("one", "two")]
            tasks = [asyncio.create_task(worker.come_again_and_again(control.address)) for worker in workers]
            await until(lambda: len(cluster.engine.open_links()) == 2)
            with pytest.raises(AssertionError, match="3 workers in a row said what cannot be while they ran this request"):
                await read(cluster.open(1))
            assert sum(worker.num_lies for worker in workers) == 3 and cluster.engine.flights.num_given_up == 1
            control._barred = Barred(first_s=600.0)
            stream = cluster.open(2)
            await until(lambda: sum(worker.num_lies for worker in workers) == 5)
            await until(lambda: all("may come again in" in control.last_words.get(worker.name, "") for worker in workers))
            assert not cluster.engine.open_links()
            for link in control:
                control.fleet.keep(link.worker)
            cluster.engine.flights.pump()
            await until(lambda: cluster.honest.num_attempts + cluster.liar.num_attempts == 1)
            cluster.honest.give(6)
            cluster.liar.give(6)
            assert await read(stream) == expected(2)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())


# --- at the door --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "limits",
    [
        {"num_kv_blocks": 1 << 60},
        {"num_kv_blocks": 0},
        {"num_kv_blocks": -5},
        {"max_model_len": 1 << 60},
        {"block_size": 0},
        {"vocab_size": VOCAB + 1},
        {"max_num_seqs": 0},
        {"block_size": 1},
        {"block_size": 1 << 40},
        {"max_model_len": 8193},
        {"kv_layout": {}},
        {"kv_layout": LAYOUT | {"num_window": 1 << 30}},
        {"kv_layout": LAYOUT | {"num_full": 1}},
        {"kv_layout": LAYOUT | {"num_full": -1}},
        {"kv_layout": LAYOUT | {"num_window": 0}},
        {"kv_layout": LAYOUT | {"num_window": True}},
        {"kv_layout": LAYOUT | {"num_full": None}},
        {"kv_layout": LAYOUT | {"page_bytes": "64"}},
        {"kv_layout": LAYOUT | {"layers": [[0, 0]] * 2}},
        *({"kv_layout": LAYOUT | {"window": window}} for window in ("x", -3, 1.5, [], 0, None)),
    ],
)
def test_limits_that_no_engine_can_have_are_refused(limits: dict[str, Any]) -> None:
    async def run() -> None:
        async with Cluster() as cluster:
            channel = await connect(cluster.engine.control.address, SECRET, to_worker)
            channel.start(lambda messages: None, lambda reason: None)
            channel.send(Hello(PROTOCOL, "third", "both", "here", 1, "boot"))
            channel.send(Ready("stub", "bigram/stub", msgspec.structs.replace(LIMITS, **limits)))
            await until(lambda: channel.closed_for is not None)
            await until(lambda: cluster.engine.control.find("third") is None)
            assert cluster.engine.room(10) == 8192 - 10
            assert cluster.engine._sizes._known is not None and cluster.engine._sizes._known[0].kv_layout is None, "it was laid out"

    asyncio.run(run())


def test_a_layout_that_can_be_is_taken() -> None:
    """Else the ones above would be refused whatever is wrong with them."""

    async def run() -> None:
        async with Cluster() as cluster:
            channel = await connect(cluster.engine.control.address, SECRET, to_worker)
            channel.start(lambda messages: None, lambda reason: None)
            channel.send(Hello(PROTOCOL, "third", "both", "here", 1, "boot"))
            channel.send(Ready("stub", "bigram/stub", msgspec.structs.replace(LIMITS, kv_layout=LAYOUT)))
            await until(lambda: len(cluster.engine.open_links()) == 3)
            channel.close("it is enough")
            await until(lambda: cluster.engine.control.find("third") is None)

    asyncio.run(run())


def test_a_pool_of_any_size_costs_the_front_end_nothing() -> None:
    """It lays out no pool to know what fits one request."""

    async def run() -> None:
        engine = ClusterEngine(bigram_model(TOKENIZER, context=8192), bigram_config(), Address("127.0.0.1", 0), SECRET)
        engine._sizes.take(Ready("stub", "bigram/stub", msgspec.structs.replace(LIMITS, num_kv_blocks=1 << 40)))
        assert engine.room(10) == 8192 - 10

    asyncio.run(run())


@pytest.mark.parametrize("name", ["", "x" * 129, "two words", "line\nbreak", "\x1b[2Jescape", "é"])
def test_names_that_could_not_be_shown_are_turned_away(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever started the worker is told why, and the front end's log has a line of it."""

    async def run() -> None:
        async with Cluster() as cluster:
            heard: list[Message] = []
            channel = await connect(cluster.engine.control.address, SECRET, to_worker)
            channel.start(heard.extend, lambda reason: None)
            channel.send(Hello(PROTOCOL, name, "both", "here", 1, "boot"))
            await until(lambda: channel.closed_for is not None)
            (refuse,) = heard
            assert isinstance(refuse, Refuse) and refuse.is_final and refuse.reason.startswith(f"name: {name[:128]!r} is not allowed")
            assert len(cluster.engine.control.fleet) == 2

    caplog.set_level(logging.WARNING, "octavo")
    asyncio.run(run())
    (refused,) = [record for record in caplog.records if "refused worker" in record.message]
    assert refused.exc_info is None and refused.message.isprintable()
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize(("protocol", "role", "word"), [(PROTOCOL + 1, "both", "protocol"), (PROTOCOL, "king", "role")])
def test_other_protocols_and_roles_are_refused_with_the_reason(protocol: int, role: str, word: str) -> None:
    async def run() -> None:
        async with Cluster() as cluster:
            heard: list[Message] = []
            channel = await connect(cluster.engine.control.address, SECRET, to_worker)
            channel.start(heard.extend, lambda reason: None)
            channel.send(Hello(protocol, "third", role, "here", 1, "boot"))
            await until(lambda: channel.closed_for is not None)
            (refuse,) = heard
            assert isinstance(refuse, Refuse) and word in refuse.reason and refuse.is_final

    asyncio.run(run())


@pytest.mark.parametrize("number", [0, MAX_BOOT_ID_CHARS, MAX_BOOT_ID_CHARS + 1, 100_000])
def test_a_process_whose_id_is_long_is_refused(number: int) -> None:
    """Processes are remembered by their ids, thousands of them."""

    async def run() -> None:
        async with Cluster() as cluster:
            heard: list[Message] = []
            channel = await connect(cluster.engine.control.address, SECRET, to_worker)
            channel.start(heard.extend, lambda reason: None)
            channel.send(Hello(PROTOCOL, "third", "both", "here", 1, "b" * number))
            await until(lambda: bool(heard))
            if number == MAX_BOOT_ID_CHARS:
                assert cluster.engine.control.find("third") is not None and isinstance(heard[0], Welcome)
                return
            (refuse,) = heard
            assert isinstance(refuse, Refuse) and refuse.is_final
            assert refuse.reason == f"boot_id: {number} characters are not allowed; 1 to {MAX_BOOT_ID_CHARS}"

    asyncio.run(run())


def test_a_reason_is_shown_without_what_terminals_obey() -> None:
    async def run() -> None:
        async with Cluster() as cluster:
            cluster.say(Goodbye("\x1b[2J" + "gone\n" * 1000))
            await until(lambda: "liar" in cluster.engine.control.last_words)
            reason = cluster.engine.control.last_words["liar"]
            assert reason.isprintable() and len(reason) == 1000 and "gone?gone" in reason
            await until(lambda: cluster.engine.control.find("liar") is None)

    asyncio.run(run())
