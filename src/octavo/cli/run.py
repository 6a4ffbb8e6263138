"""`octavo run "prompt"`: one answer, streamed, then exit."""

from __future__ import annotations

import sys
import time
from typing import Any

import click

from octavo.cli.options import engine_config, engine_options, model_options
from octavo.cli.progress import fetch


DEFAULT_SYSTEM = "You are a helpful assistant."


def sampling_options(default_temperature: float) -> Any:
    """--system, --temperature and their like, shared by run and chat."""

    def add(function: Any) -> Any:
        for option in reversed(
            [
                click.option("--system", default=DEFAULT_SYSTEM, show_default=True, help="System message; '' leaves it to the model's template."),
                click.option("--max-tokens", type=int, default=1024, show_default=True, help="Longest answer in tokens."),
                click.option("--temperature", type=float, default=default_temperature, show_default=True, help="0 is greedy."),
                click.option("--top-p", type=float, default=1.0, show_default=True),
                click.option("--top-k", type=int, default=0, help="0: off."),
                click.option("--min-p", type=float, default=0.0, help="0: off."),
                click.option("--repetition-penalty", type=float, default=1.0, show_default=True),
                click.option("--seed", type=int, help="Same seed, same text."),
            ]
        ):
            function = option(function)
        return function

    return add


def sampling_params(options: dict[str, Any]) -> Any:
    from octavo.core.request import SamplingParams

    names = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
    return SamplingParams(**{name: options[name] for name in names})


def open_llm(options: dict[str, Any]) -> Any:
    """The model of the options, fetched when needed, on an engine of its own."""
    from octavo.engine.engine import Engine
    from octavo.engine.llm import LLM

    config = engine_config({**options, "model": fetch(options["model"])})
    return LLM.from_engine(Engine.load(config))


@click.command()
@click.argument("prompt")
@model_options
@click.option("--raw", is_flag=True, help="Continue the prompt as it is, without the model's chat template.")
@sampling_options(default_temperature=0.0)
@click.option("--stats", is_flag=True, help="Print token counts and speed to stderr.")
@engine_options
def run(prompt: str, system: str, raw: bool, stats: bool, **options: Any) -> None:
    """Answer PROMPT with a model and exit ("-" reads it from stdin)."""
    if prompt == "-":
        prompt = sys.stdin.read()
    started = time.perf_counter()
    with open_llm(options) as llm:
        loaded = time.perf_counter()
        params = sampling_params(options)
        if raw or llm.engine.model.chat_template is None:
            if system and system != DEFAULT_SYSTEM:
                raise click.UsageError("--system needs a model with a chat template, and cannot be used with --raw")
            events = llm.stream(prompt, params)
        else:
            messages = [{"role": "system", "content": system}] if system else []
            events = llm.stream_chat([*messages, {"role": "user", "content": prompt}], params)
        first, count, cut = None, 0, False
        for event in events:
            first = first or time.perf_counter()
            count += len(event.token_ids)
            cut = event.finish_reason == "length"
            click.echo(event.text, nl=False)
        click.echo()
        if cut:
            click.echo(f"(cut after {count} tokens; --max-tokens raises the limit)", err=True)
        if stats and first is not None:
            seconds = time.perf_counter() - first
            speed = f"{(count - 1) / seconds:.1f} token/s" if count > 1 and seconds > 0 else "-"
            click.echo(
                f"load {loaded - started:.2f} s, first token {first - loaded:.3f} s, {count} tokens, {speed} ({llm.engine.backend.fingerprint().split(':')[-1]})",
                err=True,
            )
