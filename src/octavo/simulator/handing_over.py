"""Prefill and decode on separate engines: hand-offs on their way through a simulation.

Carries out what the desk of hand-offs says, the same class as in a cluster: its orders are calls here, and copies take the time of a link.
Owns when copies are through; who sends is told by the simulation, who receives is asked of a router.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import count

from octavo.core.request import Request
from octavo.distributed.handoff import HandoffLimits, Link
from octavo.distributed.handover import HandoverDesk, Moving, Order, OrderKind
from octavo.distributed.receivers import receiver_among
from octavo.distributed.roles import RolePools
from octavo.distributed.router import Router, RouteRequest, ShortestQueue
from octavo.simulator.links import Links
from octavo.simulator.sim_engine import SimEngine


@dataclass(frozen=True, slots=True)
class HandoffOptions:
    """``link``: each engine that sends has one like it, to all others. ``links``: those of (sender, receiver) pairs that differ, each of
    which is shared by that pair alone. ``router`` chooses among the decode engines that have room, where nobody was chosen before. Prompts
    below ``min_layerwise`` tokens go in one piece, whatever the link does with others. ``layerwise``: what the others take from the first
    token on, where that is known as a link of its own, which every sender has as well. ``most_token_bytes``: of a token's KV on its way;
    what is larger is rounded, and not offered to other requests. ``at_token``: room is asked for when the first token is drawn, and where
    who was chosen has none, the router chooses; else as in a cluster, when the prompt begins."""

    link: Link = field(default_factory=lambda: Link(25e9, 1e-4))
    limits: HandoffLimits = HandoffLimits()
    router: Router = field(default_factory=ShortestQueue)
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict)
    min_layerwise: int = 0
    layerwise: Link | None = None
    most_token_bytes: int | None = None
    at_token: bool = False


@dataclass(slots=True)
class HandoffStats:
    num_offered: int = 0
    num_handed_over: int = 0
    num_failed: int = 0
    num_bytes: int = 0
    waited_s: float = 0.0  # for a receiver, summed over all that found one
    copy_s: float = 0.0  # from then, and from the first token on, until the KV was there
    first_failure: str | None = None


@dataclass(slots=True)
class _Load:
    """What is handed over. ``token_bytes``: of a token's KV on its way. ``goes_whole``: no layers are sent beside steps. ``num_sent``:
    tokens of the prompt whose KV has been given to the link before its last step."""

    request: Request
    token_bytes: int
    goes_whole: bool
    exact: bool  # there as it was stored here
    wanted: int | None = None  # the receiver that was chosen when the request came
    overlap_s: float = 0.0  # of the sender's last step, beside which layers may have been sent
    reserved_s: float = float("inf")
    num_sent: int = 0


class Handovers:
    """All hand-offs of a simulation. ``engines``: all engines, by index. ``pools``: hears where a request came to be."""

    def __init__(self, engines: Seq[SimEngine], options: HandoffOptions, pools: RolePools | None = None) -> None:
        self._pools = pools
        self._begun: dict[str, tuple[int, int]] = {}  # by request, from its prompt's begin to its first token: (key, sender)
        self._asks_s = float("inf")  # when there is somebody to ask room for
        self._options = options
        self._engines = engines
        self._receiving = "decode" if any(engine.spec.role == "decode" for engine in engines) else "both"
        self._down = set[int]()  # engines that are gone, or take nothing new
        self._is_to_give_up = False  # hand-offs that nobody is left for: there may be some
        self._open: list[int] = []  # keys of hand-offs, some of them over
        self._links = Links(options.link, options.links)
        self._layerwise = None if options.layerwise is None else Links(options.layerwise, {})
        self._desk: HandoverDesk[_Load] = HandoverDesk(options.limits, self._choose, most_in_all=1)  # answers come at once
        self._copies: list[tuple[float, int]] = []  # (copied, key)
        self._copy_s = 0.0
        self._keys = count()

    @property
    def stats(self) -> HandoffStats:
        desk = self._desk.stats
        return HandoffStats(
            desk.num_offered, desk.num_handed_over, desk.num_failed, desk.num_bytes, desk.waited_s, self._copy_s, desk.first_failure
        )

    def next_s(self) -> float:
        """When the next hand-off is copied or has waited too long; infinity when none is on its way."""
        while self._copies and self._desk.find(self._copies[0][1]) is None:
            heapq.heappop(self._copies)
        copied_s = self._copies[0][0] if self._copies else float("inf")
        return min(copied_s, self._desk.next_s, self._asks_s)

    def step_began(self, sender: SimEngine, leaving: Mapping[str, tuple[Request, int | None]], now: float) -> None:
        """A step of ``sender`` has. Room is asked for those of its prompts that are to go on elsewhere, ``leaving``: each on the engine
        that is with it if that has room."""
        for seq in () if self._options.at_token else sender.scheduler.running_sequences:
            name = seq.request.request_id
            if not seq.num_scheduled or name not in leaving or name in self._begun:
                continue
            request, wanted = leaving[name]
            if (request.params.max_tokens or 0) > 1:  # a single token is no answer to hand over
                self._begun[name] = self._offer(sender, request, now, wanted, None), sender.index
                self._asks_s = now

    def stepped(self, sender: SimEngine, now: float) -> None:
        """A step of ``sender`` has ended: what it has computed of prompts may go."""
        for key, index in self._begun.values():
            moving = self._desk.find(key) if index == sender.index else None
            if moving is not None and moving.load.reserved_s <= now:
                self._send_computed(moving, now)

    def drew(self, sender: SimEngine, request: Request, now: float, overlap_s: float, wanted: int | None = None) -> None:
        """``request`` has drawn its first token on ``sender``, in a step of ``overlap_s``."""
        key, _ = self._begun.pop(request.request_id, (None, 0))
        if key is None:
            output_token_ids = sender.offer(request.request_id)
            key = self._offer(sender, request, now, wanted, output_token_ids)
            moving = self._desk.find(key)
            assert moving is not None
            moving.load.overlap_s = 0.0 if moving.load.goes_whole else overlap_s
            return
        moving = self._desk.find(key)
        if moving is None:  # nobody was there to take it: it stays
            return
        self._desk.drew(key, sender.offer(request.request_id), now)
        if moving.handoff.receiver is not None:
            self._copy(moving, now, 0.0 if moving.load.goes_whole else min(overlap_s, now - moving.load.reserved_s))

    def withdraw(self, request_id: str, now: float) -> set[int]:
        """It is over: what was reserved for it is not needed. Returns the engines with something new to do."""
        touched, (key, _) = set[int](), self._begun.pop(request_id, (None, 0))
        if key is not None:
            self._follow(self._desk.withdraw(key, now), now, touched)
        return touched

    def _offer(self, sender: SimEngine, request: Request, now: float, wanted: int | None, output_token_ids: list[int] | None) -> int:
        num_tokens = len(request.prompt_token_ids) + (len(output_token_ids) - 1 if output_token_ids else 0)
        stored, most = sender.spec.kv_bytes_per_token, self._options.most_token_bytes
        token_bytes = stored if most is None else min(stored, most)
        goes_whole = len(request.prompt_token_ids) < self._options.min_layerwise
        load, key = _Load(request, token_bytes, goes_whole, token_bytes == stored, wanted), next(self._keys)
        if len(self._open) > 64 + 2 * len(self._desk):
            self._open = [one for one in self._open if self._desk.find(one) is not None]
        self._open.append(key)
        self._is_to_give_up |= bool(self._down)
        self._desk.offered(key, load, sender.index, num_tokens, num_tokens * token_bytes, now, output_token_ids)
        return key

    def room_may_be_there(self) -> None:
        """A sequence has ended on a decode engine."""
        self._desk.room_may_be_there()

    def gone(self, index: int, now: float) -> tuple[list[tuple[Request, list[int]]], set[int]]:
        """Engine ``index`` is gone: (requests that were on their way from it, with their output tokens; engines with something new to do).

        Those on their way to it are their senders' again.
        """
        self.close(index)
        touched, moving_ones = set[int](), [self._desk.find(key) for key in self._open]
        going = [one for one in moving_ones if one is not None and one.sender == index and one.handoff.drawn]  # others are in its loop
        lost = [(one.load.request, one.output_token_ids) for one in going]
        self._begun = {name: begun for name, begun in self._begun.items() if begun[1] != index}
        self._follow(self._desk.worker_gone(index, now), now, touched)
        return lost, touched

    def without_room(self, now: float) -> tuple[int, float]:
        """See ``HandoverDesk``."""
        return self._desk.without_room(now)

    def num_coming(self, index: int) -> int:
        """See ``HandoverDesk``."""
        return self._desk.num_coming(index)

    def close(self, index: int) -> None:
        """Engine ``index`` takes nothing new."""
        self._down.add(index)
        self._is_to_give_up = True

    def has_receivers(self, away: AbstractSet[int] | None = None) -> bool:
        """Some engine is there that goes on with answers. ``away``: engines that do not count; None: those that are gone."""
        away = self._down if away is None else away
        return any(engine.spec.role == self._receiving and engine.index not in away for engine in self._engines)

    def back(self, index: int) -> None:
        """Engine ``index`` is there, or is there again, and takes what comes."""
        self._down.discard(index)
        self._desk.room_may_be_there()

    def advance(self, now: float) -> set[int]:
        """Everything that is due by ``now``: copies that are through, waits that took too long, offers that may find room.

        Returns the indexes of the engines that may have something new to do.
        """
        touched, self._asks_s = set[int](), float("inf")
        while self.next_s() <= now and self._copies and self._copies[0][0] <= now:
            self._follow(self._desk.copied(heapq.heappop(self._copies)[1], now), now, touched)
        self._follow(self._desk.tick(now), now, touched)
        if self._is_to_give_up:
            self._is_to_give_up = False
            self._follow(self._desk.give_up(self._may_be_taken, now), now, touched)
        return touched

    def _may_be_taken(self, moving: Moving[_Load]) -> bool:
        """Somebody is there for it, given room: else waiting would be in vain."""
        away = {*self._down, moving.sender}
        return moving.load.wanted not in (None, *away) or self.has_receivers(away)

    def _choose(self, moving: Moving[_Load], refused: AbstractSet[int]) -> int | None:
        """The engine that was chosen before, else by a cluster's rule, of those that have not said that they have no room. Where nobody was
        chosen the router does it."""
        request, wanted = moving.load.request, moving.load.wanted
        away = {*refused, *self._down, moving.sender}
        if wanted is not None and wanted not in away:
            return wanted
        if wanted is not None and not self._options.at_token:
            there = (engine for engine in self._engines if engine.index not in away)
            return receiver_among(wanted, ((engine.index, engine.spec.role, engine.num_available_blocks) for engine in there))
        route = RouteRequest(request.request_id, len(request.prompt_token_ids), request.params.max_tokens)
        candidates = [engine for engine in self._engines if engine.spec.role == self._receiving and engine.index not in away]
        return candidates[self._options.router.choose(route, candidates)].index if candidates else None

    def _follow(self, orders: list[Order[_Load]], now: float, touched: set[int]) -> None:
        """Carry orders out, and those that follow from the answers."""
        todo = deque(orders)
        while todo:
            order = todo.popleft()
            engine, moving = self._engines[order.worker], order.moving
            if order.kind is OrderKind.RESERVE:
                has_room = engine.reserve(moving.load.request, moving.num_tokens)
                answer = self._desk.reserved if has_room else self._desk.no_room
                todo.extendleft(reversed(answer(moving.key, engine.index, now)))
            elif order.kind is OrderKind.SEND:
                receiver = moving.handoff.receiver
                if self._pools is not None and receiver is not None:
                    self._pools.reserved(moving.load.request.request_id, receiver, moving.num_tokens)
                moving.load.reserved_s = now
                if moving.handoff.drawn:  # who waited for a receiver could send to nobody
                    self._copy(moving, now, moving.load.overlap_s if now <= moving.handoff.offered_s else 0.0)
                else:
                    self._send_computed(moving, now)
            else:
                self._tell(order, engine)
                touched.add(engine.index)

    def _tell(self, order: Order[_Load], engine: SimEngine) -> None:
        request, tokens = order.moving.load.request, order.moving.output_token_ids
        if order.kind is OrderKind.BEGIN:
            engine.take_over(request, tokens, order.moving.load.exact)
            if self._pools is not None:
                self._pools.arrived(request.request_id)
        elif order.kind is OrderKind.RELEASE:
            engine.release_offered(request.request_id)
        elif order.kind is OrderKind.CANCEL:
            engine.cancel_reserved(request.request_id)
        else:
            if order.moving.handoff.drawn:
                engine.resume(request, tokens)
            if self._pools is not None:
                self._pools.stayed(request.request_id)

    def _send_computed(self, moving: Moving[_Load], now: float) -> None:
        """Full blocks that are computed go while the rest of the prompt is, over a link of layers; one that was measured from first tokens
        on has them in its figures."""
        load, link, sender = moving.load, self._links.between(moving.sender, moving.handoff.receiver), self._engines[moving.sender]
        transfers, size = sender.scheduler.transfers, sender.spec.cache.block_size
        seq = transfers.sender_sequence(load.request.request_id)
        if load.goes_whole or self._layerwise is not None or not link.num_layers or seq is None:
            return
        num_full = min(transfers.num_there(seq), moving.num_tokens - 1) // size * size
        if num_full > load.num_sent:
            link.send(load.token_bytes * (num_full - load.num_sent), now)
            load.num_sent = num_full

    def _copy(self, moving: Moving[_Load], now: float, overlap_s: float) -> None:
        """All that has not gone yet goes, beside the last ``overlap_s`` seconds by layers."""
        ends = moving.sender, moving.handoff.receiver
        link = whole = self._links.between(*ends)
        if self._layerwise is not None and not moving.load.goes_whole:
            link = self._layerwise.between(*ends)
            link.free_s = whole.free_s
        num_bytes = moving.load.token_bytes * (moving.num_tokens - moving.load.num_sent)
        copied_s = link.copy(num_bytes, now, overlap_s)
        whole.free_s = link.free_s  # it is one link, whatever goes over it
        self._copy_s += copied_s - now
        heapq.heappush(self._copies, (copied_s, moving.key))
