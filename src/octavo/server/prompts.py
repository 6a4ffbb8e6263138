"""Prompts of requests: text to token ids, without holding up the streams that run meanwhile.

Owns which work is done aside, on another thread, and how long a text may be. Where a text comes from is the business of ``completions`` and
``chat``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from octavo.models.tokenizer import TokenizerError
from octavo.server.errors import invalid

if TYPE_CHECKING:
    from octavo.models.tokenizer import Tokenizer

LONG = 16_384  # characters or tokens that take about as long as a step

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is continued. ``text`` is None for a prompt that came as token ids."""

    text: str | None
    token_ids: list[int]


async def run_aside(size: int, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call ``function``, on another thread when what it works on is long (``size``: its characters or tokens)."""
    if size > LONG:
        return await asyncio.to_thread(function, *args, **kwargs)
    return function(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class PromptReader:
    """``max_model_len``: tokens of the context."""

    tokenizer: Tokenizer
    max_model_len: int

    async def encode(self, texts: Sequence[str], add_special_tokens: bool, param: str) -> list[list[int]]:
        """Token ids of each text. Raises APIError 400 for text that is not Unicode, or so long that counting its tokens is a waste."""
        for text in texts:
            self._check_length(text, param)
        return await self.encode_all(texts, add_special_tokens, param)

    async def encode_all(self, texts: Sequence[str], add_special_tokens: bool, param: str) -> list[list[int]]:
        """As ``encode``, for texts of any length."""

        def encoded() -> list[list[int]]:
            return [self.tokenizer.encode(text, add_special_tokens) for text in texts]

        try:
            return await run_aside(sum(map(len, texts)), encoded)
        except TokenizerError as error:
            raise invalid(f"{param}: {error}", param) from None

    def _check_length(self, text: str, param: str) -> None:
        if len(text) <= self.max_model_len:
            return  # the usual case, which needs no look at the vocabulary
        limit = self.max_model_len * self.tokenizer.longest_token_bytes
        if len(text) > limit:
            reason = f"the context is {self.max_model_len} tokens, of at most {self.tokenizer.longest_token_bytes} bytes each"
            raise invalid(f"{param}: a text of {len(text)} characters is not allowed; {reason}", param, "context_length_exceeded")
