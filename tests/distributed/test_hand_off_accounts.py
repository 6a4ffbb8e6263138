"""Accounts of requests whose prompt one process computed and whose tokens another one: every moment charged, the hand-off by its name."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from octavo.core.request import SamplingParams
from octavo.distributed import cluster_reports
from octavo.server.prometheus import exposition
from tests.distributed.clusters import WAIT_S
from tests.distributed.kv_clusters import is_empty, kv_cluster
from tests.distributed.told_cluster import seconds_of
from tests.models.tiny import write_tiny_gguf

NUM_TOKENS = 12


def test_prefill_and_decode_apart_are_accounted_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_reports, "ANSWER_S", WAIT_S)  # a busy machine may be late with its accounts
    path = write_tiny_gguf(tmp_path / "m.gguf", context=2048)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    prompts = [[3 + (i * 31 + j * 7) % 250 for j in range(200)] for i in range(6)]

    async def run() -> None:
        async with kv_cluster(path, {"prefill": 1, "decode": 1}) as cluster:
            outputs = await asyncio.gather(*(cluster.run(prompt, params) for prompt in prompts))
            reports = cluster.engine.reports(True)
            for output in outputs:
                account = await reports.account([output.request_id])
                assert account is not None and account["state"] == "finished"
                seconds = seconds_of(account)
                assert sum(seconds.values()) == pytest.approx(account["wall_s"], abs=1e-5)
                assert abs(seconds["remainder"]) <= 0.01 * account["wall_s"], account
                assert account["workers"] == ["prefill-0", "decode-0"] and seconds["hand_off"] > 0.0 and seconds["network"] > 0.0
                assert {"prefill", "decode"} <= set(seconds)
            summary = await reports.summary(600.0, 0, "wall")
            assert (summary["num_requests"], summary["num_first_tokens"], summary["complete"]) == (6, 6, True)
            assert summary["num_gaps"] == 6 * (NUM_TOKENS - 1)
            await cluster.until(lambda: is_empty(cluster))
            lines = exposition(await reports.metrics())[0].decode().splitlines()
            samples = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
            assert samples['octavo_cluster_hand_offs_total{role="front_end",worker=""}'] == "6.0"
            assert samples['octavo_request_seconds_count{role="decode",worker="decode-0"}'] == "6.0"
            assert samples['octavo_request_seconds_count{role="prefill",worker="prefill-0"}'] == "0.0"
            assert samples['octavo_prompt_tokens_total{role="decode",worker="decode-0"}'] == "0.0"

    asyncio.run(run())
