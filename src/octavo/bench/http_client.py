"""A small HTTP/1.1 client on asyncio, made to load a server on the same machine: it must take little of the processor it measures.

Connections are kept and used again. Bytes go from the socket to httptools' parser and to an ``EventReader`` in one callback, without a task
or a queue between; the time of an event is that of the callback. Knows completions only as far as ``stream_record`` does.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
import time
from typing import Any
from urllib.parse import urlsplit

import httptools
import msgspec

from octavo.bench.stream_record import EventReader, StreamRecord, error_text
from octavo.config import ConfigError

READ_BYTES = 1 << 16
MAX_BODY_BYTES = 1 << 20  # of an answer that is no stream


class HTTPError(RuntimeError):
    """No good answer to a plain request; ``kind`` as in ``StreamRecord.error_kind``."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class _Connection(asyncio.BufferedProtocol):
    """One connection, one answer at a time. ``on_*`` are the parser's callbacks.

    ``buffer`` is what the socket is read into. All connections have the same one, since what is in it is used up before the next read; with
    a plain Protocol asyncio takes 256 KiB from the system for every read and gives it back, half of what an event then costs.
    """

    def __init__(self, timeout_s: float, buffer: memoryview) -> None:
        self._timeout_s = timeout_s
        self._buffer = buffer
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._answered: asyncio.Future[None] | None = None
        self._record: StreamRecord | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._heard_s = 0.0
        self.reader: EventReader | None = None
        self.status = 0
        self.body = b""
        self.failure: tuple[str, str] | None = None  # kind and message, when the answer did not end properly
        self.complete = False
        self._framed = False  # the answer says where it ends (by length or chunks), so that a closed connection is no end
        self._is_stream = False

    @property
    def reusable(self) -> bool:
        return self.complete and self.failure is None and self._transport is not None and not self._transport.is_closing()

    async def exchange(self, payload: bytes, record: StreamRecord | None) -> None:
        """Send a request and wait for the end of its answer, good or bad. ``record``: the request asks for a stream."""
        assert self._transport is not None
        self._record, self.reader = record, None
        self.status, self.body, self.failure, self.complete = 0, b"", None, False
        self._answered = self._loop.create_future()
        self._transport.write(payload)
        self._heard_s = time.perf_counter()
        self._watch = self._loop.call_later(self._timeout_s, self._check_silence)
        try:
            await self._answered
        finally:
            self._watch.cancel()
            self._answered = None

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, num_bytes: int) -> None:
        self._heard_s = time.perf_counter()
        try:
            self._parser.feed_data(self._buffer[:num_bytes])
        except httptools.HttpParserError as error:
            self._end(("protocol", f"the answer is not HTTP: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        self._heard_s = time.perf_counter()
        until_close = self.status and not self._framed
        self._end(None if until_close and error is None else ("broken_off", f"the connection was closed{self._after()}"))

    def on_message_begin(self) -> None:
        self._framed = False
        self._is_stream = False

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name in (b"content-length", b"transfer-encoding"):
            self._framed = True
        elif name == b"content-type":
            self._is_stream = value.lower().startswith(b"text/event-stream")

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if self.status == 200 and self._is_stream and self._record is not None:
            self.reader = EventReader(self._record)

    def on_body(self, body: bytes) -> None:
        if self.reader is not None:
            self.reader.feed(body, self._heard_s)
        elif len(self.body) < MAX_BODY_BYTES:
            self.body += body

    def on_message_complete(self) -> None:
        self.complete = self._parser.should_keep_alive()
        self._end(None)

    def _end(self, failure: tuple[str, str] | None) -> None:
        if self._answered is None or self._answered.done():
            return
        self.failure = failure
        self._answered.set_result(None)

    def _after(self) -> str:
        if self.reader is not None:
            return f" after {len(self.reader.record.event_times)} events"
        return " in the middle of the answer" if self.status else " before the answer"

    def _check_silence(self) -> None:
        """Looks again when the limit may have been reached: cheaper than a new timer for each event."""
        left_s = self._heard_s + self._timeout_s - time.perf_counter()
        if left_s <= 0:
            self._end(("timeout", f"nothing came for {self._timeout_s:g} s{self._after()}"))
        else:
            self._watch = self._loop.call_later(left_s, self._check_silence)


class HTTPClient:
    """Requests to one server. ``timeout_s``: longest silence of the server, and longest time to connect."""

    def __init__(self, url: str, api_key: str | None = None, timeout_s: float = 300.0) -> None:
        """Raises ConfigError for a URL that is not http(s)://host[:port][/path]."""
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"url: {url!r} is not allowed; {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ConfigError(f"url: {url!r} is not allowed; it is to be like http://127.0.0.1:8000")
        self.url = url.rstrip("/")
        self._host = parts.hostname
        self._port = port or (443 if parts.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._timeout_s = timeout_s
        key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._head = f"Host: {parts.netloc.rpartition('@')[2]}\r\nContent-Type: application/json\r\n{key}".encode()
        self._idle: list[_Connection] = []
        self._buffer = memoryview(bytearray(READ_BYTES))

    async def get_json(self, path: str) -> Any:
        """The JSON of a 200. Raises HTTPError."""
        head = f"GET {self._path}{path} HTTP/1.1\r\n".encode() + self._head + b"\r\n"
        connection = await self._exchange(head, None)
        self._give_back(connection)
        error = _plain_error(connection)
        if error is not None:
            raise HTTPError(*error)
        try:
            return msgspec.json.decode(connection.body)
        except msgspec.DecodeError as problem:
            raise HTTPError("protocol", f"GET {path}: the answer is not JSON: {problem}") from None

    async def stream(self, path: str, body: bytes, record: StreamRecord) -> None:
        """POST ``body`` and take the events of the answer into ``record``, whatever becomes of it."""
        head = f"POST {self._path}{path} HTTP/1.1\r\n".encode() + self._head + b"Content-Length: %d\r\n\r\n" % len(body)
        record.sent_s = time.perf_counter()
        try:
            connection = await self._exchange(head + body, record)
        except HTTPError as error:
            record.end_s = time.perf_counter()
            record.fail(error.kind, str(error))
            return
        self._judge(connection, record)
        self._give_back(connection)

    async def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()
        await asyncio.sleep(0)  # transports close in the next turn of the loop

    def _judge(self, connection: _Connection, record: StreamRecord) -> None:
        reader, now_s = connection.reader, time.perf_counter()
        if connection.failure is not None and not (reader is not None and reader.done):
            record.fail(*connection.failure)
        if reader is not None:
            reader.close(now_s)
            return
        record.end_s = now_s
        kind, message = _plain_error(connection) or ("protocol", "the answer is no event stream")
        record.fail(kind, message)

    async def _exchange(self, payload: bytes, record: StreamRecord | None) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if not connection.reusable:
                continue
            await self._run(connection, payload, record)
            if connection.status or connection.failure is None or connection.failure[0] != "broken_off":
                return connection
            # The server had closed the kept connection before it saw the request: not an error of the request.
        connection = await self._connect()
        await self._run(connection, payload, record)
        return connection

    async def _run(self, connection: _Connection, payload: bytes, record: StreamRecord | None) -> None:
        try:
            await connection.exchange(payload, record)
        except asyncio.CancelledError:
            connection.close()
            raise

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._timeout_s):
                _, connection = await loop.create_connection(self._new_connection, self._host, self._port, ssl=self._ssl)
        except TimeoutError:
            raise HTTPError("timeout", f"no connection within {self._timeout_s:g} s") from None
        except OSError as error:
            raise HTTPError("connect", f"no connection: {_reason(error)}") from None
        return connection

    def _new_connection(self) -> _Connection:
        return _Connection(self._timeout_s, self._buffer)

    def _give_back(self, connection: _Connection) -> None:
        if connection.reusable:
            self._idle.append(connection)
        else:
            connection.close()


def _reason(error: OSError) -> str:
    """asyncio's own text for a refused connection names an address and not the reason."""
    return os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)


def _plain_error(connection: _Connection) -> tuple[str, str] | None:
    """What is wrong with an answer that was to be a good one; None: nothing but, perhaps, its content."""
    if connection.failure is not None:
        return connection.failure
    if connection.status == 200:
        return None
    text = connection.body.decode("utf-8", "replace")
    with contextlib.suppress(msgspec.DecodeError):
        content = msgspec.json.decode(connection.body)
        if isinstance(content, dict) and "error" in content:
            text = error_text(content["error"])
    return f"http_{connection.status}", text.strip() or "no reason given"
