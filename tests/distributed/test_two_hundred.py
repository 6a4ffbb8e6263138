"""Two hundred requests of every kind on a small real model: by one engine, two workers, and prefill and decode apart, equal to the bit."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.config import BackendConfig, CacheConfig, EngineConfig, ModelConfig
from octavo.core.request import BeamParams
from octavo.distributed.cluster_options import ClusterOptions
from octavo.distributed.local_cluster import ClusterPlan, open_cluster, worker_names
from tests.distributed.clusters import PATIENT, WAIT_S, Cluster, children_find_the_sources
from tests.models.tiny import write_tiny_gguf


def jobs() -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(11)
    stem = [rng.randrange(3, 500) for _ in range(64)]
    out = []
    for i in range(200):
        prompt = stem[: rng.choice((0, 16, 40, 64))] + [rng.randrange(3, 500) for _ in range(rng.randint(1, 30))]
        params = SamplingParams(
            temperature=rng.choice((0.0, 0.7, 1.2)),
            top_p=rng.choice((1.0, 0.9)),
            top_k=rng.choice((0, 20)),
            frequency_penalty=rng.choice((0.0, 0.5)),
            repetition_penalty=rng.choice((1.0, 1.2)),
            max_tokens=rng.randint(1, 24),
            min_tokens=rng.choice((0, 1)),
            logprobs=rng.choice((None, 2)),
            prompt_logprobs=rng.choice((None, None, None, 1)),
            stop=rng.choice(((), ("e", "th"))),
            ignore_eos=rng.random() < 0.7,
            n=rng.choice((1, 1, 1, 2)),
            seed=i,
        )
        if i % 20 == 7:
            params = SamplingParams(temperature=0, beam=BeamParams(3), n=2, max_tokens=8, seed=i)
        out.append((prompt, params))
    return out


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf")


@pytest.fixture(scope="module")
def expected(path: Path) -> list[Any]:
    with LLM(str(path), num_kv_blocks=256, threads=1) as llm:
        outputs = [llm.generate([prompt], params)[0] for prompt, params in jobs()]
    return [(output.outputs, output.prompt_logprobs) for output in outputs]


@pytest.mark.parametrize("workers", [{"both": 2}, {"prefill": 1, "decode": 1}], ids=["replicas", "apart"])
def test_two_hundred_requests_are_answered_as_by_one_engine(path: Path, expected: list[Any], workers: dict[str, int]) -> None:
    config = EngineConfig(ModelConfig(str(path)), CacheConfig(num_kv_blocks=256), backend=BackendConfig(threads=1))

    async def run() -> None:
        engine = open_cluster(config, str(path), ClusterPlan(workers, options=ClusterOptions(liveness=PATIENT)))
        engine.start()
        try:
            async with asyncio.timeout(WAIT_S):
                await engine.ready()
            cluster = Cluster(engine, engine.launcher)  # type: ignore[arg-type]
            got = await asyncio.gather(*(cluster.run(*job) for job in jobs()))
            assert [(output.outputs, output.prompt_logprobs) for output in got] == expected
            assert {leg.worker for journey in engine.journeys.all() for leg in journey.legs} == set(worker_names(workers))
            assert ("decode" in workers) == (engine.journeys.num_handed_over > 0)
        finally:
            await engine.stop()

    with children_find_the_sources():
        asyncio.run(run())
