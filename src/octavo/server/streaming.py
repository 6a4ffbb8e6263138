"""Server-sent events of a streamed answer: fixed frames around the JSON of one choice, cheap enough to send one per token.

Owns the bytes of chunks; what is in a choice is the business of ``completions`` and ``chat``.
"""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.server.asgi import Header

EVENT_STREAM_HEADERS: tuple[Header, ...] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies must not gather events
)
DONE = b"data: [DONE]\n\n"

encode_json = msgspec.json.Encoder().encode


class Frames:
    """Chunks of one response: the same id, object, created and model in each; ``usage`` null on all but the last when it is wanted."""

    def __init__(self, shared: dict[str, Any], include_usage: bool) -> None:
        self._head = b"data: " + encode_json(shared)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        self._first_extra = b""

    def add_to_first(self, fields: dict[str, Any]) -> None:
        """More top-level fields for the first chunk."""
        self._first_extra = b"]," + encode_json(fields)[1:-1]

    def chunk(self, choice: bytes, fields: dict[str, Any] | None = None) -> bytes:
        """A chunk with one choice, given as JSON. ``fields``: more top-level fields of this one."""
        extra, self._first_extra = self._first_extra, b""
        if fields:
            extra = (extra or b"]") + b"," + encode_json(fields)[1:-1]
        if extra:
            return self._head + choice + extra + self._tail[1:]
        return self._head + choice + self._tail

    def usage(self, usage: dict[str, Any], fields: dict[str, Any] | None = None) -> bytes:
        """The last chunk: no choices, the totals."""
        return self._head + b"]," + encode_json({"usage": usage} | (fields or {}))[1:-1] + b"}\n\n"


def error_event(content: dict[str, Any]) -> bytes:
    """What a stream that has begun says when it cannot go on."""
    return b"data: " + encode_json({"error": content}) + b"\n\n"
