"""A cluster of engines of known times without any process or socket: each worker on a clock of its own, the front end on another, and links
that take a known time. What accounts say can be computed, to the last digit."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from octavo.core.clock import VirtualClock
from octavo.core.request import FinishReason, Request, SamplingParams
from octavo.distributed.answers import answer_now
from octavo.distributed.cluster_reports import ClusterReports
from octavo.distributed.journeys import Journey, Journeys
from octavo.distributed.worker_engine import engine_id
from octavo.engine.params import PreparedRequest
from tests.engine.timed import Law, TimedRun

LINK_S = 0.05  # one way


class Worker:
    """An engine whose clock has shown ``offset_s`` when the front end's showed 0."""

    def __init__(self, name: str, offset_s: float, role: str = "both", **scheduler: Any) -> None:
        self.name, self.role, self.offset_s = name, role, offset_s
        self.run = TimedRun(Law(), **scheduler)
        self.run.clock.advance(offset_s)

    @property
    def now(self) -> float:
        """On the front end's clock."""
        return self.run.clock.now() - self.offset_s


class ToldCluster:
    """The front end moves on as it is told; ``Workers`` for ``ClusterReports``."""

    def __init__(self, *workers: Worker) -> None:
        self.clock, self.journeys = VirtualClock(), Journeys()
        self.workers = {worker.name: worker for worker in workers}
        self.silent: set[str] = set()  # workers that do not answer
        self.reports = ClusterReports(self.journeys, self, self.clock, "m", True)
        self._num_keys = 0
        self._requests: dict[str, Request] = {}
        self._keys: dict[str, int] = {}

    def roles(self) -> Mapping[str, str]:
        return {name: worker.role for name, worker in self.workers.items()}

    async def ask(self, worker: str, what: str, args: bytes) -> bytes:
        if worker in self.silent:
            await asyncio.Event().wait()
        return answer_now(self.workers[worker].run.engine, what, args)

    # --- what happens -------------------------------------------------------------------------------------------------------------------

    def open(self, name: str, num_prompt: int = 100, num_output: int = 10, received_s: float | None = None) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
        prompt = [4 + i % 200 for i in range(num_prompt)]
        self._requests[name] = Request(name, prompt, params, 1, frozenset(), self.clock.now(), received_s=received_s)
        self.journeys.opened(self._requests[name])

    def place(self, name: str, worker_name: str, made: list[int] | None = None, handed_over: bool = False) -> None:
        """Send it; it arrives ``LINK_S`` later, and the worker has it in its queue."""
        worker, request = self.workers[worker_name], self._requests[name]
        self._num_keys += 1
        self._keys[name] = self._num_keys
        tell = self.journeys.handed_over if handed_over else self.journeys.placed
        tell(name, worker_name, engine_id(self._num_keys), self.clock.now())
        arrival_s = self.clock.now() + LINK_S + worker.offset_s
        if worker.run.clock.now() < arrival_s:
            worker.run.clock.advance_to(arrival_s)
        there = Request(engine_id(self._num_keys), request.prompt_token_ids, request.params, 1, frozenset(), arrival_s)
        worker.run.times_s[there.request_id] = []
        worker.run.engine.add(PreparedRequest(there, []), made or [])

    def step(self, worker_name: str, told: bool = True) -> None:
        """A step of a worker; its events arrive ``LINK_S`` after its end, unless they are lost (``told`` False)."""
        worker = self.workers[worker_name]
        names = {engine_id(key): name for name, key in self._keys.items()}
        events = worker.run.step()
        if not told:
            return
        self.at(worker.now + LINK_S)
        for event in events:
            name = names[event.request_id]
            self.journeys.tokens(name, len(event.token_ids), self.clock.now())
            if event.finish_reason is not None:
                self.journeys.ended(name, event.finish_reason, self.clock.now())

    def run(self, worker_name: str, name: str, num_tokens: int) -> None:
        """Until so many tokens of it have come in all."""
        for _ in range(10_000):
            if self.find(name).num_output_tokens >= num_tokens:
                return
            self.step(worker_name)
        raise AssertionError(f"{name} does not get {num_tokens} tokens")

    def at(self, moment_s: float) -> None:
        if self.clock.now() < moment_s:
            self.clock.advance_to(moment_s)

    def abort(self, name: str) -> None:
        self.journeys.ended(name, FinishReason.ABORT, self.clock.now())

    # --- what is told -------------------------------------------------------------------------------------------------------------------

    def find(self, name: str) -> Journey:
        found = self.journeys.find(name)
        assert found is not None
        return found

    def account(self, *names: str) -> dict[str, Any]:
        found = asyncio.run(self.reports.account(names))
        assert found is not None
        return found


def seconds_of(account: dict[str, Any]) -> dict[str, float]:
    return {part["cause"]: part["seconds"] for part in account["causes"]}
