"""N engines in virtual time: requests arrive, are routed, run step by step, and leave figures behind.

    workload ─▶ router ─▶ engine (EngineLoop over SimBackend) ─▶ RequestLog ─▶ SimulationReport

The engines are the real ones; only the device is a cost model, and time is told instead of read. Everything follows from the specs, the
requests and the seed. At one moment things happen in this order: steps end (by engine), engines go or come back, hand-offs move on,
requests arrive, steps begin (by engine), and those of a shared host settle how they hold each other up.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import count

from octavo.core.clock import MAX_SECONDS, VirtualClock
from octavo.core.prefix_index import Namespace, prompt_keys
from octavo.core.request import ParameterError, Request, SamplingParams, derive_seed
from octavo.distributed.dispatcher import QueueFull
from octavo.distributed.roles import MixedLimits, RolePools
from octavo.distributed.router import Router, RouteRequest, ShortestQueue
from octavo.engine.outputs import OutputEvent
from octavo.simulator.delivery import TokenReader
from octavo.simulator.engine_spec import EngineSpec
from octavo.simulator.front_end import FrontEnd, FrontEndOptions
from octavo.simulator.handing_over import HandoffOptions, Handovers
from octavo.simulator.outages import Outage, continued, moments
from octavo.simulator.records import RequestLog, Slo
from octavo.simulator.report import SimulationReport, report_of
from octavo.simulator.shared_host import HostSharing, SharedHost, StepKind, check_hosts
from octavo.simulator.sim_engine import SimEngine
from octavo.workload.requests import WorkloadRequest


@dataclass(frozen=True, slots=True)
class SimulationOptions:
    """``concurrency``: a closed loop of so many requests at a time; None: requests come when they are due. ``until_s``: stop there, with
    requests still on their way. ``most_misses``: stop as well when more requests than that have ended outside of ``slo``."""

    slo: Slo = field(default_factory=Slo)
    seed: int = 0
    concurrency: int | None = None
    until_s: float | None = None
    most_misses: int | None = None
    keep_requests: bool = False
    keep_gaps: bool = False
    handoff: HandoffOptions = field(default_factory=HandoffOptions)  # where there are prefill engines
    mixed: MixedLimits | None = None  # prefill and decode engines lend each other a hand
    front_end: FrontEndOptions | None = None  # requests wait there as at a cluster's, and ``mixed`` is its own; None: each goes at once
    outages: Seq[Outage] = ()
    hosts: Seq[HostSharing] = ()  # engines that hold each other up; nobody does so to those that are in none
    jump: bool = True  # take steps that only repeat at once: the same figures, sooner


class Simulation:
    """One run: made, ``run`` once, done. ``router`` chooses among the engines of role both and prefill; with ``mixed``, others too."""

    def __init__(self, specs: Seq[EngineSpec], router: Router | None = None, options: SimulationOptions | None = None) -> None:
        if not specs:
            raise ValueError("engines: at least one is needed")
        self.options = options or SimulationOptions()
        self.clock = VirtualClock()
        self.log = RequestLog(self.options.slo, self.options.keep_requests, self.options.keep_gaps)
        self._events: list[tuple[float, int, int]] = []  # (end of a step, engine, number of the engine's event)
        check_hosts(self.options.hosts, len(specs))
        held_up = {index for host in self.options.hosts for index in host.engines}
        is_late = any(host.delivery is not None for host in self.options.hosts)
        self._reader = TokenReader[StepKind | None](random.Random(f"delivery:{self.options.seed}")) if is_late else None
        shared = (self.clock, self.log, self._events, self.options.seed)
        jumps = self.options.jump and not is_late  # what was read late elsewhere holds up what a jump would give
        self.engines = [SimEngine(i, spec, *shared, jumps and i not in held_up) for i, spec in enumerate(specs)]
        self._hosts = [SharedHost(self.engines, host, self.options.seed) for host in self.options.hosts]
        self._host_of = {index: host for host, sharing in zip(self._hosts, self.options.hosts, strict=True) for index in sharing.engines}
        self._entries = [engine for engine in self.engines if engine.spec.role != "decode"]
        if not self._entries:
            raise ValueError("engines: all are of role decode; nobody computes prompts")
        roles = {engine.spec.role for engine in self.engines}
        if ("prefill" in roles) != ("decode" in roles) and (self.options.front_end is None or "both" not in roles):
            raise ValueError("engines: prefill engines need decode engines to hand over to, and decode engines prefill engines")
        self._router = router or ShortestQueue()
        chosen = self.options.front_end
        self._front = None if chosen is None else FrontEnd(self._router, chosen, self.engines, self.clock.now)
        self._pools = self._make_pools() if self._front is None else self._front.pools
        self.handoffs = Handovers(self.engines, self.options.handoff, self._pools)
        self._wants_keys = self._router.wants_keys
        for engine in self._entries if self._wants_keys else ():
            engine.tell_keys()
        self._numbers = count()
        self._requests: dict[str, tuple[Request, int | None]] = {}  # to be handed over: (request, to whom, if that was chosen)
        self._dirty: set[int] = set()  # engines that may begin a step now
        self._moments = deque(moments(self.options.outages, len(specs)))
        self._down: set[int] = set()  # engines that are gone
        self._held: list[Request] = []  # while no engine is there that would take them
        self._most_output: dict[str, int] = {}  # of live requests that allow more than they make

    def _make_pools(self) -> RolePools | None:
        if self.options.mixed is None:
            return None
        pools = RolePools(self._router, self.options.mixed, self.engines[0].spec.cache.block_size)
        for engine in self.engines:
            pools.add(engine.index, engine.spec.role, engine.spec.num_blocks)
        self._entries = self.engines
        return pools

    # --- the run ------------------------------------------------------------------------------------------------------------------------

    def run(self, requests: Iterable[WorkloadRequest]) -> SimulationReport:
        """Run all ``requests``, which come by arrival and are taken one by one, to their end (or to ``until_s``)."""
        source = iter(requests)
        upcoming = None if self.options.concurrency else self._next(source, -float("inf"))
        if self.options.concurrency:
            self._refill(source, self.options.concurrency)
            self._begin_steps(0.0)
        until_s = float("inf") if self.options.until_s is None else self.options.until_s
        while upcoming is not None or self._events or self.handoffs.next_s() < float("inf") or (self._held and self._moments):
            now = min(self._events[0][0] if self._events else float("inf"), self.handoffs.next_s())
            if self._moments:
                now = min(now, self._moments[0][0])
            if self._front is not None:
                now = min(now, max(self._front.next_s(), self.clock.now()))
            if upcoming is not None:
                now = min(now, max(upcoming.arrival_s, self.clock.now()))
            if now > until_s:
                self.clock.advance_to(until_s)
                break
            if not now <= MAX_SECONDS:
                raise ValueError(f"the clock would stand at {now:g} s, at most {MAX_SECONDS:g} is allowed; steps take too long")
            self.clock.advance_to(now)
            num_ended = self._end_steps(now)
            while self._moments and self._moments[0][0] <= now:
                self._go_or_come_back(*self._moments.popleft())
            self._dirty |= self.handoffs.advance(now)
            if self.options.concurrency:
                self._refill(source, num_ended)
            else:
                while upcoming is not None and upcoming.arrival_s <= now:
                    self._submit(upcoming, upcoming.arrival_s)
                    upcoming = self._next(source, upcoming.arrival_s)
            if self.options.most_misses is not None and self.log.num_missed > self.options.most_misses:
                break
            self._begin_steps(now)
        for engine in self.engines:
            engine.interrupt()  # where the run was stopped: what has ended by then counts, jumped or not
        return report_of(self.log, self.engines, self.handoffs.stats, self.clock.now())

    def _next(self, source: Iterator[WorkloadRequest], last_s: float) -> WorkloadRequest | None:
        upcoming = next(source, None)
        if upcoming is not None and not last_s <= upcoming.arrival_s <= MAX_SECONDS:
            limit = f"from {last_s!r}, when the last one came" if last_s >= 0.0 else "seconds"
            raise ValueError(f"arrival_s: {upcoming.arrival_s!r} is not allowed; {limit}, to {MAX_SECONDS:g}")
        return upcoming

    def _refill(self, source: Iterator[WorkloadRequest], num_ended: int) -> None:
        """Of a closed loop: a request that can never run is followed by the next at once."""
        while num_ended > 0:
            upcoming = next(source, None)
            if upcoming is None:
                return
            num_ended -= self._submit(upcoming, self.clock.now())

    def _end_steps(self, now: float) -> int:
        """Steps that end now; returns the number of requests that did."""
        num_ended = 0
        while self._events and self._events[0][0] <= now:
            _, index, event_number = heapq.heappop(self._events)
            engine = self.engines[index]
            if event_number != engine.last_event:
                continue
            self._dirty.add(engine.index)
            for event in engine.finish():
                num_ended += self._take_event(engine, event, now)
            if self._front is not None:
                self._front.stepped(engine)
        return num_ended

    def _begin_steps(self, now: float) -> None:
        if self._front is not None and len(self._front):
            self._send(self._front, now)
        for index in sorted(self._dirty):
            self.engines[index].begin(now)
        self._dirty.clear()
        for host in self._hosts:
            host.settle(now)

    # --- outages ------------------------------------------------------------------------------------------------------------------------

    def _go_or_come_back(self, now: float, is_back: bool, index: int) -> None:
        """An engine is killed, and its requests go on elsewhere; or it is there again, and takes those that were held."""
        engine = self.engines[index]
        if is_back:
            self._down.discard(index)
            self.handoffs.back(index)
            if self._pools is not None:
                self._pools.add(index, engine.spec.role, engine.spec.num_blocks)
            if self._front is not None:
                self._front.back(index)
            held, self._held = self._held, []
            for request in held:
                self._place(request)
            return
        self._down.add(index)
        if self._pools is not None:
            self._pools.remove(index)
        if self._front is not None:
            self._front.gone(index)
        elif self._wants_keys:
            self._router.gone(index)
        on_their_way, touched = self.handoffs.gone(index, now)
        self._dirty |= touched
        for request, output_token_ids in (*engine.fail(), *on_their_way):
            self.log.num_moved += 1
            self._place(continued(request, output_token_ids))

    # --- requests -----------------------------------------------------------------------------------------------------------------------

    def _submit(self, work: WorkloadRequest, arrival_s: float) -> bool:
        """Route a request to an engine. False: it can never run there."""
        number = next(self._numbers)
        request = self._request(work, number, arrival_s)
        num_prompt = len(request.prompt_token_ids)
        self.log.arrived(request.request_id, arrival_s, num_prompt)
        if work.most_output is not None:
            self._most_output[request.request_id] = work.most_output
        return self._place(request)

    def _place(self, request: Request) -> bool:
        """Route a request, which may have drawn some tokens elsewhere, to an engine. False: it can never run there."""
        if self._front is not None:
            return self._hold_back(self._front, request)
        entries = [engine for engine in self._entries if engine.index not in self._down] if self._down else self._entries
        if entries:
            self._tell_keys(entries)
        engine = self._engine_for(self._route(request), request, entries) if entries else None
        if engine is None:
            self._held.append(request)
            return True
        return self._add(engine, request)

    def _add(self, engine: SimEngine, request: Request) -> bool:
        try:
            engine.add(request)
        except ParameterError as error:
            return self._refuse(request, error)
        self._dirty.add(engine.index)
        return True

    def _refuse(self, request: Request, error: Exception) -> bool:
        """False."""
        self._over(request.request_id, 0)
        self.log.refused(request.request_id, str(error))
        return False

    def _tell_keys(self, engines: Seq[SimEngine]) -> None:
        """Tell the router what their caches have come to offer, if it wants to hear of it."""
        for engine in engines if self._wants_keys else ():
            self._router.told(engine.index, *engine.take_key_changes())

    def _route(self, request: Request) -> RouteRequest:
        """What the router is told of a request: at a front end no more than real ones know."""
        keys = tuple[bytes, ...]()
        if self._wants_keys:
            keys = tuple(prompt_keys("sim", Namespace(), request.prompt_token_ids, self.engines[0].spec.cache.block_size))
        name, num_prompt, num_output = request.request_id, len(request.prompt_token_ids), request.params.max_tokens
        if self._front is None:
            return RouteRequest(name, num_prompt, num_output, request.session, keys)
        most = self._most_output.get(name, num_output)
        return RouteRequest(name, num_prompt, None, request.session, keys, request.priority, request.user, most)

    # --- a front end ----------------------------------------------------------------------------------------------------------------------

    def _hold_back(self, front: FrontEnd, request: Request) -> bool:
        """A request waits until its turn is, and goes then in ``_send``. False: it can never run."""
        place = front.placed.get(request.request_id)
        if place is not None:
            return self._add(self.engines[place], request)
        try:
            front.submit(request, self._route(request), self.clock.now())
        except (ParameterError, QueueFull) as error:
            return self._refuse(request, error)
        return True

    def _send(self, front: FrontEnd, now: float) -> None:
        """What waits and may go goes to its engine."""
        while (sent := front.next(now)) is not None:
            if sent.receiver is not None:
                self._requests[sent.request.request_id] = sent.request, sent.receiver
            self._add(self.engines[sent.engine], sent.request)

    def _engine_for(self, route: RouteRequest, request: Request, entries: Seq[SimEngine]) -> SimEngine | None:
        """The engine that is to compute the prompt. Who is to be handed over is remembered until then. None: nobody computes prompts."""
        if self._pools is None:
            engine = entries[self._router.choose(route, entries)]
            if engine.spec.role == "prefill":
                self._requests[request.request_id] = request, None
            return engine
        placed = self._pools.place(route, entries, self.clock.now())
        if placed is None:
            return None
        if placed.is_split:
            self._requests[request.request_id] = request, placed.decode
        return self.engines[placed.prefill]

    def _over(self, request_id: str, num_output: int) -> None:
        """A request has ended, or was refused: whoever remembers it may forget it."""
        self._requests.pop(request_id, None)
        self._most_output.pop(request_id, None)
        if self._reader is not None:
            self._reader.ended(request_id)
        if self._front is not None:
            self._front.ended(request_id, num_output)
            return
        if self._wants_keys:
            self._router.ended(request_id, num_output)
        if self._pools is not None:
            self._pools.ended(request_id)

    def _request(self, work: WorkloadRequest, number: int, arrival_s: float) -> Request:
        """The request of a workload, which ends at its recorded length and never before."""
        params = SamplingParams(max_tokens=work.num_output, ignore_eos=True)
        return Request(
            str(number), work.prompt_token_ids, params, derive_seed(self.options.seed, number + 1), arrival_s=arrival_s,
            priority=work.priority, user=work.user, session=work.session,
        )  # fmt: skip

    def _read_s(self, reader: TokenReader[StepKind | None], engine: SimEngine, event: OutputEvent, now: float) -> float:
        """When what a step of ``engine`` gave a request at ``now`` is read."""
        host = self._host_of.get(engine.index)
        if host is None or host.delivery is None or not event.token_ids:
            return reader.at_s(event.request_id, now)
        return reader.read_s(event.request_id, now, host.delivery, host.beside(engine))

    def _take_event(self, engine: SimEngine, event: OutputEvent, now: float) -> int:
        """Write down what a step gave a request; 1 when it has ended."""
        is_first, read_s = False, now if self._reader is None else self._read_s(self._reader, engine, event, now)
        if event.token_ids:
            live = self.log.got_tokens(event.request_id, len(event.token_ids), read_s)
            is_first = live.num_output == len(event.token_ids)
            if is_first:
                live.num_cached = event.num_cached_tokens
        if event.token_ids and self._pools is not None:
            self._pools.prefilled(event.request_id)
        if event.finish_reason is None:
            if event.token_ids and event.request_id in self._requests:
                request, receiver = self._requests.pop(event.request_id)
                self.handoffs.offer(engine, request, now, engine.last_step_s, receiver)
            return 0
        self._over(event.request_id, self.log.live[event.request_id].num_output)
        if engine.spec.role == "decode" or self._pools is not None:
            self.handoffs.room_may_be_there()
        if event.error is not None:
            self.log.failed(event.request_id)
        else:
            self.log.completed(event.request_id, engine.index, read_s)
        return 1
