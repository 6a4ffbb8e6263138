"""Sends the requests of a workload to a server, when they are due, and records each answer.

Open loop: a request is due at its arrival, whatever the server or this process is busy with, and its latency counts from then. A generator
that counts from the moment it got round to sending leaves out the waiting that its users would see (coordinated omission). Closed loop: a
request is due when a client is free for it, which is when it is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from octavo.bench.http_client import HTTPClient
from octavo.bench.stream_record import StreamRecord
from octavo.workload.requests import WorkloadRequest

PATH = "/v1/completions"

_encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class LoadRun:
    """The records of a run as they grow, and how its requests are sent."""

    client: HTTPClient
    model: str
    ignore_eos: bool = True
    records: list[StreamRecord] = field(default_factory=list)
    started_s: float = 0.0  # on time.perf_counter
    num_running: int = 0

    async def closed(self, requests: Iterator[WorkloadRequest], concurrency: int, duration_s: float = math.inf) -> None:
        """``concurrency`` clients, until there are no more requests or ``duration_s`` has passed; what runs then is finished."""
        self.started_s = time.perf_counter()

        async def client() -> None:
            while time.perf_counter() - self.started_s < duration_s:
                request = next(requests, None)
                if request is None:
                    return
                await self.send(*self.prepare(request))

        async with asyncio.TaskGroup() as tasks:
            for _ in range(concurrency):
                tasks.create_task(client())

    async def open(self, requests: Iterator[WorkloadRequest], max_concurrency: int | None = None, duration_s: float = math.inf) -> None:
        """Each request at its arrival, or as soon after it as fewer than ``max_concurrency`` run; arrivals end with ``duration_s``."""
        gate = asyncio.Semaphore(max_concurrency) if max_concurrency is not None else contextlib.nullcontext()
        self.started_s = time.perf_counter()

        async def one(record: StreamRecord, body: bytes, due_s: float) -> None:
            async with gate:
                await self.send(record, body, due_s)

        async with asyncio.TaskGroup() as tasks:
            for request in requests:
                if request.arrival_s >= duration_s:
                    break
                prepared = self.prepare(request)  # before it is due
                due_s = self.started_s + request.arrival_s
                await asyncio.sleep(due_s - time.perf_counter())
                tasks.create_task(one(*prepared, due_s))

    async def send(self, record: StreamRecord, body: bytes, due_s: float | None = None) -> None:
        """One request from its sending to its end. ``due_s`` None: now."""
        record.due_s = time.perf_counter() if due_s is None else due_s
        self.records.append(record)
        self.num_running += 1
        try:
            await self.client.stream(PATH, body, record)
        finally:
            self.num_running -= 1

    def prepare(self, request: WorkloadRequest) -> tuple[StreamRecord, bytes]:
        """The record and the body of a request that is to be sent."""
        return StreamRecord(len(request.prompt_token_ids), request.num_output), self._body(request)

    def _body(self, request: WorkloadRequest) -> bytes:
        """Standard fields, but for ignore_eos, which makes two servers do the same work."""
        body = {
            "model": self.model,
            "prompt": request.prompt_token_ids,
            "max_tokens": request.num_output,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            body["ignore_eos"] = True
        return _encode(body)
