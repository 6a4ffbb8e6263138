"""`octavo bench simulator`."""

from __future__ import annotations

import json
from typing import Any

import click

from octavo.cli.options import POSITIVE, engine_options, model_options, predictable_config
from octavo.cli.progress import fetched, progress_line

_FITTED_HELP = "Cost of steps, as `octavo calibrate` writes it, in place of one that is measured in turn with the runs."


@click.command(short_help="The simulator against the engine, under the same loads.")
@model_options
@click.option("--repeat", type=click.IntRange(1), default=3, show_default=True, help="Real runs of each load; their spread is shown.")
@click.option("--seconds", "load_s", type=POSITIVE, default=25.0, show_default=True, help="Time of each run.")
@click.option("--calibrate-seconds", "calibrate_s", type=POSITIVE, default=60.0, show_default=True, help="Time to measure steps, in all.")
@click.option("--fitted", type=click.Path(exists=True, dir_okay=False), help=_FITTED_HELP)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="The same seed makes the same requests.")
@click.option("--json", "as_json", is_flag=True, help="Print only the JSON record.")
@engine_options
def simulator(
    repeat: int, load_s: float, calibrate_s: float, fitted: str | None, seed: int, as_json: bool, **options: Any
) -> None:
    """The simulator against the engine in this process, under the same five loads, from idle to overload.

    Time to the first token, time between tokens, throughput and the share of requests within limits: of each real run and simulated, and
    whether they agree. HTTP is not part of it. Let nothing else run meanwhile. The last line printed is a JSON record.
    """
    config = predictable_config(options)
    from octavo.costs.coefficients import read_coefficients
    from octavo.reproduce.simulator_accuracy import AccuracyCase, measure_accuracy

    cost = None if fitted is None else read_coefficients(fitted)
    case = AccuracyCase(repeat, load_s, calibrate_s, seed=seed)
    with progress_line("measuring") as progress:
        accuracy = measure_accuracy(fetched(config), case, cost, progress)
    if not as_json:
        click.echo(accuracy.text())
    click.echo(json.dumps(accuracy.record()))
