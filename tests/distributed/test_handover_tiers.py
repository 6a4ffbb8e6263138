"""KV from elsewhere goes into blocks that were the prefix cache's: what was in them is kept, in host memory and on disk, as it was."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.core.step import StepPlan
from octavo.distributed.handover import OrderKind
from octavo.distributed.messages import Reserved
from octavo.engine.engine import Engine
from octavo.engine.outputs import CompletionOutput
from tests.distributed.pair import RECEIVER, SENDER, Cluster, running, tiny_engine
from tests.distributed.test_worker_handover import check, prompt_of, transports
from tests.models.tiny import write_tiny_gguf

PARAMS = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=1, temperature=0.8, seed=1)
FIRST, SECOND = prompt_of(120, 1), prompt_of(110, 5)  # of either the receiver's pool holds one
SMALL: dict[str, Any] = {"num_kv_blocks": 10, "kv_host_memory": 8 << 20}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf", context=1024)


@pytest.fixture(scope="module")
def expected(path: Path) -> list[CompletionOutput]:
    with LLM(str(path), num_kv_blocks=64, threads=1, enable_prefix_caching=False) as llm:
        return [llm.generate(prompt, PARAMS)[0].outputs[0] for prompt in (FIRST, SECOND)]


def restoring(engine: Engine) -> Engine:
    """That always takes back what it has, however quickly it could compute it."""
    assert engine.tiering is not None
    engine.tiering.cost.restoring_pays = lambda *_: True  # type: ignore[method-assign]
    engine.tiering.cost.recompute_s = lambda *_: 60.0  # type: ignore[method-assign]
    return engine


def num_restored(path: Path, expected: list[CompletionOutput], **settings: Any) -> int:
    """Tokens of the first prompt that a new engine finds on disk; its answer is the right one."""
    with LLM(str(path), threads=1, **settings) as llm:
        restoring(llm.engine)
        output = llm.generate(FIRST, PARAMS)[0]
        assert output.outputs[0].token_ids == expected[0].token_ids
        return output.num_cached_tokens


@pytest.mark.parametrize("fails", [False, True], ids=["saved", "not saved"])
def test_what_it_displaced_comes_back_from_host_memory(path: Path, expected: list[CompletionOutput], fails: bool) -> None:
    async def body() -> None:
        receiver = restoring(tiny_engine(path, **SMALL))
        execute = receiver.backend.execute

        def failing(plan: StepPlan) -> Any:
            if plan.block_saves and not plan.slices:
                raise RuntimeError("no memory for this")
            return execute(plan)

        if fails:
            receiver.backend.execute = failing  # type: ignore[method-assign]
        async with running([tiny_engine(path), receiver], transports) as pair:
            await answered(pair, FIRST, expected[0], worker=RECEIVER)
            await answered(pair, SECOND, expected[1], worker=SENDER, ticket=True)
            await answered(pair, FIRST, expected[0], worker=RECEIVER)
            assert receiver.tiering is not None
            assert (receiver.tiering.tiers.stats.host_hit_tokens > 64) is not fails  # a plan of its own may have saved one block more
            receiver.scheduler.check_invariants()

    asyncio.run(body())


async def answered(pair: Cluster, prompt: list[int], expected: CompletionOutput, worker: int, ticket: bool = False) -> None:
    stream = pair.submit(prompt, PARAMS, ticket=ticket, worker=worker)
    await pair.answered(stream)
    assert stream.by[-1] == RECEIVER
    check(stream, expected)


def test_what_it_displaced_comes_back_from_disk(path: Path, expected: list[CompletionOutput], tmp_path: Path) -> None:
    settings = {**SMALL, "kv_disk_path": str(tmp_path / "kv"), "kv_disk_flush_seconds": 0}

    async def body() -> None:
        async with running([tiny_engine(path), tiny_engine(path, **settings)], transports) as pair:
            await answered(pair, FIRST, expected[0], worker=RECEIVER)
            await answered(pair, SECOND, expected[1], worker=SENDER, ticket=True)

    asyncio.run(body())
    assert num_restored(path, expected, **settings) > 0


def test_a_reservation_that_came_to_nothing_costs_nothing_of_the_disk(
    path: Path, expected: list[CompletionOutput], tmp_path: Path
) -> None:
    settings = {**SMALL, "kv_disk_path": str(tmp_path / "kv"), "kv_disk_flush_seconds": 0}

    async def body() -> None:
        async with running([tiny_engine(path), tiny_engine(path, **settings)], transports) as pair:
            await answered(pair, FIRST, expected[0], worker=RECEIVER)
            pair.order_hook = lambda order: order.kind is not OrderKind.SEND  # nothing is copied
            stream = pair.submit(SECOND, PARAMS, ticket=True)
            await pair.until(lambda: bool(pair.heard(Reserved)))
            pair.abort(pair.key_of(stream))
            await pair.quiet()

    asyncio.run(body())
    assert num_restored(path, expected, **settings) == 112
