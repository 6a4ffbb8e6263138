"""The engine of a worker: attempts in, events and figures out, for one connection to a front end after the other.

Owns the engine with its thread, which attempts there are, and what is told of the load and of the prefix cache. An attempt that nobody
wants any more is forgotten at once, and what the engine still makes of it goes nowhere but its account. What moves KV between workers is a
``KVSide``, of which this module knows the messages alone. All but what is marked runs on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

import msgspec

from octavo.core.key_changes import KeyChanges
from octavo.core.request import FinishReason, ParameterError, Request
from octavo.distributed.full_step import full_step_prices
from octavo.distributed.messages import (
    SHORT_KEY_BYTES,
    Begin,
    Cancel,
    CopyFailed,
    Event,
    Events,
    FromWorker,
    Keys,
    Load,
    MessageError,
    NoRoom,
    Ready,
    Release,
    Reserve,
    Resume,
    Send,
    Submit,
    WorkerLimits,
)
from octavo.distributed.wire import check_token_ids
from octavo.distributed.worker_account import account_of
from octavo.engine.engine import Engine
from octavo.engine.engine_thread import EngineThread
from octavo.engine.outputs import OutputEvent
from octavo.engine.params import PreparedRequest

logger = logging.getLogger("octavo.worker")

TELL_S = 0.02  # between two news of the load, while steps are made
MAX_KEYS = 4096  # in one message: who has to take in a whole cache does other things between
MAX_EVENTS_BYTES = 8 << 20  # of log-probabilities and tokens, about, in one message
ACCOUNT_BYTES = 1024  # of an account in a message, about
MAX_FAILURES_IN_A_ROW = 6  # steps; more than one request is tried for. An engine that makes no others draws all, since it is never busy
REFUSED = "refused"  # an error code: the request cannot be queued, here or elsewhere

KVMessage = Reserve | Send | Begin | Release | Cancel | Resume


class KVSide(Protocol):
    """What moves KV between this worker and others. Called on the event loop's thread but for ``after_step``."""

    address: str | None
    transports: list[str]

    def listen(self, host: str) -> None:
        """Be reached at ``host`` from now on, as ``address`` says; no transfer is on its way. OSError when it cannot."""
        ...

    def submitted(self, message: Submit, request: Request) -> None:
        """On the engine's thread: an attempt with a ticket has just been queued."""
        ...

    def take(self, message: KVMessage) -> None: ...

    def after_step(self, events: list[OutputEvent]) -> None:
        """On the engine's thread, after each step and before the next plan."""
        ...

    def dropped(self, keys: Sequence[int]) -> None:
        """Nobody wants these attempts any more. They are aborted in the engine after this call."""
        ...

    def dropped_all(self) -> None:
        """The front end is gone, or has given all away: nothing is offered, reserved or on its way any more."""
        ...

    def close(self) -> None: ...


_PREFIX = "attempt-"


def engine_id(key: int) -> str:
    """The name of an attempt in the worker's engine, and so in what that tells of its requests."""
    return f"{_PREFIX}{key}"


def key_of(name: str) -> int | None:
    """The attempt that ``engine_id`` named so; None: it is none."""
    number = name.removeprefix(_PREFIX)
    return int(number) if name != number and number.isascii() and number.isdigit() else None


@dataclass(slots=True)
class _Attempt:
    key: int
    engine_id: str
    num_open: int  # choices whose last event has not been sent


