"""What workers say goes into logs, status and answers to whoever asks: in order, short, and without what terminals obey."""

from __future__ import annotations

import asyncio
import logging

import pytest

from octavo.distributed.channel import connect
from octavo.distributed.link import AskError
from octavo.distributed.messages import PROTOCOL, Answer, Goodbye, Hello, Message, Ready, ToWorker, to_worker
from tests.distributed.test_lying_workers import LIMITS, SECRET, Cluster, until
from tests.distributed.test_stub_worker import front_end, stub

LONG = "\x1b[2J" + "x" * 100_000  # in one message there is room for 64 MiB


def is_short_and_plain(text: str) -> bool:
    return len(text) < 2000 and text.isprintable()


async def joins(cluster: Cluster, name: str, role: str, ready: Ready) -> None:
    """Another worker says so, and is told something."""
    heard = list[ToWorker]()
    channel = await connect(cluster.engine.control.address, SECRET, to_worker)
    channel.start(heard.extend, lambda reason: None)
    for message in (Hello(PROTOCOL, name, role, "here", 1, name), ready):
        channel.send(message)
    await until(lambda: heard)


async def is_refused(cluster: Cluster, role: str = "both", model: str = "stub", fingerprint: str = "bigram/stub") -> None:
    await joins(cluster, "third", role, Ready(model, fingerprint, LIMITS))
    await until(lambda: cluster.engine.control.last_words.get("third"))


async def listens_where_nobody_gets_to(cluster: Cluster) -> None:
    for role, address in (("prefill", "tcp=127.0.0.1:7"), ("decode", f"shm={LONG}")):
        await joins(cluster, role, role, Ready("stub", "bigram/stub", LIMITS, address, ["tcp"]))
        await until(lambda role=role: (link := cluster.engine.control.find(role)) is not None and link.takes_requests)


async def leaves(cluster: Cluster) -> None:
    cluster.say(Goodbye(LONG))
    await until(lambda: cluster.engine.control.last_words.get("liar"))


KINDS = {
    "a role": lambda cluster: is_refused(cluster, role=LONG),
    "a model": lambda cluster: is_refused(cluster, model=LONG, fingerprint="another/stub"),
    "a build": lambda cluster: is_refused(cluster, fingerprint=f"bigram/{LONG}"),
    "an address": listens_where_nobody_gets_to,
    "a reason": leaves,
}


@pytest.mark.parametrize("kind", KINDS)
def test_logs_and_status_have_little_of_what_workers_say(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> list[str]:
        async with Cluster() as cluster:
            await KINDS[kind](cluster)
            return list(cluster.engine.control.last_words.values())

    caplog.set_level(logging.INFO, "octavo")
    texts = [*asyncio.run(run()), *(record.getMessage() for record in caplog.records)]
    assert any("xxx" in text for text in texts) and all(map(is_short_and_plain, texts))


def test_why_a_worker_cannot_answer_is_short() -> None:
    async def run() -> None:
        async with Cluster() as cluster:
            link = cluster.engine.control.find("liar")
            assert link is not None
            asking = asyncio.create_task(cluster.engine.control.ask(link, "metrics", b"{}", timeout_s=120.0))
            await until(lambda: link._questions)
            answers: list[Message] = [Answer(number, error=LONG) for number in link._questions]
            cluster.say(*answers)
            with pytest.raises(AskError, match="liar: .*xxx") as refusal:
                await asking
            assert is_short_and_plain(str(refusal.value))

    asyncio.run(run())


def test_workers_are_listed_by_name_and_number_whoever_came_first() -> None:
    async def run() -> None:
        engine = await front_end()
        names = ["worker-10", "worker-2", "a", "worker-1"]
        tasks = []
        for name in names:
            tasks.append(stub(engine, name)[1])
            await until(lambda name=name: engine.control.find(name) is not None)  # type: ignore[misc]
        assert [entry["name"] for entry in engine.cluster.status()["workers"]] == ["a", "worker-1", "worker-2", "worker-10"]
        for task in tasks:
            task.cancel()
        await engine.stop()

    asyncio.run(run())
