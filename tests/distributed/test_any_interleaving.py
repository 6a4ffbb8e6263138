"""Whatever order messages come in, and whoever dies, hangs, drains or leaves between them: each stream has its tokens, nothing is left."""

from __future__ import annotations

import asyncio
import logging

import pytest

from octavo.core.clock import VirtualClock
from octavo.core.request import FinishReason
from octavo.distributed import cluster_engine
from octavo.distributed.fleet import WorkerState
from octavo.distributed.journeys import LegEnd
from tests.distributed.model_workers import World

CLUSTERS = [  # roles by name, and the blocks that each has
    ({"p0": "prefill", "d0": "decode", "d1": "decode"}, 40),
    ({"a": "both", "b": "both"}, 30),
    ({"p0": "prefill", "p1": "prefill", "d0": "decode", "x": "both"}, 12),
    ({"p": "prefill", "d": "decode"}, 10),
]
NUM_MOVES = 400
NUM_SEEDS = 24


def check(world: World) -> None:
    engine = world.engine
    engine.flights.check_invariants()
    engine.handovers.check_invariants()
    engine.flights.dispatcher.check_invariants()
    engine.journeys.check_invariants()
    assert not world.faults, world.faults[0]


def read(world: World) -> None:
    world.readers = {name: reader for name, reader in world.readers.items() if not reader.read()}


def settle(world: World) -> None:
    """All come back, and nothing happens any more but what has to: every answer ends."""
    for name in world.roles:
        if name not in world.workers:
            world.join(name)
    for link in world.links.values():
        link.worker.draining = False
        if link.worker.state is WorkerState.SUSPECT:
            world.hang(link)
    world.fails, is_busy = False, True
    for _ in range(5000):
        if not world.readers and not is_busy:
            break
        is_busy = False
        for name, worker in world.workers.items():
            while worker.inbox:
                worker.hear()
                is_busy = True
            if not worker.outbox:
                assert worker.attempts.keys() <= world.links[name].keys, "it works for nobody"
            is_busy = worker.copy(world.rng, world.workers) | worker.step(world.rng, False) | is_busy
            worker.say(worker.load(len(worker.attempts), 0.01 * len(worker.attempts)))
            while worker.outbox:
                world.deliver(name)
        world.engine.clock.advance(0.5)  # type: ignore[attr-defined]
        world.engine._look()
        read(world)
    assert not world.readers, f"{', '.join(world.readers)} hang; {world.engine.flights.num_waiting} wait"


def check_at_rest(world: World) -> None:
    engine = world.engine
    for worker in world.workers.values():
        while worker.inbox:
            worker.hear()
        assert not worker.attempts and not worker.coming, worker.name
    pools, dispatcher = engine.handovers.pools, engine.flights.dispatcher
    assert not len(engine.flights) and not engine.flights.num_waiting and not len(engine.handovers.desk) and not len(dispatcher)
    assert not pools._placed and all(not one.foreign and not one.promised for one in pools._workers.values())
    for journey in engine.journeys.all():  # those with choices may be over before their attempt is
        untold = [leg for leg in journey.legs if leg.end is not LegEnd.LOST and leg.account is None]
        assert not untold or journey.num_choices > 1 or journey.finish_reason in (FinishReason.ABORT, FinishReason.ERROR), untold


@pytest.mark.parametrize(("fails", "max_choices"), [(False, 1), (True, 3)])
def test_each_stream_has_its_tokens_and_nothing_is_left(fails: bool, max_choices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_engine, "WallClock", lambda: VirtualClock(1.0))
    logging.disable(logging.CRITICAL)

    async def run() -> tuple[int, int]:
        num_lost = num_handed_over = 0
        for seed in range(NUM_SEEDS):
            world = World(seed, *CLUSTERS[seed % len(CLUSTERS)], fails, max_choices)
            for move in range(NUM_MOVES):
                world.act()
                read(world)
                if move % 20 == 0:
                    check(world)
            settle(world)
            check(world)
            check_at_rest(world)
            num_lost += world.engine.flights.num_lost
            num_handed_over += world.engine.handovers.desk.stats.num_handed_over
        return num_lost, num_handed_over

    try:
        num_lost, num_handed_over = asyncio.run(run())
    finally:
        logging.disable(logging.NOTSET)
    assert num_lost > 300 and num_handed_over > 15, "little has happened"
