"""`octavo bench prefix`: prefix sharing by the block and by the token, side by side."""

from __future__ import annotations

from typing import Any

import click

from octavo.cli.options import engine_config, engine_options, model_options, refuse_given
from octavo.cli.progress import fetched

_OUTPUT_HELP = "Output tokens of each request."


@click.command(short_help="Prefix sharing by the block and by the token, side by side.")
@model_options
@click.option("--users", type=click.IntRange(1), default=4, show_default=True, help="Conversations behind one system prompt.")
@click.option("--turns", type=click.IntRange(1), default=5, show_default=True, help="Turns of each conversation.")
@click.option("--requests", type=click.IntRange(1), default=24, show_default=True, help="Single questions behind one system prompt.")
@click.option("--system", "num_system", type=click.IntRange(1), default=101, show_default=True, help="Tokens of the system prompts.")
@click.option("--question", "num_question", type=click.IntRange(1), default=37, show_default=True, help="Tokens of each question or turn.")
@click.option("--output", "num_output", type=click.IntRange(1), default=24, show_default=True, help=_OUTPUT_HELP)
@click.option("--json", "as_json", is_flag=True, help="Print only the JSON record.")
@engine_options
def prefix(as_json: bool, **options: Any) -> None:
    """Prefix sharing by the block and by the token, side by side.

    Two engines answer the same requests one after the other; the answers must be equal. The last line printed is a JSON record.
    """
    refuse_given(("prefix_granularity", "no_enable_prefix_caching"), "both ways of sharing are measured")
    from octavo.bench.prefix import PrefixCase, run_prefix

    case = PrefixCase(**{name: options.pop(name) for name in PrefixCase.__dataclass_fields__})
    run_prefix(fetched(engine_config(options)), case, click.echo, as_json)
