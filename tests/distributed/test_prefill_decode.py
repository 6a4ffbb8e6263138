"""Prefill and decode in processes of their own: the answers of one engine, whoever makes them, and whatever happens to a worker."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.engine.outputs import OutputEvent, RequestOutput
from tests.distributed.kv_clusters import HANDOVER, SIZES, is_empty, kv_cluster
from tests.models.tiny import write_tiny_gguf

PAIR = {"prefill": 1, "decode": 1}
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, frequency_penalty=0.4, max_tokens=20, ignore_eos=True, logprobs=1)
KINDS = (
    replace(SAMPLED, temperature=0.0),
    SAMPLED,
    SamplingParams(temperature=1.0, max_tokens=30, stop=("a", " wor", "é"), min_tokens=3),
    replace(SAMPLED, n=2, max_tokens=8),
    replace(SAMPLED, max_tokens=1),
    replace(SAMPLED, prompt_logprobs=1),
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("models") / "m.gguf", context=2048)


def jobs(count: int) -> list[tuple[list[int], SamplingParams]]:
    lengths = (1, 15, 16, 17, 70, 130, 200)
    prompts = [[3 + (i * 31 + j * j * 7 + j) % 250 for j in range(lengths[i % len(lengths)])] for i in range(count)]
    return [(prompt, replace(KINDS[i % len(KINDS)], seed=i)) for i, prompt in enumerate(prompts)]


def as_answer(output: RequestOutput) -> RequestOutput:
    return replace(output, request_id="", num_cached_tokens=0, cache_match=None)


def alone(path: Path, some: list[tuple[list[int], SamplingParams]]) -> list[RequestOutput]:
    with LLM(str(path), threads=1, **SIZES) as llm:
        return [as_answer(llm.generate(*job)[0]) for job in some]


@pytest.fixture(scope="module")
def expected(path: Path) -> list[RequestOutput]:
    return alone(path, jobs(42))


def same(got: list[RequestOutput], expected: list[RequestOutput]) -> None:
    for output, one in zip(got, expected, strict=True):
        assert as_answer(replace(output, prompt=None)) == replace(one, prompt=None)


@pytest.mark.parametrize(("transport", "more"), [("shm", {"min_layerwise": 64}), ("tcp", {"checksum": "crc32", "min_layerwise": 1})])
def test_a_pair_answers_as_one_engine(path: Path, expected: list[RequestOutput], transport: str, more: dict[str, Any]) -> None:
    handover = replace(HANDOVER, transport=transport, **more)

    async def run() -> None:
        async with kv_cluster(path, PAIR, handover) as pair:
            same(await asyncio.gather(*(pair.run(*job) for job in jobs(42))), expected)
            stats = pair.engine.handovers.desk.stats
            goes = [one for one in jobs(42) if one[1].n == 1 and one[1].max_tokens != 1]
            assert stats.num_failed == 0 and stats.num_handed_over >= len(goes) - 7, stats  # a stop may come with the first token
            await pair.until(lambda: is_empty(pair))
            first = [one.legs[0] for one in pair.engine.journeys.all() if len(one.legs) == 2]  # prefill, then decode
            assert first and all(leg.found_s is not None and leg.sent_s <= leg.found_s <= (leg.end_s or 0.0) for leg in first)

    asyncio.run(run())


class Counts:
    def __init__(self) -> None:
        self.tokens: dict[str, int] = {}

    def __call__(self, event: OutputEvent) -> None:
        self.tokens[event.request_id] = self.tokens.get(event.request_id, 0) + len(event.token_ids)


@pytest.mark.parametrize("victim", ["decode-0", "prefill-0"])
def test_a_worker_that_is_killed_takes_no_answer_with_it(path: Path, victim: str) -> None:
    some = [(prompt, replace(SAMPLED, seed=i, max_tokens=60)) for i, (prompt, _) in enumerate(jobs(14))]
    expected = alone(path, some)

    async def run() -> None:
        async with kv_cluster(path, PAIR) as pair:
            counts = Counts()
            tasks = [asyncio.create_task(pair.run(*job, counts)) for job in some]
            await pair.until(lambda: sum(n >= 2 for n in counts.tokens.values()) >= 4)
            pair.signal(victim, signal.SIGKILL)
            same(await asyncio.gather(*tasks), expected)
            await pair.until(lambda: set(pair.engine.roles()) == {"prefill-0", "decode-0"} and is_empty(pair))
            assert len(pair.engine.handovers.desk) == 0

    asyncio.run(run())
