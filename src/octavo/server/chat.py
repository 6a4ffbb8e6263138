"""POST /v1/chat/completions: messages through the model's chat template, and how a choice of the answer looks.

The rendered text is tokenised as it is: all special tokens in it, BOS included, are the template's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from octavo.engine.outputs import CompletionOutput, OutputEvent, RequestOutput
from octavo.models.tokenizer import Tokenizer
from octavo.server.completions import ending
from octavo.server.errors import invalid
from octavo.server.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from octavo.server.openai_types import ChatRequest, TokenizeRequest
from octavo.server.prompts import Prompt, PromptReader, run_aside
from octavo.server.streaming import encode_json

if TYPE_CHECKING:
    from octavo.models.loaded import LoadedModel

_OWN_ARGUMENTS = {"self", "messages", "tools", "add_generation_prompt", "continue_final_message"}
ROLES = ("system", "developer", "user", "assistant", "tool")


async def chat_prompt(request: ChatRequest | TokenizeRequest, num_chars: int, model: LoadedModel, reader: PromptReader) -> Prompt:
    """The conversation as text and token ids. Raises APIError 400 for what the template, or its absence, does not allow.

    ``num_chars``: about what the messages are long.
    """
    if isinstance(request, ChatRequest) and request.stream and request.prompt_logprobs is not None:
        raise invalid("prompt_logprobs: it is not available when stream is true", "prompt_logprobs")
    text = await run_aside(num_chars, render, request, model)
    encode = reader.encode if isinstance(request, ChatRequest) else reader.encode_all
    (token_ids,) = await encode([text], bool(request.add_special_tokens), "messages")
    return Prompt(text, token_ids)


def render(request: ChatRequest | TokenizeRequest, model: LoadedModel) -> str:
    from octavo.models.chat_template import TemplateError

    messages = _check_messages(request.messages)
    if model.chat_template is None:
        raise invalid(f"messages: the model {model.name!r} has no chat template; use /v1/completions", "messages", "no_chat_template")
    extra = request.chat_template_kwargs or {}
    for name in extra.keys() & _OWN_ARGUMENTS:
        raise invalid(f"chat_template_kwargs: {name!r} is a field of the request, not of chat_template_kwargs", "chat_template_kwargs")
    try:
        return model.chat_template.render(messages, request.add_generation_prompt, bool(request.continue_final_message), None, **extra)
    except TemplateError as error:
        raise invalid(str(error), error.param, "chat_template_error") from None


def _check_messages(messages: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Messages of known roles; what is in them is the template's business."""
    if messages is None:
        raise invalid("messages: the field is missing", "messages", "missing_field")
    if not messages:
        raise invalid("messages: [] is not allowed; at least one message is needed", "messages")
    for i, message in enumerate(messages):
        role = message.get("role")
        if role not in ROLES:
            raise invalid(f"messages[{i}].role: {str(role)[:80]!r} is not allowed; one of {', '.join(ROLES)}", "messages")
    return messages


class ChatFormat:
    """Choices as OpenAI's chat completions have them, with vLLM's additions."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, request: ChatRequest, tokenizer: Tokenizer) -> None:
        self._request = request
        self._names = TokenNames(tokenizer, bool(request.return_tokens_as_token_ids))

    def whole(self, index: int, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        request = self._request
        choice = {
            "index": index,
            "message": {"role": "assistant", "content": completion.text, "refusal": None},
            "logprobs": chat_logprobs(completion.logprobs or [], self._names) if request.logprobs else None,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        if request.return_token_ids:
            choice["token_ids"] = completion.token_ids
        return choice

    def whole_fields(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        fields = self.first_chunk_fields(outputs)
        if self._request.prompt_logprobs is not None:
            fields["prompt_logprobs"] = prompt_logprobs(outputs[0].prompt_logprobs or [], self._names.tokenizer)
        return fields

    def first_chunk_fields(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        return {"prompt_token_ids": outputs[0].prompt_token_ids} if self._request.return_token_ids else {}

    def chunks(self, index: int, output: RequestOutput, event: OutputEvent, first: bool) -> list[bytes]:
        """The first event's chunk comes after one with the role alone."""
        chunks = []
        if first:
            role = b'{"role":"assistant","content":""}'
            chunks.append(b'{"index":%d,"delta":%b,"logprobs":null,"finish_reason":null}' % (index, role))
        logprobs = encode_json(chat_logprobs(event.logprobs or [], self._names)) if self._request.logprobs else b"null"
        ids = b',"token_ids":' + encode_json(event.token_ids) if self._request.return_token_ids else b""
        content = encode_json(event.text)
        chunks.append(b'{"index":%d,"delta":{"content":%b},"logprobs":%b,%b%b}' % (index, content, logprobs, ending(event), ids))
        return chunks
