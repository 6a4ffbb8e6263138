"""`octavo run "prompt"`: one answer, streamed, then exit."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from octavo.cli.options import bad_flag, drafting_config, engine_options, model_options
from octavo.cli.progress import fetched

if TYPE_CHECKING:
    from octavo.core.request import SamplingParams
    from octavo.engine.llm import LLM

DEFAULT_SYSTEM = "You are a helpful assistant."
_SAMPLING_NAMES = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")


def sampling_options(default_temperature: float) -> Callable[[Callable], Callable]:
    """--system, --temperature and their like, shared by run and chat."""
    system_help = "System message of the chat; '' sends none."
    options = [
        click.option("--system", default=DEFAULT_SYSTEM, show_default=True, help=system_help),
        click.option("--max-tokens", type=click.IntRange(1), default=1024, show_default=True, help="Longest answer in tokens."),
        click.option("--temperature", type=float, default=default_temperature, show_default=True, help="0 takes the likeliest token."),
        click.option("--top-p", type=float, default=1.0, show_default=True, help="Draw from the likeliest tokens of this mass; 1: off."),
        click.option("--top-k", type=int, default=0, show_default=True, help="Draw from the k likeliest tokens; 0: off."),
        click.option("--min-p", type=float, default=0.0, show_default=True, help="Least probability relative to the best; 0: off."),
        click.option("--repetition-penalty", type=float, default=1.0, show_default=True, help="Above 1 makes known tokens rarer."),
        click.option("--seed", type=int, help="The same seed gives the same text (default: drawn anew)."),
    ]

    def add(function: Callable) -> Callable:
        for option in reversed(options):
            function = option(function)
        return function

    return add


def sampling_params(options: dict[str, Any]) -> SamplingParams:
    """SamplingParams of the options' values. Raises BadParameter that names the flag; no flag needs the vocabulary for that."""
    from octavo.core.request import ParameterError, SamplingParams

    params = SamplingParams(**{name: options[name] for name in _SAMPLING_NAMES})
    try:
        params.validate(vocab_size=1)
    except ParameterError as error:
        raise bad_flag(error) from None
    return params


def open_llm(options: dict[str, Any]) -> LLM:
    """The model of the options, fetched when needed, on an engine of its own."""
    config = drafting_config(options)
    from octavo.engine.engine import Engine
    from octavo.engine.llm import LLM

    return LLM.from_engine(Engine.load(fetched(config)))


@click.command()
@click.argument("prompt")
@model_options
@click.option("--raw", is_flag=True, help="Continue PROMPT as it is, without the model's chat template.")
@sampling_options(default_temperature=0.0)
@click.option("--stats", is_flag=True, help="Print times, tokens and speed to stderr.")
@engine_options
def run(prompt: str, system: str, raw: bool, stats: bool, **options: Any) -> None:
    """Answer PROMPT with a model and exit. PROMPT "-" is read from stdin."""
    system_given = click.get_current_context().get_parameter_source("system") is ParameterSource.COMMANDLINE
    if raw and system_given:
        raise click.UsageError("--system is part of a chat, and --raw makes none; leave out one of them")
    params = sampling_params(options)
    if prompt == "-":
        prompt = sys.stdin.read()
        if not raw:  # `echo` and here-documents end in a newline that is not part of the question
            prompt = prompt.removesuffix("\n").removesuffix("\r")
    started_s = time.perf_counter()
    with open_llm(options) as llm:
        has_template = llm.engine.model.chat_template is not None
        if not (raw or has_template):
            if system_given:
                raise click.UsageError(f"--system: model {options['model']!r} has no chat template, so it takes no system message")
            click.echo("(the model has no chat template; it continues the prompt as it is)", err=True)
        chat_system = system if has_template and not raw else None
        _answer(llm, prompt, chat_system, params, started_s if stats else None)


def _answer(llm: LLM, prompt: str, system: str | None, params: SamplingParams, started_s: float | None) -> None:
    """Stream the answer to stdout. ``system`` None: no chat. ``started_s``: when loading began, None without statistics."""
    loaded_s = time.perf_counter()
    if system is None:
        events = llm.stream(prompt, params)
    else:
        messages = [{"role": "system", "content": system}] if system else []
        events = llm.stream_chat([*messages, {"role": "user", "content": prompt}], params)
    first_s, num_tokens, cut = 0.0, 0, False
    for event in events:
        first_s = first_s or time.perf_counter()
        num_tokens += len(event.token_ids)
        cut = event.finish_reason == "length"
        click.echo(event.text, nl=False)
    click.echo()
    if cut:
        why = "--max-tokens raises the limit" if num_tokens == params.max_tokens else "the context is full"
        click.echo(f"(cut after {num_tokens} tokens; {why})", err=True)
    if started_s is not None:
        seconds = time.perf_counter() - first_s
        speed = f"{(num_tokens - 1) / seconds:.1f} token/s" if num_tokens > 1 else "-"
        backend = llm.engine.backend
        path = getattr(backend, "isa", backend.name)
        times = f"load {loaded_s - started_s:.2f} s, first token {first_s - loaded_s:.3f} s"
        click.echo(f"{times}, {num_tokens} tokens, then {speed} ({path})", err=True)
