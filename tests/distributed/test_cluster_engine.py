"""A cluster of real processes on a model of known probabilities: the same answers as one engine, whatever happens to its workers."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import replace

import pytest

from octavo.core.request import BeamParams, ParameterError, SamplingParams
from octavo.distributed.cluster_options import ClusterOptions
from octavo.distributed.fleet import LivenessLimits, WorkerState
from octavo.engine.event_stream import EngineUnavailable
from octavo.engine.outputs import OutputEvent, RequestOutput
from tests.distributed.clusters import PATIENT, Cluster, alone, cluster, run_alone

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
    return [as_answer(run_alone(engine, *job)) for job in jobs(42)]


def test_two_replicas_answer_as_one_engine(expected: list[RequestOutput]) -> None:
    async def run() -> None:
        async with cluster(2) as two:
            got = await asyncio.gather(*(two.run(*job) for job in jobs(42)))
            assert [as_answer(output) for output in got] == expected
            assert {leg.worker for journey in two.engine.journeys.all() for leg in journey.legs} == {"worker-0", "worker-1"}
            await two.until(lambda: all(link.load.num_used_blocks == 0 for link in two.engine.control))
            assert two.engine.flights.num_lost == 0

    asyncio.run(run())
