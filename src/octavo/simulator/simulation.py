"""N engines in virtual time: requests arrive, are routed, run step by step, and leave figures behind.

    workload ─▶ router ─▶ engine (EngineLoop over SimBackend) ─▶ RequestLog ─▶ SimulationReport

The engines are the real ones; only the device is a cost model, and time is told instead of read. Everything follows from the specs, the
requests and the seed. At one moment things happen in this order: steps end (by engine), engines go or come back, those that are scaled
come and go, hand-offs move on, requests arrive, steps begin (by engine), and those of a shared host settle how they hold each other up.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Iterable, Iterator, Set
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import count

from octavo.core.clock import MAX_SECONDS, VirtualClock
from octavo.core.prefix_index import Namespace, prompt_keys
from octavo.core.request import ParameterError, Request, SamplingParams, derive_seed
from octavo.distributed.roles import RolePools
from octavo.distributed.router import Router, RouteRequest, ShortestQueue
from octavo.engine.outputs import OutputEvent
from octavo.simulator.delivery import TokenReader
from octavo.simulator.engine_spec import EngineSpec
from octavo.simulator.handing_over import Handovers
from octavo.simulator.outages import Moment, continued, moments
from octavo.simulator.records import RequestLog
from octavo.simulator.report import SimulationReport, report_of
from octavo.simulator.scaling import SimScaling
from octavo.simulator.shared_host import SharedHost, StepKind, check_hosts
from octavo.simulator.sim_engine import SimEngine
from octavo.simulator.simulation_options import SimulationOptions
from octavo.workload.requests import WorkloadRequest


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
        self._make_engine = lambda index, spec: SimEngine(index, spec, *shared, jumps and index not in held_up)
        self.engines = [self._make_engine(i, spec) for i, spec in enumerate(specs)]
        self._hosts = [SharedHost(self.engines, host, self.options.seed) for host in self.options.hosts]
        self._host_of = {index: host for host, sharing in zip(self._hosts, self.options.hosts, strict=True) for index in sharing.engines}
        if all(spec.role == "decode" for spec in specs):
            raise ValueError("engines: all are of role decode; nobody computes prompts")
        self._check_roles({engine.spec.role for engine in self.engines})
        self._router = router or ShortestQueue()
        self._pools = self._make_pools()
        self._able = [engine for engine in self.engines if self._computes_prompts(engine)]
        self.handoffs = Handovers(self.engines, self.options.handoff, self._pools)
        self._wants_keys = self._router.wants_keys
        for engine in self.engines if self._wants_keys else ():
            engine.tell_keys()
        self._scaling = SimScaling(self.options.scale, self.engines, self.log) if self.options.scale else None
        self._numbers = count()
        self._requests: dict[str, tuple[Request, int | None]] = {}  # to be handed over: (request, to whom, if that was chosen)
        self._dirty: set[int] = set()  # engines that may begin a step now
        self._moments = deque(moments(self.options.outages, len(specs)))
        self._down: set[int] = set()  # engines that are gone
        self._held: list[Request] = []  # while no engine is there that would take them

    def _check_roles(self, roles: Set[str]) -> None:
        if ("prefill" in roles) != ("decode" in roles):
            raise ValueError("engines: prefill engines need decode engines to hand over to, and decode engines prefill engines")

    def _make_pools(self) -> RolePools | None:
        if self.options.mixed is None:
            return None
        pools = RolePools(self._router, self.options.mixed, self.engines[0].spec.cache.block_size)
        for engine in self.engines:
            pools.add(engine.index, engine.spec.role, engine.spec.num_blocks)
        return pools

    def _computes_prompts(self, engine: SimEngine) -> bool:
        return engine.spec.role != "decode" or self._pools is not None

    def _entries(self) -> Seq[SimEngine]:
        """Engines that take requests, as far as they are there; while none of them is, others answer whole requests, as in a cluster."""
        away, scaling = self._down, self._scaling
        if not away and scaling is None:
            return self._able
        there = [one for one in self.engines if one.index not in away and not (scaling is not None and scaling.is_closed(one.index))]
        return [one for one in there if self._computes_prompts(one)] or there

    # --- the run ------------------------------------------------------------------------------------------------------------------------

    def run(self, requests: Iterable[WorkloadRequest]) -> SimulationReport:
        """Run all ``requests``, which come by arrival and are taken one by one, to their end (or to ``until_s``)."""
        source = iter(requests)
        upcoming = None if self.options.concurrency else self._next(source, -float("inf"))
        self._take_moments(0.0)
        if self.options.concurrency:
            self._refill(source, self.options.concurrency)
            self._begin_steps(0.0)
        until_s = float("inf") if self.options.until_s is None else self.options.until_s
        while upcoming is not None or self._events or self.handoffs.next_s() < float("inf") or (self._is_held and self._more_may_come()):
            now = min(self._events[0][0] if self._events else float("inf"), self.handoffs.next_s())
            if self._moments:
                now = min(now, self._moments[0].at_s)
            now = min(now, max(self._due_s(), self.clock.now()))
            if upcoming is not None:
                now = min(now, max(upcoming.arrival_s, self.clock.now()))
            if now > until_s:
                self.clock.advance_to(until_s)
                break
            if not now <= MAX_SECONDS:
                raise ValueError(f"the clock would stand at {now:g} s, at most {MAX_SECONDS:g} is allowed; steps take too long")
            self.clock.advance_to(now)
            num_ended = self._end_steps(now)
            self._take_moments(now)
            if self._scaling is not None and self._scaling.next_s <= now:
                self._scale(self._scaling, now)
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

    def _due_s(self) -> float:
        """When something is to be looked at, whatever engines do; infinity: nothing is."""
        return float("inf") if self._scaling is None else self._scaling.next_s

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
            self.handoffs.stepped(engine, now)
            self._stepped(engine)
        return num_ended

    def _stepped(self, engine: SimEngine) -> None:
        """A step of it has ended, or a run of steps, and the next one has not begun."""

    def _begin_steps(self, now: float) -> None:
        for index in sorted(self._dirty):
            engine = self.engines[index]
            if engine.begin(now) and self._requests:
                self.handoffs.step_began(engine, self._requests, now)
        self._dirty.clear()
        for host in self._hosts:
            host.settle(now)

    # --- outages ------------------------------------------------------------------------------------------------------------------------

    @property
    def _is_held(self) -> bool:
        """Requests wait for an engine that is there."""
        return bool(self._held)

    def _take_moments(self, now: float) -> None:
        while self._moments and self._moments[0].at_s <= now:
            self._go_or_come_back(self._moments.popleft())

    def _go_or_come_back(self, moment: Moment) -> None:
        """An engine is killed, and its requests go on elsewhere, or drains; or it is there again, and takes those that were held."""
        index, engine = moment.engine, self.engines[moment.engine]
        if self._scaling is not None and self._scaling.is_gone(index):
            return
        if not moment.is_back and moment.drains:
            self._down.add(index)
            self.handoffs.close(index)
            self._closed(index)
        elif not moment.is_back:
            self._kill(engine, moment.at_s)
        else:
            if moment.drains and moment.is_new and engine.is_empty:  # one that is late goes on with what it has
                self._kill(engine, moment.at_s)
            self._down.discard(index)
            if self._pools is not None and self._pools.role_of(index) is None:
                self._pools.add(index, engine.spec.role, engine.spec.num_blocks)
            if self._scaling is None or not self._scaling.is_closed(index):
                self._opened(index)

    def _kill(self, engine: SimEngine, now: float) -> None:
        self._down.add(engine.index)
        if self._pools is not None:
            self._pools.remove(engine.index)
        self._lost(engine.index)
        on_their_way, touched = self.handoffs.gone(engine.index, now)
        self._dirty |= touched
        for request, output_token_ids in (*engine.fail(), *on_their_way):
            self.log.num_moved += 1
            self._place_again(continued(request, output_token_ids))

    def _closed(self, index: int) -> None:
        """An engine takes nothing new: whoever chooses is told."""

    def _lost(self, index: int) -> None:
        """An engine is gone with all it had: whoever chooses is told."""
        if self._wants_keys:
            self._router.gone(index)

    def _more_may_come(self) -> bool:
        """Engines that would take what is held."""
        return bool(self._moments) or not self.options.scale.keys().isdisjoint(("prefill", "both"))

    # --- scaling ------------------------------------------------------------------------------------------------------------------------

    def _scale(self, scaling: SimScaling, now: float) -> None:
        """Engines come and go as the scalers say."""
        coming_back = {moment.engine for moment in self._moments if moment.is_back}
        down = {index: index in coming_back for index in self._down}
        waiting = len(self._held), sum(len(request.prompt_token_ids) for request in self._held)
        changes = scaling.advance(now, self.handoffs, self._pools, down, waiting)
        for role in changes.added:
            first = next(engine.spec for engine in self.engines if engine.spec.role == role)
            engine = self._make_engine(len(self.engines), replace(first, name=f"{role}-added-{len(self.engines)}"))
            engine.there_from_s = now
            self.engines.append(engine)
            if self._computes_prompts(engine):
                self._able.append(engine)
            self.handoffs.close(engine.index)
            scaling.starts(engine, now)
            if self._pools is not None:
                self._pools.add(engine.index, role, engine.spec.num_blocks)
            if self._wants_keys:
                engine.tell_keys()
        for index in changes.closed:
            self.handoffs.close(index)
        for index in changes.gone:
            self.engines[index].there_to_s = now
            if self._pools is not None:
                self._pools.remove(index)
            if self._wants_keys:
                self._router.gone(index)
        for index in changes.opened:
            if index not in self._down:
                self._opened(index)

    def _opened(self, index: int) -> None:
        """An engine takes requests, and those that were held first."""
        self.handoffs.back(index)
        held, self._held = self._held, []
        for request in held:
            self._place(request)

    # --- requests -----------------------------------------------------------------------------------------------------------------------

    def _submit(self, work: WorkloadRequest, arrival_s: float) -> bool:
        """Route a request to an engine. False: it can never run there."""
        number = next(self._numbers)
        request = self._request(work, number, arrival_s)
        num_prompt = len(request.prompt_token_ids)
        self.log.arrived(request.request_id, arrival_s, num_prompt)
        if self._scaling is not None:
            self._scaling.num_prompt_tokens += num_prompt
        return self._place(request)

    def _place(self, request: Request) -> bool:
        """Route a request, which may have drawn some tokens elsewhere, to an engine. False: it can never run there."""
        entries = self._entries()
        if not entries:
            self._held.append(request)
            return True
        return self._add(self._engine_for(self._route(request, entries), request, entries), request)

    def _place_again(self, request: Request) -> None:
        """Its engine is gone, and it has drawn some tokens there, maybe."""
        self._place(request)

    def _add(self, engine: SimEngine, request: Request) -> bool:
        """Queue it there. False: it can never run there."""
        try:
            engine.add(request)
        except ParameterError as error:
            return self._refuse(request, error)
        self._dirty.add(engine.index)
        return True

    def _refuse(self, request: Request, error: Exception) -> bool:
        """False."""
        self._over(request.request_id, None)
        self.log.refused(request.request_id, str(error))
        return False

    def _route(self, request: Request, entries: Seq[SimEngine]) -> RouteRequest:
        """What the router is told of a request, and before it what the engines' caches have come to offer."""
        for engine in entries if self._wants_keys else ():
            self._router.told(engine.index, *engine.take_key_changes())
        num_prompt, num_output = len(request.prompt_token_ids), request.params.max_tokens
        return RouteRequest(request.request_id, num_prompt, num_output, request.session, self._keys_of(request))

    def _keys_of(self, request: Request) -> tuple[bytes, ...]:
        """Of its prompt's blocks, where the router wants them."""
        block_size = self.engines[0].spec.cache.block_size
        return tuple(prompt_keys("sim", Namespace(), request.prompt_token_ids, block_size)) if self._wants_keys else ()

    def _engine_for(self, route: RouteRequest, request: Request, entries: Seq[SimEngine]) -> SimEngine:
        """The engine that is to compute the prompt. Who is to be handed over is remembered until then."""
        self._requests.pop(request.request_id, None)  # of an engine that is gone
        placed = None if self._pools is None else self._pools.place(route, entries, self.clock.now())
        if placed is None:
            engine = entries[self._router.choose(route, entries)]
            if engine.spec.role == "prefill" and self.handoffs.has_receivers():
                self._requests[request.request_id] = request, None
            return engine
        if placed.is_split:
            self._requests[request.request_id] = request, placed.decode
        return self.engines[placed.prefill]

    def _over(self, request_id: str, num_output: int | None) -> None:
        """A request has ended, or was refused: whoever remembers it may forget it. ``num_output``: tokens of its answer, if it had one."""
        self._requests.pop(request_id, None)
        self._dirty |= self.handoffs.withdraw(request_id, self.clock.now())
        if self._reader is not None:
            self._reader.ended(request_id)
        self._routed(request_id, num_output)

    def _routed(self, request_id: str, num_output: int | None) -> None:
        """A request is over: whoever chose for it is told."""
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
                if self._scaling is not None:
                    self._scaling.begun(live.num_prompt, live.num_cached)
        if event.token_ids and self._pools is not None:
            self._pools.prefilled(event.request_id)
        if event.finish_reason is None:
            if event.token_ids and event.request_id in self._requests:
                request, receiver = self._requests.pop(event.request_id)
                self.handoffs.drew(engine, request, now, engine.last_step_s, receiver)
            return 0
        self._over(event.request_id, None if event.error is not None else self.log.live[event.request_id].num_output)
        if engine.spec.role == "decode" or self._pools is not None:
            self.handoffs.room_may_be_there()
        if event.error is not None:
            self.log.failed(event.request_id)
        else:
            self.log.completed(event.request_id, engine.index, read_s)
        return 1
