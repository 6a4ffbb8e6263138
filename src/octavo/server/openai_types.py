"""Bodies of requests: what fields there are, and strict reading of JSON into them.

A field of the OpenAI or vLLM API that Octavo does not serve is refused by name unless its value changes nothing (``NEUTRAL``); a field that
nobody defines is reported in the response's ``warnings``. Explicit nulls are as if absent. Knows no engine and no model.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec

from octavo.core.request import SamplingParams, shown
from octavo.server.choices import choice_params
from octavo.server.errors import APIError, invalid

DEFAULT_COMPLETION_TOKENS = 16  # as OpenAI's and vLLM's
MAX_PROMPTS = 2048
MAX_BIASES = 300_000  # above any vocabulary
MAX_WARNINGS = 20
MAX_REQUEST_ID_CHARS = 128
MAX_CACHE_KEY_CHARS = 256
DIAGNOSED_BYTES = 1 << 20  # of a body that is not JSON; a larger one is not searched for what exactly is wrong


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None


class SamplingFields(msgspec.Struct, kw_only=True):
    """Fields that chat and plain completions share; meanings as in SamplingParams."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    cache_salt: str | None = None
    speculative: dict[str, Any] | None = None
    request_id: str | None = None
    priority: int | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    explain: bool | None = None
    warnings: list[str] = []  # filled by parse_body, never read from the body

    def sampling_params(self, logprobs: int | None, **resolved: Any) -> SamplingParams:
        """SamplingParams with defaults for what is absent and ``resolved`` as it is; ranges are checked later, by the engine."""
        resolved |= choice_params(self, logprobs)
        given = {name: value for name in _SAMPLING_NAMES if (value := getattr(self, name)) is not None}
        for name in ("stop", "stop_token_ids", "bad_words", "allowed_token_ids"):
            if isinstance(given.get(name), list):
                given[name] = tuple(given[name])
        return SamplingParams(**given, **resolved, logit_bias=_logit_bias(self.logit_bias or {}))

    def name_of(self, param: str) -> str:
        """The field of this request behind a parameter of the engine, for errors."""
        if param in ("n", "beam_width"):
            return "n" if self.best_of is None else "best_of"
        return param

    def checked_request_id(self) -> str | None:
        """The client's name for the answer. It comes back in ``id`` and is written to the log."""
        name = self.request_id
        if name is not None and not (0 < len(name) <= MAX_REQUEST_ID_CHARS and name.isprintable()):
            limit = f"1 to {MAX_REQUEST_ID_CHARS} printable characters"
            raise invalid(f"request_id: {_shown(name)} is not allowed; {limit}", "request_id")
        return name

    def checked_cache_key(self) -> str | None:
        """The session that the client says this request belongs to; None: none."""
        key = self.prompt_cache_key
        if key is not None and len(key) > MAX_CACHE_KEY_CHARS:
            raise invalid(f"prompt_cache_key: {_shown(key)} is not allowed; at most {MAX_CACHE_KEY_CHARS} characters", "prompt_cache_key")
        return key or None

    def check_stream_options(self) -> bool:
        """Whether a usage chunk is wanted."""
        if self.stream_options is None:
            return False
        if not self.stream:
            raise invalid("stream_options: it is only allowed when stream is true", "stream_options")
        return bool(self.stream_options.include_usage)


_SAMPLING_NAMES = (
    "min_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "allowed_token_ids", "bad_words", "seed", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "skip_special_tokens",
)  # fmt: skip


