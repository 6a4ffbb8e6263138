"""Decode workers come while answers wait for room, and go when they do not: real ones, and no request fails or answers otherwise."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from octavo.core.request import SamplingParams
from octavo.distributed import scaling
from octavo.distributed.autoscale import ScaleLimits
from octavo.distributed.cluster_options import HandoverOptions
from tests.distributed.kv_clusters import is_empty, kv_cluster
from tests.models.tiny import write_tiny_gguf

PARAMS = SamplingParams(temperature=0.8, max_tokens=60, ignore_eos=True, seed=5)
LIMITS = {
    "prefill": ScaleLimits(least=1, most=2, start_s=60.0),
    "decode": ScaleLimits(least=1, most=2, up_wait_s=0.01, down_after_s=0.3, start_s=0.5, rate_s=0.2),
}


def test_decode_workers_come_with_the_load_and_go_when_it_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker has blocks for three answers, and ten are wanted: they wait for room, though there is time to compute them."""
    monkeypatch.setattr(scaling, "ASK_S", 0.05)
    path = write_tiny_gguf(tmp_path / "m.gguf", context=256)

    async def run() -> None:
        async with kv_cluster(path, {"prefill": 1, "decode": 1}, HandoverOptions(may_borrow=False), LIMITS, num_kv_blocks=20) as pair:
            answers = dict[int, set[tuple[int, ...]]]()

            def names() -> set[str]:
                return {link.name for link in pair.engine.open_links()}

            async def keep_busy(number: int) -> None:
                while True:
                    output = await pair.run([3 + number] * 33, PARAMS)
                    assert output.error is None
                    answers.setdefault(number, set()).add(tuple(output.outputs[0].token_ids))

            running = [asyncio.create_task(keep_busy(number)) for number in range(10)]
            await pair.until(lambda: "decode-1" in names())
            taken = lambda: {link.name for link in pair.engine.control if link.load.num_running}  # noqa: E731
            await pair.until(lambda: "decode-1" in taken() and 0 in answers)
            assert names() == {"prefill-0", "decode-0", "decode-1"}
            for task in running:
                task.cancel()
            assert all(isinstance(end, asyncio.CancelledError) for end in await asyncio.gather(*running, return_exceptions=True))
            await pair.until(lambda: len(list(pair.engine.control)) == 2 and len(pair.processes.names) == 2)
            assert pair.engine.flights.num_lost == 0 and pair.engine.handovers.desk.stats.num_handed_over > 0
            assert (await pair.run([3] * 33, PARAMS)).outputs[0].token_ids == list(*answers[0])
            assert all(len(tokens) == 1 and len(next(iter(tokens))) == 60 for tokens in answers.values())
            await pair.until(lambda: is_empty(pair))
            pair.engine.handovers.check_invariants()

    asyncio.run(run())
