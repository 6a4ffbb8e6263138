"""Requests sent to an engine in this process: every token in a record, latencies from when a request was due, failures that stay theirs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from octavo.bench.engine_load import run_engine_load
from octavo.bench.latency import summary, ttft_s
from octavo.bench.stream_record import StreamRecord
from octavo.config import BackendConfig, CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.engine import Engine
from octavo.workload.requests import WorkloadRequest
from tests.models.tiny import write_tiny_gguf


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    model = write_tiny_gguf(tmp_path / "rand.gguf", context=128)
    scheduler = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64)
    return Engine.load(EngineConfig(ModelConfig(str(model)), CacheConfig(num_kv_blocks=32), scheduler, BackendConfig(threads=1)))


def records_of(engine: Engine, requests: list[WorkloadRequest]) -> list[StreamRecord]:
    async def run() -> list[StreamRecord]:
        running = AsyncEngine(engine)
        running.start()
        try:
            return await run_engine_load(running, requests)
        finally:
            await running.stop()

    return asyncio.run(run())


def test_every_request_has_its_record(engine: Engine) -> None:
    prompt = [7] * 40
    requests = [WorkloadRequest(0.01 * i, [5 + i, *prompt], 1 + 3 * i) for i in range(5)]
    requests.append(WorkloadRequest(0.05, [5, *prompt], 2))
    records = records_of(engine, requests)
    numbers = [(one.num_prompt, one.num_output, one.num_tokens) for one in records]
    assert numbers == [(41, one.num_output, one.num_output) for one in requests]
    for one, request in zip(records, requests, strict=True):
        assert one.error_kind is None
        assert one.due_s - records[0].due_s == pytest.approx(request.arrival_s)
        assert one.due_s <= one.sent_s <= one.event_times[0] <= one.event_times[-1] <= one.end_s
        assert ttft_s(one) > 0.0
    assert records[5].num_cached == 32  # the blocks of the first prompt
    figures = summary(records)
    assert (figures["num_completed"], figures["num_output_tokens"]) == (6, 1 + 4 + 7 + 10 + 13 + 2)


def test_a_request_that_can_never_run_fails_alone(engine: Engine) -> None:
    records = records_of(engine, [WorkloadRequest(0.0, [5] * 200, 4), WorkloadRequest(0.0, [5] * 20, 4)])
    assert [one.error_kind for one in records] == ["refused", None]
    assert "128" in records[0].error_message and not records[0].event_times and records[0].end_s >= records[0].due_s


def test_a_step_that_fails_is_in_the_records(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.backend, "execute", lambda plan: 1 / 0)
    (record,) = records_of(engine, [WorkloadRequest(0.0, [5] * 20, 4)])
    assert record.error_kind == "stream_error" and "ZeroDivisionError" in record.error_message and record.num_tokens == 0
