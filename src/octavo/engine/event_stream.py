"""Events of one call on their way to its reader, and the errors of a reader or an engine that is not there.

Owns what waits for a reader and how much of it may. It knows no engine: whoever makes the events puts them in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from octavo.core.request import FinishReason, Request
from octavo.engine.outputs import GenerationError, OutputEvent

_MAX_READ = 64  # events
_EVENT_BYTES = 400  # what a waiting event takes, about, apart from its text, tokens and log-probabilities
_TOP_ENTRY_BYTES = 80


class EngineUnavailable(RuntimeError):
    """No request is taken: the engine is shutting down, is dead, or has too much to do. ``retry_after_s``: a guess at when one may be."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)


class StreamOverflow(GenerationError):
    """A reader left more events waiting than its stream may hold; the request was aborted."""


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


def error_event(request_id: str, choice: int, message: str) -> OutputEvent:
    """The last event of a choice that cannot go on."""
    return OutputEvent(request_id, choice, "", [], finish_reason=FinishReason.ERROR, error=message)
