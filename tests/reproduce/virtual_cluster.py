"""Two engines on devices of known times, driven in virtual time as a front end drives workers: what a prediction can be held against.

Not the simulation: engines are whole ones, routing and hand-offs are written out here once more. At one moment steps end, KV arrives,
requests come, and steps begin, in this order.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from octavo.core.request import Request, SamplingParams
from octavo.distributed.handoff import Link
from octavo.distributed.router import RouteRequest, ShortestQueue
from octavo.engine.outputs import OutputEvent
from octavo.reproduce.cluster_prediction import Answer
from octavo.workload.requests import WorkloadRequest
from tests.engine.timed import TimedRun


@dataclass(slots=True)
class Node:
    """An ``EngineView``: what a step in flight computes is pending until it has ended."""

    index: int
    run: TimedRun
    end_s: float = float("inf")  # of the step in flight
    events: list[OutputEvent] = field(default_factory=list)  # of that
    load: tuple[int, int] = (0, 0)  # when it began, and what came since

    @property
    def pending_tokens(self) -> int:
        return self._load()[0]

    @property
    def num_sequences(self) -> int:
        return self._load()[1]

    num_available_blocks = 1 << 20
    pending_s = 0.0

    def _load(self) -> tuple[int, int]:
        if self.end_s < float("inf"):
            return self.load
        scheduler = self.run.engine.scheduler
        running, waiting = scheduler.running_sequences, scheduler.waiting_sequences
        pending = sum(len(seq.token_ids) - seq.num_computed for seq in running) + sum(len(seq.token_ids) for seq in waiting)
        return pending, len(running) + len(waiting)

    def add(self, name: str, work: WorkloadRequest) -> None:
        self.load = (self.load[0] + len(work.prompt_token_ids), self.load[1] + 1)
        self.run.add(name, work.prompt_token_ids, work.num_output)

    def begin(self, now: float) -> None:
        if self.end_s < float("inf") or not self.run.engine.has_work:
            return
        self.load = self._load()
        self.run.clock.advance_to(now)
        self.events = self.run.engine.step()
        self.run.engine.scheduler.check_invariants()
        self.end_s = self.run.clock.now()


def serve(
    runs: Seq[TimedRun], requests: Seq[WorkloadRequest], link: Link | None = None, kv_bytes: int = 0, in_s: float = 0.0, out_s: float = 0.0
) -> list[Answer]:
    """``link``: the first engine computes prompts and hands them over to the second; None: both do all."""
    nodes, router = [Node(i, run) for i, run in enumerate(runs)], ShortestQueue()
    coming = [(work.arrival_s + in_s, str(i), work) for i, work in enumerate(requests)]
    copies: list[tuple[float, str, list[int]]] = []
    times: dict[str, list[float]] = {name: [] for _, name, _ in coming}
    works = {name: work for _, name, work in coming}
    while coming or copies or any(node.end_s < float("inf") for node in nodes):
        now = min([node.end_s for node in nodes] + [moment[0] for moment in (*copies, *coming[:1])])
        for node in nodes:
            if node.end_s <= now:
                node.end_s = float("inf")
                for event in node.events:
                    times[event.request_id] += [now] * len(event.token_ids)
                    if link is not None and node.index == 0 and event.finish_reason is None:
                        tokens = node.run.engine.loop.offer(event.request_id)
                        num_tokens = len(works[event.request_id].prompt_token_ids)
                        assert nodes[1].run.engine.scheduler.transfers.reserve(request_of(node, event.request_id, works), num_tokens)
                        copies.append((link.copy(num_tokens * kv_bytes, now), event.request_id, tokens))
        for copy in sorted(copies):
            if copy[0] <= now:
                copies.remove(copy)
                nodes[0].run.engine.release(copy[1])
                nodes[1].run.engine.begin(request_of(nodes[0], copy[1], works), copy[2], True)
        while coming and coming[0][0] <= now:
            _, name, work = coming.pop(0)
            able = nodes if link is None else nodes[:1]
            able[router.choose(RouteRequest(name, len(work.prompt_token_ids)), able)].add(name, work)
        for node in nodes:
            node.begin(now)
    return [
        Answer(work.arrival_s, got[0] + out_s, tuple(b - a for a, b in zip(got, got[1:], strict=False)))
        for work, got in ((works[name], times[name]) for name in times)
    ]


def request_of(node: Node, name: str, works: dict[str, WorkloadRequest]) -> Request:
    """As the first engine prepared it."""
    work, engine = works[name], node.run.engine
    params = SamplingParams(temperature=0.0, max_tokens=work.num_output, ignore_eos=True)
    return engine.prepare(work.prompt_token_ids, params, name).request
