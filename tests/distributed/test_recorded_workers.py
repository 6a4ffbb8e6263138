"""Recordings of workers that hand requests over while they run: each is told again without the other, and makes the same plans."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octavo import SamplingParams
from octavo.core.step import StepPlan, StepResult
from octavo.distributed.handover import Order, OrderKind
from octavo.distributed.messages import Offered
from octavo.distributed.tcp_transport import TcpTransport
from octavo.distributed.throttle import Throttle
from octavo.distributed.transport import Transport
from octavo.simulator.replay import Replay, replay_recording
from tests.distributed.pair import RECEIVER, SENDER, Answer, Cluster, running, tiny_engine
from tests.models.tiny import write_tiny_gguf

PARAMS = SamplingParams(temperature=0.9, seed=7, max_tokens=16, ignore_eos=True)
NAMES = ("prefill", "decode")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("models") / "m.gguf", context=2048)


def prompt_of(num_tokens: int, salt: int = 0) -> list[int]:
    return [5 + (i * i + 7 * i + 13 * salt) % 480 for i in range(num_tokens)]


def transports() -> dict[str, Transport]:
    return {"tcp": TcpTransport(b"a secret of the tests", Throttle(20e6, 4096))}


def recorded(
    path: Path, folder: Path, use: Callable[[Cluster], Awaitable[None]], failed: Sequence[int] = (), **options: Any
) -> tuple[Replay, Replay]:
    """What two workers did, told again; as many steps as they made. ``failed``: workers by the steps of theirs that failed."""
    engines = [tiny_engine(path, **{"max_num_batched_tokens": 32, "record": str(folder / name), **options}) for name in NAMES]

    async def body() -> None:
        async with running(engines, transports, transport="tcp") as cluster:
            await use(cluster)
            await cluster.quiet()

    asyncio.run(body())
    sender, receiver = (replay_recording(folder / name) for name in NAMES)
    num_steps = [engine.scheduler.stats.num_steps + failed.count(index) for index, engine in enumerate(engines)]
    assert [sender.num_plans, receiver.num_plans] == num_steps
    assert [one.num_preemptions for one in (sender, receiver)] == [engine.scheduler.stats.num_preemptions for engine in engines]
    return sender, receiver


@pytest.mark.parametrize("options", [{}, {"spec": 3, "spec_method": "ngram"}, {"scheduling_policy": "fair", "block_size": 32}])
def test_what_is_handed_over_is_in_both_recordings(path: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    async def use(cluster: Cluster) -> None:
        answers = [cluster.submit(prompt_of(n, n), replace(PARAMS, seed=n)) for n in (1, 16, 40, 100, 130, 100)]
        await cluster.answered(*answers)
        assert all(answer.by == [SENDER, RECEIVER] for answer in answers)

    sender, receiver = recorded(path, tmp_path, use, **options)
    assert (sender.num_handed_over, sender.num_left_out, sender.requests) == (6, 6, [])
    assert (receiver.num_taken_over, receiver.num_left_out) == (6, 0)
    taken = sorted((len(work.prompt_token_ids), work.num_output) for work in receiver.requests)
    assert taken == [(n, 16) for n in (1, 16, 40, 100, 100, 130)]


def test_in_pools_that_are_too_small_with_clients_that_leave_and_copies_that_fail(path: Path, tmp_path: Path) -> None:
    left = list[Answer]()

    async def use(cluster: Cluster) -> None:
        def hook(order: Order[int]) -> bool:
            if order.kind is OrderKind.SEND and order.moving.key % 4 == 0:
                cluster.sides[RECEIVER]._port.cancel(order.moving.key)
            return True

        cluster.order_hook = hook
        answers = [cluster.submit(prompt_of(40 + 10 * (i % 5), i), replace(PARAMS, seed=i, max_tokens=40)) for i in range(16)]
        beside = [cluster.submit(prompt_of(30, 50 + i), replace(PARAMS, max_tokens=60), ticket=False, worker=i % 2) for i in range(6)]
        await cluster.until(lambda: any(answer.by == [SENDER, RECEIVER] for answer in answers))
        left.extend([answer for answer in answers if answer.token_ids and not answer.over][::3])
        for answer in left:
            cluster.abort(cluster.key_of(answer))
        rest = [*beside, *(answer for answer in answers if answer not in left)]

        def all_over() -> bool:
            cluster.desk.room_may_be_there()  # as after each news of the load
            cluster._follow(cluster.desk.tick(time.monotonic()))
            return all(answer.over for answer in rest)

        await cluster.until(all_over)

    sender, receiver = recorded(path, tmp_path, use, num_kv_blocks=24, admission_lookahead=1)
    assert sender.num_handed_over > 0 and receiver.num_taken_over > 0 and sender.requests, "some stayed"
    was_cut = any(not answer.over for answer in left)  # its end may have been on its way when its client left
    assert (sender.num_aborts + receiver.num_aborts > 0) == was_cut


@pytest.mark.parametrize("place", [SENDER, RECEIVER])
def test_a_step_that_fails_with_what_was_held_or_reserved(path: Path, tmp_path: Path, place: int) -> None:
    failed = list[int]()

    async def use(cluster: Cluster) -> None:
        engine = cluster.workers[place].engine
        cluster.order_hook = lambda order: order.kind is not OrderKind.SEND
        held = cluster.submit(prompt_of(60), PARAMS)
        await cluster.until(lambda: bool(cluster.sides[RECEIVER]._coming) and bool(cluster.heard(Offered)))
        execute = engine.backend.execute

        def fail(plan: StepPlan) -> StepResult:
            failed.append(place)
            raise ZeroDivisionError

        engine.backend.execute = fail  # type: ignore[method-assign]
        broken = cluster.submit(prompt_of(5), PARAMS, ticket=False, worker=place)
        await cluster.answered(broken)
        engine.backend.execute = execute  # type: ignore[method-assign]
        await cluster.answered(held)
        cluster.order_hook = lambda order: True
        other = cluster.submit(prompt_of(70), PARAMS)
        await cluster.answered(other)
        assert other.by == [SENDER, RECEIVER]

    sender, receiver = recorded(path, tmp_path, use, failed)
    assert failed and sender.num_handed_over == receiver.num_taken_over == 1
