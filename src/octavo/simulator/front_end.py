"""The front end of a simulated cluster: requests wait there while all engines have enough to do, and go by the dispatcher that a real one
has, its roles and its router.

Engines are seen as workers are: by what they last told (``ToldLoad``), after a step and before the next plan, at most every TELL_S unless
they have run dry; and by what was sent to them since. Owns what waits, who goes next and what has been told; the simulation carries it out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from octavo.core.request import ParameterError, Request
from octavo.distributed.dispatcher import Backpressure, Dispatcher, QueueFull
from octavo.distributed.role_router import RoleRouter
from octavo.distributed.roles import MixedLimits, RolePools
from octavo.distributed.router import Router
from octavo.distributed.told_load import Told, ToldLoad
from octavo.distributed.views import EngineView, RouteRequest
from octavo.simulator.sim_engine import SimEngine

TELL_S = 0.02  # as workers do (``worker_engine``)


@dataclass(frozen=True, slots=True)
class FrontEndOptions:
    """``may_borrow``: an engine takes on the other role under pressure, by ``mixed``. ``placed``: requests, by their number as a string,
    that go to this engine whatever anybody says: to fill its cache, say."""

    backpressure: Backpressure = field(default_factory=Backpressure)
    mixed: MixedLimits = MixedLimits()
    may_borrow: bool = True
    placed: Mapping[str, int] = field(default_factory=dict)


class Sent(NamedTuple):
    """``engine``: index of the one that gets it; ``receiver``: of the one that it is handed over to after its prompt, if it is."""

    request: Request
    engine: int
    receiver: int | None


class FrontEnd:
    """``router`` chooses who computes prompts."""

    def __init__(self, router: Router, options: FrontEndOptions, engines: Seq[SimEngine], clock: Callable[[], float]) -> None:
        block_size = engines[0].spec.cache.block_size
        self.placed = options.placed
        self.pools = RolePools(router, options.mixed, block_size, options.may_borrow)
        for engine in engines:
            self.pools.add(engine.index, engine.spec.role, engine.spec.num_blocks)
        self._engines, self._down, self._now = engines, set[int](), clock
        self._views = [ToldLoad(engine.index, block_size, engine.spec.num_blocks) for engine in engines]
        self._told_s = [-math.inf] * len(engines)
        self._num_received = [0] * len(engines)
        self._wants_keys = router.wants_keys
        for engine in engines:
            engine.on_repeats = partial(self._repeated, engine)
        self._router = RoleRouter(router, self.pools, self._there, clock)
        self._dispatcher = Dispatcher(self._router, options.backpressure, holds=self._holds)
        self._requests: dict[str, Request] = {}

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._dispatcher)

    def _there(self) -> list[ToldLoad]:
        return [view for view in self._views if view.index not in self._down]

    # --- what engines tell ---------------------------------------------------------------------------------------------------------------

    def stepped(self, engine: SimEngine) -> None:
        """A step of it has ended, and the next one is not planned."""
        if self._now() >= self._told_s[engine.index] + TELL_S or not engine.loop.has_work:
            self._tell(engine, self._now())

    def _repeated(self, engine: SimEngine, ends_s: Seq[float]) -> None:
        """Steps of it have ended that only repeat: some of them it told of, and all had the same to tell."""
        told_s = self._told_s[engine.index]
        for end_s in ends_s:
            if end_s >= told_s + TELL_S:
                told_s = end_s
        if told_s > self._told_s[engine.index]:
            self._tell(engine, told_s)

    def next_s(self) -> float:
        """When an engine whose steps only repeat will first tell of them, while requests wait to hear it; infinity: none is to."""
        if not len(self):
            return math.inf
        told = zip(self._engines, self._told_s, strict=True)
        return min(engine.next_repeat_s(told_s, told_s + TELL_S) for engine, told_s in told)

    def _tell(self, engine: SimEngine, now: float) -> None:
        index = engine.index
        self._told_s[index] = now
        self._views[index].told(Told(self._num_received[index], *engine.load()))
        if self._wants_keys:
            self._router.told(index, *engine.told_key_changes())

    # --- requests -------------------------------------------------------------------------------------------------------------------------

    def submit(self, request: Request, route: RouteRequest, now: float) -> None:
        """A request comes. Raises ParameterError when no engine could ever hold it, QueueFull when too many wait."""
        self._keep(request)
        try:
            self._dispatcher.submit(route, self._there(), now)
        except QueueFull:
            del self._requests[request.request_id]
            raise

    def resubmit(self, request: Request, route: RouteRequest) -> None:
        """What is left of a request whose engine is gone comes again: before those that came after it first did. Raises ParameterError as
        ``submit`` does."""
        self._keep(request)
        self._dispatcher.resubmit(route, request.arrival_s)

    def _keep(self, request: Request) -> None:
        if not any(_can_hold(engine, request) for engine in self._engines):
            raise ParameterError("max_tokens", request.params.max_tokens, "no engine can hold that many behind this prompt")
        self._requests[request.request_id] = request

    def next(self, now: float) -> Sent | None:
        """Who goes now. Ask until None."""
        for engine in self._engines:
            self._repeated(engine, engine.repeats_ended())
        there = self._there()
        places = self._router.entries(there) if there else []
        firsts, others = [there[place] for place in places], [view for i, view in enumerate(there) if i not in places]
        found = self._dispatcher.next(firsts, now, others)
        if found is None:
            return None
        route, place = found
        request, receiver = self._requests.pop(route.request_id), self._router.receiver_of(route.request_id)
        if receiver is not None and (request.params.max_tokens or 0) <= 1:  # a single token is no answer to hand over
            self.pools.stayed(route.request_id)
            receiver = None
        view = [*firsts, *others][place]
        view.sent(route.num_prompt, self._router.num_cached(route.request_id))
        self._num_received[view.index] += 1
        return Sent(request, view.index, receiver)

    def ended(self, request_id: str, num_output: int | None) -> None:
        """It is over; one that never waited here changes nothing."""
        self._dispatcher.ended(request_id, num_output)

    def closed(self, index: int) -> None:
        """Engine ``index`` gets nothing new; it goes on with what it has."""
        self._down.add(index)

    def gone(self, index: int) -> None:
        """Engine ``index`` is gone with all it had; its requests come again."""
        self._down.add(index)
        self._views[index].reset()
        self._num_received[index] = 0
        self._dispatcher.gone(index)

    def back(self, index: int) -> None:
        """Engine ``index`` is there again: empty if it was gone, with what it has if it was closed."""
        self._down.discard(index)

    def check_invariants(self) -> None:
        """AssertionError unless what waits is what is kept, and nobody was told of more requests than were sent. For tests."""
        self._dispatcher.check_invariants()
        self.pools.check_invariants()
        assert {route.request_id for route in self._dispatcher.waiting_requests()} == self._requests.keys()
        assert all(view.last.num_received <= num for view, num in zip(self._views, self._num_received, strict=True))

    def _holds(self, route: RouteRequest, view: EngineView) -> bool:
        return _can_hold(self._engines[view.index], self._requests[route.request_id])


def _can_hold(engine: SimEngine, request: Request) -> bool:
    """To its end, if it had nothing else."""
    limits = engine.scheduler.limits
    try:
        limits.check_prompt(request)
    except ParameterError:
        return False
    return limits.clamped_max_tokens(request) is None
