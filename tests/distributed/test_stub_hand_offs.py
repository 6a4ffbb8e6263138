"""Hand-offs between two workers that say what a test has them say: what the front end believes, and what it tells."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from octavo.bench.stub_worker import StubWorker
from octavo.core.request import FinishReason
from octavo.distributed import operations
from octavo.distributed.cluster_engine import ClusterEngine
from octavo.distributed.cluster_options import ClusterOptions, HandoverOptions
from octavo.distributed.handoff import HandoffLimits
from octavo.distributed.messages import (
    Copied,
    CopyFailed,
    Event,
    Events,
    Message,
    Offered,
    PromptStarted,
    Ready,
    Reserve,
    Reserved,
    ToWorker,
    Welcome,
)
from octavo.engine.event_stream import EventStream
from tests.distributed.test_stub_worker import PATIENT, SECRET, TOKENIZER, expected, front_end, open_stream, read, until

NUM_TOKENS = 6
FIRST = expected(1, NUM_TOKENS)[0]


class MovesKV(StubWorker):
    """A stub that others could bring KV to. ``heard``: what it was told."""

    def __init__(self, *args: Any, **options: Any) -> None:
        StubWorker.__init__(self, *args, **options)
        self.heard = list[ToWorker]()

    def _take(self, messages: list[ToWorker]) -> None:
        self.heard += messages
        StubWorker._take(self, messages)

    def has(self, kind: type[ToWorker]) -> list[Any]:
        return [message for message in self.heard if isinstance(message, kind)]

    def _ready(self, welcome: Welcome) -> Ready:
        return msgspec.structs.replace(StubWorker._ready(self, welcome), kv_address="tcp=127.0.0.1:1", transports=["tcp"])

    def say(self, *messages: Message) -> None:
        assert self._channel is not None
        for message in messages:
            self._channel.send(message)


class Pair:
    """A front end with one request, whose prompt the prefill worker has begun."""

    def __init__(self, engine: ClusterEngine) -> None:
        self.engine = engine
        self.sender, self.receiver = (MovesKV(role, "bigram", TOKENIZER.vocab_size, role=role) for role in ("prefill", "decode"))
        self.stream: EventStream
        self.key = 0


@contextlib.asynccontextmanager
async def pair() -> AsyncIterator[Pair]:
    one = Pair(await front_end())
    tasks = [asyncio.create_task(worker.run(one.engine.control.address, SECRET)) for worker in (one.sender, one.receiver)]
    await until(lambda: len(one.engine.open_links()) == 2)
    one.stream = open_stream(one.engine, 1, NUM_TOKENS)
    await until(lambda: one.sender.num_attempts == 1)
    one.key = next(iter(one.sender._attempts))
    one.sender.say(PromptStarted(one.key))
    await until(lambda: one.engine.handovers.desk.find(one.key) is not None)
    yield one
    one.engine.handovers.check_invariants()
    one.engine.flights.check_invariants()
    await one.engine.stop()
    await asyncio.gather(*tasks)


@pytest.mark.parametrize("offered", [[10**9], [-1], [TOKENIZER.vocab_size], [FIRST + 1], [], [FIRST, FIRST], [FIRST]])
def test_tokens_are_handed_over_that_were_sent_and_no_others(offered: list[int]) -> None:
    """Nobody would notice others that can be, and those that cannot would end the engine of the receiver, and of the next."""

    async def run() -> None:
        async with pair() as one:
            desk, reading = one.engine.handovers.desk, asyncio.create_task(read(one.stream))
            one.sender.give(1)
            one.sender.say(Offered(one.key, offered))
            if offered == [FIRST]:
                await until(lambda: (moving := desk.find(one.key)) is not None and moving.handoff.drawn)
                assert len(one.engine.open_links()) == 2
                one.sender.give(NUM_TOKENS - 1)
            else:
                await until(lambda: one.receiver.num_attempts == 1)  # from the beginning of its own, after what the client has
                assert one.engine.control.find("prefill") is None and not len(desk)
                one.receiver.give(NUM_TOKENS - 1)
            assert await reading == expected(1, NUM_TOKENS)

    asyncio.run(run())


@pytest.mark.parametrize("is_over", ["copied", "failed", "withdrawn"])
def test_a_receiver_that_is_drained_gets_what_is_on_its_way_to_it(is_over: str) -> None:
    """It has room for it, and no request yet: it is told to end when the answer that came is over, or when none comes."""

    async def run() -> None:
        async with pair() as one:
            desk, reading = one.engine.handovers.desk, asyncio.create_task(read(one.stream))
            one.receiver.say(Reserved(one.key))
            await until(lambda: (moving := desk.find(one.key)) is not None and moving.handoff.receiver is not None)
            link = one.engine.control.find("decode")
            assert link is not None
            await one.engine.cluster.drain("decode")
            for _ in range(3):
                await asyncio.sleep(operations.LOOK_S)
                assert not link.is_leaving and link.worker.draining and desk.find(one.key) is not None
            if is_over == "copied":
                one.sender.give(1)
                one.sender.say(Offered(one.key, [FIRST]))
                one.receiver.say(Copied(one.key))
                await until(lambda: link.keys == {one.key})
                await asyncio.sleep(2 * operations.LOOK_S)
                assert not link.is_leaving
                told = expected(1, NUM_TOKENS)[1:]
                one.receiver.say(Events([Event(one.key, 0, "", told, FinishReason.LENGTH)]))
            elif is_over == "failed":
                one.receiver.say(CopyFailed(one.key, "the network is gone"))
                await until(lambda: desk.find(one.key) is None)
                one.sender.give(NUM_TOKENS)
            else:
                reading.cancel()
                one.engine.abort(one.stream)
            await until(lambda: link.is_leaving and one.engine.control.find("decode") is None)
            if is_over != "withdrawn":
                assert await reading == expected(1, NUM_TOKENS)
            assert one.engine.flights.num_lost == 0

    asyncio.run(run())


@pytest.mark.parametrize("leaves", [True, False])
def test_a_copy_that_nobody_wants_any_more_is_no_trouble(leaves: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A client that leaves in the middle of it ends the copy, and the log has nothing of it; of one that fails it has."""

    async def run() -> None:
        async with pair() as one:
            if leaves:
                one.engine.abort(one.stream)
                await until(lambda: one.sender.num_attempts == 0)
            failures = [CopyFailed(one.key, "nobody wants it any more"), CopyFailed(one.key, "the sender is gone")]
            one.sender.say(failures[0])
            one.receiver.say(failures[1])
            if leaves:
                await until(lambda: heard == {"prefill", "decode"})
            else:
                await until(lambda: one.engine.handovers.desk.find(one.key) is None)
                one.sender.give(NUM_TOKENS)
                assert await read(one.stream) == expected(1, NUM_TOKENS)

    heard = set[str]()
    with pytest.MonkeyPatch.context() as patch:
        said = ClusterEngine.said

        def noted(self: ClusterEngine, link: object, message: object) -> None:
            said(self, link, message)  # type: ignore[arg-type]
            if isinstance(message, CopyFailed):
                heard.add(link.name)  # type: ignore[attr-defined]

        patch.setattr(ClusterEngine, "said", noted)
        caplog.set_level(logging.WARNING, "octavo")
        asyncio.run(run())
    warned = [record.message for record in caplog.records if record.message.startswith("hand-off")]
    assert len(warned) == (0 if leaves else 1)


