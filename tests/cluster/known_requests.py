"""Requests whose right answers are known: seeded, of many kinds, asked of one plain engine first and of a cluster then.

An answer is compared whole: texts, finish and stop reasons, log-probabilities to the bit.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.models.tiny import CORPUS

WORDS = CORPUS.split()
_TIMEOUT_S = 300.0


class RequestFailed(RuntimeError):
    """No whole answer: the status, the error in the stream, or what became of the connection."""


@dataclass(frozen=True, slots=True)
class KnownRequest:
    """``body``: of a completion that is streamed."""

    number: int
    body: dict[str, Any]


def known_requests(count: int, seed: int = 0, max_prompt_words: int = 120, max_output: int = 48) -> list[KnownRequest]:
    """Sampled ones for the most part: temperatures, cuts, penalties, stop strings, log-probabilities, several choices, shared prefixes."""
    draw = random.Random(seed)
    shared = [" ".join(draw.choices(WORDS, k=max_prompt_words // 2)) for _ in range(3)]
    return [KnownRequest(number, _body(draw, number, shared, max_prompt_words, max_output)) for number in range(count)]


def _body(draw: random.Random, number: int, shared: Sequence[str], max_words: int, max_output: int) -> dict[str, Any]:
    own = " ".join(draw.choices(WORDS, k=draw.randint(1, max_words // 2)))
    prompt = own if draw.random() < 0.5 else f"{draw.choice(shared)} {own}"
    body: dict[str, Any] = {"prompt": prompt, "seed": draw.getrandbits(32), "max_tokens": draw.randint(4, max_output), "stream": True}
    body["temperature"] = draw.choice((0.0, 0.7, 1.0, 1.3))
    kinds: tuple[Callable[[], dict[str, Any]], ...] = (
        dict,
        lambda: {"top_p": 0.9, "top_k": 50},
        lambda: {"min_p": 0.02, "frequency_penalty": 0.5, "presence_penalty": 0.3},
        lambda: {"repetition_penalty": 1.2, "logprobs": 3},
        lambda: {"stop": [" the", "q"], "ignore_eos": True},
        lambda: {"n": 2, "temperature": 1.0, "logprobs": 0},
        lambda: {"ignore_eos": True, "min_tokens": 3},
    )
    return body | kinds[number % len(kinds)]()


async def ask(port: int, request: KnownRequest, on_piece: Callable[[int], None] = lambda size: None, host: str = "127.0.0.1") -> Any:
    """The answer as it is compared. ``on_piece`` is told of each piece of text, by its characters. Raises RequestFailed."""
    gathered = _Gathered(on_piece)
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            await _events(host, port, json.dumps(request.body).encode(), gathered.event)
    except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
        raise RequestFailed(f"the connection failed: {type(error).__name__}: {error}") from None
    return gathered.answer()


class _Gathered:
    """The pieces of a streamed completion, put together by choice."""

    def __init__(self, on_piece: Callable[[int], None]) -> None:
        self._on_piece = on_piece
        self._choices: dict[int, dict[str, Any]] = {}

    def event(self, content: dict[str, Any]) -> None:
        if "error" in content:
            raise RequestFailed(f"an error in the stream: {content['error']}")
        for piece in content["choices"]:
            choice = self._choices.setdefault(piece["index"], {"text": "", "tokens": [], "token_logprobs": [], "top_logprobs": []})
            choice["text"] += piece["text"]
            self._on_piece(len(piece["text"]))
            for name in ("tokens", "token_logprobs", "top_logprobs"):
                choice[name] += (piece.get("logprobs") or {}).get(name) or []
            for name in ("finish_reason", "stop_reason"):
                if piece.get(name) is not None:
                    choice[name] = piece[name]

    def answer(self) -> Any:
        if not self._choices or any("finish_reason" not in choice for choice in self._choices.values()):
            raise RequestFailed("the stream ended without a finish reason")
        return [self._choices[index] for index in sorted(self._choices)]


async def _events(host: str, port: int, body: bytes, on_event: Callable[[dict[str, Any]], None]) -> None:
    """POST a completion and read its events to [DONE]."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        writer.write(head.encode() + b"Connection: close\r\n\r\n" + body)
        status = (await reader.readline()).decode()
        while (await reader.readline()).strip():
            pass
        if " 200 " not in status:
            raise RequestFailed(f"{status.strip() or 'no answer'}: {(await reader.read(2000)).decode(errors='replace')}")
        held = b""
        while size := int(await reader.readline() or b"0", 16):
            held += await reader.readexactly(size)
            await reader.readexactly(2)
            *events, held = held.split(b"\n\n")
            for event in events:
                content = event.removeprefix(b"data: ")
                if content == b"[DONE]":
                    return
                on_event(json.loads(content))
        raise RequestFailed("the stream ended without [DONE]")
    finally:
        writer.close()


async def ask_all(port: int, requests: Sequence[KnownRequest], at_once: int) -> list[Any]:
    """The answers, in order, ``at_once`` requests at a time. Raises RequestFailed."""
    gate = asyncio.Semaphore(at_once)

    async def one(request: KnownRequest) -> Any:
        async with gate:
            return await ask(port, request)

    return await asyncio.gather(*(one(request) for request in requests))


def difference(answer: Any, right: Any) -> str | None:
    """In what two answers differ; None: in nothing."""
    if answer == right:
        return None
    if len(answer) != len(right):
        return f"{len(answer)} choices instead of {len(right)}"
    for index, (got, wanted) in enumerate(zip(answer, right, strict=True)):
        for name in sorted(got.keys() | wanted.keys()):
            if got.get(name) != wanted.get(name):
                return f"choice {index}, {name}: {got.get(name)!r:.300} instead of {wanted.get(name)!r:.300}"
    return "in order"
