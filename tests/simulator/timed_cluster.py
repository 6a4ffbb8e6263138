"""A cluster of engines on devices of known times, driven in virtual time as a front end drives workers: what a replay can be held against.

Not the simulation: engines are whole ones, their loads are told as workers tell them, and what workers do for hand-offs is written out
here once more. The dispatcher, the roles, the desk of hand-offs and the journeys are a front end's own. At one moment steps end, KV
arrives, requests come, and steps begin. Prompts from ``min_layerwise`` tokens on are handed over as a link with layers has it; an answer
without room is its sender's again in time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from itertools import count
from typing import NamedTuple

from octavo.core.clock import VirtualClock
from octavo.core.cluster_window import ClusterWindow
from octavo.core.key_changes import KeyChanges
from octavo.core.request import Request, SamplingParams
from octavo.distributed.answers import answer_now
from octavo.distributed.attendance import Attendance, Presence, Seen
from octavo.distributed.cluster_options import ClusterOptions
from octavo.distributed.cluster_reports import ClusterReports
from octavo.distributed.dispatcher import Dispatcher
from octavo.distributed.flight import route_of
from octavo.distributed.handoff import Link
from octavo.distributed.handover import HandoverDesk, Moving, Order, OrderKind
from octavo.distributed.journeys import Journeys
from octavo.distributed.receivers import receiver_among
from octavo.distributed.recorded_cluster import front_end_of
from octavo.distributed.role_router import RoleRouter
from octavo.distributed.roles import RolePools
from octavo.distributed.router import create_router
from octavo.distributed.told_load import Told, ToldLoad
from octavo.distributed.views import RouteRequest
from octavo.distributed.worker_engine import TELL_S, load_of
from octavo.engine.outputs import OutputEvent
from octavo.engine.params import PreparedRequest
from tests.engine.planted import Arrival
from tests.engine.timed import Law, TimedRun

BLOCK = 16
NUM_BLOCKS = 400  # few enough to be checked after each step


@dataclass(slots=True)
class Node:
    name: str
    role: str
    run: TimedRun
    view: ToldLoad
    num_received: int = 0
    told_s: float = -1.0
    end_s: float = float("inf")  # of the step in flight
    step_s: float = 0.0  # of that, or the last
    presence: Presence = Presence.OPEN
    num_boots: int = 1

    @property
    def seen(self) -> Seen:
        limits = self.run.engine
        return Seen(self.name, self.role, f"boot-{self.num_boots}", self.presence, limits.num_kv_blocks, limits.max_model_len)
    events: list[OutputEvent] = field(default_factory=list)  # of that

    def tell(self, now: float) -> tuple[list[bytes], list[bytes]]:
        """What a worker says after a step: its load, and the keys that its cache has begun and ceased to offer."""
        if now - self.told_s < TELL_S and self.run.engine.has_work:
            return [], []
        self.told_s = now
        load = load_of(self.run.engine, self.num_received)
        num = load.num_running + load.num_waiting
        self.view.told(Told(self.num_received, load.pending_tokens, load.pending_s, num, load.num_available_blocks))
        index = self.run.engine.scheduler.kv.index
        return index.changes.take() if index is not None and index.changes is not None else ([], [])

    def begin(self, now: float) -> None:
        if self.presence is Presence.AWAY or self.end_s < float("inf") or not self.run.engine.has_work:
            return
        if self.run.clock.now() < now:
            self.run.clock.advance_to(now)
        self.events = self.run.engine.step()
        self.run.engine.scheduler.check_invariants()
        self.end_s = self.run.clock.now()
        self.step_s = self.end_s - now


class Turn(NamedTuple):
    """What becomes of a worker that does both: it is killed, drained, kept again, or started anew."""

    at_s: float
    what: str
    worker: str


@dataclass(slots=True)
class Going:
    """A request that is to be handed over. ``meant``: who is to go on with it. ``num_done``: tokens of its prompt that ended steps have
    computed, of which ``num_sent`` have gone; ``reserved_s``: since when there is room for it."""

    name: str
    sender: Node
    meant: int
    key: int | None = None  # of its hand-off, once its prompt has begun
    num_done: int = 0
    num_sent: int = 0
    reserved_s: float = float("inf")


class TimedCluster:
    """``roles`` by name of a worker. ``link``: of hand-offs, from each prefill worker to all others. ``decode_blocks``: of decode workers,
    where they have others than the rest."""

    def __init__(
        self, roles: Mapping[str, str], law: Law, options: ClusterOptions | None = None, link: Link | None = None,
        decode_blocks: int | None = None, **settings: object
    ) -> None:  # fmt: skip
        self.clock, self.journeys, self.options = VirtualClock(), Journeys(), options or ClusterOptions()
        of_decode = settings if decode_blocks is None else {**settings, "num_kv_blocks": decode_blocks}
        self.attendance = Attendance(1e9)
        self._law, self._settings = law, settings
        self.nodes = [
            self._node(i, name, role, law, of_decode if role == "decode" else settings) for i, (name, role) in enumerate(roles.items())
        ]
        self.link = replace(link or Link(1e9, 1e-3))  # its own: a link knows when it is free
        prompts = create_router(self.options.router, BLOCK)
        self.pools = RolePools(prompts, None, BLOCK, self.options.handover.may_borrow)
        for node in self.nodes:
            self.pools.add(node.view.index, node.role, node.view.num_blocks)
        self.router = RoleRouter(prompts, self.pools, lambda: [node.view for node in self._open()], self.clock.now)
        self.dispatcher = Dispatcher(self.router, self.options.backpressure)
        self.requests: dict[str, Request] = {}
        self.times_s: dict[str, list[float]] = {}
        self._made: dict[str, list[int]] = {}
        self._at: dict[str, Node] = {}
        self._look()
        self.desk: HandoverDesk[Going] = HandoverDesk(self.options.handover.limits, self._choose, most_in_all=1)
        self._copies: list[tuple[float, int]] = []  # (through, key)
        self._going: dict[str, Going] = {}  # until the first token
        self._keys = count()

    def _node(self, index: int, name: str, role: str, law: Law, settings: Mapping[str, object]) -> Node:
        run = TimedRun(law, **{"num_kv_blocks": NUM_BLOCKS, **settings})  # type: ignore[arg-type]
        index_of_blocks = run.engine.scheduler.kv.index
        if index_of_blocks is not None:
            index_of_blocks.changes = KeyChanges()
        return Node(name, role, run, ToldLoad(index, BLOCK, run.engine.num_kv_blocks))

    # --- the run ------------------------------------------------------------------------------------------------------------------------

    def _open(self) -> list[Node]:
        return [node for node in self.nodes if node.presence is Presence.OPEN]

    def serve(self, arrivals: Seq[Arrival], turns: Seq[Turn] = ()) -> TimedCluster:
        """All of them, to their end."""
        coming, turning = sorted(arrivals, key=lambda one: one.at_s), sorted(turns)
        while coming or turning or self._copies or any(node.end_s < float("inf") for node in self.nodes):
            moments = [node.end_s for node in self.nodes] + [copy[0] for copy in self._copies] + [one.at_s for one in coming[:1]]
            moments += [turn.at_s for turn in turning[:1]]
            now = min(*moments, self.desk.next_s)
            self.clock.advance_to(max(now, self.clock.now()))
            for node in self.nodes:
                if node.end_s <= now:
                    node.end_s = float("inf")
                    self._ended(node, now)
            while turning and turning[0].at_s <= now:
                self._turn(turning.pop(0))
            for copy in sorted(self._copies):
                if copy[0] <= now:
                    self._copies.remove(copy)
                    self._follow(self.desk.copied(copy[1], now), now)
            while coming and coming[0].at_s <= now:
                self._came(coming.pop(0))
            self._follow(self.desk.tick(now), now)
            self._pump(now)
            for node in self.nodes:
                node.begin(now)
            self._look_at_prompts(now)
        assert not len(self.dispatcher) and not len(self.desk) and not self._going
        return self

    def _ended(self, node: Node, now: float) -> None:
        """A step has."""
        self.router.told(node.view.index, *node.tell(now))
        for event in node.events:
            name = event.request_id
            assert event.error is None, event.error
            self.times_s[name] += [now] * len(event.token_ids)
            self._made[name] += event.token_ids
            self.journeys.tokens(name, len(event.token_ids), now)
            if event.token_ids:
                self.pools.prefilled(name)
            if event.finish_reason is not None:
                del self._at[name]
                self.journeys.ended(name, event.finish_reason, now)
                self.dispatcher.ended(name, len(self.times_s[name]))
                self.desk.room_may_be_there()
            elif event.token_ids and name in self._going:
                self._drew(self._going.pop(name), now)
        for going in self._going.values():
            seq = node.run.engine.scheduler.transfers.sender_sequence(going.name) if going.sender is node else None
            if seq is not None:
                going.num_done = seq.num_computed
                self._send_done(going, now)

    # --- hand-offs ------------------------------------------------------------------------------------------------------------------------

    def _look_at_prompts(self, now: float) -> None:
        """Those of which a step has just begun to compute a part are offered: room is asked for."""
        for going in self._going.values():
            seq = going.sender.run.engine.scheduler.transfers.sender_sequence(going.name)
            if going.key is None and seq is not None and seq.num_computed:
                going.num_done = seq.num_cached
                going.key, num_prompt = next(self._keys), len(self.requests[going.name].prompt_token_ids)
                num_bytes = num_prompt * going.sender.run.engine.backend.kv_capacity(0).bytes_per_block // BLOCK
                self.desk.offered(going.key, going, going.sender.view.index, num_prompt, num_bytes, now)
        self._follow(self.desk.tick(now), now)

    def _drew(self, going: Going, now: float) -> None:
        moving = None if going.key is None else self.desk.find(going.key)
        if moving is None:
            return
        self._follow(self.desk.drew(moving.key, going.sender.run.engine.loop.offer(going.name), now), now)
        if moving.handoff.receiver is not None:
            by_layers = moving.num_tokens >= self.options.handover.min_layerwise
            self._copy(moving, now, min(going.sender.step_s, now - going.reserved_s) if by_layers else 0.0)

    def _send_done(self, going: Going, now: float) -> None:
        num_prompt = len(self.requests[going.name].prompt_token_ids)
        num_full = min(going.num_done, num_prompt - 1) // BLOCK * BLOCK
        by_layers = self.link.num_layers and num_prompt >= self.options.handover.min_layerwise
        if by_layers and going.reserved_s <= now and num_full > going.num_sent:
            token_bytes = going.sender.run.engine.backend.kv_capacity(0).bytes_per_block // BLOCK
            self.link.send((num_full - going.num_sent) * token_bytes, now)
            going.num_sent = num_full

    def _copy(self, moving: Moving[Going], now: float, overlap_s: float) -> None:
        num_bytes = moving.handoff.num_bytes // moving.num_tokens * (moving.num_tokens - moving.load.num_sent)
        self._copies.append((self.link.copy(num_bytes, now, overlap_s), moving.key))

    def _choose(self, moving: Moving[Going], away: AbstractSet[int]) -> int | None:
        others = [node for node in self._open() if node is not moving.load.sender and node.view.index not in away]
        return receiver_among(moving.load.meant, [(node.view.index, node.role, node.view.num_available_blocks) for node in others])

    def _follow(self, orders: Seq[Order[Going]], now: float) -> None:
        """As a front end and its workers do."""
        for order in orders:
            moving, going = order.moving, order.moving.load
            request, engine = self.requests[going.name], self.nodes[order.worker].run.engine
            if order.kind is OrderKind.RESERVE:
                has_room = engine.scheduler.transfers.reserve(request, moving.num_tokens) is not None
                answer = self.desk.reserved if has_room else self.desk.no_room
                self._follow(answer(moving.key, order.worker, now), now)
            elif order.kind is OrderKind.SEND:
                assert moving.handoff.receiver is not None
                self.journeys.found(going.name, now)
                self.pools.reserved(going.name, moving.handoff.receiver, moving.num_tokens)
                going.reserved_s = now
                if moving.handoff.drawn:
                    self._copy(moving, now, 0.0)
                else:
                    self._send_done(going, now)
            elif order.kind is OrderKind.BEGIN:
                self._begin(moving, self.nodes[order.worker], now)
            elif order.kind is OrderKind.RELEASE:
                engine.release(going.name)
                self.router.told(order.worker, *self.nodes[order.worker].tell(now))
            elif order.kind is OrderKind.CANCEL:
                engine.scheduler.transfers.cancel(going.name)
            else:
                if moving.handoff.drawn:
                    engine.loop.resume(request, moving.output_token_ids)
                self.pools.stayed(going.name)

    def _begin(self, moving: Moving[Going], receiver: Node, now: float) -> None:
        name = moving.load.name
        receiver.run.engine.begin(self.requests[name], moving.output_token_ids, True)
        self._at[name] = receiver
        self.pools.arrived(name)
        self.journeys.handed_over(name, receiver.name, name, now)

    def _came(self, one: Arrival) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=one.num_output, ignore_eos=True)
        request = Request(one.name, list(one.prompt), params, len(self.requests), frozenset(), one.at_s, cache_salt=one.salt)
        self.requests[one.name], self.times_s[one.name], self._made[one.name] = request, [], []
        self.dispatcher.submit(self._route(request), [node.view for node in self._open()], one.at_s)
        self.journeys.opened(request)

    def _route(self, request: Request) -> RouteRequest:
        engine = self.nodes[0].run.engine
        fingerprint = f"{engine.model.fingerprint}/{engine.backend.fingerprint()}"
        return route_of(request, fingerprint, BLOCK, self.router.wants_keys)

    def _pump(self, now: float) -> None:
        while len(self.dispatcher) and (there := self._open()):
            entries = [there[place] for place in self.router.entries([node.view for node in there])]
            found = self.dispatcher.next([node.view for node in entries], now)
            if found is None:
                return
            route, place = found
            node, receiver = entries[place], self.router.receiver_of(route.request_id)
            if receiver is not None and self.requests[route.request_id].params.max_tokens == 1:
                self.pools.stayed(route.request_id)
            elif receiver is not None:
                self._going[route.request_id] = Going(route.request_id, node, receiver)
            node.view.sent(route.num_prompt, self.router.num_cached(route.request_id))
            node.num_received += 1
            self.journeys.placed(route.request_id, node.name, route.request_id, now)
            if node.run.clock.now() < now:
                node.run.clock.advance_to(now)
            node.run.times_s[route.request_id], self._at[route.request_id] = [], node
            prepared = PreparedRequest(replace(self.requests[route.request_id], arrival_s=now), [])
            node.run.engine.add(prepared, list(self._made[route.request_id]))

    # --- workers that go and come ---------------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        self.attendance.look((node.seen for node in self.nodes if node.presence is not Presence.AWAY), self.clock.now())

    def _turn(self, turn: Turn) -> None:
        (node,) = (node for node in self.nodes if node.name == turn.worker)
        if turn.what == "drain":
            node.presence = Presence.CLOSED
        elif turn.what == "keep":
            node.presence = Presence.OPEN
        elif turn.what == "kill":
            self._lose(node)
        else:
            assert turn.what == "start", turn.what
            if node.presence is not Presence.AWAY:
                assert not node.run.engine.has_work, "it has not drained yet"
                self._lose(node)
            fresh = self._node(node.view.index, node.name, node.role, self._law, self._settings)
            fresh.num_boots = node.num_boots + 1
            self.nodes[self.nodes.index(node)] = fresh
            fresh.run.clock.advance_to(self.clock.now())
            self.pools.add(fresh.view.index, fresh.role, fresh.view.num_blocks)
        self._look()

    def _lose(self, node: Node) -> None:
        node.presence, node.end_s = Presence.AWAY, float("inf")
        self._look()
        self.pools.remove(node.view.index)
        self.dispatcher.gone(node.view.index)
        for name in [name for name, at in self._at.items() if at is node]:
            del self._at[name]
            self.journeys.lost(name, self.clock.now())
            self.dispatcher.resubmit(self._route(self.requests[name]), self.requests[name].arrival_s)

    # --- what is told of it -------------------------------------------------------------------------------------------------------------

    def roles(self) -> Mapping[str, str]:
        """See ``cluster_reports.Workers``."""
        return {node.name: node.role for node in self.nodes if node.presence is not Presence.AWAY}

    async def ask(self, worker: str, what: str, args: bytes) -> bytes:
        """See ``cluster_reports.Workers``."""
        (node,) = (node for node in self.nodes if node.name == worker)
        return answer_now(node.run.engine, what, args)

    def reports(self) -> ClusterReports:
        return ClusterReports(self.journeys, self, self.clock, "m", True, None, front_end_of(self.options), self.attendance)

    def window(self, seconds: float = 1e9) -> ClusterWindow:
        return asyncio.run(self.reports().recorded(seconds))
