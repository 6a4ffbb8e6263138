"""What is cached of a prompt that waits at a worker is no work to do, for the front end that sends it and for the worker."""

from __future__ import annotations

import asyncio

from octavo.distributed.flight import Begun
from octavo.distributed.told_load import Told, ToldLoad
from octavo.distributed.worker_engine import load_of
from tests.distributed.test_worker import answer, front_end, until, worker
from tests.engine.timed import Law, TimedRun

BEGINNING = [7 + i % 50 for i in range(320)]


def run_beside() -> TimedRun:
    """The beginning is cached, a sequence has the only place, and a prompt that goes on behind the beginning waits."""
    run = TimedRun(Law(), 64, max_num_seqs=1, max_num_batched_tokens=64)
    run.add("before", BEGINNING, 2)
    while run.engine.has_work:
        run.step()
    run.add("runs", 8, 9)
    run.step()
    run.add("waits", [*BEGINNING, 5, 6], 4)
    return run


def test_it_is_counted_once_by_the_front_end_and_by_the_worker() -> None:
    run, view = run_beside(), ToldLoad(0, 16, 64)
    view.sent(322, 320)
    view.last = Told(pending_tokens=1, num_sequences=1, num_available_blocks=60)
    before = view.pending_tokens, view.num_sequences
    load = load_of(run.engine, 1)
    view.told(Told(1, load.pending_tokens, load.pending_s, load.num_waiting + load.num_running, load.num_available_blocks))
    assert before == (view.pending_tokens, view.num_sequences) == (3, 2)


def test_a_front_end_knows_how_much_of_prompts_was_computed() -> None:
    async def run() -> None:
        async with front_end() as engine:
            _, task = worker(engine.control.address, "a")
            await until(lambda: bool(engine.open_links()))
            for i in range(3):
                await answer(engine, f"r{i}", [40] * 40)
            assert engine.flights.begun == Begun(3, 120, 2 * 32)
        await task

    asyncio.run(run())
