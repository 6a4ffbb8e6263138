"""What a worker was asked before its connection was cut, or it was given up, and answers afterwards: nothing is kept for it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from octavo.distributed.messages import Cancel, Copied, CopyFailed, NoRoom, Reserve, Reserved, Send
from tests.distributed.pair import RECEIVER, Cluster, tiny_engine
from tests.distributed.test_stub_hand_offs import NUM_TOKENS, pair
from tests.distributed.test_stub_worker import expected, read, until
from tests.distributed.test_worker_handover import SAMPLED, Gate, prompt_of, run
from tests.models.tiny import write_tiny_gguf


@pytest.mark.parametrize("num_blocks", [96, 4])
def test_an_answer_is_not_told_to_the_next_connection(tmp_path: Path, num_blocks: int) -> None:
    """The connection is cut, and another is there, all amid one step: room is asked for by the old one, and again by the new one."""
    engine, path = tiny_engine(path := write_tiny_gguf(tmp_path / "l.gguf", context=2048), num_kv_blocks=num_blocks), path
    gate = Gate(engine)

    async def use(cluster: Cluster) -> None:
        worker = cluster.workers[RECEIVER]
        running = cluster.submit(prompt_of(3), SAMPLED, ticket=False, worker=RECEIVER)
        old, new = (cluster.submit(prompt_of(64 + i), SAMPLED, ticket=False) for i in range(2))
        await gate.step_begins()
        old_key, new_key = cluster.key_of(old), cluster.key_of(new)
        worker.take_kv(Reserve(old_key, old.request, 64))
        worker.drop_all()
        worker.begin_connection()
        worker.take_kv(Reserve(new_key, new.request, 65))
        gate.open()
        await cluster.until(lambda: any(key == new_key for _, key in _answers(cluster)))
        assert _answers(cluster) == [(Reserved if num_blocks == 96 else NoRoom, new_key)]
        worker.take_kv(Cancel(new_key))
        running.over = True
        await cluster.answered(old, new)
        await cluster.quiet()

    run([tiny_engine(path), engine], use)


def _answers(cluster: Cluster) -> list[tuple[type, int]]:
    return [(type(message), message.key) for _, message in cluster.said if isinstance(message, Reserved | NoRoom | CopyFailed)]


@pytest.mark.parametrize("first", ["no room", "room", "a failure"])
def test_room_that_nobody_asked_for_is_given_back(first: str) -> None:
    """Two answers to what was one question: the first counts, and room that the second found is kept for nobody."""

    async def body() -> None:
        async with pair() as one:
            desk, key = one.engine.handovers.desk, one.key
            reading = asyncio.create_task(read(one.stream))
            await until(lambda: one.receiver.has(Reserve))
            if first == "no room":
                one.receiver.say(NoRoom(key), Reserved(key))
            else:
                one.receiver.say(Reserved(key))
                await until(lambda: one.sender.has(Send))
            if first == "a failure":
                one.receiver.say(CopyFailed(key, "the test wants it so"))
                await until(lambda: desk.find(key) is None and len(one.receiver.has(Cancel)) == 1)
                one.receiver.say(Reserved(key))
            elif first == "room":
                one.receiver.say(Reserved(key), Copied(key))
                await until(lambda: (moving := desk.find(key)) is not None and moving.handoff.arrived)
            await until(lambda: len(one.receiver.has(Cancel)) == {"no room": 1, "room": 0, "a failure": 2}[first])
            one.sender.give(NUM_TOKENS)
            assert await reading == expected(1, NUM_TOKENS)

    asyncio.run(body())
