"""`octavo bench`: measurements of this engine on this machine."""

from __future__ import annotations

from typing import Any

import click

from octavo.cli.options import engine_options, model_options
from octavo.cli.progress import fetch


@click.group()
def bench() -> None:
    """Measure this engine on this machine."""


@bench.command()
@model_options
@click.option("--prompt", "num_prompt", type=click.IntRange(1), default=512, show_default=True, help="Prompt tokens of each sequence.")
@click.option("--output", "num_output", type=click.IntRange(2), default=128, show_default=True, help="Output tokens of each sequence.")
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True, help="Sequences at once.")
@click.option("--repeat", type=click.IntRange(1), default=3, show_default=True, help="Measured runs; the medians are reported.")
@click.option("--json", "as_json", is_flag=True, help="Print only the JSON record.")
@engine_options
def offline(num_prompt: int, num_output: int, batch: int, repeat: int, as_json: bool, **options: Any) -> None:
    """Prefill and decode speed without a server: random tokens, no end of text, one run to warm up."""
    from octavo.bench.offline import OfflineCase, run_offline
    from octavo.cli.options import engine_config

    options["max_num_seqs"] = max(options["max_num_seqs"], batch)
    options["max_num_batched_tokens"] = max(options["max_num_batched_tokens"], options["max_num_seqs"])
    case = OfflineCase(num_prompt, num_output, batch, repeat)
    run_offline(engine_config({**options, "model": fetch(options["model"])}), case, click.echo, as_json)
