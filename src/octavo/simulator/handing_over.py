"""Prefill and decode on separate engines: hand-offs on their way through a simulation.

Owns the hand-offs and their due times; who sends is told by the simulation, who receives is asked of a router. Offers that nobody has room
for wait in order of arrival, and are made again whenever room may have come.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import count

from octavo.core.request import Request
from octavo.distributed.handoff import Action, Handoff, HandoffLimits, HandoffState, Link
from octavo.distributed.roles import RolePools
from octavo.distributed.router import Router, RouteRequest, ShortestQueue
from octavo.simulator.links import Links
from octavo.simulator.sim_engine import SimEngine


@dataclass(frozen=True, slots=True)
class HandoffOptions:
    """``link``: each engine that sends has one like it, to all others. ``links``: those of (sender, receiver) pairs that differ, each of
    which is shared by that pair alone. ``router`` chooses among the decode engines that have room, where nobody was chosen before."""

    link: Link = field(default_factory=lambda: Link(25e9, 1e-4))
    limits: HandoffLimits = HandoffLimits()
    router: Router = field(default_factory=ShortestQueue)
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict)


@dataclass(slots=True)
class HandoffStats:
    num_offered: int = 0
    num_handed_over: int = 0
    num_failed: int = 0
    num_bytes: int = 0
    waited_s: float = 0.0  # for a receiver, summed over all that found one
    copy_s: float = 0.0  # from then until the KV was there
    first_failure: str | None = None


@dataclass(slots=True)
class _Moving:
    """A hand-off with what it hands over. ``overlap_s``: the sender's last step, beside which layers may have been sent."""

    handoff: Handoff
    request: Request
    output_token_ids: list[int]
    overlap_s: float
    wanted: int | None = None  # the receiver that was chosen when the request came
    copied_s: float = float("inf")


class HandoffDesk:
    """All hand-offs of a simulation. ``engines``: all engines, by index. ``pools``: hears where a request came to be."""

    def __init__(self, engines: Seq[SimEngine], options: HandoffOptions, pools: RolePools | None = None) -> None:
        self._pools = pools
        self.stats = HandoffStats()
        self._options = options
        self._engines = engines
        self._receivers = [engine for engine in engines if engine.spec.role == "decode"]
        self._links = Links(options.link, options.links)
        self._waiting: deque[_Moving] = deque()  # offered, in order
        self._due: list[tuple[float, int, _Moving]] = []  # (copied or deadline, number, hand-off)
        self._numbers = count()
        self._room_may_be_there = False

    def next_s(self) -> float:
        """When the next hand-off is copied or has waited too long; infinity when none is on its way."""
        while self._due and self._is_stale(*self._due[0]):
            heapq.heappop(self._due)
        return self._due[0][0] if self._due else float("inf")

    def _is_stale(self, due_s: float, _: int, moving: _Moving) -> bool:
        return moving.handoff.is_over or due_s not in (moving.copied_s, moving.handoff.deadline_s)

    def offer(self, sender: SimEngine, request: Request, now: float, overlap_s: float, wanted: int | None = None) -> None:
        """``request`` has drawn its first token on ``sender`` and goes on elsewhere: on engine ``wanted`` if it has room."""
        output_token_ids = sender.offer(request.request_id)
        num_tokens = len(request.prompt_token_ids) + len(output_token_ids) - 1
        num_bytes = num_tokens * sender.spec.kv_bytes_per_token
        handoff = Handoff(request.request_id, sender.index, num_bytes, now, self._options.limits)
        moving = _Moving(handoff, request, output_token_ids, overlap_s, wanted)
        self.stats.num_offered += 1
        self._waiting.append(moving)
        self._push(handoff.deadline_s, moving)
        self._room_may_be_there = True

    def room_may_be_there(self) -> None:
        """A sequence has ended on a decode engine."""
        self._room_may_be_there = True

    def advance(self, now: float) -> set[int]:
        """Everything that is due by ``now``: copies that are through, waits that took too long, offers that may find room.

        Returns the indexes of the engines that may have something new to do.
        """
        touched = set[int]()
        while self.next_s() <= now:
            _, _, moving = heapq.heappop(self._due)
            if moving.copied_s <= now and moving.handoff.state is HandoffState.RESERVED:
                self._act(moving, moving.handoff.copied(now), now, touched)
            else:
                self._act(moving, moving.handoff.expire(now), now, touched)
        if self._room_may_be_there:
            self._room_may_be_there = False
            self._make_offers(now, touched)
        return touched

    def _make_offers(self, now: float, touched: set[int]) -> None:
        while self._waiting:
            moving = self._waiting[0]
            if moving.handoff.state is HandoffState.OFFERED:
                receiver = self._receiver(moving)
                if receiver is None:
                    return
                self.stats.waited_s += now - moving.handoff.offered_s
                self._act(moving, moving.handoff.reserved(receiver.index, now), now, touched)
            self._waiting.popleft()

    def _receiver(self, moving: _Moving) -> SimEngine | None:
        """The engine that the router chooses among those with room, its blocks reserved."""
        request, candidates = moving.request, [engine for engine in self._receivers if engine.index != moving.handoff.sender]
        if moving.wanted is not None and self._engines[moving.wanted].reserve(request, moving.output_token_ids):
            return self._engines[moving.wanted]
        route = RouteRequest(request.request_id, len(request.prompt_token_ids), request.params.max_tokens)
        while candidates:
            engine = candidates.pop(self._options.router.choose(route, candidates))
            if engine.reserve(request, moving.output_token_ids):
                return engine
        return None

    def _act(self, moving: _Moving, actions: list[Action], now: float, touched: set[int]) -> None:
        handoff, request = moving.handoff, moving.request
        sender = self._engines[handoff.sender]
        for action in actions:
            receiver = None if handoff.receiver is None else self._engines[handoff.receiver]
            if action is Action.COPY:
                moving.copied_s = self._links.between(sender.index, handoff.receiver).copy(handoff.num_bytes, now, moving.overlap_s)
                self.stats.copy_s += moving.copied_s - now
                self._push(moving.copied_s, moving)
                self._push(handoff.deadline_s, moving)
            elif action is Action.BEGIN and receiver is not None:
                receiver.take_over(request, moving.output_token_ids)
                if self._pools is not None:
                    self._pools.arrived(request.request_id)
                touched.add(receiver.index)
                self.stats.num_handed_over += 1
                self.stats.num_bytes += handoff.num_bytes
            elif action is Action.RELEASE:
                sender.release_offered(request.request_id)
                handoff.released()
                touched.add(sender.index)
            elif action is Action.CANCEL and receiver is not None:
                receiver.cancel_reserved(request.request_id)
                self._room_may_be_there = True
                touched.add(receiver.index)
            elif action is Action.RESUME:
                sender.resume(request, moving.output_token_ids)
                if self._pools is not None:
                    self._pools.stayed(request.request_id)
                touched.add(sender.index)
                self.stats.num_failed += 1
                self.stats.first_failure = self.stats.first_failure or handoff.failure

    def _push(self, due_s: float, moving: _Moving) -> None:
        heapq.heappush(self._due, (due_s, next(self._numbers), moving))
