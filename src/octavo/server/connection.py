"""One client's connection: uvicorn's HTTP/1.1 protocol, hardened against clients that are slow, endless, gone, or ask for other protocols.

Owns the limits of what lies around a request: the size and time of its head, the rate of its body, how long an answer may wait to be
taken. Whatever it refuses is answered in the shape of every other error. Knows no route and no engine; bodies are bounded by ``asgi``.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

import httptools
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from octavo.server.asgi import JSON_TYPE, TRANSPORT_KEY
from octavo.server.errors import APIError

MAX_HEAD_BYTES = 64 << 10  # request line and headers; also what a chunked body may spend on framing and trailers at least
FRAMING_BYTES_PER_BODY_BYTE = 8  # chunks of one byte take six
MIN_BODY_BYTES_PER_S = 1024
MAX_PIPELINED = 16  # requests that are read before the answer to the first of them is done

_UPGRADE_HEADERS = (b"upgrade", b"http2-settings")


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """``head_s``: for a request's head to arrive, from the connection or its first byte. ``stall_s``: how long a client may take nothing
    of a waiting answer; and what a body may take on top of its bytes at MIN_BODY_BYTES_PER_S. ``max_connections``: at once."""

    head_s: float = 30.0
    stall_s: float = 120.0
    max_connections: int = 4096


class Connection(HttpToolsProtocol):
    """uvicorn's protocol, and these differences:

    - The transport is in the scope, so that a stuck connection can be dropped.
    - Small writes are sent at once.
    - A client that leaves ends all of its requests, the running one and those it had pipelined. (One that sends a long body ahead, before
      the answer to its last request, is not read until then, so its leaving shows late.)
    - Requests to upgrade (h2c, websocket) are served as they are, with their bodies: the server goes on in HTTP/1.1.
    - Heads are bounded, and ``enforce`` cuts off who is too slow.
    - Connections above the limit are turned away, before the process runs out of file descriptors.
    """

    limits = ConnectionLimits()

    @classmethod
    def limited(cls, limits: ConnectionLimits) -> type[Connection]:
        """The protocol with limits of its own; uvicorn makes the instances."""
        return type("LimitedConnection", (cls,), {"limits": limits})

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._running: RequestResponseCycle | None = None  # whose answer is next; ``cycle`` is the one read last
        self._declined: bytes | None = None  # the head, rewritten, of a request to upgrade
        self._num_requests = 0  # begun
        self._in_head = False
        self._head_since_s: float | None = self.loop.time()
        self._head_bytes = 0  # of the last request, like the four below
        self._body_since_s = 0.0
        self._body_bytes = 0
        self._other_bytes = 0  # received in pieces that completed no head and held no body: begun heads, framing, trailers
        self._num_unsent = 0
        self._unsent_since_s = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # asyncio does so only for sockets that name their protocol. Without it a chunk may wait 40 ms for the acknowledgement of the last.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if len(self.connections) > self.limits.max_connections:
            message = f"there are too many connections; at most {self.limits.max_connections} at once"
            self.refuse(APIError(503, message, code="overloaded", headers=((b"retry-after", b"1"),)))

    # --- reading ---

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._head_since_s is None and self._at_rest:
            self._head_since_s = self.loop.time()
        number, body_bytes = self._num_requests, self._body_bytes
        try:
            self._feed(data)
            if self._num_requests == number and (self._in_head or self._reads_body):
                self._count_other(len(data) - (self._body_bytes - body_bytes))
        except httptools.HttpParserError as error:
            cause = error.__context__
            self.refuse(cause if isinstance(cause, APIError) else APIError(400, "the request is not valid HTTP/1.1", code="invalid_http"))
        except APIError as error:
            self.refuse(error)

    def _feed(self, data: bytes) -> None:
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                if self._declined is None:
                    raise httptools.HttpParserError("CONNECT") from None
                data = self._declined + data[upgrade.args[0] :]
                self._declined = None
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does: the first request is answered

    def on_message_begin(self) -> None:
        super().on_message_begin()
        scope: MutableMapping[str, Any] = self.scope  # type: ignore[assignment]
        scope[TRANSPORT_KEY] = self.transport
        self._num_requests += 1
        self._in_head = True
        if self._head_since_s is None:  # else its time runs since the first byte that belonged to no request before it
            self._head_since_s = self.loop.time()
        self._head_bytes = self._body_bytes = self._other_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_since_s = None
        if self.parser.should_upgrade():
            self._declined = self._head_without_upgrade()
            return
        self._body_since_s = self.loop.time()
        super().on_headers_complete()
        if 0 < len(self.pipeline) <= MAX_PIPELINED:
            self.flow.resume_reading()  # a connection that is not read does not show that its client has gone

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._declined is None and not self.parser.should_upgrade():
            super().on_message_complete()

    def _head_without_upgrade(self) -> bytes | None:
        """The head of the request, to be read once more as one that asks for no other protocol; None for CONNECT."""
        method = self.parser.get_method()
        if method == b"CONNECT":
            return None
        lines = [method + b" " + self.url + b" HTTP/1.1"]
        for name, value in self.headers:
            if name == b"connection":
                tokens = [token.strip() for token in value.split(b",")]
                value = b", ".join(token for token in tokens if token.lower() not in _UPGRADE_HEADERS)
            if name not in _UPGRADE_HEADERS and (value or name != b"connection"):
                lines.append(name + b": " + value)
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def _count_head(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        if self._head_bytes > MAX_HEAD_BYTES:
            raise APIError(431, f"the head of the request is too large; at most {MAX_HEAD_BYTES} bytes are read", code="head_too_large")

    def _count_other(self, num_bytes: int) -> None:
        self._other_bytes += num_bytes
        if self._other_bytes > MAX_HEAD_BYTES + FRAMING_BYTES_PER_BODY_BYTE * self._body_bytes:
            what = "the head of the request, or the framing and trailers of its body, are too large"
            raise APIError(431, f"{what}; at most {MAX_HEAD_BYTES} bytes are read", code="head_too_large")

    # --- answering ---

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._end_requests()

    def _end_requests(self) -> None:
        """Tell all requests of this connection that their client has gone."""
        for cycle in (self._running, *(cycle for cycle, _ in self.pipeline)):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self.pipeline.clear()

    def shutdown(self) -> None:
        """As uvicorn's, but a request that has not arrived is not waited for."""
        if self._reads_body:
            self.refuse(APIError(503, "the server is shutting down", code="unavailable"))
        else:
            super().shutdown()

    def refuse(self, error: APIError) -> None:
        """Answer with ``error``, unless another answer has begun or is due first, and close."""
        if self.transport.is_closing():
            return
        running = self._running
        if running is None or running.response_complete or not (running.response_started or self.pipeline):
            body = error.body()
            headers = [*self.server_state.default_headers, JSON_TYPE, (b"content-length", b"%d" % len(body)), (b"connection", b"close")]
            headers += error.headers
            lines = b"".join(b"%b: %b\r\n" % header for header in headers)
            self.transport.write(STATUS_LINE[error.status] + lines + b"\r\n" + body)
        self._end_requests()
        self.transport.close()

    # --- time ---

    @property
    def _at_rest(self) -> bool:
        """No request has a head without an answer."""
        return self.cycle is None or bool(self.cycle.response_complete)

    @property
    def _reads_body(self) -> bool:
        return self.cycle is not None and self.cycle.more_body and not self.cycle.response_complete

    def enforce(self) -> None:
        """Cut the client off when it is too slow. To be called every now and then."""
        limits = self.limits
        now_s = self.loop.time()
        num_unsent = self.transport.get_write_buffer_size()
        if num_unsent == 0 or num_unsent != self._num_unsent:  # it cannot grow for long: whoever writes waits from 64 KiB on
            self._num_unsent, self._unsent_since_s = num_unsent, now_s
        elif now_s - self._unsent_since_s > limits.stall_s:
            self.transport.abort()
        if self._at_rest:
            if self._head_since_s is not None and now_s - self._head_since_s > limits.head_s:
                self.refuse(APIError(408, f"no request has arrived within {limits.head_s:g} s", code="request_timeout"))
        elif self._reads_body:
            self._enforce_body_rate(now_s)

    def _enforce_body_rate(self, now_s: float) -> None:
        stall_s = self.limits.stall_s
        if self.flow.read_paused:  # it is us who do not read
            self._body_since_s = now_s
        elif now_s - self._body_since_s > stall_s + self._body_bytes / MIN_BODY_BYTES_PER_S:
            what = f"less than {MIN_BODY_BYTES_PER_S} bytes a second came over more than {stall_s:g} s"
            self.refuse(APIError(408, f"the body has not arrived: {what}", code="request_timeout"))
