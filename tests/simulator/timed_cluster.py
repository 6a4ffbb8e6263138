"""A cluster of engines on devices of known times, driven in virtual time as a front end drives workers: what a replay can be held against.

Not the simulation: engines are whole ones, their loads are told as workers tell them, and hand-offs are written out here once more. The
dispatcher, the roles and the journeys are a front end's own. At one moment steps end, KV arrives, requests come, and steps begin.
Prompts from ``min_layerwise`` tokens on are handed over as a link with layers has it; an answer without room is its sender's again in time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
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
from octavo.distributed.journeys import Journeys
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
class Offered:
    """An answer that has its first token, and for which nobody has had room yet. ``meant``: who was to go on with it."""

    name: str
    sender: Node
    meant: Node
    made: list[int]
    drew_s: float


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
        self._offered: list[Offered] = []
        self._copies: list[tuple[float, str, Node, Node, list[int]]] = []
        self._receivers: dict[str, int] = {}

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
            moments += [one.drew_s + self.options.handover.limits.reserve_s for one in self._offered]
            now = min(moments)
            self.clock.advance_to(max(now, self.clock.now()))
            for node in self.nodes:
                if node.end_s <= now:
                    node.end_s = float("inf")
                    self._ended(node, now)
            while turning and turning[0].at_s <= now:
                self._turn(turning.pop(0))
            for copy in sorted(self._copies, key=lambda copy: copy[:2]):
                if copy[0] <= now:
                    self._copies.remove(copy)
                    self._arrived(*copy)
            while coming and coming[0].at_s <= now:
                self._came(coming.pop(0))
            self._find_room(now)
            self._pump(now)
            for node in self.nodes:
                node.begin(now)
        assert not len(self.dispatcher) and not self._offered
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
            elif name in self._receivers:
                made = node.run.engine.loop.offer(name)
                self._offered.append(Offered(name, node, self.nodes[self._receivers.pop(name)], made, now))

    def _find_room(self, now: float) -> None:
        """For those that were offered, in their order: where it was meant to go, else at another that decodes."""
        for late in [one for one in self._offered if one.drew_s + self.options.handover.limits.reserve_s <= now]:
            self._offered.remove(late)
            late.sender.run.engine.loop.resume(self.requests[late.name], late.made)
            self.pools.stayed(late.name)
        while self._offered:
            one = self._offered[0]
            request = self.requests[one.name]
            num_prompt = len(request.prompt_token_ids)
            num_tokens = num_prompt + len(one.made) - 1
            others = (node for node in self.nodes if node.role == "decode" and node is not one.meant)
            for node in (one.meant, *others):
                if node.run.engine.scheduler.transfers.reserve(request, num_tokens) is not None:
                    break
            else:
                return
            del self._offered[0]
            self.journeys.found(one.name, now)
            num_bytes = num_tokens * one.sender.run.engine.backend.kv_capacity(0).bytes_per_block // BLOCK
            overlap_s = one.sender.step_s if num_prompt >= self.options.handover.min_layerwise else 0.0
            self._copies.append((self.link.copy(num_bytes, now, overlap_s), one.name, one.sender, node, one.made))

    def _arrived(self, now: float, name: str, sender: Node, receiver: Node, made: list[int]) -> None:
        sender.run.engine.release(name)
        self.router.told(sender.view.index, *sender.tell(now))
        receiver.run.engine.begin(self.requests[name], made, True)
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
                self._receivers[route.request_id] = receiver
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