class WorkerEngine:
    """``send`` takes what is for the front end; ``on_death`` is called when the engine is of no use any more, with the reason."""

    def __init__(self, engine: Engine, send: Callable[[FromWorker], None], on_death: Callable[[str], None]) -> None:
        self.engine = engine
        self.thread = EngineThread(engine, self._deliver, self._after_step)
        self.kv: KVSide | None = None
        self._attempts: dict[str, _Attempt] = {}  # by engine id
        self._by_key: dict[int, _Attempt] = {}
        self._send = send
        self._on_death = on_death
        self._connection = 0  # what was read for an earlier one is not told to the next
        self._load: Load | None = None  # the figures that were read last, for this connection
        self._is_asked = False  # for new figures
        # On the engine's thread:
        self._read_for = 0  # the connection
        self._num_received = 0  # requests, by this connection
        self._wants_prices = False  # the front end, of full steps
        self._read_s = 0.0  # when the figures were read
        self._is_stale = False  # there has been a step since
        if engine.scheduler.kv.index is not None:
            engine.scheduler.kv.index.changes = KeyChanges()

    @property
    def num_attempts(self) -> int:
        return len(self._attempts)

    def begin_connection(self, wants_prices: bool = False) -> None:
        """A front end is there that knows nothing of this engine yet: from now on it is told all. ``wants_prices``: see ``Welcome``."""
        self._connection += 1
        self._load, connection = None, self._connection

        def begin() -> list[OutputEvent]:
            self._read_for, self._num_received, self._read_s, self._wants_prices = connection, 0, 0.0, wants_prices
            index = self.engine.scheduler.kv.index
            if index is not None and index.changes is not None:
                index.changes.take()
                keys = [node.key[:SHORT_KEY_BYTES] for node in index.blocks().values() if index.is_full(node)]
                for start in range(0, max(1, len(keys)), MAX_KEYS):
                    self.tell(Keys(keys[start : start + MAX_KEYS], anew=start == 0))
            return []

        self.thread.post(begin)

    # --- attempts -----------------------------------------------------------------------------------------------------------------------

    def submit(self, message: Submit) -> None:
        """Begin an attempt; what cannot be queued ends with error events."""
        wire = message.request
        attempt = self._remember(message.key, wire.params.n)
        request = wire.request(attempt.engine_id, self.engine.clock.now())

        def add() -> list[OutputEvent]:
            self._num_received += 1
            try:
                wire.check(self.engine.backend.vocab_size)
                check_token_ids("output_token_ids", message.output_token_ids, self.engine.backend.vocab_size)
                self.check_fits(request)
                self.engine.add(PreparedRequest(request, []), message.output_token_ids)
                if message.ticket is not None and self.kv is not None:
                    self.kv.submitted(message, request)
            except ParameterError as error:
                self.thread.tell(self._refuse, (attempt, error))
            return []

        self.thread.post(add)

    def check_fits(self, request: Request) -> None:
        """ParameterError where the answer would be cut short here, and not by another worker. On the engine's thread."""
        most = self.engine.scheduler.clamped_max_tokens(request)
        if most is not None:
            raise ParameterError("max_tokens", request.params.max_tokens, f"at most {most} behind this prompt, on a worker of this size")

    def _refuse(self, refused: tuple[_Attempt, ParameterError]) -> None:
        """The request passed the front end's checks and cannot be queued here."""
        attempt, error = refused
        if self._by_key.get(attempt.key) is not attempt:
            return
        num_choices = attempt.num_open
        self._forget(attempt)
        if self.kv is not None:
            self.kv.dropped([attempt.key])
        ends = [Event(attempt.key, c, finish_reason=FinishReason.ERROR, error=str(error), error_code=REFUSED) for c in range(num_choices)]
        self._send(Events(ends))

    def abort(self, keys: Sequence[int]) -> None:
        """Unknown keys, and those that have ended, do nothing."""
        found = [attempt for key in keys if (attempt := self._by_key.get(key)) is not None]
        for attempt in found:
            self._forget(attempt)
        if self.kv is not None:
            self.kv.dropped(keys)
        names = [attempt.engine_id for attempt in found]
        if names:
            self.thread.post(lambda: [event for name in names for event in self.engine.abort(name)])

    def drop_all(self) -> None:
        """End everything that a front end has asked for."""
        self.abort(list(self._by_key))
        if self.kv is not None:
            self.kv.dropped_all()

    def take_kv(self, message: KVMessage) -> None:
        """A move of KV that the front end wants; refused where nothing moves any."""
        if self.kv is not None:
            self.kv.take(message)
        elif isinstance(message, Reserve):
            self._send(NoRoom(message.key, "this worker takes no KV from others"))
        elif isinstance(message, Send):
            self._send(CopyFailed(message.key, "this worker sends no KV to others"))

    def adopt(self, key: int) -> None:
        """An attempt that comes from another worker runs here from now on."""
        self._remember(key, 1)

    def leave(self, key: int) -> None:
        """An attempt has gone to another worker: nothing more of it is sent from here."""
        attempt = self._by_key.get(key)
        if attempt is not None:
            self._forget(attempt)

    def _remember(self, key: int, num_choices: int) -> _Attempt:
        name = engine_id(key)
        attempt = self._attempts[name] = self._by_key[key] = _Attempt(key, name, num_choices)
        return attempt

    def _forget(self, attempt: _Attempt) -> None:
        del self._attempts[attempt.engine_id], self._by_key[attempt.key]

    # --- events -------------------------------------------------------------------------------------------------------------------------

    def _deliver(self, events: list[OutputEvent]) -> None:
        if self.thread.died is not None:
            self._on_death(f"the engine loop has died: {self.thread.died}")
        told, num_bytes, aborted = list[Event](), 0, dict[str, None]()
        for event in events:
            attempt = self._attempts.get(event.request_id)
            if attempt is None:
                if event.finish_reason is FinishReason.ABORT:
                    aborted[event.request_id] = None
                continue
            account = None
            if event.finish_reason is not None:
                attempt.num_open -= 1
                if attempt.num_open == 0:
                    self._forget(attempt)
                    account = account_of(self.engine, attempt.engine_id)
            told.append(Event.of(attempt.key, event, account))
            num_bytes += event_bytes(event) + (ACCOUNT_BYTES if account is not None else 0)
            if num_bytes > MAX_EVENTS_BYTES:
                self._send_events(told)
                told, num_bytes = [], 0
        self._send_events(told)
        self.tell_aborted([*aborted])

    def tell_aborted(self, names: Sequence[str]) -> None:
        """Where the time of these went: nobody wanted them any more, and they have ended in the engine."""
        found = [(key, account_of(self.engine, name)) for name in names if (key := key_of(name)) is not None]
        self._send_events([Event(key, finish_reason=FinishReason.ABORT, account=one) for key, one in found if one is not None])

    def _send_events(self, events: list[Event]) -> None:
        try:
            if events:
                self._send(Events(events))
        except MessageError as error:
            if len(events) > 1:
                for event in events:
                    self._send_events([event])
                return
            logger.error("an event of attempt %d cannot be sent: %s", events[0].key, error)
            self.abort([events[0].key])
            ends = Event(events[0].key, events[0].choice, finish_reason=FinishReason.ERROR, error=str(error), error_code=REFUSED)
            self._send(Events([ends]))

    # --- figures ------------------------------------------------------------------------------------------------------------------------

    def _after_step(self, events: list[OutputEvent]) -> None:
        """On the engine's thread."""
        if self.kv is not None:
            self.kv.after_step(events)
        if self.engine.num_failures_in_a_row >= MAX_FAILURES_IN_A_ROW:
            self.thread.tell(self._on_death, f"the last {self.engine.num_failures_in_a_row} steps failed")
        now_s = time.monotonic()
        self._is_stale = now_s - self._read_s < TELL_S and self.engine.has_work  # that it is idle is told at once: routers look for those
        if not self._is_stale:
            self._read_s = now_s
            self._read()

    def _read(self) -> None:
        """Read the figures and have them sent. On the engine's thread."""
        index = self.engine.scheduler.kv.index
        if index is not None and index.changes is not None and len(index.changes):
            published, forgotten = index.changes.take()
            self.tell(Keys([key[:SHORT_KEY_BYTES] for key in published], [key[:SHORT_KEY_BYTES] for key in forgotten]))
        self.tell(load_of(self.engine, self._num_received, self._wants_prices))

    def tell(self, message: FromWorker) -> None:
        """Send what came of what the engine's thread is at, or has been: nothing when that is of an earlier connection. From any thread."""
        self.thread.tell(self._told, (self._read_for, message))

    def _told(self, read: tuple[int, FromWorker]) -> None:
        connection, message = read
        if connection != self._connection:
            return
        if isinstance(message, Load):
            self._load = message
        self._send(message)

    def beat(self) -> None:
        """The heartbeat: the figures that were read last, and how long the engine's thread has been at what it does now."""
        if self._load is None:
            self._send(Keys(step_age_s=self.thread.silent_s))  # nothing else is known yet, and never will be if its thread hangs
            return
        self._send(msgspec.structs.replace(self._load, step_age_s=self.thread.silent_s))
        if self._is_stale and not self._is_asked:
            self._is_asked = True

            def read() -> list[OutputEvent]:
                self._is_asked, self._read_s = False, 0.0
                return []

            self.thread.post(read)

    async def close(self) -> None:
        """Join the thread, let the engine keep what a restart can use, and close it."""
        self.drop_all()
        if self.kv is not None:
            self.kv.close()
        await self.thread.stop()
        await asyncio.to_thread(self.engine.close)