class Answers(MovesKV):
    """A receiver that has room for whatever it is asked about."""

    __slots__ = ()

    def _take(self, messages: list[ToWorker]) -> None:
        MovesKV._take(self, messages)
        self.say(*[Reserved(message.key) for message in messages if isinstance(message, Reserve)])


def test_a_receiver_amid_a_long_step_holds_up_no_hand_off() -> None:
    """It has most room, so all are meant for it; others take what it does not answer to, though there is no limit on waiting."""

    async def run() -> None:
        limits = HandoffLimits(reserve_s=1e6, answer_s=0.05)
        engine = await front_end(ClusterOptions(liveness=PATIENT, handover=HandoverOptions(limits=limits)))
        sender = MovesKV("prefill", "bigram", TOKENIZER.vocab_size, role="prefill")
        silent = MovesKV("silent", "bigram", TOKENIZER.vocab_size, role="decode", num_kv_blocks=1 << 20)
        other = Answers("other", "bigram", TOKENIZER.vocab_size, role="decode", num_kv_blocks=1 << 10)
        tasks = [asyncio.create_task(worker.run(engine.control.address, SECRET)) for worker in (sender, silent, other)]
        await until(lambda: len(engine.open_links()) == 3)
        for i in range(12):
            open_stream(engine, i, NUM_TOKENS)
        await until(lambda: sender.num_attempts == 12)
        keys = list(sender._attempts)
        sender.say(*[PromptStarted(key) for key in keys])
        taker, desk = engine.control.find("other"), engine.handovers.desk
        assert taker is not None
        await until(lambda: all((moving := desk.find(key)) and moving.handoff.receiver == taker.index for key in keys))
        engine.handovers.check_invariants()
        await engine.stop()
        await asyncio.gather(*tasks)

    asyncio.run(run())
