"""Decode workers with smaller KV pools: an answer that one of them would cut short is handed over to others, or stays where it began."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from octavo.distributed.messages import NoRoom, Offered, PromptStarted, Reserve, Submit
from tests.distributed.pair import SENDER, Cluster, tiny_engine
from tests.distributed.test_stub_hand_offs import MovesKV
from tests.distributed.test_stub_worker import SECRET, TOKENIZER, expected, front_end, open_stream, read, until
from tests.distributed.test_worker_handover import SAMPLED, alone, check, prompt_of, run
from tests.models.tiny import write_tiny_gguf

SMALL = 2  # blocks; their 32 tokens hold the prompt, and not the answer
NUM_TOKENS = 60


def test_a_receiver_that_has_room_for_the_prompt_alone_refuses(tmp_path: Path) -> None:
    path, prompt = write_tiny_gguf(tmp_path / "l.gguf", context=2048), prompt_of(30)
    params = replace(SAMPLED, max_tokens=NUM_TOKENS)
    right = alone(path, prompt, params)

    async def use(cluster: Cluster) -> None:
        answer = cluster.submit(prompt, params)
        await cluster.until(lambda: bool(cluster.heard(NoRoom)) and bool(cluster.heard(Offered)))
        assert f"max_tokens: {NUM_TOKENS} is not allowed" in cluster.heard(NoRoom)[0][1].reason
        cluster._follow(cluster.desk.failed(cluster.key_of(answer), "nobody can have it", 0.0))
        await cluster.answered(answer)
        check(answer, right)
        assert answer.by == [SENDER]
        await cluster.quiet()

    run([tiny_engine(path), tiny_engine(path, num_kv_blocks=SMALL)], use)


@pytest.mark.parametrize("with_large", [True, False])
def test_only_workers_that_hold_the_answer_are_asked_for_room(with_large: bool) -> None:
    """However much room they have, and whoever was meant."""

    async def run_all() -> None:
        engine = await front_end()
        vocab_size = TOKENIZER.vocab_size
        sender = MovesKV("prefill", "bigram", vocab_size, role="prefill")
        small = MovesKV("small", "bigram", vocab_size, role="decode", num_kv_blocks=SMALL)
        workers, tasks = [small, sender], list[asyncio.Task[None]]()
        if with_large:
            workers.append(MovesKV("large", "bigram", vocab_size, role="decode", num_kv_blocks=1 << 10))
        for worker in workers:  # the small one first: of those that say that they have as much room it is the one to be chosen
            tasks.append(asyncio.create_task(worker.run(engine.control.address, SECRET)))
            await until(lambda: len(engine.open_links()) == len(tasks))
        await until(lambda: len({link.view.num_available_blocks for link in engine.open_links()}) == 1)
        stream = open_stream(engine, 1, NUM_TOKENS)
        await until(lambda: sender.num_attempts == 1)
        (submit,) = sender.has(Submit)
        assert (submit.ticket is not None) == with_large
        if with_large:
            sender.say(PromptStarted(submit.key))
            await until(lambda: bool(workers[2].has(Reserve)))
        sender.give(NUM_TOKENS)
        assert await read(stream) == expected(1, NUM_TOKENS)
        assert not small.has(Reserve)
        engine.handovers.check_invariants()
        await engine.stop()
        await asyncio.gather(*tasks)

    asyncio.run(run_all())
