"""Length limits and stop rules of a request, as pure functions of its parameters and the engine's sizes.

A sequence of t tokens needs KV for t - 1 of them: the last token is drawn but never run. So the KV pool allows one token more than it
holds.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.core.request import FinishReason, ParameterError, Request, Sequence

StopEnd = tuple[FinishReason, int | str | None]
"""How a sequence ended, and the token id or string that ended it (None: EOS or length)."""


@dataclass(frozen=True, slots=True)
class LengthLimits:
    """``max_model_len``: prompt and output of a sequence together. ``num_blocks`` x ``block_size``: tokens that the KV pool holds."""

    max_model_len: int
    num_blocks: int
    block_size: int

    @property
    def num_pool_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def max_total_tokens(self) -> int:
        """Most tokens, prompt and output, that one sequence can reach."""
        return min(self.max_model_len, self.num_pool_tokens + 1)

    def check_prompt(self, request: Request) -> None:
        """ParameterError when the prompt is empty or leaves no room for a token. With max_tokens 0 it needs no such room."""
        num_prompt = len(request.prompt_token_ids)
        if num_prompt == 0:
            raise ParameterError("prompt", num_prompt, "the prompt has no tokens; at least one is needed")
        num_new = 0 if request.params.max_tokens == 0 else 1
        if num_prompt + num_new > self.max_model_len:
            room = "" if num_new == 0 else ", one of them for the output"
            limit = f"the prompt has {num_prompt} tokens and the context is {self.max_model_len} tokens{room}"
            raise ParameterError("prompt", num_prompt, limit, code="context_length_exceeded")
        if num_prompt > self.num_pool_tokens:
            pool = f"{self.num_pool_tokens} tokens ({self.num_blocks} blocks of {self.block_size})"
            limit = f"the prompt has {num_prompt} tokens and the KV pool holds {pool}, less than the context of {self.max_model_len}"
            limit += self._remedy(num_prompt)
            raise ParameterError("prompt", num_prompt, limit, code="context_length_exceeded")

    def _remedy(self, num_prompt: int) -> str:
        """What would make room for a prompt that the pool does not hold, where it is not only a larger pool."""
        return ""

    def max_output_tokens(self, request: Request) -> int:
        """Output tokens that ``request`` may make: what is left of the context and the pool, or max_tokens when that is less."""
        left = self._max_total_tokens(request) - len(request.prompt_token_ids)
        return left if request.params.max_tokens is None else min(request.params.max_tokens, left)

    def final_tokens(self, request: Request) -> int:
        """Tokens of a choice whose KV is written if it runs to ``max_tokens``: all but the last one."""
        return len(request.prompt_token_ids) + max(self.max_output_tokens(request) - 1, 0)

    def _max_total_tokens(self, request: Request) -> int:
        """Beams share the full blocks of the prompt for certain; all others each may need for itself. A first token needs no room."""
        if request.params.beam is None:
            return self.max_total_tokens
        num_prompt = len(request.prompt_token_ids)
        num_shared = num_prompt // self.block_size
        num_own = (self.num_blocks - num_shared) // request.params.beam.width
        return min(self.max_total_tokens, max((num_shared + num_own) * self.block_size, num_prompt) + 1)

    def clamped_max_tokens(self, request: Request) -> int | None:
        """The number that an explicit max_tokens is reduced to, or None when it stands as asked."""
        allowed = self.max_output_tokens(request)
        asked = request.params.max_tokens
        return allowed if asked is not None and allowed < asked else None


@dataclass(frozen=True, slots=True)
class StopRule:
    """When a sequence of a request ends by its tokens. Stop strings are the engine's business."""

    eos_token_ids: frozenset[int]
    stop_token_ids: frozenset[int]
    min_tokens: int
    max_tokens: int

    @classmethod
    def of(cls, request: Request, max_tokens: int) -> StopRule:
        params = request.params
        eos = frozenset() if params.ignore_eos else request.eos_token_ids
        return cls(eos, frozenset(params.stop_token_ids), params.min_tokens, max_tokens)

    def test(self, token_id: int, num_output_tokens: int) -> StopEnd | None:
        """The end that ``token_id`` brings as output token number ``num_output_tokens`` (from 1); None: go on.

        A stop wins over the length limit. Stops are tested only once ``min_tokens`` other tokens exist, as in vLLM.
        """
        if num_output_tokens > self.min_tokens:
            if token_id in self.eos_token_ids:
                return FinishReason.STOP, None
            if token_id in self.stop_token_ids:
                return FinishReason.STOP, token_id
        return (FinishReason.LENGTH, None) if num_output_tokens >= self.max_tokens else None

    def append_tokens(self, seq: Sequence, token_ids: list[int], text_stop: tuple[int, str] | None) -> StopEnd | None:
        """Append drawn tokens to ``seq`` up to the first that ends it, and cut ``token_ids`` to those kept. Returns the end, if any.

        ``text_stop``: (tokens to keep, stop string). The earliest end counts; at the same token a stop string wins over a stop token,
        since the engine has cut the text there.
        """
        num_kept = len(token_ids) if text_stop is None else text_stop[0]
        end: StopEnd | None = None if text_stop is None else (FinishReason.STOP, text_stop[1])
        for i, token_id in enumerate(token_ids[:num_kept], 1):
            seq.token_ids.append(token_id)
            if end is None or i < num_kept:
                token_end = self.test(token_id, len(seq.token_ids) - seq.num_prompt_tokens)
                if token_end is not None:
                    num_kept, end = i, token_end
                    break
        del token_ids[num_kept:]
        return end


def check_outputs(request: Request, num_output_tokens: int, rule: StopRule) -> None:
    """ParameterError unless a sequence of ``request`` can go on after so many output tokens that were made elsewhere."""
    if request.params.n != 1 or request.params.beam is not None:
        raise ParameterError("n", request.params.n, "one choice, and no beams, can go on after tokens that were made elsewhere")
    if not 0 < num_output_tokens < rule.max_tokens:
        raise ParameterError("output_token_ids", num_output_tokens, f"at least 1 and less than max_tokens, which is {rule.max_tokens} here")