class CompletionRequest(SamplingFields, kw_only=True):
    """POST /v1/completions. ``max_tokens`` absent means 16, or what is left of the context when that is less."""

    prompt: str | list[Any] | None = None
    echo: bool | None = None
    logprobs: int | None = None

    def prompts(self) -> tuple[list[str], list[list[int]]]:
        """The prompts one by one: texts, or token ids (never both)."""
        prompt = self.prompt
        if prompt is None:
            raise invalid("prompt: it is missing; text, token ids or a list of either is needed", "prompt", "missing_field")
        if isinstance(prompt, str):
            return [prompt], []
        if not prompt:
            raise invalid("prompt: [] is not allowed; at least one prompt is needed", "prompt")
        if _is_token_ids(prompt):
            return [], [prompt]
        if len(prompt) > MAX_PROMPTS:
            raise invalid(f"prompt: {len(prompt)} prompts are not allowed; at most {MAX_PROMPTS} in one request", "prompt")
        if all(isinstance(p, str) for p in prompt):
            return prompt, []
        if all(isinstance(p, list) and _is_token_ids(p) for p in prompt):
            return [], prompt
        raise invalid("prompt: it must be text, token ids (integers), a list of texts, or a list of lists of token ids", "prompt")

    def params(self) -> SamplingParams:
        prompt_logprobs = self.prompt_logprobs
        if self.echo and self.logprobs is not None:
            if self.use_beam_search:
                raise invalid("echo: with logprobs it is not available when use_beam_search is true", "echo")
            prompt_logprobs = max(self.logprobs, prompt_logprobs or 0)
        return self.sampling_params(max_tokens=self.max_tokens, logprobs=self.logprobs, prompt_logprobs=prompt_logprobs)


class ChatRequest(SamplingFields, kw_only=True):
    """POST /v1/chat/completions. ``max_tokens`` and ``max_completion_tokens`` are one thing; absent means up to the context."""

    messages: list[dict[str, Any]] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def params(self) -> SamplingParams:
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise invalid("max_completion_tokens: it differs from max_tokens; give one of them", "max_completion_tokens")
        max_tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid("top_logprobs: it is only allowed when logprobs is true", "top_logprobs")
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return self.sampling_params(max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=self.prompt_logprobs)

    def name_of(self, param: str) -> str:
        if param == "max_tokens" and self.max_completion_tokens is not None:
            return "max_completion_tokens"
        return {"prompt": "messages", "logprobs": "top_logprobs"}.get(param) or super().name_of(param)


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /tokenize: a prompt, or messages through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None
    warnings: list[str] = []


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /detokenize: token ids to text, special tokens written out."""

    tokens: list[int]
    model: str | None = None
    warnings: list[str] = []


# Fields of the OpenAI and vLLM APIs that Octavo does not serve -> values that ask for nothing.
_OFF: tuple[Any, ...] = (None, False)
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "response_format": (None, {"type": "text"}),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "reasoning_effort": (None, "none"),
    "verbosity": (None,),
    "web_search_options": (None,),
    "store": _OFF,
    "suffix": (None, ""),
    "truncate_prompt_tokens": (None,),
    "spaces_between_special_tokens": (None, True),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "structured_outputs": (None,),
    "logits_processors": (None, []),
    "prompt_embeds": (None,),
    "chat_template": (None,),
    "documents": (None, []),
    "mm_processor_kwargs": (None, {}),
    "kv_transfer_params": (None,),
    "vllm_xargs": (None, {}),
    "lora_request": (None,),  # adapters, as other servers call them
    "lora": (None, []),
    "lora_path": (None,),
    "adapter_id": (None,),
}
NEUTRAL_STREAM_OPTIONS: dict[str, tuple[Any, ...]] = {"continuous_usage_stats": _OFF, "include_obfuscation": _OFF}
# Fields that change nothing about the answer by their nature.
METADATA = frozenset({"metadata", "service_tier", "safety_identifier", "parallel_tool_calls"})

_SURROGATE = re.compile("[\ud800-\udfff]")

Body = TypeVar("Body", CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest)


def parse_body(body: bytes, kind: type[Body]) -> Body:
    """Read a JSON body. Raises APIError 400 that names the field to blame."""
    fields = _decode_object(body)
    warnings = _drop_unserved(fields, kind, NEUTRAL)
    stream_options = fields.get("stream_options")
    if isinstance(stream_options, dict):
        warnings += _drop_unserved(stream_options, StreamOptions, NEUTRAL_STREAM_OPTIONS, "stream_options")
    try:
        parsed = msgspec.convert(fields, kind, strict=True)
    except (msgspec.ValidationError, OverflowError) as error:
        param = _param_of(str(error))
        raise invalid(f"{param or 'the body'}: {str(error).split(' - at ')[0]}", param, "invalid_type") from None
    if len(warnings) > MAX_WARNINGS:
        warnings[MAX_WARNINGS:] = [f"{len(warnings) - MAX_WARNINGS} more fields are not of this API; they were ignored"]
    parsed.warnings = warnings
    return parsed


def _drop_unserved(
    fields: dict[str, Any], kind: type[msgspec.Struct], neutral: dict[str, tuple[Any, ...]], parent: str | None = None
) -> list[str]:
    """Take what ``kind`` does not have out of ``fields``, which are the body or its field ``parent``. Returns warnings."""
    warnings = []
    for name in list(fields):
        if name in kind.__struct_fields__ and name != "warnings":
            continue
        value, path = fields.pop(name), name if parent is None else f"{parent}.{name}"
        if name in neutral:
            if value not in neutral[name]:
                raise invalid(f"{path}: {_shown(value)} is not supported by this server", parent or name, "unsupported_parameter")
        elif name not in METADATA or parent is not None:
            warnings.append(f"{_shown(path)} is not a field of this API; it was ignored")
    return warnings


def _decode_object(body: bytes) -> dict[str, Any]:
    try:
        fields = msgspec.json.decode(body)
    except RecursionError:
        raise invalid("the body is nested too deeply", None, "invalid_json") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if len(body) <= DIAGNOSED_BYTES:
            _blame_field(body)
        raise invalid(f"the body is not valid JSON: {error}", None, "invalid_json") from None
    if not isinstance(fields, dict):
        raise invalid("the body must be a JSON object", None, "invalid_json")
    return fields


def _blame_field(body: bytes) -> None:
    """Raise APIError for the top-level field that holds what Python reads and JSON, or Unicode, does not have: NaN, an infinity (as literal
    or by overflow), half of a surrogate pair. Return when none of that is what is wrong."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return
    for name, value in fields.items() if isinstance(fields, dict) else ():
        if any(isinstance(part, float) and not math.isfinite(part) for part in _parts(value)):
            raise invalid(f"{_plain(name)}: the number is not finite; JSON has no NaN or infinity", _plain(name))
        for part in (name, *_parts(value)):
            if isinstance(part, str) and (found := _SURROGATE.search(part)):
                what = f"lone surrogate \\u{ord(found[0]):04x}; text must be valid Unicode"
                raise invalid(f"{_plain(name)}: {what}", _plain(name), "invalid_json")


