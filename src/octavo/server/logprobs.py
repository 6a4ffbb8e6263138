"""Log-probabilities in the API's three shapes: OpenAI completions, OpenAI chat, and vLLM's prompt_logprobs.

Owns text offsets. JSON has no infinity, so a log-probability of -inf is shown as -9999, as in vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from octavo.core.step import TokenLogprobs

if TYPE_CHECKING:
    from octavo.models.tokenizer import Tokenizer

LOWEST = -9999.0


class TokenNames:
    """How tokens are written: as their text, or as "token_id:N" (``return_tokens_as_token_ids``)."""

    def __init__(self, tokenizer: Tokenizer, as_ids: bool) -> None:
        self.tokenizer = tokenizer
        self._as_ids = as_ids

    def name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else self.tokenizer.token_text(token_id)


class CompletionLogprobs:
    """OpenAI's completions shape for one choice, chunk by chunk: tokens, token_logprobs, top_logprobs, text_offset.

    ``text_offset`` counts characters of the choice's text (with ``echo``: of prompt and answer) before the token.
    """

    def __init__(self, names: TokenNames, prompt_token_ids: Sequence[int], echoed_chars: int, skip_special_tokens: bool) -> None:
        self._names = names
        self._stream = names.tokenizer.stream(prompt_token_ids, skip_special_tokens)
        self._offset = echoed_chars

    def chunk(self, entries: Sequence[TokenLogprobs]) -> dict[str, list[Any]]:
        out = empty_completion_logprobs()
        for entry in entries:
            out["text_offset"].append(self._offset)
            self._offset += len(self._stream.push(entry.token_id))
            append_completion_entry(out, entry, self._names, len(entry.top_ids))
        return out


def empty_completion_logprobs() -> dict[str, list[Any]]:
    return {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}


def append_completion_entry(out: dict[str, list[Any]], entry: TokenLogprobs, names: TokenNames, k: int) -> None:
    """All but the offset. ``top_logprobs`` has the best k and the token itself; of tokens with one text the better one stays."""
    own = clamp(entry.logprob)
    out["tokens"].append(names.name(entry.token_id))
    out["token_logprobs"].append(own)
    top: dict[str, float] = {}
    for token_id, logprob in zip(entry.top_ids[:k], entry.top_logprobs[:k], strict=True):
        top.setdefault(names.name(token_id), clamp(logprob))
    top.setdefault(names.name(entry.token_id), own)
    out["top_logprobs"].append(top)


def echoed_logprobs(
    prompt: str, prompt_token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None], names: TokenNames, k: int
) -> dict[str, list[Any]]:
    """The completions shape for an echoed prompt, with the best ``k`` of each entry; its first token has no log-probability.

    Offsets point into ``prompt``. What the tokenizer put before the text (BOS) is at offset 0.
    """
    out = empty_completion_logprobs()
    stream = names.tokenizer.stream((), skip_special_tokens=False)
    shown = [len(stream.push(token_id)) for token_id in prompt_token_ids]
    num_added = max(0, sum(shown) + len(stream.flush()) - len(prompt))
    offset = -num_added
    for token_id, entry, num_chars in zip(prompt_token_ids, entries, shown, strict=True):
        out["text_offset"].append(max(0, offset))
        offset += num_chars
        if entry is None:
            out["tokens"].append(names.name(token_id))
            out["token_logprobs"].append(None)
            out["top_logprobs"].append(None)
        else:
            append_completion_entry(out, entry, names, k)
    return out


def chat_logprobs(entries: Sequence[TokenLogprobs], names: TokenNames) -> dict[str, Any]:
    """OpenAI's chat shape. ``bytes`` of consecutive entries join to the UTF-8 of the text."""
    content = []
    for entry in entries:
        shown = _chat_entry(entry.token_id, entry.logprob, names)
        shown["top_logprobs"] = [_chat_entry(t, lp, names) for t, lp in zip(entry.top_ids, entry.top_logprobs, strict=True)]
        content.append(shown)
    return {"content": content, "refusal": None}


def _chat_entry(token_id: int, logprob: float, names: TokenNames) -> dict[str, Any]:
    return {"token": names.name(token_id), "logprob": clamp(logprob), "bytes": list(names.tokenizer.token_bytes(token_id))}


def prompt_logprobs(entries: Sequence[TokenLogprobs | None], tokenizer: Tokenizer) -> list[dict[str, Any] | None]:
    """vLLM's shape: per prompt position null or {token id: {logprob, rank, decoded_token}}, the best k and the token itself."""
    return [None if entry is None else _ranked(entry, tokenizer) for entry in entries]


def _ranked(entry: TokenLogprobs, tokenizer: Tokenizer) -> dict[str, Any]:
    out = {str(entry.token_id): _ranked_entry(entry.token_id, entry.logprob, entry.rank, tokenizer)}
    for rank, (token_id, logprob) in enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True), 1):
        out[str(token_id)] = _ranked_entry(token_id, logprob, rank, tokenizer)
    return out


def _ranked_entry(token_id: int, logprob: float, rank: int, tokenizer: Tokenizer) -> dict[str, Any]:
    return {"logprob": clamp(logprob), "rank": rank, "decoded_token": tokenizer.token_text(token_id)}


def clamp(logprob: float) -> float:
    return max(logprob, LOWEST)
