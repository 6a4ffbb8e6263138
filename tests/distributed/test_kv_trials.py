"""Workers between whom KV does not get over: one hand-off finds that out now and then, and no other answer waits for it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

import msgspec
import pytest

from octavo.bench.stub_worker import StubWorker
from octavo.distributed.cluster_engine import ClusterEngine
from octavo.distributed.kv_trials import KVTrials
from octavo.distributed.messages import (
    Begin,
    Copied,
    CopyFailed,
    Events,
    Message,
    Offered,
    PromptStarted,
    Ready,
    Reserve,
    Reserved,
    Resume,
    Send,
    Submit,
    ToWorker,
    Welcome,
)
from tests.distributed.test_stub_worker import SECRET, TOKENIZER, expected, front_end, open_stream, read, until

PAIR = ("sender", "receiver")
NUM_TOKENS = 5


def test_of_those_that_come_while_it_is_in_doubt_one_tries() -> None:
    going = {1, 2, 3}
    trials = KVTrials(going.__contains__)
    assert trials.may_try(PAIR, None, 0.0) and trials.may_try(PAIR, 1, 0.0)
    trials.tries(PAIR, 1)
    trials.tries(PAIR, 2)
    trials.failed(PAIR, 10.0)
    trials.failed(PAIR, 10.5)  # the other that was on its way
    assert [trials.may_try(PAIR, 3, now) for now in (10.5, 10.9, 11.0)] == [False, False, True]
    assert trials.may_try(("sender", "another"), 3, 10.5) and trials.may_try(("receiver", "sender"), 3, 10.5)
    trials.tries(PAIR, 3)
    assert [trials.may_try(PAIR, key, 11.0) for key in (None, 2, 3)] == [False, False, True]
    trials.did_not(PAIR, 2)
    assert not trials.may_try(PAIR, 2, 11.0)
    trials.did_not(PAIR, 3)  # there was no room
    trials.tries(PAIR, 2)
    assert not trials.may_try(PAIR, 3, 11.0)
    going.remove(2)  # its client has left
    assert trials.may_try(PAIR, 3, 11.0)
    trials.tries(PAIR, 3)
    trials.arrived(PAIR)
    assert all(trials.may_try(PAIR, key, 11.0) for key in (None, 1, 2, 3))


def test_each_failure_of_a_trial_doubles_the_pause_up_to_a_minute() -> None:
    trials, now, pauses = KVTrials(lambda key: False), 0.0, []
    for _ in range(9):
        trials.failed(PAIR, now)
        pause_s = next(s for s in range(100) if trials.may_try(PAIR, None, now + s))
        pauses.append(pause_s)
        now += pause_s
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    trials.arrived(PAIR)
    trials.failed(PAIR, now)
    assert trials.may_try(PAIR, None, now + 1.0)


class Stub(StubWorker):
    """Draws one token of a prompt with a ticket and has it handed over; of the rest all. Keeps the keys of what it is to send."""

    def __init__(self, role: str) -> None:
        super().__init__(role, "bigram", TOKENIZER.vocab_size, role=role)
        self.sends = list[int]()
        self.num_whole = 0  # requests without a ticket

    def _ready(self, welcome: Welcome) -> Ready:
        return msgspec.structs.replace(StubWorker._ready(self, welcome), kv_address="tcp=10.0.0.1:1", transports=["tcp"])

    def say(self, *messages: Message) -> None:
        assert self._channel is not None
        for message in messages:
            self._channel.send(message)

    def finish(self, key: int) -> None:
        self.say(Events(self._events(self._attempts[key], NUM_TOKENS)))

    def _take(self, messages: list[ToWorker]) -> None:
        StubWorker._take(self, messages)
        for message in messages:
            match message:
                case Submit(ticket=None):
                    self.num_whole += 1
                    self.finish(message.key)
                case Submit():
                    events = self._events(self._attempts[message.key], 1)
                    self.say(PromptStarted(message.key), Events(events), Offered(message.key, events[0].token_ids))
                case Reserve():
                    self.say(Reserved(message.key))
                case Send():
                    self.sends.append(message.key)
                case Begin() | Resume():
                    self.finish(message.key)


class Pair:
    """A front end between two workers, of whose pairs the clock is told."""

    def __init__(self, engine: ClusterEngine) -> None:
        self.engine, self.now_s, self.num_asked = engine, 1000.0, 0
        self.prefill, self.decode = Stub("prefill"), Stub("decode")
        engine.handovers._now = lambda: self.now_s

    async def ask(self, num: int = 1) -> list[asyncio.Task[None]]:
        """Requests that have their first tokens, once they have gone as far as they get by themselves."""
        tasks, num_sends = [], len(self.prefill.sends)
        for _ in range(num):
            self.num_asked += 1
            tasks.append(asyncio.create_task(self._answered(self.num_asked)))
        await until(lambda: sum(task.done() for task in tasks) + len(self.prefill.sends) - num_sends == num)
        return tasks

    async def _answered(self, number: int) -> None:
        assert await read(open_stream(self.engine, number, NUM_TOKENS)) == expected(number, NUM_TOKENS)

    def fail(self) -> None:
        """What is on its way finds out that there is none."""
        for key in self.prefill.sends:
            self.prefill.say(CopyFailed(key, "TimeoutError: timed out"))
        self.prefill.sends.clear()

    def arrive(self) -> None:
        for key in self.prefill.sends:
            self.decode._attempts[key] = self.prefill._attempts.pop(key)
            self.decode.say(Copied(key))
        self.prefill.sends.clear()


@contextlib.asynccontextmanager
async def pair() -> AsyncIterator[Pair]:
    one = Pair(await front_end())
    tasks = [asyncio.create_task(worker.run(one.engine.control.address, SECRET)) for worker in (one.prefill, one.decode)]
    await until(lambda: len(one.engine.open_links()) == 2)
    yield one
    one.engine.handovers.check_invariants()
    await one.engine.stop()
    await asyncio.gather(*tasks)


def test_behind_a_wall_one_answer_waits_now_and_then_and_no_other() -> None:
    async def run() -> None:
        async with pair() as one:
            for pause_s in (1.0, 2.0, 4.0):
                waiting = await one.ask(2 if pause_s == 1.0 else 4)
                assert len(one.prefill.sends) == (2 if pause_s == 1.0 else 1), "of those that come while it is in doubt one tries"
                one.fail()
                await asyncio.gather(*waiting)
                for later_s in (0.0, 0.9 * pause_s):
                    one.now_s += later_s
                    await asyncio.gather(*await one.ask())
                    assert not one.prefill.sends, "it has tried a moment ago"
                one.now_s += 0.1 * pause_s
            waiting = await one.ask(3)
            assert len(one.prefill.sends) == 1
            one.arrive()  # the wall is down
            await asyncio.gather(*waiting)
            waiting = await one.ask(3)
            assert len(one.prefill.sends) == 3
            one.arrive()
            await asyncio.gather(*waiting)
            assert one.engine.handovers.desk.stats.num_handed_over == 4

    asyncio.run(run())


def test_a_copy_that_takes_too_long_counts_as_one_that_failed() -> None:
    async def run() -> None:
        async with pair() as one:
            waiting = await one.ask()
            one.now_s += one.engine.options.handover.limits.copy_s
            await asyncio.gather(*waiting)  # its sender went on
            one.prefill.sends.clear()
            await asyncio.gather(*await one.ask())
            assert not one.prefill.sends

    asyncio.run(run())


def test_hundreds_that_fail_at_once_are_few_lines_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with pair() as one:
            waiting = await one.ask(8)
            one.fail()
            await asyncio.gather(*waiting)

    caplog.set_level(logging.WARNING, "octavo.cluster")
    asyncio.run(run())
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("hand-off")]
    assert len(lines) == 6 and lines[0].endswith("by worker prefill: TimeoutError: timed out")
    assert lines[5] == "hand-off: 3 more within 10 s (3 times: TimeoutError: timed out)"
