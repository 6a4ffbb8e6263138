"""From what a user asked to what the scheduler runs: limits, seeds, bad words, room for the output.

Owns the checks that need the vocabulary, the tokenizer or the size of the KV pool. It never schedules and keeps no state.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from octavo.core.request import ParameterError, SamplingParams

if TYPE_CHECKING:
    from octavo.models.tokenizer import Tokenizer

MAX_STOPS = 64
MAX_STOP_CHARS = 4096


class ContextLengthError(ParameterError):
    """The prompt leaves no room for the output. ``limit_tokens`` is the true limit, ``num_prompt_tokens`` the true count."""

    def __init__(self, param: str, num_prompt_tokens: int, limit_tokens: int, what: str) -> None:
        super().__init__(param, num_prompt_tokens, "", "context_length_exceeded")
        self.num_prompt_tokens = num_prompt_tokens
        self.limit_tokens = limit_tokens
        self.args = (f"{param}: the prompt has {num_prompt_tokens} tokens; {what}",)


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request must fit: ``max_model_len`` prompt and output tokens together, ``kv_tokens`` positions in the whole KV pool."""

    vocab_size: int
    max_model_len: int
    kv_tokens: int

    def room(self, num_prompt_tokens: int) -> int:
        """Output tokens that a prompt leaves room for. The last token drawn is never computed, so it needs no KV."""
        return min(self.max_model_len, self.kv_tokens + 1) - num_prompt_tokens


@dataclass(frozen=True, slots=True)
class ResolvedParams:
    """``params`` with ``max_tokens`` a number and bad words as token ids; ``warnings`` name what was changed and why."""

    params: SamplingParams
    seed: int
    warnings: list[str]


def check_prompt(token_ids: Sequence[int], limits: Limits, max_tokens: int | None, param: str = "prompt") -> None:
    """Raise ParameterError unless the prompt is token ids of this vocabulary and leaves room for its output."""
    if not token_ids:
        raise ParameterError(param, [], "at least one token is needed")
    try:
        low, high = min(token_ids), max(token_ids)
    except TypeError:
        low, high = -1, -1
    if low < 0 or high >= limits.vocab_size or not all(type(t) is int for t in token_ids):
        bad = next(t for t in token_ids if type(t) is not int or not 0 <= t < limits.vocab_size)
        raise ParameterError(param, bad, f"token ids are integers from 0 to {limits.vocab_size - 1}")
    num, needed = len(token_ids), 0 if max_tokens == 0 else 1
    if num + needed > limits.max_model_len:
        raise ContextLengthError(
            param, num, limits.max_model_len, f"the model's context of {limits.max_model_len} tokens must hold them and at least {needed} more"
        )
    if num > limits.kv_tokens:
        raise ContextLengthError(param, num, limits.kv_tokens, f"the KV cache holds {limits.kv_tokens} tokens in all, so it can never run")


def resolve_params(params: SamplingParams, num_prompt_tokens: int, limits: Limits, tokenizer: "Tokenizer | None") -> ResolvedParams:
    """Check ``params`` and fill in what is left open. Raises ParameterError.

    ``max_tokens`` absent means what is left of the context; above that it is clamped with a warning.
    """
    params.validate(limits.vocab_size)
    if len(params.stop) > MAX_STOPS:
        raise ParameterError("stop", len(params.stop), f"at most {MAX_STOPS} stop strings")
    for stop in params.stop:
        if len(stop) > MAX_STOP_CHARS:
            raise ParameterError("stop", f"{len(stop)} characters", f"a stop string has at most {MAX_STOP_CHARS}")
    warnings: list[str] = []
    room = limits.room(num_prompt_tokens)
    max_tokens = room if params.max_tokens is None else params.max_tokens
    if max_tokens > room:
        limit = "the context" if limits.max_model_len <= limits.kv_tokens else "the KV cache"
        warnings.append(f"max_tokens: {max_tokens} was reduced to {room}, all that {limit} leaves after a prompt of {num_prompt_tokens} tokens")
        max_tokens = room
    min_tokens = params.min_tokens
    if min_tokens > max_tokens:
        warnings.append(f"min_tokens: {min_tokens} was reduced to {max_tokens}, as max_tokens")
        min_tokens = max_tokens
    seed = secrets.randbits(63) if params.seed is None else params.seed & 0xFFFFFFFFFFFFFFFF
    bad_ids = params.bad_words_token_ids + bad_words_token_ids(params.bad_words, tokenizer)
    resolved = replace(params, max_tokens=max_tokens, min_tokens=min_tokens, bad_words_token_ids=bad_ids, seed=seed)
    return ResolvedParams(resolved, seed, warnings)


def bad_words_token_ids(words: Sequence[str], tokenizer: "Tokenizer | None") -> tuple[tuple[int, ...], ...]:
    """Token ids of each word at the start of a text and after a blank (when that is a single other first token, as in vLLM)."""
    if not words:
        return ()
    if tokenizer is None:
        raise ParameterError("bad_words", list(words), "they need a tokenizer, which this engine runs without")
    out: list[tuple[int, ...]] = []
    for word in words:
        plain = tuple(tokenizer.encode(word.lstrip(), add_special_tokens=False))
        if not plain:
            raise ParameterError("bad_words", word, "a word with at least one token that is not blank")
        out.append(plain)
        spaced = tuple(tokenizer.encode(" " + word.lstrip(), add_special_tokens=False))
        if spaced and spaced[0] != plain[0] and len(spaced) == len(plain):
            out.append(spaced)
    return tuple(out)
