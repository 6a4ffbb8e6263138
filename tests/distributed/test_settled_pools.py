"""What workers have promised and do for others is settled with the first token of a request, as in a simulation, whoever answers it: its
blocks are then in what its worker tells, and would count twice."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from octavo.core.request import SamplingParams
from octavo.distributed.cluster_engine import ClusterEngine
from octavo.distributed.cluster_options import ClusterOptions
from octavo.distributed.messages import Load, Offered, PromptStarted, Reserved
from octavo.distributed.roles import RolePools
from tests.distributed.test_stub_hand_offs import MovesKV
from tests.distributed.test_stub_worker import PATIENT, SECRET, TOKENIZER, expected, front_end, until

NUM_BLOCKS, NUM_TOKENS = 10, 60


class Told(MovesKV):
    """Tells what a test says of its load. ``busy_s``: of prompts; ``free``: blocks."""

    __slots__ = ("busy_s", "free")

    def __init__(self, name: str, role: str, busy_s: float = 0.0, free: int = NUM_BLOCKS) -> None:
        super().__init__(name, "bigram", TOKENIZER.vocab_size, role=role, num_kv_blocks=NUM_BLOCKS)
        self.busy_s, self.free = busy_s, free

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(0.01)
            if self._channel is not None:
                pending = int(1000 * self.busy_s)
                self._channel.send(Load(num_available_blocks=self.free, num_received=self.num_received, pending_s=self.busy_s,
                                        pending_tokens=pending, num_running=len(self._attempts) + bool(pending)))  # fmt: skip


@contextlib.asynccontextmanager
async def cluster(*workers: Told) -> AsyncIterator[tuple[ClusterEngine, RolePools]]:
    engine = await front_end(ClusterOptions(liveness=PATIENT))
    tasks = [asyncio.create_task(worker.run(engine.control.address, SECRET)) for worker in workers]
    await until(lambda: len(engine.open_links()) == len(workers))
    for worker in workers:
        await until(lambda worker=worker: abs(link_of(engine, worker).view.pending_s - worker.busy_s) < 0.01)
        await until(lambda worker=worker: link_of(engine, worker).load.num_available_blocks == worker.free)
    yield engine, engine.handovers.pools
    engine.handovers.check_invariants()
    await engine.stop()
    await asyncio.gather(*tasks)


def link_of(engine: ClusterEngine, worker: Told):  # type: ignore[no-untyped-def]
    link = engine.control.find(worker.name)
    assert link is not None
    return link


def submit(engine: ClusterEngine, n: int = 1) -> None:
    params = engine.check_params(SamplingParams(max_tokens=NUM_TOKENS, seed=1, n=n))
    engine.submit([engine.prepare_checked([4, 7], params, "r1")])


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(
    ("workers", "by", "is_mixed", "stays_foreign"),
    [
        ([Told("a", "both")], 0, False, False),
        ([Told("p", "prefill", 5.0), Told("d", "decode")], 1, True, False),  # borrowed for the prompt
        ([Told("p", "prefill"), Told("d", "decode", free=0)], 0, True, True),  # borrowed for the answer, which is what is foreign
        ([Told("d", "decode")], 0, True, False),  # there is nobody else
    ],
)
def test_who_answers_the_whole_request(workers: list[Told], by: int, is_mixed: bool, stays_foreign: bool, n: int) -> None:
    async def run() -> None:
        made = [Told(worker.name, worker.role, worker.busy_s, worker.free) for worker in workers]
        async with cluster(*made) as (engine, pools):
            submit(engine, n)
            await until(lambda: made[by].num_attempts == 1)
            index = link_of(engine, made[by]).index
            worker = pools.worker(index)
            had = dict(worker.promised), set(worker.foreign)
            assert worker.is_mixed == is_mixed and had[1] == ({"r1"} if is_mixed else set())
            made[by].give(1)
            await until(lambda: engine.flights.begun.num == 1)
            assert not worker.promised, f"{had[0]} are told of as used"
            assert worker.foreign == ({"r1"} if stays_foreign else set())

    asyncio.run(run())


def test_who_is_handed_over_is_promised_until_it_is_there() -> None:
    async def run() -> None:
        made = [Told("p", "prefill"), Told("d", "decode")]
        async with cluster(*made) as (engine, pools):
            submit(engine)
            await until(lambda: made[0].num_attempts == 1)
            key = next(iter(made[0]._attempts))
            made[0].say(PromptStarted(key))
            made[0].give(1)
            made[0].say(Offered(key, [expected(1, 1)[0]]))
            await until(lambda: (moving := engine.handovers.desk.find(key)) is not None and moving.handoff.drawn)
            worker = pools.worker(link_of(engine, made[1]).index)
            before = worker.promised["r1"]
            made[1].say(Reserved(key))
            await until(lambda: worker.promised["r1"] != before)
            assert worker.promised["r1"] == before - 1, "of what it has reserved its load tells"

    asyncio.run(run())
