"""`octavo chat`: a conversation in the terminal. Ctrl-C stops the answer, not the program; Ctrl-D or /exit leaves."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

import click

from octavo.cli.options import engine_options, model_options
from octavo.cli.run import open_llm, sampling_options, sampling_params

if TYPE_CHECKING:
    from octavo.core.request import SamplingParams
    from octavo.engine.llm import LLM

HELP = "/reset forgets the conversation, /exit (or Ctrl-D) leaves, Ctrl-C stops an answer"


@click.command()
@model_options
@sampling_options(default_temperature=0.7)
@engine_options
def chat(system: str, **options: Any) -> None:
    """Talk with a model: streamed, over several turns."""
    params = sampling_params(options)
    with open_llm(options) as llm:
        if llm.engine.model.chat_template is None:
            raise click.UsageError(f"model {options['model']!r} has no chat template; `octavo run` continues a prompt with it")
        Conversation(llm, params, system).talk()


class Conversation:
    """Messages so far, and the loop that reads one and answers it."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str) -> None:
        self.llm = llm
        self.params = params
        self.start = [{"role": "system", "content": system}] if system else []
        self.messages = list(self.start)

    def talk(self) -> None:
        if sys.stdin.isatty():
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  (gives input() line editing and history)
        click.echo(HELP)
        while True:
            try:
                line = input("> ").strip()
            except EOFError:
                click.echo()
                return
            except KeyboardInterrupt:
                click.echo()
                continue
            if line == "/exit":
                return
            if line == "/reset":
                self.messages = list(self.start)
                click.echo("(forgotten)")
            elif line.startswith("/"):
                click.echo(HELP)
            elif line:
                self.answer(line)

    def answer(self, text: str) -> None:
        """Stream one answer. What was said until a Ctrl-C stays in the conversation; a refused turn does not."""
        from octavo.core.request import ParameterError

        messages = [*self.messages, {"role": "user", "content": text}]
        parts: list[str] = []
        try:
            self._stream(messages, parts)
        except KeyboardInterrupt:
            click.echo(" (stopped)", nl=False)
        except ParameterError as e:
            click.echo(f"octavo: {e} (/reset starts anew)", err=True)
            return
        click.echo()
        self.messages = [*messages, {"role": "assistant", "content": "".join(parts)}]

    def _stream(self, messages: list[dict[str, str]], parts: list[str]) -> None:
        """Show an answer and add its pieces to ``parts``; leaving early ends it in the engine too."""
        events = self.llm.stream_chat(messages, self.params)
        cut = False
        try:
            for event in events:
                parts.append(event.text)
                cut = event.finish_reason == "length"
                click.echo(event.text, nl=False)
        finally:
            events.close()
        if cut:
            click.echo(" (cut)", nl=False)
