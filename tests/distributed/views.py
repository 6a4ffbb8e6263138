"""An engine as tests of routers tell it."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.distributed.views import RouteRequest


@dataclass
class View:
    index: int
    pending_tokens: int = 0
    num_sequences: int = 0
    num_available_blocks: int = 1000
    num_blocks: int = 1000
    pending_s: float = 0.0
    num_unseen: int = 0


def keys(text: str) -> tuple[bytes, ...]:
    """A key for each beginning of ``text``: texts that begin alike have the same first keys."""
    return tuple(text[: i + 1].encode().rjust(8, b".")[-8:] + b"+rest" for i in range(len(text)))


def route(name: str = "r", num_prompt: int = 100, **options: object) -> RouteRequest:
    return RouteRequest(name, num_prompt, **options)  # type: ignore[arg-type]
