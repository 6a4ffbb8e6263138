"""`octavo bench advice`."""

from __future__ import annotations

from typing import Any

import click

from octavo.cli.options import Finite, engine_config, engine_options, model_options
from octavo.cli.progress import fetched


@click.command(short_help="Replayed advice against the switches really thrown.")
@model_options
@click.option("--num-requests", type=click.IntRange(20, 500), default=80, show_default=True, help="Of each run.")
@click.option("--load", type=Finite(0.1, 2.0), default=0.85, show_default=True, help="Of capacity, where requests arrive by a rate.")
@click.option("--repeat", type=click.IntRange(1), default=2, show_default=True, help="Runs without and with each switch.")
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed makes the same requests.")
@click.option("--switch", "switches", multiple=True, help="Only these cases (default: all).")
@click.option("--json", "as_json", is_flag=True, help="Print only the JSON record.")
@engine_options
def advice(**options: Any) -> None:
    """Replayed advice against the switches really thrown.

    For each of seven switches, and one that gains nothing: a load on an engine that lacks it, what a replay of that run says it would
    gain, and what it gains. The cases: places, pool, kv_dtype, policy, chunk, prefix_cache, salt, nothing. The last line is a JSON record.
    """
    config = engine_config(options)
    from octavo.bench.advice import KINDS, AdviceCase, run_advice
    from octavo.cli.what_if import replay_window

    kinds = options["switches"] or KINDS
    for kind in kinds:
        if kind not in KINDS:
            raise click.BadParameter(f"{kind!r} is not allowed; one of {', '.join(KINDS)}", param_hint="'--switch'")
    case = AdviceCase(options["num_requests"], options["load"], options["repeat"], options["seed"], tuple(kinds))
    run_advice(fetched(config), case, replay_window, click.echo, options["as_json"])
