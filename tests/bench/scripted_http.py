"""An HTTP server whose every byte a test decides: answers are coroutines that write to the socket as they please."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]

STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def event(text: str = "x", finish: str | None = None, **fields: Any) -> bytes:
    """A completion's event with one choice."""
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}
    return b"data: " + json.dumps({"id": "c", "choices": [choice], **fields}).encode() + b"\n\n"


def usage(num_tokens: int, num_cached: int = 0) -> bytes:
    counts = {"prompt_tokens": 1, "completion_tokens": num_tokens, "prompt_tokens_details": {"cached_tokens": num_cached}}
    return b"data: " + json.dumps({"id": "c", "choices": [], "usage": counts}).encode() + b"\n\n"


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def answer_of(num_tokens: int) -> bytes:
    """A whole streamed answer."""
    events = [event() for _ in range(num_tokens - 1)] + [event(finish="length"), usage(num_tokens), DONE]
    return STREAM_HEAD + b"".join(map(chunked, events)) + LAST_CHUNK


def plain(status: int, content: bytes, content_type: str = "application/json") -> bytes:
    return f"HTTP/1.1 {status} X\r\nContent-Type: {content_type}\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content


MODELS = plain(200, b'{"object":"list","data":[{"id":"m"},{"id":"other"}]}')


class ScriptedHTTP:
    """``answers``: what the n-th request gets, bytes or an Answer; the last one is for all that follow. An answer that closes the writer
    ends the connection. ``bodies``, ``heads``: what came. ``most_at_once``: of requests that were being answered."""

    def __init__(self, *answers: bytes | Answer) -> None:
        self._answers = answers
        self.bodies: list[dict[str, Any]] = []
        self.heads: list[str] = []
        self.num_connections = 0
        self.num_running = 0
        self.most_at_once = 0

    async def __aenter__(self) -> ScriptedHTTP:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while not writer.is_closing():
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = next((int(line[15:]) for line in head.lower().splitlines() if line.startswith("content-length:")), 0)
                body = await reader.readexactly(length)
                self.num_running += 1
                self.most_at_once = max(self.most_at_once, self.num_running)
                try:
                    await self._answer(head, body)(writer)
                    await writer.drain()
                finally:
                    self.num_running -= 1
        writer.close()

    def _answer(self, head: str, body: bytes) -> Answer:
        if head.startswith("GET /v1/models "):
            return _write(MODELS)
        self.heads.append(head)
        self.bodies.append(json.loads(body))
        answer = self._answers[min(len(self.bodies), len(self._answers)) - 1]
        return _write(answer) if isinstance(answer, bytes) else answer


def _write(data: bytes) -> Answer:
    async def write(writer: asyncio.StreamWriter) -> None:
        writer.write(data)

    return write


def then_close(data: bytes) -> Answer:
    """Write ``data`` and end the connection."""

    async def write(writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()
        writer.close()

    return write
