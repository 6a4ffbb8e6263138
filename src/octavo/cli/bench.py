"""`octavo bench`: measurements of this engine on this machine."""

from __future__ import annotations

from typing import Any

import click

from octavo.cli.bench_serve import serve
from octavo.cli.options import engine_config, engine_options, model_options
from octavo.cli.progress import fetched


@click.group()
def bench() -> None:
    """Measure this engine on this machine."""


@bench.command(short_help="Speed of prompts and of decoding, without a server.")
@model_options
@click.option("--prompt", "num_prompt", type=click.IntRange(1), default=512, show_default=True, help="Prompt tokens of each sequence.")
@click.option("--output", "num_output", type=click.IntRange(2), default=128, show_default=True, help="Output tokens of each sequence.")
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True, help="Sequences at once (default of --max-num-seqs).")
@click.option("--repeat", type=click.IntRange(1), default=3, show_default=True, help="Measured runs; the medians are reported.")
@click.option("--json", "as_json", is_flag=True, help="Print only the JSON record.")
@engine_options
def offline(num_prompt: int, num_output: int, batch: int, repeat: int, as_json: bool, **options: Any) -> None:
    """Speed of prompts and of decoding, without a server.

    Random tokens, no end of text, one run to warm up. The last line printed is a JSON record.
    """
    if click.get_current_context().get_parameter_source("max_num_seqs") is click.core.ParameterSource.DEFAULT:
        options["max_num_seqs"] = batch
    config = engine_config(options)
    from octavo.bench.offline import OfflineCase, run_offline

    run_offline(fetched(config), OfflineCase(num_prompt, num_output, batch, repeat), click.echo, as_json)


@bench.command(short_help="Time until `octavo serve` answers, and its memory.", context_settings={"ignore_unknown_options": True})
@click.option("--model", "-m", default="smollm2", show_default=True, help="The model to serve, as for `octavo serve`.")
@click.option("--repeat", type=click.IntRange(1), default=5, show_default=True, help="Measured starts; the medians are reported.")
@click.option("--json", "as_json", is_flag=True, help="Print only the JSON record.")
@click.argument("serve_args", nargs=-1, type=click.UNPROCESSED)
def start(model: str, repeat: int, as_json: bool, serve_args: tuple[str, ...]) -> None:
    """Time until `octavo serve` answers GET /health, and its peak memory by then.

    All other flags go to `octavo serve` as they are. One start warms the page cache. The last line printed is a JSON record.
    """
    from octavo.bench.start import run_start
    from octavo.cli.progress import fetch

    run_start(fetch(model), serve_args, repeat, click.echo, as_json)


bench.add_command(serve)
