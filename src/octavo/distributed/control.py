"""The front end's side of the control channels: who may join, what each worker said last, and which of them are trusted.

    listen ─▶ Hello ─▶ Welcome ─▶ Ready ─▶ Beat (it has joined) ─▶ (Load, Keys, Events ...) ─▶ closed
                └─ Refuse: another protocol, another model, a name that is taken

Owns the links, the fleet that says which of them to trust, and heartbeats. Knows no request: what a worker says of attempts, and that it
is lost, goes to the ``ControlHandler``. All of it happens on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import Callable, Iterator

from octavo.config import EngineConfig
from octavo.distributed.attempts import Loss
from octavo.distributed.barred import Barred
from octavo.distributed.channel import HANDSHAKE_S, Address, Channel, Listener
from octavo.distributed.control_handler import ControlHandler
from octavo.distributed.fingerprints import misfit
from octavo.distributed.fleet import Change, Fleet, LivenessLimits, WorkerState
from octavo.distributed.flood_log import FloodLog
from octavo.distributed.kv_ways import KVPlace, kv_host_for
from octavo.distributed.link import Link
from octavo.distributed.messages import (
    MAX_BOOT_ID_CHARS,
    MAX_NAME_CHARS,
    PROTOCOL,
    Answer,
    Beat,
    Events,
    FromWorker,
    Goodbye,
    Hello,
    Keys,
    Load,
    MessageError,
    Offered,
    Ready,
    Refuse,
    Reset,
    Shutdown,
    Welcome,
    check_figure,
    check_name,
    config_bytes,
    from_worker,
    shown_reason,
)
from octavo.distributed.roles import ROLES
from octavo.distributed.told_load import Told, ToldLoad
from octavo.distributed.wire import check_account
from octavo.distributed.worker_sizes import check_limits
from octavo.models.loaded import LoadedModel

logger = logging.getLogger("octavo.cluster")

HELLO_S = HANDSHAKE_S  # from the handshake to Hello
LOOK_S = 0.1  # between two looks at the fleet
BEAT_S = 1.0
WORKER_GONE_S = 10.0  # a front end silent for so long is gone, for its workers
ASK_S = 2.0
MAX_LAST_WORDS = 256  # workers from elsewhere have a new name with each process


class Control:
    """``config``: what workers are to run; ``model``: that they are to have. What they say is checked as far as it leads anywhere: a worker
    that lies loses its channel, and its streams go on elsewhere. ``wants_prices``: see ``Welcome``."""

    def __init__(
        self,
        config: EngineConfig,
        model: LoadedModel,
        secret: bytes,
        handler: ControlHandler,
        limits: LivenessLimits,
        clock: Callable[[], float],
        wants_prices: bool = False,
    ) -> None:
        self.fleet = Fleet(limits)
        self.fingerprint: str | None = None  # of the workers that are ready, or were last: all have the same
        self.last_words: dict[str, str] = {}  # of workers that ended before they were ready, or left; the latest
        self._config, self._model, self._wants_prices = config, model, wants_prices
        self._handler = handler
        self._now = clock
        self._listener = Listener(secret, from_worker, self._open)
        self._links: dict[str, Link] = {}  # by name
        self._strangers: set[Channel[FromWorker]] = set()  # proven, and without Hello yet
        self._barred = Barred[str]()  # by boot id
        self._refusals = FloodLog(logger, "refused worker")  # it may come again and again
        self._returns = FloodLog(logger, "worker", logging.INFO)  # of those that came to nothing before
        self._numbers = itertools.count(1)
        self._watch: asyncio.Task[None] | None = None

    @property
    def address(self) -> Address:
        return self._listener.address

    def __iter__(self) -> Iterator[Link]:
        """By index."""
        return iter(sorted(self._links.values(), key=lambda link: link.index))

    def find(self, name: str) -> Link | None:
        return self._links.get(name)

    async def open(self, address: Address) -> None:
        """Listen. OSError, which names the flag, when the address cannot be had."""
        try:
            await self._listener.open(address)
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
            raise OSError(error.errno or 0, f"workers_listen: cannot listen at {address}: {reason}") from error
        self._watch = asyncio.create_task(self._look())

    def close(self) -> None:
        """No more workers; those that there are, are told to end."""
        self._listener.close()
        if self._watch is not None:
            self._watch.cancel()
        for link in list(self._links.values()):
            self.shut_down(link)
            link.channel.close("the front end ends")
        for channel in list(self._strangers):
            channel.abort("the front end ends")
        self._refusals.flush()
        self._returns.flush()

    def shut_down(self, link: Link) -> None:
        """Have a worker end now."""
        link.is_leaving = True
        link.channel.send(Shutdown())

    # --- joining ------------------------------------------------------------------------------------------------------------------------

    def _open(self, channel: Channel[FromWorker]) -> None:
        self._strangers.add(channel)
        link: Link | None = None

        def take(messages: list[FromWorker]) -> None:
            nonlocal link
            for message in messages:
                if link is None:
                    self._strangers.discard(channel)
                    link = self._hello(channel, message)
                    if link is None:
                        return
                elif channel.closed_for is None:
                    self._heed(link, message)

        def closed(reason: str) -> None:
            if link is not None:
                self._closed(link, reason)
            elif channel in self._strangers:
                self._strangers.discard(channel)
                logger.info("a connection from %s has ended before Hello: %s", channel.peer, reason)

        channel.start(take, closed, HELLO_S)

    def _hello(self, channel: Channel[FromWorker], message: FromWorker) -> Link | None:
        """The first message: the link of a worker that may join; None: it was refused."""
        if not isinstance(message, Hello):
            raise MessageError(f"a worker says {type(message).__name__} before Hello")
        try:
            check_name(message.name)
        except MessageError as error:
            self._refuse(channel, shown_reason(message.name[:MAX_NAME_CHARS]), str(error))
            return None
        known = self._links.get(message.name)
        is_taken = known is not None and known.worker.boot_id != message.boot_id and known.worker.state is not WorkerState.SUSPECT
        fault = None
        if message.protocol != PROTOCOL:
            fault = f"it speaks protocol {message.protocol}, this front end {PROTOCOL}"
        elif message.role not in ROLES:
            fault = f"role: {message.role!r} is not allowed; one of {', '.join(ROLES)}"
        elif not 0 < len(message.boot_id) <= MAX_BOOT_ID_CHARS:
            fault = f"boot_id: {len(message.boot_id)} characters are not allowed; 1 to {MAX_BOOT_ID_CHARS}"
        elif known is not None and is_taken:
            fault = f"name: {message.name!r} is not allowed; a worker of that name is here, from {known.channel.peer}"
        is_final = not is_taken
        if fault is None and (wait_s := self._barred.wait_s(message.boot_id, self._now())) > 0.0:
            fault, is_final = f"it said what cannot be, and may come again in {wait_s:.1f} s", False
        if fault is not None:
            self._refuse(channel, message.name, fault, is_final)
            return None
        if known is not None:
            self._closed(known, "it has connected again")
        now = self._now()
        worker = self.fleet.hello(message.name, message.role, shown_reason(message.host), message.pid, message.boot_id, now)
        link = self._links[message.name] = Link(channel, worker)
        kv_host = kv_host_for(self.address.host, channel.peer_host)
        channel.send(Welcome(config_bytes(self._config), WORKER_GONE_S, self._wants_prices, kv_host))
        if message.name in self.last_words:
            self._returns.say(f"has connected again, as {message.role}", message.name)
        else:
            logger.info("worker %s (%s, pid %d) has connected from %s", message.name, message.role, message.pid, channel.peer)
        return link

    def _refuse(self, channel: Channel[FromWorker], name: str, reason: str, is_final: bool = True) -> None:
        """``reason``: may quote what the worker has said."""
        reason = shown_reason(reason)
        self._refusals.say(reason, name)
        self._last_words(name, reason)
        channel.send(Refuse(reason, is_final))
        channel.close("it was refused")

    def _last_words(self, name: str, reason: str) -> None:
        self.last_words.pop(name, None)
        self.last_words[name] = reason
        if len(self.last_words) > MAX_LAST_WORDS:
            del self.last_words[next(iter(self.last_words))]

    def _ready(self, link: Link, message: Ready) -> None:
        are_others, model = any(other.ready is not None for other in self), self._model.fingerprint
        if (fault := misfit(message.model, message.fingerprint, model, None)) is not None:
            link.is_refused = True
            self._refuse(link.channel, link.name, fault)
            return
        is_bound = are_others or self._handler.is_amid_answers()
        if is_bound and (fault := misfit(message.model, message.fingerprint, model, self.fingerprint)) is not None:
            link.is_refused = True
            self._refuse(link.channel, link.name, fault, is_final=are_others)  # else: until the answers are over
            return
        check_limits(message.limits, self._config, self._model.program)
        self.fingerprint = message.fingerprint
        link.ready, limits, now = message, message.limits, self._now()
        link.kv = KVPlace.told(message.kv_address, message.transports, link.channel.peer_host, link.channel.local_host)
        link.view = ToldLoad(link.index, limits.block_size, limits.num_kv_blocks)
        self.fleet.ready(link.worker, now)
        self.last_words.pop(link.name, None)
        if link.worker.state is WorkerState.SUSPECT:
            logger.warning("worker %s is here and suspect: %s", link.name, link.worker.reason)
            return  # the handler hears of it when it has recovered
        logger.info("worker %s is ready", link.name)
        link.channel.send(Beat(has_joined=True))
        self._handler.worker_ready(link)

    # --- what workers say ---------------------------------------------------------------------------------------------------------------

    def _heed(self, link: Link, message: FromWorker) -> None:
        """Deal with a message. MessageError, which costs the worker its channel, when it cannot be; a fault of ours does so only while it
        joins, since it can neither stay nor be told otherwise."""
        joins = link.ready is None
        try:
            self._take(link, message)
        except MessageError:
            raise
        except Exception as error:
            if joins:
                raise
            self._handler.fault(error)

    def _take(self, link: Link, message: FromWorker) -> None:
        match message:
            case Load():
                self._load(link, message)
            case Answer():
                link.answered(message)
            case Keys() if link.ready is not None:
                if message.anew and link.has_begun_keys:  # each time what all workers have would be looked through
                    raise MessageError("a worker's Keys cannot be: anew is said once")
                link.has_begun_keys = link.has_begun_keys or message.anew
                if (age_s := message.step_age_s) is not None:
                    check_figure(message, "step_age_s")
                    self.fleet.told_steps(link.worker, link.worker.num_steps, age_s, self._now())
                self._handler.told_keys(link, message)
            case Goodbye():
                link.wants_to_leave, link.worker.reason = True, shown_reason(message.reason)
                self._last_words(link.name, link.worker.reason)
                self.fleet.drain(link.worker)
                self._handler.worker_leaves(link)
            case Ready() if link.worker.state is WorkerState.STARTING:
                self._ready(link, message)
            case Hello() | Ready():
                raise MessageError(f"a worker says {type(message).__name__} twice")
            case _ if link.ready is None:
                raise MessageError(f"a worker says {type(message).__name__} before Ready")
            case _:
                if isinstance(message, Events):
                    for event in message.events:
                        event.check(self._model.program.vocab_size)
                if isinstance(message, Offered):
                    check_account(message.account)
                if link.worker.state is WorkerState.READY:
                    self._handler.said(link, message)

    def _load(self, link: Link, load: Load) -> None:
        for name in load.__struct_fields__:
            check_figure(load, name)
        self.fleet.told_steps(link.worker, load.num_steps, load.step_age_s, self._now())
        if link.ready is None:
            return
        link.load = load
        num_sequences = load.num_waiting + load.num_running
        try:
            link.view.told(Told(load.num_received, load.pending_tokens, load.pending_s, num_sequences, load.num_available_blocks))
        except ValueError as error:
            raise MessageError(f"a worker's Load cannot be: {error}") from error
        if link.worker.state is WorkerState.READY:
            self._handler.told(link)

    def _closed(self, link: Link, reason: str) -> None:
        if self._links.get(link.name) is not link:
            return
        del self._links[link.name]
        was_trusted = link.worker.state is WorkerState.READY
        self.fleet.closed(link.worker, reason, self._now())
        link.channel.close(reason)
        link.leave_unanswered()
        level = logging.DEBUG if link.is_refused else logging.INFO if link.is_leaving else logging.WARNING
        logger.log(level, "worker %s is gone: %s", link.name, reason)
        loss = Loss.LEFT if link.is_leaving else Loss.DIED
        if link.channel.is_peers_doing:
            loss = Loss.LIED
            self._barred.failed(link.worker.boot_id, self._now())
        if was_trusted:
            self._handler.worker_lost(link, loss)
        if link.ready is not None:
            self._handler.worker_gone(link)

    # --- time ---------------------------------------------------------------------------------------------------------------------------

    async def _look(self) -> None:
        beat_s = 0.0
        while True:
            now = self._now()
            if now - beat_s >= BEAT_S:
                beat_s = now
                for link in self:
                    link.channel.send(Beat())
            self._look_at(now)
            await asyncio.sleep(LOOK_S)

    def _look_at(self, now: float) -> None:
        for link in self:
            if link.heard_s != link.channel.heard_s:  # also of bytes of a long message, which may take seconds on its way
                link.heard_s = link.channel.heard_s
                self.fleet.heard(link.worker, now)
        for worker, change in self.fleet.look(now):
            try:
                self._changed(self._links[worker.name], change)
            except Exception as error:  # a fault of ours must not end the watch over all the others
                logger.critical("worker %s: what became of it could not be dealt with", worker.name, exc_info=error)

    def _changed(self, link: Link, change: Change) -> None:
        logger.warning("worker %s is %s: %s", link.name, change.value, link.worker.reason or "it speaks again")
        if change in (Change.SUSPECTED, Change.STALLED):
            self._handler.worker_lost(link, Loss.HUNG if change is Change.SUSPECTED else Loss.STALLED)
        elif change is Change.RECOVERED:
            link.channel.send(Reset())
            link.channel.send(Beat(has_joined=True))  # it may have been suspect since before it was ready
            self._handler.worker_ready(link)
        else:
            self._closed(link, link.worker.reason)

    # --- questions ----------------------------------------------------------------------------------------------------------------------

    async def ask(self, link: Link, what: str, args: bytes, timeout_s: float = ASK_S) -> bytes:
        """See ``Link.ask``."""
        return await link.ask(next(self._numbers), what, args, timeout_s)
