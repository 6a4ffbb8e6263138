"""The engine behind an asyncio program: one thread runs steps, the event loop's thread adds requests and reads their events.

Owns one stream of events per request, aborting and draining; the thread is ``engine_thread``'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Unpack

from octavo.core.clock import Clock
from octavo.core.request import SamplingParams
from octavo.engine.engine import Engine
from octavo.engine.engine_thread import EngineThread
from octavo.engine.event_stream import EngineUnavailable, EventStream, error_event
from octavo.engine.outputs import OutputEvent
from octavo.engine.params import PreparedRequest, RequestOptions
from octavo.engine.serving import Cluster, Health, Reports

if TYPE_CHECKING:
    from octavo.engine.replay_advice import Replayer
    from octavo.models.loaded import LoadedModel

logger = logging.getLogger("octavo.engine")

MAX_FAILURES_IN_A_ROW = 3


class AsyncEngine:
    """Life: ``start`` on the event loop, ``submit`` and ``abort`` on the same loop, ``stop`` once. A ``ServingEngine``."""

    cluster: Cluster | None = None  # it has no workers

    def __init__(self, engine: Engine, stream_limit_bytes: int = 8 << 20, stall_s: float = 60.0) -> None:
        """``stream_limit_bytes`` of events may wait for a reader; ``stall_s`` without progress makes the engine unhealthy."""
        self.engine = engine
        self.stream_limit_bytes = stream_limit_bytes
        self.stall_s = stall_s
        self._streams: dict[str, EventStream] = {}
        self._stopping = False
        self.draining = False
        self._thread = EngineThread(engine, self._deliver)
        self._idle = asyncio.Event()

    def start(self) -> None:
        self._idle.set()
        self._thread.start()

    async def ready(self) -> None:
        """See ServingEngine: it is, as soon as it has been made."""

    @property
    def model(self) -> LoadedModel:
        return self.engine.model

    @property
    def model_name(self) -> str:
        return self.engine.config.model.served_model_name or self.engine.model.name

    @property
    def max_model_len(self) -> int:
        return self.engine.max_model_len

    @property
    def fingerprint(self) -> str:
        return self.engine.backend.fingerprint()

    @property
    def clock(self) -> Clock:
        return self.engine.clock

    @property
    def num_remembered(self) -> int:
        return self.engine.timeline.ended_records.capacity

    def room(self, num_prompt_tokens: int) -> int:
        """See ServingEngine."""
        return self.engine.room(num_prompt_tokens)

    def blocked(self, request_ids: Iterable[str], begin_s: float, end_s: float) -> None:
        """See ServingEngine."""
        self.engine.timeline.blocked(request_ids, begin_s, end_s)

    def delivered(self, request_ids: Iterable[str], now_s: float) -> None:
        """See ServingEngine."""
        self.engine.timeline.delivered(request_ids, now_s)

    def reports(self, shows_misses: bool, replayer: Replayer | None = None) -> Reports:
        """See ServingEngine."""
        from octavo.engine.reports import EngineReports

        return EngineReports(self.engine, shows_misses, replayer)

    def prepare_checked(
        self, prompt_token_ids: list[int], params: SamplingParams, request_id: str | None = None, **options: Unpack[RequestOptions]
    ) -> PreparedRequest:
        """See ServingEngine."""
        return self.engine.prepare_checked(prompt_token_ids, params, request_id, **options)

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
        self._thread.post(lambda: self._add(prepared))
        return stream

    def abort(self, stream: EventStream) -> None:
        """Forget a call whose reader has gone, and end what is left of it. Does nothing when all of it has ended and been delivered."""
        request_ids = self._streams.keys() & stream.request_ids
        if request_ids:
            for request_id in request_ids:
                del self._streams[request_id]
            self._thread.post(lambda: self._abort(request_ids))
            self._check_idle()

    @property
    def num_open_requests(self) -> int:
        return len(self._streams)

    def health(self) -> Health:
        """Whether the loop makes progress, and whether requests are taken."""
        engine = self.engine
        if self._thread.died is not None:
            return Health(False, False, f"the engine loop has died: {self._thread.died}")
        if not self._thread.is_alive:
            return Health(False, False, "the engine loop is not running")
        silent_s = self._thread.silent_s
        if silent_s > self.stall_s:
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
        if not self._thread.was_started:
            self._stopping = True
            self.engine.close()
            return
        if not self._idle.is_set() and drain_s > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), drain_s)
        self._thread.post(lambda: self.engine.fail_all("the server is shutting down"))
        self._stopping = True
        await self._thread.stop()
        self.engine.close()

    def _check_available(self) -> None:
        if self._thread.died is not None:
            raise EngineUnavailable(f"the engine loop has died: {self._thread.died}")
        if self.draining:
            raise EngineUnavailable("the server is shutting down")

    # --- on the loop thread ---

    def _add(self, prepared: Sequence[PreparedRequest]) -> list[OutputEvent]:
        events = []
        for one in prepared:
            request = one.request
            try:
                self.engine.add(one)
            except Exception as error:  # a request that passed every check and still cannot be queued ends alone
                logger.error("request %s could not be queued", request.request_id, exc_info=error)
                message = f"{type(error).__name__}: {error}"
                events += [error_event(request.request_id, choice, message) for choice in range(request.params.n)]
        return events

    def _abort(self, request_ids: Iterable[str]) -> list[OutputEvent]:
        return [event for request_id in request_ids for event in self.engine.abort(request_id)]

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
        if self._thread.died is not None:
            self._fail_streams(self._thread.died)
        self._check_idle()

    def _fail_streams(self, message: str) -> None:
        """The loop has died: nothing else will end these streams."""
        for stream in set(self._streams.values()):
            for request_id, choice in stream.open_choices():
                stream.put(error_event(request_id, choice, message))
        self._streams.clear()

    def _check_idle(self) -> None:
        if not self._streams:
            self._idle.set()
