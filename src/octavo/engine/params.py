"""From what a user asked to what the scheduler runs: limits, seeds, bad words, room for the output.

Owns the checks that need the vocabulary, the tokenizer or the size of the KV pool. It never schedules and keeps no state between requests.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypedDict

from octavo.core.limits import LengthLimits
from octavo.core.request import MAX_LOGPROBS, BeamParams, ParameterError, Request, SamplingParams, num_places

if TYPE_CHECKING:
    from octavo.core.speculative_params import SpeculativeParams
    from octavo.models.tokenizer import Tokenizer

MAX_STOPS = 64
MAX_STOP_CHARS = 4096
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_CHARS = 256


class RequestOptions(TypedDict, total=False):
    """What a request may say besides its prompt and how tokens are drawn; fields and defaults of ``Request``."""

    cache_salt: str | None
    speculative: SpeculativeParams | None
    priority: int
    user: str | None
    session: str | None
    received_s: float | None


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that the scheduler will take; ``warnings`` name what was changed about it and why."""

    request: Request
    warnings: list[str]


@dataclass(frozen=True, slots=True)
class RequestPreparer:
    """What the checks of a request need. ``tokenizer`` None: token ids only (simulation)."""

    vocab_size: int
    limits: LengthLimits
    max_n: int  # choices that can run together
    eos_token_ids: frozenset[int]
    tokenizer: Tokenizer | None = None

    def check(self, params: SamplingParams) -> SamplingParams:
        """Check and resolve what depends on no prompt, once for a call of many. Raises ParameterError for the first field at fault.

        Bad words become token ids, and a ``top_k`` that leaves out nothing becomes 0.
        """
        for name, ids in (("allowed_token_ids", params.allowed_token_ids), ("stop_token_ids", params.stop_token_ids)):
            if ids is not None and len(ids) > self.vocab_size:
                raise ParameterError(name, f"{len(ids)} entries", f"at most as many as there are tokens ({self.vocab_size})")
        params.validate(self.vocab_size)
        if num_places(params) > self.max_n:
            name = "n" if params.beam is None else "beam_width"
            raise ParameterError(name, num_places(params), f"at most max_num_seqs ({self.max_n}), since all of them run together")
        if params.beam is not None:
            self._check_beam(params, params.beam)
            params = replace(params, temperature=0.0)
        _check_texts("stop", params.stop, MAX_STOPS, MAX_STOP_CHARS)
        _check_texts("bad_words", params.bad_words, MAX_BAD_WORDS, MAX_BAD_WORD_CHARS)
        bad_words = params.bad_words_token_ids + bad_words_token_ids(params.bad_words, self.tokenizer)
        top_k = params.top_k if params.top_k < self.vocab_size else 0
        return replace(params, top_k=top_k, bad_words=(), bad_words_token_ids=bad_words)

    def _check_beam(self, params: SamplingParams, beam: BeamParams) -> None:
        """Enough tokens for so many different hypotheses, and rows that can name as many as the search has to see."""
        if 2 * beam.width > self.vocab_size:
            raise ParameterError("beam_width", beam.width, f"at most half of the vocabulary ({self.vocab_size // 2})")
        ends = self.eos_token_ids | frozenset(params.stop_token_ids)
        if beam.num_candidates(len(ends)) > MAX_LOGPROBS:
            most = MAX_LOGPROBS - beam.width
            limit = f"with a beam width of {beam.width}, at most {most} tokens may end a text, end-of-sequence tokens included"
            raise ParameterError("stop_token_ids", f"{len(ends)} tokens", limit)

    def prepare(self, request: Request) -> PreparedRequest:
        """Check the prompt of ``request``, whose params come from ``check``, and fit them to it. Raises ParameterError.

        ``max_tokens`` becomes a number: what is left of the context when absent, and at most that, with a warning. An absent seed is drawn.
        """
        params = request.params
        self.limits.check_prompt(request)
        _check_token_ids("prompt", request.prompt_token_ids, self.vocab_size)
        max_tokens = self.limits.max_output_tokens(request)
        warnings: list[str] = []
        if self.limits.clamped_max_tokens(request) is not None:
            num_prompt = len(request.prompt_token_ids)
            what = "context" if num_prompt + max_tokens == self.limits.max_model_len else "KV cache"
            reason = f"all that the {what} leaves after {num_prompt} prompt tokens"
            warnings.append(f"max_tokens: {params.max_tokens} was reduced to {max_tokens}, {reason}")
        if params.beam is not None and request.speculative is not None and request.speculative.enabled:
            warnings.append("speculative: nothing was drafted, since beam search draws nothing")
        if params.min_tokens > max_tokens:
            warnings.append(f"min_tokens: {params.min_tokens} was reduced to {max_tokens}, as max_tokens")
        resolved = replace(params, max_tokens=max_tokens, min_tokens=min(params.min_tokens, max_tokens))
        seed = secrets.randbits(63) if params.seed is None else params.seed & 0xFFFFFFFFFFFFFFFF
        return PreparedRequest(replace(request, params=resolved, seed=seed, eos_token_ids=self.eos_token_ids), warnings)


def _check_texts(param: str, texts: Sequence[str], max_texts: int, max_chars: int) -> None:
    if len(texts) > max_texts:
        raise ParameterError(param, f"{len(texts)} entries", f"at most {max_texts}")
    longest = max(map(len, texts), default=0)
    if longest > max_chars:
        raise ParameterError(param, f"a string of {longest} characters", f"at most {max_chars} characters each")


def check_priority(priority: int, scheduling_policy: str) -> None:
    """ParameterError for a priority that is no 64-bit integer, or that the policy would not heed."""
    if type(priority) is not int or not -(2**63) <= priority < 2**63:
        raise ParameterError("priority", priority, "an integer of at most 64 bits")
    if priority and scheduling_policy != "priority":
        raise ParameterError("priority", priority, f"0, or a server with scheduling_policy priority; this one has {scheduling_policy}")


def _check_token_ids(param: str, token_ids: Sequence[int], vocab_size: int) -> None:
    for token in token_ids:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise ParameterError(param, token, f"token ids are integers from 0 to {vocab_size - 1}")


def bad_words_token_ids(words: Sequence[str], tokenizer: Tokenizer | None) -> tuple[tuple[int, ...], ...]:
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
