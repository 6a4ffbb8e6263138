"""The engine behind an asyncio program: one thread runs steps, the event loop's thread adds requests and reads their events.

Owns the loop thread, one stream of events per request, aborting and draining. One ``call_soon_threadsafe`` per step carries all of its
events across. An idle loop thread waits on a condition and takes no CPU.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from octavo.core.request import FinishReason, Request, SamplingParams
from octavo.engine.engine import Engine
from octavo.engine.outputs import GenerationError, OutputEvent
from octavo.engine.params import PreparedRequest

logger = logging.getLogger("octavo.engine")

SWITCH_INTERVAL_S = 0.0005  # so that a busy event loop hands the interpreter to the loop thread soon
MAX_FAILURES_IN_A_ROW = 3
_MAX_READ = 64  # events
_EVENT_BYTES = 400  # what a waiting event takes, about, apart from its text, tokens and log-probabilities
_TOP_ENTRY_BYTES = 80


class EngineUnavailable(RuntimeError):
    """No request is taken: the engine is shutting down or its loop thread has died."""


class StreamOverflow(GenerationError):
    """A reader left more events waiting than its stream may hold; the request was aborted."""


@dataclass(frozen=True, slots=True)
class Health:
    """``live``: the process can serve again; ``ready``: it takes requests now. ``detail`` says what is wrong."""

    live: bool
    ready: bool
    detail: str


class EventStream:
    """Events of the requests of one call, for one reader. Not thread-safe: all of it happens on the event loop's thread.

    ``limit_bytes`` is what may pile up while the reader is away, that is, busy with sending what it has read. Events that find it waiting
    in ``read`` are never too many, however large: they go straight on.
    """

    def __init__(self, requests: Sequence[Request], limit_bytes: int) -> None:
        self.on_overflow: Callable[[], None] | None = None
        self.request_ids = frozenset(r.request_id for r in requests)
        self._open = {r.request_id: set(range(r.params.n)) for r in requests}  # choices whose last event has not come
        self._limit_bytes = limit_bytes
        self._num_bytes = 0
        self._events: list[OutputEvent] = []
        self._overflowed = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def finished(self) -> bool:
        """Every choice's last event has been read."""
        return not self._open and not self._events

    def is_open(self, request_id: str) -> bool:
        return request_id in self._open

    def open_choices(self) -> list[tuple[str, int]]:
        """(request id, choice) of all that go on, in order."""
        return [(request_id, choice) for request_id, choices in self._open.items() for choice in sorted(choices)]

    def put(self, event: OutputEvent) -> bool:
        """Add an event; False when the reader is too far behind and the stream is given up."""
        if self._overflowed:
            return False
        self._events.append(event)
        self._num_bytes += _size_bytes(event)
        if event.finish_reason is not None:
            self._close(event)
        if self._waiter is not None:
            if not self._waiter.done():
                self._waiter.set_result(None)
        elif self._num_bytes > self._limit_bytes:
            self._overflowed = True
            self._events.clear()
            if self.on_overflow is not None:
                self.on_overflow()
        return not self._overflowed

    def _close(self, event: OutputEvent) -> None:
        choices = self._open.get(event.request_id)
        if choices is not None:
            choices.discard(event.choice)
            if not choices:
                del self._open[event.request_id]

    async def read(self) -> list[OutputEvent]:
        """Events that wait, at least one and at most ``_MAX_READ``; an empty list when the request has ended. Raises StreamOverflow.

        What is left goes on counting as waiting: a reader for whom events are made faster than they can be written is cut off, and does
        not keep the event loop to itself with ever larger pieces.
        """
        if self._events:
            await asyncio.sleep(0)  # others first: this reader is behind
        elif self._open and not self._overflowed:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._overflowed:
            raise StreamOverflow(f"more than {self._limit_bytes} bytes of output waited for their reader")
        events, self._events = self._events[:_MAX_READ], self._events[_MAX_READ:]
        self._num_bytes = self._num_bytes - sum(map(_size_bytes, events)) if self._events else 0
        return events


def _size_bytes(event: OutputEvent) -> int:
    size = _EVENT_BYTES + 4 * len(event.text) + 8 * len(event.token_ids)
    if event.logprobs is None and event.prompt_logprobs is None:
        return size
    num_top = sum(1 + len(entry.top_ids) for entry in (*(event.logprobs or ()), *(event.prompt_logprobs or ())))
    return size + _TOP_ENTRY_BYTES * num_top


