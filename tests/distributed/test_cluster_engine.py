"""A cluster of real processes on a model of known probabilities: the same answers as one engine, whatever happens to its workers."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import replace

import pytest

from octavo.core.request import BeamParams, SamplingParams
from octavo.distributed.fleet import LivenessLimits, WorkerState
from octavo.distributed.process_worker import FIRST_PAUSE_S
from octavo.engine.outputs import OutputEvent, RequestOutput
from tests.distributed.clusters import Cluster, alone, cluster, run_alone

SAMPLED = SamplingParams(
    temperature=0.8, top_p=0.95, frequency_penalty=0.4, repetition_penalty=1.1, max_tokens=40, ignore_eos=True, logprobs=2
)
KINDS = {
    "greedy": SamplingParams(temperature=0, max_tokens=30, ignore_eos=True),
    "sampled": SAMPLED,
    "stops": SamplingParams(temperature=1.0, max_tokens=60, stop=("a", " wor", "é"), min_tokens=5),
    "choices": replace(SAMPLED, n=3, max_tokens=20),
    "beams": SamplingParams(temperature=0, n=2, beam=BeamParams(3), max_tokens=12, ignore_eos=True),
    "prompt scored": replace(SAMPLED, prompt_logprobs=1),
    "some tokens": SamplingParams(temperature=1.0, allowed_token_ids=tuple(range(40, 90)), max_tokens=30, ignore_eos=True),
}


def prompt_of(i: int) -> list[int]:
    return [3 + (i * 31 + j * j * 7 + j) % 250 for j in range(5 + i % 23)]


def jobs(count: int) -> list[tuple[list[int], SamplingParams]]:
    kinds = list(KINDS.values())
    return [(prompt_of(i), replace(kinds[i % len(kinds)], seed=i)) for i in range(count)]


def as_answer(output: RequestOutput) -> RequestOutput:
    """All that must not depend on who answers: not the name, and not what the prefix cache had."""
    return replace(output, request_id="", num_cached_tokens=0, cache_match=None)


@pytest.fixture(scope="module")
def expected() -> list[RequestOutput]:
    engine = alone()
    return [as_answer(run_alone(engine, *job)) for job in jobs(14)]


def test_two_replicas_answer_as_one_engine(expected: list[RequestOutput]) -> None:
    async def run() -> None:
        async with cluster(2) as two:
            got = await asyncio.gather(*(two.run(*job) for job in jobs(14)))
            assert [as_answer(output) for output in got] == expected
            assert {leg.worker for journey in two.engine.journeys.all() for leg in journey.legs} == {"worker-0", "worker-1"}
            await two.until(lambda: all(link.load.num_used_blocks == 0 for link in two.engine.control))
            assert two.engine.flights.num_lost == 0

    asyncio.run(run())


class Watched:
    """Requests that run together, and the tokens that each has had."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.num_tokens: dict[str, int] = {}

    def _count(self, event: OutputEvent) -> None:
        self.num_tokens[event.request_id] = self.num_tokens.get(event.request_id, 0) + len(event.token_ids)

    def start(self, some: list[tuple[list[int], SamplingParams]]) -> list[asyncio.Task[RequestOutput]]:
        return [asyncio.create_task(self.cluster.run(*job, self._count)) for job in some]

    async def start_held(self, some: list[tuple[list[int], SamplingParams]]) -> list[asyncio.Task[RequestOutput]]:
        """They stream, on all workers, and none of them can end before the gate is opened: the least that any has is five tokens."""
        self.cluster.gate.allow(0)
        tasks, links = self.start(some), self.cluster.engine.control
        await self.cluster.until(lambda: sum(len(link.keys) for link in links) == len(some))
        for step in range(1, 5):
            self.cluster.gate.allow(step)
            await self.cluster.until(lambda step=step: all(self._furthest(link.name) >= step for link in links))
        return tasks

    def _furthest(self, worker: str) -> int:
        """The most tokens of a request that it has."""
        return max((n for request_id, n in self.num_tokens.items() if self.cluster.holder(request_id) == worker), default=0)

    async def until_streaming(self, num_requests: int, num_tokens: int = 3) -> None:
        await self.cluster.until(lambda: sum(n >= num_tokens for n in self.num_tokens.values()) >= num_requests)


async def all_free(cluster: Cluster) -> None:
    """Every worker is trusted, and its blocks are nobody's."""
    links = cluster.engine.control
    names = set(cluster.processes.names)
    await cluster.until(lambda: {link.name for link in links if link.takes_requests} == names)
    await cluster.until(lambda: all(link.load.num_used_blocks == link.load.num_running == link.load.num_waiting == 0 for link in links))


