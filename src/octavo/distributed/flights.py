"""Requests on their way through a cluster: each waits, is answered by a worker, or waits again because that was lost.

    submitted ─▶ dispatcher ─▶ sent to a worker ─▶ events ─▶ over
                     ▲               │
                     └── paced ── lost, failed

Owns the flights, and how what was lost goes on. What is new of a worker's events goes to the streams of their calls; ``attempts`` says what
that is, ``running_attempts`` whose it is, ``dispatcher`` who goes where and when. It knows links and sends on their channels, and reads the
clock that it is given; the fleet is ``control``'s business.

What a worker says that cannot be is a MessageError, and costs it its channel. A fault of ours ends the request that it struck, and nothing
else: it would go with the request to the next worker, and cost us that as well.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from octavo.core.limits import LengthLimits
from octavo.core.request import FinishReason
from octavo.distributed.attempts import Attempts, Divergence, Loss, Pacer
from octavo.distributed.cluster_options import ClusterOptions
from octavo.distributed.dispatcher import Dispatcher, Unroutable
from octavo.distributed.faults import Faults
from octavo.distributed.flight import Begun, Flight, RoutedRequest, Watcher
from octavo.distributed.link import Link
from octavo.distributed.lost_flights import LostFlights
from octavo.distributed.messages import Abort, Event, MessageError, Submit, WireRequest
from octavo.distributed.running_attempts import RunningAttempts
from octavo.distributed.struck import Struck
from octavo.distributed.worker_account import WorkerAccount
from octavo.distributed.worker_engine import REFUSED, engine_id
from octavo.engine.event_stream import EventStream
from octavo.engine.outputs import OutputEvent
from octavo.engine.serving import NO_WORKER

if TYPE_CHECKING:
    from octavo.distributed.handovers import Handovers

logger = logging.getLogger("octavo.cluster")


class Flights:
    """``links``: those that take requests now. ``fingerprint`` and block size of the workers name the blocks of prompts."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        options: ClusterOptions,
        links: Callable[[], Sequence[Link]],
        clock: Callable[[], float],
        watcher: Watcher,
    ) -> None:
        self.dispatcher = dispatcher
        self.watcher = watcher
        self.handovers: Handovers | None = None  # where there are workers that hand over
        self.num_lost = 0  # attempts
        self.num_given_up = 0  # requests
        self.num_prompt_tokens = self.num_output_tokens = 0  # of all requests that came, the output as it was made
        self.begun, self.num_ended = Begun(), 0  # requests that are over
        self._options = options
        self._links = links
        self._now = clock
        self._flights: dict[str, Flight] = {}  # by request id
        self._running = RunningAttempts()
        self._lost = LostFlights(Pacer(options.resubmit_per_s, options.resubmit_burst), self.pump)
        self._struck = Struck()
        dispatcher.holds = lambda route, view: self._flights[route.request_id].fits(view)
        self.faults = Faults(self._uproot)
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._flights)

    async def idle(self) -> None:
        """Wait until there is none."""
        await self._idle.wait()

    def is_amid_answers(self) -> bool:
        """Some have been sent in part."""
        return any(flight.attempts.num_sent_tokens for flight in self._flights.values())

    def find(self, request_id: str) -> Flight | None:
        return self._flights.get(request_id)

    def find_key(self, key: int) -> Flight | None:
        return self._running.find(key)

    @property
    def num_waiting_tokens(self) -> int:
        """Known tokens of the requests that no worker has."""
        return sum(flight.num_tokens for flight in self._flights.values() if flight.link is None) if self.num_waiting else 0

    @property
    def num_waiting(self) -> int:
        """Requests that no worker has."""
        return len(self.dispatcher) + len(self._lost)

    # --- from the server ----------------------------------------------------------------------------------------------------------------

    def submit(self, routed: Sequence[RoutedRequest], stream: EventStream) -> None:
        """The requests of one call. Raises QueueFull, and takes none of them then."""
        links, now = self._entries(), self._now()
        views, taken = [link.view for link in links], list[str]()
        try:
            for one in routed:
                self.dispatcher.submit(one.route, views, now)
                taken.append(one.request.request_id)
                self._flights[taken[-1]] = Flight(one.request, Attempts(one.request, self._options.retries), stream, one.route)
        except Exception:
            for request_id in taken:
                self.dispatcher.withdraw(request_id)
                del self._flights[request_id]
            raise
        self._idle.clear()
        requests = [one.request for one in routed]
        self.num_prompt_tokens += sum(len(request.prompt_token_ids) for request in requests)
        for request in requests:
            with self.faults.guarded(self._flights[request.request_id]):
                self.watcher.opened(request)
        self.pump()

    def abort(self, request_ids: Iterable[str]) -> None:
        """Nobody reads these any more. Unknown ones do nothing."""
        for flight in filter(None, map(self._flights.get, request_ids)):
            with self.faults.guarded(flight):
                self._withdraw(flight)
                self._close(flight, FinishReason.ABORT)
        self.pump()

    def fail(self, flight: Flight, message: str, code: str | None = None) -> None:
        """End a request with error events."""
        self._withdraw(flight)
        self._close_failed(flight, message, code)

    def fail_all(self, message: str, code: str | None = None) -> None:
        for flight in list(self._flights.values()):
            with self.faults.guarded(flight):
                self.fail(flight, message, code)

    def fail_waiting(self, message: str, since_s: float) -> None:
        """End the requests that nobody has and that came before ``since_s``: there is no worker."""
        for flight in [flight for flight in self._flights.values() if flight.link is None and flight.request.arrival_s <= since_s]:
            with self.faults.guarded(flight):
                self.fail(flight, message, NO_WORKER)

    def fail_unheld(self, there: Sequence[LengthLimits], wait_s: float) -> None:
        """End requests that no worker of these sizes, ``there`` or to be there again, could ever hold, and none has for ``wait_s``."""
        suspects = [flight for flight in self._lost if flight.attempts.is_suspect]
        for flight in (*(self._flights[route.request_id] for route in self.dispatcher.set_aside()), *suspects):
            with self.faults.guarded(flight):
                if (why := flight.unheld_for(there, self._now(), wait_s)) is not None:
                    self.fail(flight, why, NO_WORKER)

    def _withdraw(self, flight: Flight) -> None:
        """From wherever it is."""
        if flight.link is not None:
            flight.link.channel.send(Abort([flight.attempts.key]))
            self._leave_link(flight)
        elif not self._lost.remove(flight):
            self.dispatcher.withdraw(flight.request.request_id)

    def _close(self, flight: Flight, reason: FinishReason) -> None:
        """It is over, and in no place any more. All of it happens, whatever fails."""
        request_id = flight.request.request_id
        del self._flights[request_id]
        self.num_ended += 1
        if not self._flights:
            self._idle.set()
        with self.faults.guarded(flight):
            is_whole = reason not in (FinishReason.ABORT, FinishReason.ERROR)
            self.dispatcher.ended(request_id, flight.attempts.usual_tokens if is_whole else None)
        with self.faults.guarded(flight):
            self.watcher.ended(request_id, reason, self._now())

    def _close_failed(self, flight: Flight, message: str, code: str | None = None) -> None:
        with self.faults.guarded():
            for event in flight.attempts.failed(message, code):
                flight.stream.put(event)
        self._close(flight, FinishReason.ERROR)

    def _uproot(self, flight: Flight, message: str) -> None:
        """End a request of which the books may be half written: wherever it may be, it is taken away."""
        if self._flights.get(flight.request.request_id) is not flight:
            return
        key, link = flight.attempts.key, self._running.forget(flight)
        self._lost.forget(flight)
        if link is not None:
            with self.faults.guarded():
                link.channel.send(Abort([key]))
        if self.handovers is not None:
            with self.faults.guarded():
                self.handovers.left(key)
        with self.faults.guarded():
            self.dispatcher.drop(flight.request.request_id)
        self._close_failed(flight, message)

    # --- to workers ---------------------------------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Send on whatever waits and may go. Raises nothing: whoever speaks, or submits, does not answer for what strikes another."""
        with self.faults.guarded():
            if len(self._lost):
                self._go_again()
            if len(self.dispatcher):
                self._dispatch()

    def _dispatch(self) -> None:
        entries, others = self._places()
        links, views, spare = [*entries, *others], [link.view for link in entries], [link.view for link in others]
        while True:
            try:
                found = self.dispatcher.next(views, self._now(), spare)
            except Unroutable as error:
                self.faults.found(error.__cause__ or error, self._flights[error.request_id])
                continue
            if found is None:
                return
            route, place = found
            flight = self._flights[route.request_id]
            with self.faults.guarded(flight):
                self._send(flight, links[place])

    def _entries(self) -> Sequence[Link]:
        """Workers that may be given prompts now."""
        return self._links() if self.handovers is None else self.handovers.entries(self._links())

    def _places(self) -> tuple[Sequence[Link], Sequence[Link]]:
        """Workers that may be given prompts now, and all others that take requests: for what none of the first could ever hold."""
        entries = self._entries()
        firsts = {link.index for link in entries}
        return entries, [link for link in self._links() if link.index not in firsts]

    def _send(self, flight: Flight, link: Link) -> None:
        request, now = flight.request, self._now()
        made = self._running.begin(flight, link, now)
        key = flight.attempts.key
        ticket = None if self.handovers is None else self.handovers.ticket(flight, link, key, len(made))
        try:
            link.channel.send(Submit(key, WireRequest.of(request, flight.age_s(now)), made, ticket))
        except MessageError as error:
            self.fail(flight, str(error), REFUSED)
            return
        link.view.sent(len(request.prompt_token_ids) + len(made), self.dispatcher.router.num_cached(request.request_id))
        self.watcher.placed(request.request_id, link.name, engine_id(key), now)

    # --- from workers -------------------------------------------------------------------------------------------------------------------

    def take(self, link: Link, events: Sequence[Event]) -> None:
        """Events of a worker that is trusted; those of attempts that were given up are dropped, but for their accounts. Raises
        MessageError."""
        for event in events:
            if event.account is not None:
                self.told(link, event.key, event.account)
            flight = self._running.find(event.key)
            if flight is None or flight.link is not link:
                continue
            flight.check(event)
            try:
                self._take(flight, link, event)
            except Exception as error:
                self.faults.found(error, flight)

    def _take(self, flight: Flight, link: Link, event: Event) -> None:
        output = event.output(flight.request.request_id)
        if output.error is not None and output.error_code is None:
            self.failed(event.key, output.error)
            return
        if output.token_ids and self.handovers is not None:
            self.handovers.drew(flight)
        try:
            new = flight.attempts.take(output)
        except Divergence as error:
            logger.critical("request %s: %s: %s", flight.request.request_id, link.name, error)
            self.fail(flight, str(error))
            return
        if new is not None:
            self._deliver(flight, new)

    def _deliver(self, flight: Flight, event: OutputEvent) -> None:
        self.num_output_tokens += len(event.token_ids)
        if 0 < len(event.token_ids) == flight.attempts.num_sent_tokens:
            self.begun.add(flight.request, event)
        if event.token_ids:
            self.watcher.tokens(flight.request.request_id, len(event.token_ids), self._now())
        if not flight.stream.put(event):  # its reader is too far behind, and has been told
            self.abort(flight.stream.request_ids)
        elif flight.attempts.is_over:
            if flight.attempts.is_made_on:
                self._withdraw(flight)
            else:
                self._leave_link(flight)
            self._close(flight, event.finish_reason or FinishReason.STOP)
        else:
            self._lost.went_on(flight)

    def told(self, link: Link, key: int, account: WorkerAccount) -> None:
        """Where the time of an attempt went at ``link``, which has ended it or holds it to be handed over."""
        with self.faults.guarded():
            self.watcher.told(link.name, engine_id(key), account)

    def lost(self, link: Link, loss: Loss) -> None:
        """Nothing that ``link`` says of its attempts counts any more: others go on with them."""
        struck = self._running.at(link)
        for flight in struck:
            with self.faults.guarded(flight):
                self._leave_link(flight)
                self._lose(flight, loss)
        if loss.is_open:
            ids = [flight.request.request_id for flight in struck]
            had_to_go = loss is Loss.DIED and link.worker.draining  # it does not come back
            self._confirm(ids if had_to_go else self._struck.lost(link.name, link.worker.boot_id, ids, self._now()))
        self.pump()

    def returned(self, link: Link) -> None:
        """A worker takes requests, or does again. If it was lost and is the same process, what it had did it no harm; if another had its
        name before, that one is gone."""
        forgiven, gone = self._struck.returned(link.name, link.worker.boot_id)
        for flight in filter(None, map(self._flights.get, forgiven)):
            flight.attempts.forgive()
        self._confirm(gone)

    def tick(self) -> None:
        """Time has passed: who has been lost for so long does not come back. To be called a few times a second."""
        self._confirm(self._struck.expired(self._now() - self._options.liveness.gone_s))
        self.pump()

    def _confirm(self, request_ids: Iterable[str]) -> None:
        """The workers that these were lost with do not come back."""
        for flight in filter(None, map(self._flights.get, request_ids)):
            if (given_up := flight.attempts.confirm()) is not None and flight.link is None:
                with self.faults.guarded(flight):
                    self._give_up(flight, given_up)

    def _lose(self, flight: Flight, loss: Loss, error: str | None = None) -> None:
        """The request waits for its turn to go on, or has to fail, with ``error`` if there is one."""
        self.num_lost += 1
        self.watcher.lost(flight.request.request_id, self._now())
        given_up = flight.attempts.lost(loss)
        self._lost.add(flight)
        if given_up is not None:
            self._give_up(flight, given_up, error)

    def _give_up(self, flight: Flight, given_up: str, error: str | None = None) -> None:
        self.num_given_up += 1
        logger.error("request %s: %s", flight.request.request_id, given_up)
        self.fail(flight, error or given_up)

    def failed(self, key: int, error: str) -> None:
        """The worker that has an attempt cannot go on with it: another may."""
        flight = self._running.find(key)
        if flight is not None:
            self._withdraw(flight)
            self._lose(flight, Loss.FAILED, error)
            self.pump()

    def moved(self, key: int, link: Link) -> None:
        """An attempt goes on at ``link``, which has its KV."""
        flight = self._running.find(key)
        assert flight is not None
        self._lost.cleared(flight)
        self._running.moved(flight, link)
        self.watcher.handed_over(flight.request.request_id, link.name, engine_id(key), self._now())

    def _leave_link(self, flight: Flight) -> None:
        self._lost.cleared(flight)
        self._running.left(flight)
        if self.handovers is not None:
            self.handovers.left(flight.attempts.key)

    def _go_again(self) -> None:
        """Let those of the lost go on whose turn it is: into the queue, or past it to one of the links, if there are any."""
        while (found := self._lost.next(*self._places(), self._now())) is not None:
            flight, links = found
            with self.faults.guarded(flight):
                if links:
                    link = links[self.dispatcher.send_alone(flight.route, [link.view for link in links])]
                    self._lost.runs_alone(flight, link)
                    self._send(flight, link)
                else:
                    self.dispatcher.resubmit(flight.route, flight.request.arrival_s)

    def check_invariants(self) -> None:
        """AssertionError unless every flight is in one place. For tests."""
        waiting = {route.request_id for route in self.dispatcher.waiting_requests()}
        again = {flight.request.request_id for flight in self._lost}
        sent = {flight.request.request_id for flight in self._flights.values() if flight.link is not None}
        assert len(waiting) + len(again) + len(sent) == len(self._flights), "a flight is lost, or in two places"
        assert waiting | again | sent == self._flights.keys()
        assert len(self._running) == len(sent)
        self._running.check_invariants()
        self._lost.check_invariants()