class AsyncEngine:
    """Life: ``start`` on the event loop, ``submit`` and ``abort`` on the same loop, ``stop`` once."""

    def __init__(self, engine: Engine, stream_limit_bytes: int = 8 << 20, stall_s: float = 60.0) -> None:
        """``stream_limit_bytes`` of events may wait for a reader; ``stall_s`` without progress makes the engine unhealthy."""
        self.engine = engine
        self.stream_limit_bytes = stream_limit_bytes
        self.stall_s = stall_s
        self._streams: dict[str, EventStream] = {}
        self._inbox: deque[Callable[[], list[OutputEvent]]] = deque()  # run by the loop thread between steps
        self._wake = threading.Condition()
        self._stopping = False
        self.draining = False
        self._died: str | None = None
        self._beat_s = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="octavo-loop", daemon=True)
        self._aio: asyncio.AbstractEventLoop | None = None
        self._idle = asyncio.Event()
        self._old_switch_interval_s = sys.getswitchinterval()

    def start(self) -> None:
        self._aio = asyncio.get_running_loop()
        self._idle.set()
        self._old_switch_interval_s = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._thread.start()

    def check_params(self, params: SamplingParams) -> SamplingParams:
        """As Engine.check_params; also raises EngineUnavailable."""
        self._check_available()
        return self.engine.check_params(params)

    def submit(self, prepared: Sequence[PreparedRequest]) -> EventStream:
        """Queue the prepared requests of one call; their events come on the stream. Raises EngineUnavailable."""
        self._check_available()
        stream = EventStream([p.request for p in prepared], self.stream_limit_bytes)
        self._streams.update((p.request.request_id, stream) for p in prepared)
        self._idle.clear()
        self._post(lambda: self._add(prepared))
        return stream

    def abort(self, stream: EventStream) -> None:
        """Forget a call whose reader has gone, and end what is left of it. Does nothing when all of it has ended and been delivered."""
        request_ids = self._streams.keys() & stream.request_ids
        if request_ids:
            for request_id in request_ids:
                del self._streams[request_id]
            self._post(lambda: self._abort(request_ids))
            self._check_idle()

    @property
    def num_open_requests(self) -> int:
        return len(self._streams)

    def health(self) -> Health:
        """Whether the loop makes progress, and whether requests are taken."""
        engine = self.engine
        if self._died is not None:
            return Health(False, False, f"the engine loop has died: {self._died}")
        if not self._thread.is_alive():
            return Health(False, False, "the engine loop is not running")
        silent_s = time.monotonic() - self._beat_s
        if (engine.has_work or self._inbox) and silent_s > self.stall_s:
            return Health(False, False, f"no step has finished for {silent_s:.0f} s")
        if engine.num_failures_in_a_row >= MAX_FAILURES_IN_A_ROW:
            return Health(False, False, f"the last {engine.num_failures_in_a_row} steps failed")
        if self.draining:
            return Health(True, False, "the server is shutting down")
        return Health(True, True, "ok")

    def drain(self) -> None:
        """Take no new requests from now on; those taken go on."""
        self.draining = True

    async def stop(self, drain_s: float = 0.0) -> None:
        """Drain for at most ``drain_s``, end what is left with error events, join the thread and close the engine. Idempotent.

        Before ``start`` there is only the engine to close.
        """
        self.drain()
        if self._stopping:
            return
        if self._aio is None:
            self._stopping = True
            self.engine.close()
            return
        if not self._idle.is_set() and drain_s > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), drain_s)
        self._post(lambda: self.engine.fail_all("the server is shutting down"))
        with self._wake:
            self._stopping = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)
        await asyncio.sleep(0)  # events posted by the thread's last round are delivered
        self.engine.close()
        sys.setswitchinterval(self._old_switch_interval_s)

    def _check_available(self) -> None:
        if self._died is not None:
            raise EngineUnavailable(f"the engine loop has died: {self._died}")
        if self.draining:
            raise EngineUnavailable("the server is shutting down")

    def _post(self, action: Callable[[], list[OutputEvent]]) -> None:
        with self._wake:
            if not self._inbox and not self.engine.has_work:
                self._beat_s = time.monotonic()  # an idle loop was silent by right: progress is due from now on
            self._inbox.append(action)
            self._wake.notify()

    # --- the loop thread ---

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self._beat_s = time.monotonic()
                events: list[OutputEvent] = []
                while self._inbox:
                    events += self._inbox.popleft()()
                events += self.engine.step()
                if events:
                    self._publish(events)
        except BaseException as error:
            logger.critical("the engine loop has died", exc_info=error)
            self._died = f"{type(error).__name__}: {error}"
            self._publish([])

    def _add(self, prepared: Sequence[PreparedRequest]) -> list[OutputEvent]:
        events = []
        for one in prepared:
            request = one.request
            try:
                self.engine.add(one)
            except Exception as error:  # a request that passed every check and still cannot be queued ends alone
                logger.error("request %s could not be queued", request.request_id, exc_info=error)
                message = f"{type(error).__name__}: {error}"
                events += [_error_event(request.request_id, choice, message) for choice in range(request.params.n)]
        return events

    def _abort(self, request_ids: Iterable[str]) -> list[OutputEvent]:
        return [event for request_id in request_ids for event in self.engine.abort(request_id)]

    def _wait_for_work(self) -> bool:
        """Wait until there is something to do; False when the thread is to end. Meanwhile small pieces of what can wait are done."""
        while not self._is_wanted():
            idle_s = self.engine.idle()
            with self._wake:
                if not self._is_wanted():
                    self._wake.wait(idle_s)
        return bool(self._inbox) or not self._stopping

    def _is_wanted(self) -> bool:
        return bool(self._inbox) or self._stopping or self.engine.has_work

    def _publish(self, events: list[OutputEvent]) -> None:
        assert self._aio is not None
        try:
            self._aio.call_soon_threadsafe(self._deliver, events)
        except RuntimeError:  # the event loop has been closed: nobody reads any more
            self._stopping = True

    # --- back on the event loop ---

    def _deliver(self, events: list[OutputEvent]) -> None:
        for event in events:
            stream = self._streams.get(event.request_id)
            if stream is None:
                continue
            if not stream.put(event):
                self.abort(stream)
            elif event.finish_reason is not None and not stream.is_open(event.request_id):
                del self._streams[event.request_id]
        if self._died is not None:
            self._fail_streams(self._died)
        self._check_idle()

    def _fail_streams(self, message: str) -> None:
        """The loop has died: nothing else will end these streams."""
        for stream in set(self._streams.values()):
            for request_id, choice in stream.open_choices():
                stream.put(_error_event(request_id, choice, message))
        self._streams.clear()

    def _check_idle(self) -> None:
        if not self._streams:
            self._idle.set()


def _error_event(request_id: str, choice: int, message: str) -> OutputEvent:
    return OutputEvent(request_id, choice, "", [], finish_reason=FinishReason.ERROR, error=message)
