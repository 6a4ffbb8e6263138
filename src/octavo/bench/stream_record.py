"""What one streamed request saw: its events with their times, its usage, or the error that ended it.

Owns the reading of server-sent events of the completions API. Knows no socket; ``http_client`` feeds it bytes.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any

import msgspec


class _Choice(msgspec.Struct):
    text: str | None = None
    finish_reason: str | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


@dataclass(slots=True)
class StreamRecord:
    """Times in seconds on ``time.perf_counter``.

    ``due_s``: when the request was to be sent; latencies count from it. ``event_times``: of each event that brought a token. ``end_s``:
    when the answer, or the hope of one, ended. ``num_reported``: output tokens as the server counts them (None: it did not say).
    ``error_kind``: connect, timeout, http_STATUS, broken_off (the stream ended early), stream_error (the server said so in the stream),
    protocol (not what the API gives), empty (no token). None: the whole answer came.
    """

    num_prompt: int
    num_output: int
    due_s: float = 0.0
    sent_s: float = 0.0
    event_times: array[float] = field(default_factory=lambda: array("d"))
    end_s: float = 0.0
    num_reported: int | None = None
    num_cached: int = 0
    error_kind: str | None = None
    error_message: str = ""
    texts: list[str] | None = None  # of its events, where somebody wants them

    @property
    def num_tokens(self) -> int:
        """Output tokens: as reported, else one per event."""
        return len(self.event_times) if self.num_reported is None else self.num_reported

    def fail(self, kind: str, message: str) -> None:
        """The first error stands."""
        if self.error_kind is None:
            self.error_kind, self.error_message = kind, message[:500]


class EventReader:
    """Takes the body of a stream, cut anywhere, into a record."""

    __slots__ = ("record", "done", "_rest", "_finish_s")

    def __init__(self, record: StreamRecord) -> None:
        self.record = record
        self.done = False  # [DONE] has come
        self._rest = b""
        self._finish_s: float | None = None  # when a finish reason came

    def feed(self, data: bytes, now_s: float) -> None:
        """Take in what came at ``now_s``; an event counts when its last byte is there."""
        if self._rest:
            data = self._rest + data
        *lines, self._rest = data.split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now_s)

    def close(self, now_s: float) -> None:
        """The body has ended, properly or not."""
        record = self.record
        if self._rest:
            self.feed(b"\n", now_s)
        if not record.end_s:
            record.end_s = now_s
        if not record.event_times and self._finish_s is not None and record.num_reported:
            record.event_times.append(self._finish_s)  # one token without text of its own, such as a special one
        if not self.done and self._finish_s is None:
            record.fail("broken_off", f"the stream ended after {len(record.event_times)} events, without a finish reason and [DONE]")
        elif not record.event_times:
            record.fail("empty", "the stream ended without a token")

    def _event(self, content: bytes, now_s: float) -> None:
        record = self.record
        if content == b"[DONE]":
            self.done = True
            record.end_s = now_s
            return
        try:
            chunk = _decode(content)
        except (msgspec.DecodeError, ValueError) as error:
            record.fail("protocol", f"an event is not a chunk of a completion: {error}")
            return
        if chunk.error is not None:
            record.fail("stream_error", error_text(chunk.error))
        if chunk.choices:
            choice = chunk.choices[0]
            if choice.finish_reason is None or choice.text:
                record.event_times.append(now_s)
                if record.texts is not None:
                    record.texts.append(choice.text or "")
            if choice.finish_reason is not None:
                self._finish_s = now_s
        if chunk.usage is not None:
            record.num_reported = chunk.usage.completion_tokens
            details = chunk.usage.prompt_tokens_details
            record.num_cached = (details.cached_tokens or 0) if details else 0


def error_text(error: Any) -> str:
    """The message in the ``error`` of an answer, which is an object with servers of OpenAI's manners and a string with others."""
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)