def test_streams_survive_workers_that_are_killed(expected: list[RequestOutput]) -> None:
    """kill -9 of a worker while all kinds of requests stream: every answer is that of the undisturbed engine, and another comes."""

    async def run() -> None:
        async with cluster(2) as two:
            for victim in ("worker-0", "worker-1"):
                tasks = await Watched(two).start_held(jobs(14))
                link = two.engine.control.find(victim)
                assert link is not None
                before, has = two.engine.flights.num_lost, len(link.keys)
                two.signal(victim, signal.SIGKILL)
                two.gate.open()
                assert [as_answer(output) for output in await asyncio.gather(*tasks)] == expected
                assert two.engine.flights.num_lost - before == has > 0
                await all_free(two)
                assert two.processes._workers[victim].pause_s == FIRST_PAUSE_S  # who was ready is replaced soon, however often

    asyncio.run(run())


def test_streams_survive_a_worker_that_hangs(expected: list[RequestOutput]) -> None:
    """SIGSTOP: its streams go on elsewhere; when it goes on it begins anew, and what it still says of them is dropped."""

    async def run() -> None:
        async with cluster(2) as two:
            tasks = await Watched(two).start_held(jobs(14))
            found = two.engine.control.find("worker-0")
            assert found is not None
            # From now on: before, a worker that a busy machine keeps silent would lose what is held at it.
            two.engine.control.fleet.limits = LivenessLimits(suspect_s=0.6, stall_s=60.0, gone_s=600.0)
            two.signal("worker-0", signal.SIGSTOP)
            two.gate.open()
            assert [as_answer(output) for output in await asyncio.gather(*tasks)] == expected
            await two.until(lambda: found.worker.state is WorkerState.SUSPECT)
            two.signal("worker-0", signal.SIGCONT)
            await all_free(two)
            assert two.engine.control.find("worker-0") is found

    asyncio.run(run())


def test_without_a_worker_requests_wait_for_the_next_one_and_not_for_ever(expected: list[RequestOutput]) -> None:
    async def run() -> None:
        async with cluster(1, delay_s=0.004) as one:
            watched = Watched(one)
            tasks = watched.start(jobs(7))
            await watched.until_streaming(3)
            one.signal("worker-0", signal.SIGKILL)
            assert [as_answer(output) for output in await asyncio.gather(*tasks)] == expected[:7]

            one.engine.outlook.wait_s = 0.3
            one.processes.release("worker-0")
            one.signal("worker-0", signal.SIGKILL)
            await one.until(lambda: not one.engine.open_links())
            assert not one.engine.health().ready and one.engine.health().live
            output = await one.run(*jobs(1)[0])
            assert output.error_code == "no_worker" and "0.3 s" in str(output.error)

    asyncio.run(run())


def test_workers_are_replaced_and_drained_without_a_failed_request(expected: list[RequestOutput]) -> None:
    """All of them one after another, one by its name, which comes back, one by SIGTERM."""

    async def run() -> None:
        async with cluster(2, delay_s=0.004) as two:
            watched, before = Watched(two), {link.worker.boot_id for link in two.engine.control}
            tasks = watched.start(jobs(14))
            await watched.until_streaming(3)
            assert (await two.engine.cluster.restart())["restart"] == {"done": 0, "of": 2}
            with pytest.raises(ValueError, match="going on"):
                await two.engine.cluster.restart()
            later = watched.start(jobs(7))
            assert [as_answer(output) for output in await asyncio.gather(*tasks)] == expected
            assert [as_answer(output) for output in await asyncio.gather(*later)] == expected[:7]
            await two.until(lambda: two.engine.cluster.status()["restart"] is None)
            await all_free(two)
            assert not before & {link.worker.boot_id for link in two.engine.control}

            tasks = watched.start(jobs(7))
            entry = await two.engine.cluster.drain("worker-1")
            assert entry["draining"] and entry["name"] == "worker-1"
            assert [as_answer(output) for output in await asyncio.gather(*tasks)] == expected[:7]
            await two.until(lambda: [link.name for link in two.engine.control] == ["worker-0"])
            assert two.processes.names == ["worker-0"]
            assert as_answer(await two.run(*jobs(1)[0])) == expected[0]

            assert (await two.engine.cluster.undrain("worker-1"))["state"] == "starting"  # another process
            await two.until(lambda: len(two.engine.open_links()) == 2)
            watched = Watched(two)
            tasks = watched.start(jobs(7))
            await watched.until_streaming(2)
            await two.engine.cluster.drain("worker-1")
            assert (await two.engine.cluster.undrain("worker-1"))["draining"] is False
            before = {link.worker.boot_id for link in two.engine.control if link.name == "worker-0"}
            two.signal("worker-0", signal.SIGTERM)
            assert [as_answer(output) for output in await asyncio.gather(*tasks)] == expected[:7]
            await two.until(lambda: not before & {link.worker.boot_id for link in two.engine.control})
            await all_free(two)  # another has come
            assert two.engine.flights.num_lost == 0

    asyncio.run(run())
