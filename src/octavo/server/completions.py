"""POST /v1/completions: prompts as text or token ids, and how a choice of the answer looks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo.engine.outputs import CompletionOutput, OutputEvent, RequestOutput
from octavo.models.tokenizer import Tokenizer
from octavo.server.errors import invalid
from octavo.server.logprobs import CompletionLogprobs, TokenNames, echoed_logprobs, prompt_logprobs
from octavo.server.openai_types import CompletionRequest
from octavo.server.prompts import Prompt, PromptReader, run_aside
from octavo.server.streaming import encode_json


async def completion_prompts(request: CompletionRequest, num_chars: int, reader: PromptReader) -> list[Prompt]:
    """The prompts with their token ids. Text gets what the model's own setting adds (BOS), unless ``add_special_tokens`` is false.

    ``num_chars``: about what the prompts are long.
    """
    if request.stream and request.prompt_logprobs is not None:
        raise invalid("prompt_logprobs: it is not available when stream is true", "prompt_logprobs")
    texts, token_ids = await run_aside(num_chars // 16, request.prompts)
    if texts:
        encoded = await reader.encode(texts, request.add_special_tokens is not False, "prompt")
        return [Prompt(text, ids) for text, ids in zip(texts, encoded, strict=True)]
    return [Prompt(None, ids) for ids in token_ids]


class CompletionFormat:
    """Choices as OpenAI's completions have them, with vLLM's additions."""

    whole_object = chunk_object = "text_completion"

    def __init__(self, request: CompletionRequest, tokenizer: Tokenizer) -> None:
        self._request = request
        self._names = TokenNames(tokenizer, bool(request.return_tokens_as_token_ids))
        self._skip_special = request.skip_special_tokens is not False
        self._logprobs: dict[int, CompletionLogprobs] = {}  # by choice index of a stream

    def whole(self, index: int, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        request = self._request
        echoed = self._echoed_text(output) if request.echo else ""
        logprobs = None
        if request.logprobs is not None:
            logprobs = self._new_logprobs(output, len(echoed)).chunk(completion.logprobs or [])
            if request.echo:
                before = self._echoed_logprobs(output, echoed)
                logprobs = {name: before[name] + values for name, values in logprobs.items()}
        choice = {
            "index": index,
            "text": echoed + completion.text,
            "logprobs": logprobs,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        if request.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs or [], self._names.tokenizer)
        if request.return_token_ids:
            choice |= {"prompt_token_ids": output.prompt_token_ids, "token_ids": completion.token_ids}
        return choice

    def whole_fields(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        return {}

    def first_chunk_fields(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        return {}

    def chunks(self, index: int, output: RequestOutput, event: OutputEvent, first: bool) -> list[bytes]:
        request = self._request
        text = event.text
        if first and request.echo:
            text = self._echoed_text(output) + text
        logprobs = b"null"
        if request.logprobs is not None:
            logprobs = encode_json(self._chunk_logprobs(index, output, event, first))
        ids = b""
        if request.return_token_ids:
            ids = b',"token_ids":' + encode_json(event.token_ids)
            ids += b',"prompt_token_ids":' + (encode_json(output.prompt_token_ids) if first else b"null")
        return [b'{"index":%d,"text":%b,"logprobs":%b,%b%b}' % (index, encode_json(text), logprobs, ending(event), ids)]

    def _chunk_logprobs(self, index: int, output: RequestOutput, event: OutputEvent, first: bool) -> dict[str, list[Any]]:
        before: dict[str, list[Any]] = {}
        if first:
            echoed = self._echoed_text(output) if self._request.echo else ""
            self._logprobs[index] = self._new_logprobs(output, len(echoed))
            if self._request.echo:
                before = self._echoed_logprobs(output, echoed)
        chunk = self._logprobs[index].chunk(event.logprobs or [])
        return {name: before.get(name, []) + values for name, values in chunk.items()}

    def _new_logprobs(self, output: RequestOutput, echoed_chars: int) -> CompletionLogprobs:
        return CompletionLogprobs(self._names, output.prompt_token_ids, echoed_chars, self._skip_special)

    def _echoed_text(self, output: RequestOutput) -> str:
        """The prompt as it came; token ids are written out, special tokens too."""
        if output.prompt is not None:
            return output.prompt
        return self._names.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)

    def _echoed_logprobs(self, output: RequestOutput, echoed: str) -> dict[str, list[Any]]:
        """Of the asked k only, though prompt_logprobs may have asked for more."""
        assert self._request.logprobs is not None
        return echoed_logprobs(echoed, output.prompt_token_ids, output.prompt_logprobs or [None], self._names, self._request.logprobs)


def ending(event: OutputEvent) -> bytes:
    """The fields of a chunk's choice that say whether and why it ended; null until its last chunk."""
    if event.finish_reason is None:
        return b'"finish_reason":null'
    return b'"finish_reason":%b,"stop_reason":%b' % (encode_json(event.finish_reason.value), encode_json(event.stop_reason))
