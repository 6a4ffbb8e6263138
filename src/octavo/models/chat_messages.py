"""Chat messages as templates want them.

Owns the step from the messages of an OpenAI-style request to values that templates of every habit can print, test and join.
Knows nothing of any template and never changes the caller's messages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = dict[str, Any]


class TemplateError(ValueError):
    """A chat cannot be rendered. The message is meant for the client: the template's own sentence, or the field and its limit.

    ``param`` names the request's field as the user wrote it.
    """

    def __init__(self, message: str, param: str = "messages") -> None:
        self.param = param
        super().__init__(message)


class ToolArguments(dict[str, Any]):
    """Arguments of a tool call: an object to templates that iterate or serialise it, its JSON text to those that print or join it.

    Clients send ``function.arguments`` as a JSON string. Some templates want that string, some the object in it.
    """

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, other: Any) -> str:
        return str(self) + other

    def __radd__(self, other: Any) -> str:
        return other + str(self)


class NullContent(str):
    """The content of an assistant message that only calls tools: null where a template tests for it, no text where it prints it."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return other is None or str.__eq__(self, other) is True

    def __ne__(self, other: object) -> bool:
        return not self == other


def normalise(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Copies of ``messages`` with text content and parsed tool arguments. TemplateError names the field that does not fit.

    Text parts are joined by newlines. Null or absent content is allowed only for an assistant message with tool calls.
    Other keys pass through as they are.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise TemplateError("messages: a list of at least one message is needed")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: Mapping[str, Any], where: str) -> Message:
    if not isinstance(message, Mapping):
        raise TemplateError(f"{where}: a {type(message).__name__} is not a message; it is an object with role and content")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise TemplateError(f"{where}.role: {role!r} is not a role; a non-empty string is needed")
    result = dict(message)
    calls = message.get("tool_calls")
    if calls is not None:
        if not isinstance(calls, Sequence) or isinstance(calls, (str, bytes)):
            raise TemplateError(f"{where}.tool_calls: a list is needed")
        result["tool_calls"] = [_tool_call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)]
    else:
        result.pop("tool_calls", None)  # null is as if absent: templates test whether the key is there
    result["content"] = _content(message.get("content"), where, may_be_null=role == "assistant" and bool(calls))
    return result


def _kind(value: Any) -> str:
    """What JSON calls it."""
    if isinstance(value, Mapping):
        return "an object"
    return "a boolean" if isinstance(value, bool) else "a number" if isinstance(value, int | float) else f"a {type(value).__name__}"


def _content(content: Any, where: str, may_be_null: bool) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        if may_be_null:
            return NullContent()
        raise TemplateError(f"{where}.content: null is allowed only for an assistant message with tool_calls")
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise TemplateError(f"{where}.content: {_kind(content)} is not content; it is a string or a list of parts")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text":
            raise TemplateError(f"{where}.content[{index}]: parts of type {kind!r} are not supported; this model takes text parts")
        if not isinstance(part.get("text"), str):
            raise TemplateError(f"{where}.content[{index}].text: a string is needed")
        texts.append(part["text"])
    return "\n".join(texts)


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    if not isinstance(call, Mapping):
        raise TemplateError(f"{where}: an object with function.name and function.arguments is needed")
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise TemplateError(f"{where}.function: an object with name and arguments is needed")
    return {**call, "function": {**function, "arguments": _arguments(function.get("arguments"), f"{where}.function.arguments")}}


def _arguments(value: Any, where: str) -> ToolArguments:
    """The object in ``arguments``. An empty string and null mean no arguments; anything but an object is refused."""
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value, parse_constant=_not_a_number)
        except (ValueError, RecursionError):
            raise TemplateError(f"{where}: not valid JSON") from None
    elif value is None or isinstance(value, str):
        value = {}
    if not isinstance(value, Mapping):
        raise TemplateError(f"{where}: a JSON object is needed, not a {type(value).__name__}")
    return ToolArguments(value)


def _not_a_number(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def leading_system(messages: Sequence[Message]) -> int:
    """How many system messages stand at the start."""
    count = 0
    while count < len(messages) and messages[count]["role"] == "system":
        count += 1
    return count


def merge_system(messages: Sequence[Message]) -> list[Message] | None:
    """The leading system messages put before the text of the first user turn, a blank line between; None if no user turn follows."""
    count = leading_system(messages)
    if not count or count == len(messages) or messages[count]["role"] != "user":
        return None
    text = "\n\n".join([message["content"] for message in messages[: count + 1]])
    return [{**messages[count], "content": text}, *messages[count + 1 :]]
