"""The few ASGI pieces the server is made of: bounded bodies, JSON answers, work that ends when its client leaves, and the key check.

Knows nothing of models or engines. Works on any ASGI server; ``TRANSPORT_KEY`` in the scope, where the server puts it, lets a stuck
connection be dropped at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any

import msgspec

from octavo.server.errors import APIError, as_api_error

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Header = tuple[bytes, bytes]

TRANSPORT_KEY = "octavo.transport"
SMALL_BODY_BYTES = 64 << 10
DISCARD_S = 2.0  # how long the rest of a refused body is read and dropped
JSON_TYPE: Header = (b"content-type", b"application/json")


class ClientLeft(Exception):
    """The connection was closed before the request was read."""


class BodyRefused(APIError):
    """The rest of the body is not read, so the connection cannot be used again."""

    def __init__(self, status: int, message: str, code: str, headers: tuple[Header, ...] = ()) -> None:
        super().__init__(status, message, code=code, headers=((b"connection", b"close"), *headers))


class BodyReader:
    """Reads bodies of at most ``limit_bytes``, and has room for ``num_whole`` of that size in unfinished requests at once.

    Bodies of up to SMALL_BODY_BYTES need no room, so that a few large ones, however slow, keep nobody else out.
    """

    def __init__(self, limit_bytes: int, num_whole: int = 8) -> None:
        self._limit_bytes = limit_bytes
        self._room_bytes = self._total_bytes = limit_bytes * num_whole

    @contextlib.asynccontextmanager
    async def read(self, scope: Scope, receive: Receive) -> AsyncIterator[bytes]:
        """The whole body; its room is taken until the end of the block. Raises BodyRefused as soon as it is known to be too large or
        to find no room, APIError 415 for a compressed one, ClientLeft when the client leaves."""
        encoding = header(scope, b"content-encoding")
        if encoding is not None and encoding.strip().lower() not in (b"", b"identity"):
            shown = encoding[:80].decode("latin-1")
            raise APIError(415, f"content-encoding: {shown!r} is not supported; bodies are read as they are", code="unsupported_encoding")
        declared = header(scope, b"content-length")
        if declared is not None and declared.isdigit():
            self._check_size(int(declared))
        held_bytes = 0
        try:
            chunks: list[bytes] = []
            num_bytes = 0
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientLeft
                chunks.append(message.get("body", b""))
                num_bytes += len(chunks[-1])
                more = message.get("more_body", False)
                self._check_size(num_bytes)
                if num_bytes > SMALL_BODY_BYTES:
                    held_bytes += self._take_room(num_bytes - held_bytes)
            yield b"".join(chunks)
        finally:
            self._room_bytes += held_bytes

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > self._limit_bytes:
            raise BodyRefused(413, f"the body is too large; at most {self._limit_bytes} bytes are read", code="body_too_large")

    def _take_room(self, num_bytes: int) -> int:
        if num_bytes > self._room_bytes:
            what = f"bodies of unfinished requests fill the {self._total_bytes} bytes there are for them"
            message = f"{what}; try again, or with at most {SMALL_BODY_BYTES} bytes"
            raise BodyRefused(503, message, code="overloaded", headers=((b"retry-after", b"1"),))
        self._room_bytes -= num_bytes
        return num_bytes


async def refuse_body(receive: Receive, send: Send, error: BodyRefused, headers: tuple[Header, ...]) -> None:
    """Answer while the client still sends, then discard for a while: closing at once would reset the connection under the answer."""
    body = error.body()
    start_headers = [(b"content-length", str(len(body)).encode()), JSON_TYPE, *error.headers, *headers]
    await send({"type": "http.response.start", "status": error.status, "headers": start_headers})
    await send({"type": "http.response.body", "body": body, "more_body": True})
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_S):
            while (message := await receive())["type"] == "http.request" and message.get("more_body", False):
                pass
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def request_id(scope: Scope) -> bytes:
    """The client's X-Request-Id when it is short and printable, else a new one."""
    given = header(scope, b"x-request-id")
    if given is not None and 0 < len(given) <= 128 and all(33 <= c <= 126 for c in given):
        return given
    return uuid.uuid4().hex.encode()


def header(scope: Scope, name: bytes) -> bytes | None:
    """The first header called ``name`` (lower case)."""
    return next((value for key, value in scope["headers"] if key == name), None)


async def send_body(
    send: Send, status: int, body: bytes, headers: tuple[Header, ...] = (JSON_TYPE,), until_taken: bool = False
) -> None:
    """``until_taken``: return only when the client has taken the body but for what buffers hold: servers wait before the next message."""
    start_headers = [(b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": start_headers})
    await send({"type": "http.response.body", "body": body, "more_body": until_taken})
    if until_taken:
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def send_json(
    send: Send, content: Any, status: int = 200, headers: tuple[Header, ...] = (), until_taken: bool = False
) -> None:
    """See ``send_body``."""
    await send_body(send, status, msgspec.json.encode(content), (JSON_TYPE, *headers), until_taken)


async def send_error(send: Send, error: Exception, headers: tuple[Header, ...] = ()) -> None:
    api_error = as_api_error(error)
    await send_body(send, api_error.status, api_error.body(), (JSON_TYPE, *api_error.headers, *headers))


async def until_disconnect(receive: Receive, work: Awaitable[None]) -> None:
    """Await ``work``, cancelling it when the client leaves first. The body must have been read. Exceptions of ``work`` pass through.

    Servers cancel streaming responses of their own accord at best, and plain ones not at all; this holds for both.
    """
    worker = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((worker, watcher), return_when=asyncio.FIRST_COMPLETED)
        if worker.done():
            worker.result()
    finally:
        for task in (worker, watcher):
            if not task.done():
                task.cancel()
        await asyncio.gather(worker, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def drop_connection(scope: Scope) -> None:
    """Close a connection without waiting for its client to take what is buffered; the response's task then sees a disconnect."""
    transport = scope.get(TRANSPORT_KEY)
    if transport is not None:
        transport.abort()


class KeyCheck:
    """Refuses every request without the right bearer key, but for ``open_paths``; so a route added later is covered.

    Only a hash of the key is kept, and comparison takes constant time.
    """

    def __init__(self, app: App, api_key: str, open_paths: frozenset[str]) -> None:
        self._app = app
        self._key_hash = hashlib.sha256(api_key.encode()).digest()
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._allowed(scope):
            await self._app(scope, receive, send)
        else:
            error = APIError(401, "a valid API key is needed: Authorization: Bearer KEY", code="invalid_api_key")
            await send_error(send, error, ((b"www-authenticate", b"Bearer"),))

    def _allowed(self, scope: Scope) -> bool:
        if scope["type"] != "http":
            return False
        if scope["path"] in self._open_paths:
            return True
        values = [value for key, value in scope["headers"] if key == b"authorization"]
        if len(values) != 1:
            return False
        scheme, _, key = values[0].partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(hashlib.sha256(key).digest(), self._key_hash)