def load_of(engine: Engine, num_received: int, wants_prices: bool = False) -> Load:
    """The figures of an engine now; on its thread. ``wants_prices``: with those of full steps, which take two looks into the cost model."""
    scheduler, shape = engine.scheduler, engine.scheduler.pending_shape()
    return Load(
        scheduler.stats.num_steps,
        0.0,
        scheduler.num_waiting,
        scheduler.num_running,
        shape.num_rows,
        engine.step_cost.seconds_of(shape) if shape.num_rows else 0.0,
        scheduler.kv.pool.num_available,
        scheduler.num_used_blocks,
        scheduler.num_offered,
        scheduler.num_reserved,
        num_received,
        *(full_step_prices(engine) if wants_prices else ()),
    )


def event_bytes(event: OutputEvent) -> int:
    """What an event takes in a message, about."""
    size = 64 + 4 * len(event.text) + 5 * len(event.token_ids)
    for entries in (event.logprobs, event.prompt_logprobs):
        if entries is not None:
            size += sum(80 + 14 * len(entry.top_ids) for entry in entries)
    return size


def ready_of(worker: WorkerEngine) -> Ready:
    """What a worker says of its engine."""
    engine, kv = worker.engine, worker.kv
    block = engine.backend.kv_capacity(0)
    limits = WorkerLimits(
        engine.max_model_len,
        engine.scheduler.limits.max_total_tokens,
        engine.config.scheduler.max_num_seqs,
        engine.backend.vocab_size,
        engine.config.cache.block_size,
        engine.num_kv_blocks,
        block.bytes_per_block // engine.config.cache.block_size,
        sorted(engine.speculator.methods),
        None if block.layout is None else asdict(block.layout),
    )
    fingerprint = f"{engine.model.fingerprint}/{engine.backend.fingerprint()}"
    if kv is None:
        return Ready(engine.model.name, fingerprint, limits)
    return Ready(engine.model.name, fingerprint, limits, kv.address, kv.transports)
