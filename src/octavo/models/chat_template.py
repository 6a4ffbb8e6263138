"""From chat messages to the text a model was trained on.

Owns what happens around the model's own template: system messages for templates that have no place for them, and continuing a
message instead of answering it. The template runs in ``template_sandbox``; messages are prepared by ``chat_messages``.
The text has all special tokens the template writes, so it is tokenized with add_special_tokens=False.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from octavo.models.chat_messages import Message, TemplateError, leading_system, merge_system, normalise

__all__ = ["ChatTemplate", "TemplateError"]

_RESERVED = frozenset(("self", "messages", "tools", "add_generation_prompt", "bos_token", "eos_token"))
# Marks the end of the message to continue. Ends in a blank to show whether the template keeps blanks at a message's end.
_END_MARK = "\u2063octavo:end\u2063 "


class ChatTemplate:
    """A model's chat template. Compiled at the first render (jinja2 is imported then) and shared by equal sources; thread-safe."""

    def __init__(self, source: str, bos_token: str = "", eos_token: str = "") -> None:
        self.source = source
        self.bos_token = bos_token
        self.eos_token = eos_token

    def render(
        self,
        /,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        **extra: Any,
    ) -> str:
        """The text of a chat. TemplateError (a ValueError) carries the template's own sentence or names the field at fault.

        ``add_generation_prompt`` opens the assistant's turn (None: unless ``continue_final_message``). ``continue_final_message``
        ends the text exactly where the final message ends; blanks at its end stay if the template keeps them. Both at once is an
        error. ``extra`` are further variables of the template.

        Where the template refuses or ignores leading system messages, their text goes before that of the first user turn. The
        role "developer" is "system" to templates that do not know it.
        """
        if continue_final_message and add_generation_prompt:
            sentence = "continue_final_message: not together with add_generation_prompt; a message is continued or answered"
            raise TemplateError(sentence, "continue_final_message")
        clash = _RESERVED & extra.keys()
        if clash:
            raise TemplateError(f"chat_template_kwargs: {sorted(clash)[0]!r} is set by other means", "chat_template_kwargs")
        chat = normalise(messages)
        if "developer" not in self.source:
            chat = [{**message, "role": "system"} if message["role"] == "developer" else message for message in chat]
        variables = {"documents": None, **extra, "tools": tools, "add_generation_prompt": add_generation_prompt}
        if add_generation_prompt is None:
            variables["add_generation_prompt"] = not continue_final_message
        if not continue_final_message:
            return self._render(chat, variables)
        if not chat[-1]["content"]:
            raise TemplateError(f"messages[{len(chat) - 1}].content: empty; there is no text to continue")
        chat[-1] = {**chat[-1], "content": chat[-1]["content"] + _END_MARK}
        return _cut_at_mark(self._render(chat, variables))

    def _render(self, chat: list[Message], variables: dict[str, Any]) -> str:
        """Render, with the system messages moved into the first user turn if the template has no place for them."""
        from octavo.models.template_sandbox import TemplateRaised

        count = leading_system(chat)
        merged = merge_system(chat)
        try:
            text = self._run(chat, variables)
        except TemplateRaised:
            if merged is None:
                raise
            return self._run(merged, variables)
        if merged is None or all(message["content"].strip() in text for message in chat[:count]):
            return text
        # Not found as written: either the template rewrote it, or it left it out, which the text without it shows.
        return self._run(merged, variables) if self._run(chat[count:], variables) == text else text

    def _run(self, chat: list[Message], variables: dict[str, Any]) -> str:
        from octavo.models import template_sandbox

        everything = {**variables, "messages": chat, "bos_token": self.bos_token, "eos_token": self.eos_token}
        return template_sandbox.run(template_sandbox.compiled(self.source), everything)


def _cut_at_mark(text: str) -> str:
    end = text.rfind(_END_MARK.rstrip())
    if end < 0:
        raise TemplateError("continue_final_message: this model's chat template does not show the final message", "continue_final_message")
    kept_blanks = text.startswith(_END_MARK, end)
    return text[:end] if kept_blanks else text[:end].rstrip()
