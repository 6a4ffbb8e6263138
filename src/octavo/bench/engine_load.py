"""Sends the requests of a workload to what serves them in this process when they are due, without HTTP, and records each answer.

The requests take the way that those of the server take behind its handlers: prepared on the event loop, queued with the loop thread or sent
to a worker, their events read on the event loop by a task for each. What it says of times is therefore the engine's own, text included.
Open loop: a request is due at its arrival, and its latency counts from then, as in ``load``. ``timed_load`` and ``in_process`` step an
engine themselves.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterable

from octavo.bench.stream_record import StreamRecord
from octavo.core.request import SamplingParams
from octavo.engine.serving import ServingEngine
from octavo.workload.requests import WorkloadRequest


async def run_engine_load(engine: ServingEngine, requests: Iterable[WorkloadRequest]) -> list[StreamRecord]:
    """The records of ``requests``, which come by arrival, when all have ended; times on ``time.perf_counter``. Requests are greedy and end
    at their length. One that fails has its error in its record."""
    started_s = time.perf_counter()
    records: list[StreamRecord] = []
    run = f"load-{secrets.token_hex(6)}"

    async def one(request: WorkloadRequest, record: StreamRecord, name: str) -> None:
        record.sent_s = time.perf_counter()
        params = SamplingParams(temperature=0.0, max_tokens=request.num_output, ignore_eos=True)
        try:
            stream = engine.submit([engine.prepare_checked(request.prompt_token_ids, engine.check_params(params), name)])
            while events := await stream.read():
                now_s = time.perf_counter()
                for event in events:
                    record.event_times.extend([now_s] * len(event.token_ids))
                    record.num_cached = max(record.num_cached, event.num_cached_tokens)
                    if event.error is not None:
                        record.fail("stream_error", event.error)
        except (ValueError, RuntimeError) as error:  # it can never run, or the engine takes none
            record.fail("refused", str(error))
        record.num_reported, record.end_s = len(record.event_times), time.perf_counter()

    async with asyncio.TaskGroup() as tasks:
        for request in requests:
            due_s = started_s + request.arrival_s
            await asyncio.sleep(due_s - time.perf_counter())
            record = StreamRecord(len(request.prompt_token_ids), request.num_output, due_s)
            records.append(record)
            tasks.create_task(one(request, record, f"{run}-{len(records)}"))
    return records