def _parts(value: Any) -> Iterator[Any]:
    """``value`` and all that is in it, keys of objects too."""
    yield value
    if isinstance(value, dict):
        yield from value
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            yield from _parts(part)


def _plain(name: str) -> str:
    """A field's name as UTF-8 can say it."""
    return _SURROGATE.sub("?", name)


def _param_of(message: str) -> str | None:
    """The top-level field in msgspec's "... - at `$.field...`" or "... missing required field `field`"."""
    found = re.search(r"`\$\.([A-Za-z_]\w*)", message) or re.search(r"missing required field `(\w+)`", message)
    return found[1] if found else None


def _logit_bias(bias: dict[str, float]) -> dict[int, float]:
    """JSON's text keys as token ids, each in its one decimal form, so that no two keys mean the same token."""
    if len(bias) > MAX_BIASES:
        raise invalid(f"logit_bias: {len(bias)} entries are not allowed; at most {MAX_BIASES}", "logit_bias")
    out = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 9 and (key[0] != "0" or key == "0")):
            raise invalid(f"logit_bias: key {_shown(key)} is not a token id", "logit_bias")
        out[int(key)] = value
    return out


def _is_token_ids(prompt: list[Any]) -> bool:
    return all(type(t) is int for t in prompt)


def _shown(value: Any) -> str:
    return shown(value, 80)


__all__ = ["APIError", "ChatRequest", "CompletionRequest", "DetokenizeRequest", "SamplingFields", "TokenizeRequest", "parse_body"]
