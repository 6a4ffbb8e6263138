"""A34: prefill and decode apart, and a client that leaves: both sides have their blocks back, and later requests are served."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from octavo import LLM, SamplingParams
from octavo.distributed.handoff import HandoffState
from octavo.distributed.stream_transport import IDLE_S
from octavo.engine.event_stream import EventStream
from tests.distributed.clusters import WAIT_S, Cluster
from tests.distributed.kv_clusters import SIZES, is_empty, kv_cluster
from tests.models.tiny import write_tiny_gguf

PAIR = {"prefill": 1, "decode": 1}
PARAMS = SamplingParams(temperature=0.8, max_tokens=200, ignore_eos=True, seed=5)
BACK_S = IDLE_S  # the shortest limit that would give blocks back in the end: by themselves they are back before, in one round at least


def prompt_of(i: int, length: int = 300) -> list[int]:
    return [3 + (i * 31 + j * j * 7 + j) % 250 for j in range(length)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("models") / "m.gguf", context=2048)


class Client:
    """A request whose stream can be left at a moment of its hand-off."""

    def __init__(self, cluster: Cluster, i: int) -> None:
        self.cluster = cluster
        prepared = cluster.prepare(prompt_of(i), PARAMS)
        self.name = prepared.request.request_id
        self.stream: EventStream = cluster.engine.submit([prepared])

    @property
    def state(self) -> HandoffState | None:
        """Of its hand-off; None: there is none yet, or none any more."""
        flight = self.cluster.engine.flights.find(self.name)
        moving = None if flight is None else self.cluster.engine.handovers.desk.find(flight.attempts.key)
        return None if moving is None else moving.handoff.state

    @property
    def holder(self) -> str | None:
        return self.cluster.holder(self.name)

    @property
    def is_over(self) -> bool:
        """All of it was read in one go, the end too, on a busy machine. That each was offered is asserted at the end."""
        return self.cluster.engine.flights.find(self.name) is None

    async def until(self, condition: Callable[[], bool]) -> None:
        """Without a pause that could jump over the moment."""
        async with asyncio.timeout(WAIT_S):
            while not condition():
                await asyncio.sleep(0)

    def leave(self) -> None:
        self.cluster.engine.abort(self.stream)


async def during_prefill(client: Client) -> None:
    await client.until(lambda: client.state is not None or client.is_over)


async def between(client: Client) -> None:
    """Reserved there, or asked for; the copy may not have begun."""
    await client.until(lambda: client.state is HandoffState.RESERVED or client.holder == "decode-0" or client.is_over)


async def during_transfer(client: Client) -> None:
    await between(client)
    await asyncio.sleep(0.001)


async def during_decode(client: Client) -> None:
    await client.until(lambda: client.holder == "decode-0" or client.is_over)
    await client.stream.read()
    await client.stream.read()


MOMENTS = (during_prefill, between, during_transfer, during_decode)


async def seconds_until_empty(cluster: Cluster) -> float:
    """Until both workers have said that nothing is taken, and the front end holds nothing."""
    started = time.monotonic()
    await cluster.until(lambda: is_empty(cluster) and not len(cluster.engine.flights) and not len(cluster.engine.handovers.desk))
    return time.monotonic() - started


async def leave_at(cluster: Cluster, i: int, moment: Callable[[Client], Awaitable[None]]) -> float:
    client = Client(cluster, i)
    await moment(client)
    client.leave()
    return await seconds_until_empty(cluster)


def resident_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("num_rounds", [4, pytest.param(200, marks=pytest.mark.soak)])
def test_blocks_are_back_whenever_the_client_leaves(path: Path, num_rounds: int) -> None:
    """``num_rounds`` at each of the four moments; the pools would be full after five leaks. Memory does not grow with them."""
    with LLM(str(path), threads=1, **SIZES) as llm:
        expected = llm.generate(prompt_of(999), PARAMS)[0].outputs[0].token_ids

    async def run() -> None:
        async with kv_cluster(path, PAIR, num_kv_blocks=170) as cluster:
            took, sizes = list[float](), list[list[int]]()
            for i in range(num_rounds):
                took += [await leave_at(cluster, 4 * i + j, moment) for j, moment in enumerate(MOMENTS)]
                if i in (num_rounds // 3, num_rounds - 1):
                    sizes.append([resident_bytes(pid) for pid in cluster.processes.pids.values()])
            output = await cluster.run(prompt_of(999), PARAMS)
            assert output.outputs[0].token_ids == expected
            quickest = {moment.__name__: min(took[j :: len(MOMENTS)]) for j, moment in enumerate(MOMENTS)}
            assert max(quickest.values()) < BACK_S, f"blocks come back after {quickest} s at best"
            if num_rounds >= 100:
                assert all(last - first < 8 << 20 for first, last in zip(*sizes, strict=True)), f"memory grows: {sizes}"
            assert cluster.engine.handovers.desk.stats.num_offered == len(took) + 1, "a request with a ticket was not offered"

    asyncio.run(run())


def test_a_decode_worker_that_is_killed_takes_nothing_with_it(path: Path) -> None:
    """Between prefill and transfer: the prefill worker makes the answer, or the next decode worker does, and all blocks are back."""
    with LLM(str(path), threads=1, **SIZES) as llm:
        expected = [llm.generate(prompt_of(i), PARAMS)[0].outputs[0].token_ids for i in range(2)]

    async def run() -> None:
        async with kv_cluster(path, PAIR, num_kv_blocks=170) as cluster:
            for i in range(2):
                before = cluster.engine.handovers.desk.stats.num_offered
                task = asyncio.create_task(cluster.run(prompt_of(i), PARAMS))
                await cluster.until(lambda n=before: cluster.engine.handovers.desk.stats.num_offered > n)
                cluster.signal("decode-0", signal.SIGKILL)
                output = await task
                assert output.outputs[0].token_ids == expected[i]
                await cluster.until(lambda: set(cluster.engine.roles()) == {"prefill-0", "decode-0"})
                await seconds_until_empty(cluster)

    asyncio.run(run())


def test_the_prefill_worker_is_killed_and_nothing_stays_reserved(path: Path) -> None:
    with LLM(str(path), threads=1, **SIZES) as llm:
        expected = llm.generate(prompt_of(0), PARAMS)[0].outputs[0].token_ids

    async def run() -> None:
        async with kv_cluster(path, PAIR, num_kv_blocks=170) as cluster:
            task = asyncio.create_task(cluster.run(prompt_of(0), PARAMS))
            await cluster.until(lambda: cluster.engine.handovers.desk.stats.num_offered > 0)
            cluster.signal("prefill-0", signal.SIGKILL)
            output = await task
            assert output.outputs[0].token_ids == expected
            await cluster.until(lambda: set(cluster.engine.roles()) == {"prefill-0", "decode-0"})
            await seconds_until_empty(cluster)

    asyncio.run(run())
