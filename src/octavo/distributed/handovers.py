"""Hand-offs of a cluster: the front end's side. What workers say goes to the desk, what the desk orders goes to workers.

    Flights ─ ticket? ─▶ Submit ─▶ PromptStarted ... Offered ─▶ HandoverDesk ─▶ Reserve, Send, Begin, Release, Cancel, Resume

Owns who hands over to whom: which attempts have tickets, and which of them have begun on their receiver. A flight stays its sender's until
it begins there; whenever it leaves, for whatever reason, what was reserved for it is cancelled. Links, channels and flights are their
owners'.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.distributed.cluster_options import HandoverOptions
from octavo.distributed.flood_log import FloodLog
from octavo.distributed.handover import HandoverDesk, Moving, Order, OrderKind
from octavo.distributed.kv_trials import KVTrials, Pair
from octavo.distributed.kv_ways import way
from octavo.distributed.messages import (
    Begin,
    Cancel,
    Copied,
    CopyFailed,
    FromWorker,
    MessageError,
    NoRoom,
    Offered,
    PromptStarted,
    Release,
    Reserve,
    Reserved,
    Resume,
    Send,
    Ticket,
    WireRequest,
    shown_reason,
)
from octavo.distributed.receivers import receiver_among
from octavo.distributed.role_router import RoleRouter
from octavo.distributed.roles import RolePools

if TYPE_CHECKING:
    from octavo.distributed.flight import Flight
    from octavo.distributed.flights import Flights
    from octavo.distributed.link import Link

logger = logging.getLogger("octavo.cluster")


@dataclass(slots=True)
class _Ticketed:
    """An attempt that is to be handed over. ``num_tokens``: whose KV goes over; ``wanted``: to whom."""

    flight: Flight
    num_tokens: int
    wanted: int


class Handovers:
    """``links``: workers that are trusted and take requests; ``every``: all others as well, since what they have goes on while they drain.
    ``router``: that the flights' dispatcher asks."""

    def __init__(
        self,
        flights: Flights,
        router: RoleRouter,
        links: Callable[[], Sequence[Link]],
        every: Callable[[], Iterable[Link]],
        options: HandoverOptions,
        clock: Callable[[], float],
    ) -> None:
        self.desk: HandoverDesk[_Ticketed] = HandoverDesk(options.limits, self._choose)
        self._flights, self._router, self._links, self._every, self._options, self._now = flights, router, links, every, options, clock
        self._ticketed: dict[int, _Ticketed] = {}  # by key, until it begins elsewhere or stays
        self._begun: dict[int, Link] = {}  # by key: the receiver that goes on with it
        self._room: dict[int, tuple[int, int]] = {}  # by worker: what it last said of its room
        self._failures, self._no_ways = FloodLog(logger, "hand-off"), FloodLog(logger, "KV has no way")
        self._known: dict[int, Link] = {}  # by index, as of the last look at all
        self._trials = KVTrials(lambda key: self.desk.find(key) is not None)

    @property
    def pools(self) -> RolePools:
        return self._router.pools

    # --- for the flights ----------------------------------------------------------------------------------------------------------------

    def entries(self, links: Sequence[Link]) -> list[Link]:
        """Those of ``links`` that may be given prompts now."""
        return [links[place] for place in self._router.entries([link.view for link in links])]

    def ticket(self, flight: Flight, link: Link, key: int, num_made: int) -> Ticket | None:
        """For an attempt that is about to be sent to ``link``: whether it is handed over after its prompt."""
        request, wanted = flight.request, self._router.receiver_of(flight.request.request_id)
        if wanted is None:
            return None
        params, num_tokens = request.params, len(request.prompt_token_ids) + num_made
        goes = params.n == 1 and params.beam is None and params.max_tokens is not None and params.max_tokens - num_made > 1
        if not goes or not any(self._takers(link, flight, wanted)):
            self._router.pools.stayed(request.request_id)
            return None
        self._ticketed[key] = _Ticketed(flight, num_tokens, wanted)
        return Ticket(layerwise=num_tokens >= self._options.min_layerwise)

    def drew(self, flight: Flight) -> None:
        """Its worker has computed its prompt, handed over or not: tokens have come, the first of this attempt or others."""
        self._router.pools.prefilled(flight.request.request_id)

    def left(self, key: int) -> None:
        """Its worker has it no longer: it has ended, or was given up."""
        self._begun.pop(key, None)
        if self._ticketed.pop(key, None) is not None:
            self._follow(self.desk.withdraw(key, self._now()))

    def close(self) -> None:
        """Tell what the log has only counted yet."""
        self._failures.flush()
        self._no_ways.flush()

    # --- workers ------------------------------------------------------------------------------------------------------------------------

    def ready(self, link: Link) -> None:
        """It takes requests from now on."""
        pools = self._router.pools
        if pools.role_of(link.index) is None:
            pools.add(link.index, link.worker.role, link.view.num_blocks)
        self._tell_of_ways(link)
        self._look()

    def lost(self, link: Link) -> None:
        """Nothing that it says counts any more; its flights have left it."""
        self._room.pop(link.index, None)
        self._follow(self.desk.worker_gone(link.index, self._now()))
        self._router.pools.remove(link.index)
        self._give_up()

    def told(self, link: Link) -> None:
        """Its load has changed."""
        room = (link.load.num_available_blocks, link.load.num_running)
        if len(self.desk) and self._room.get(link.index) != room:
            self.desk.room_may_be_there()
            self._look()
        self._room[link.index] = room

    def tick(self) -> None:
        """Time has passed. To be called a few times a second."""
        self._look()
        self._give_up()

    def _give_up(self) -> None:
        """Where nobody is left to take a hand-off, waiting for room would be in vain."""
        self._follow(self.desk.give_up(lambda moving: any(self._receivers(moving)), self._now()))

    def about(self, link: Link, message: FromWorker) -> Flight | None:
        """The flight that a message is about, if it goes on. MessageError for tokens that its worker has not sent: the receiver would go on
        after them, and another engine draw others, or none, since it may not have such."""
        key = getattr(message, "key", 0)
        ticketed = self._ticketed.get(key)
        if isinstance(message, Offered) and ticketed is not None and ticketed.flight.link is link:
            num_offered, sent = len(message.output_token_ids), ticketed.flight.attempts.made_token_ids
            if message.output_token_ids != sent:
                raise MessageError(f"output_token_ids: {num_offered} offered tokens are not the {len(sent)} that were sent")
        return self._flights.find_key(key)

    def said(self, link: Link, message: FromWorker) -> None:
        """Of a hand-off, by a worker that is trusted, and which ``about`` had nothing against."""
        now, desk = self._now(), self.desk
        match message:
            case PromptStarted():
                self._started(link, message.key)
            case Offered():
                ticketed = self._ticketed.get(message.key)
                if ticketed is not None and ticketed.flight.link is link:
                    if message.account is not None:
                        self._flights.told(link, message.key, message.account)
                    self._started(link, message.key)  # unless it has said so
                    self._follow(desk.drew(message.key, message.output_token_ids, now))
            case Reserved():
                self._reserved(link, message.key)
            case NoRoom():
                self._end_trial(link, message.key)
                self._follow(desk.no_room(message.key, link.index, now, never=message.reason is not None))
            case Copied():
                moving = desk.find(message.key)
                if moving is not None and moving.handoff.receiver == link.index:
                    self._follow(desk.copied(message.key, now))
            case CopyFailed():
                self._copy_failed(link, message)
        self._look()

    def _started(self, link: Link, key: int) -> None:
        ticketed = self._ticketed.get(key)
        if ticketed is None or ticketed.flight.link is not link or self.desk.find(key) is not None:
            return
        num_bytes = 0 if link.ready is None else ticketed.num_tokens * link.ready.limits.kv_bytes_per_token
        self.desk.offered(key, ticketed, link.index, ticketed.num_tokens, num_bytes, self._now())

    def _reserved(self, link: Link, key: int) -> None:
        """``link`` has room for it. Where that is no receiver it answers what nobody asks any more, or two questions were taken for one, as
        of a worker that was lost in between: it is not to keep it."""
        orders = self.desk.reserved(key, link.index, self._now())
        moving = self.desk.find(key)
        if moving is None or moving.handoff.receiver != link.index:
            link.channel.send(Cancel(key))
        self._follow(orders)

    def _copy_failed(self, link: Link, message: CopyFailed) -> None:
        reason = shown_reason(message.reason)
        if self._begun.get(message.key) is link:  # it has begun there, and lost its KV meanwhile: nobody has it
            self._flights.failed(message.key, f"worker {link.name}: {reason}")
            return
        moving = self.desk.find(message.key)
        if moving is not None and link.index in (moving.sender, moving.handoff.receiver):  # else it is over, or was withdrawn
            self._failures.say(reason, f"{message.key} by worker {link.name}")
            self._did_not_arrive(moving)
            self._follow(self.desk.failed(message.key, reason, self._now()))

    # --- pairs that KV did not get over between ------------------------------------------------------------------------------------------

    def _did_not_arrive(self, moving: Moving[_Ticketed]) -> None:
        sender, receiver = self._link(moving.sender), self._link(moving.handoff.receiver)
        if sender is not None and receiver is not None:
            self._trials.failed(_pair(sender, receiver), self._now())

    def _end_trial(self, receiver: Link, key: int) -> None:
        moving = self.desk.find(key)
        sender = None if moving is None else self._link(moving.sender)
        if sender is not None:
            self._trials.did_not(_pair(sender, receiver), key)

    # --- orders -------------------------------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        self._follow(self.desk.tick(self._now()))

    def _link(self, index: int | None) -> Link | None:
        link = None if index is None else self._known.get(index)
        if link is None or not link.channel.is_open:  # else nobody else has come in its place
            self._known = {one.index: one for one in self._every()}
            link = None if index is None else self._known.get(index)
        return link

    def _choose(self, moving: Moving[_Ticketed], away: AbstractSet[int]) -> int | None:
        """The worker that was chosen when the request came; else, of the others that may decode, the one with most room."""
        able = [link for link in self._receivers(moving) if link.index not in away]
        return receiver_among(moving.load.wanted, ((link.index, link.worker.role, link.view.num_available_blocks) for link in able))

    def _receivers(self, moving: Moving[_Ticketed]) -> Iterator[Link]:
        """Who may take it, given room."""
        sender = self._link(moving.sender)
        takers = () if sender is None else self._takers(sender, moving.load.flight, moving.load.wanted, moving.key)
        return (link for link in takers if link.index not in moving.unfit)

    def _takers(self, sender: Link, flight: Flight, wanted: int, key: int | None = None) -> Iterator[Link]:
        """Whom ``sender`` may hand over to: who is meant, and all others that decode, as far as KV gets there and the answer fits."""
        now = self._now()
        for link in self._links():
            may_decode = link is not sender and (link.worker.role != "prefill" or link.index == wanted) and flight.fits(link.view)
            if may_decode and self._way(sender, link) is not None and self._trials.may_try(_pair(sender, link), key, now):
                yield link

    def _way(self, sender: Link, receiver: Link) -> tuple[str, str] | None:
        """(transport, the receiver's address); None: there is none."""
        return way(sender.kv, receiver.kv, self._options.transport)

    def _tell_of_ways(self, link: Link) -> None:
        """Of workers that are there to hand over to each other, and cannot: nobody would see why one of them has nothing to do."""
        for other in self._links():
            for sender, receiver in ((link, other), (other, link)):
                is_meant = sender.worker.role == "prefill" and receiver.worker.role == "decode"
                if is_meant and receiver.kv.addresses and sender.kv.transports and self._way(sender, receiver) is None:
                    where = ", ".join(f"{name} {address}" for name, address in receiver.kv.addresses.items())
                    how = f"by {self._options.transport} to worker {receiver.name}, which listens at {shown_reason(where)}"
                    self._no_ways.say(f"from worker {sender.name} {how}")

    def _follow(self, orders: Sequence[Order[_Ticketed]]) -> None:
        for order in orders:
            link = self._link(order.worker)
            if link is not None:
                with self._flights.faults.guarded(order.moving.load.flight):
                    self._send(order, link)
            elif order.kind is OrderKind.RESERVE:
                self._follow(self.desk.no_room(order.moving.key, order.worker, self._now()))

    def _send(self, order: Order[_Ticketed], link: Link) -> None:
        moving, flight, key = order.moving, order.moving.load.flight, order.moving.key
        match order.kind:
            case OrderKind.RESERVE:
                sender = self._link(moving.sender)
                if sender is not None:
                    self._trials.tries(_pair(sender, link), key)
                request = WireRequest.of(flight.request, flight.age_s(self._now()))
                link.channel.send(Reserve(key, request, moving.num_tokens))
            case OrderKind.SEND:  # as soon as a receiver has room
                self._flights.watcher.found(flight.request.request_id, self._now())
                receiver = self._link(moving.handoff.receiver)
                way = None if receiver is None else self._way(link, receiver)
                if receiver is None or way is None:
                    self._follow(self.desk.failed(key, "its receiver is gone", self._now()))
                    return
                self._router.pools.reserved(flight.request.request_id, receiver.index, moving.num_tokens)
                link.channel.send(Send(key, way[1], way[0], self._options.wire_dtype, self._options.checksum))
            case OrderKind.BEGIN:
                del self._ticketed[key]
                self._begun[key] = link
                if flight.link is not None:
                    self._trials.arrived(_pair(flight.link, link))
                self._flights.moved(key, link)
                self._router.pools.arrived(flight.request.request_id)
                link.channel.send(Begin(key, moving.output_token_ids))
            case OrderKind.RELEASE:
                link.channel.send(Release(key))
            case OrderKind.CANCEL:
                link.channel.send(Cancel(key))
            case OrderKind.RESUME:
                self._ticketed.pop(key, None)
                self._router.pools.stayed(flight.request.request_id)
                if moving.handoff.drawn:  # its copy took too long, or failed, which is known; else the prompt did
                    self._did_not_arrive(moving)
                link.channel.send(Resume(key))

    def check_invariants(self) -> None:
        """AssertionError unless tickets, hand-offs and flights agree. For tests."""
        self.desk.check_invariants()
        self._router.pools.check_invariants()
        for key, ticketed in self._ticketed.items():
            assert ticketed.flight.attempts.key == key and ticketed.flight.link is not None, f"{key} has a ticket and no worker"
        assert not self._ticketed.keys() & self._begun.keys()


def _pair(sender: Link, receiver: Link) -> Pair:
    return sender.worker.boot_id, receiver.worker.boot_id
