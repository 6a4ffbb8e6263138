"""`octavo bench waste`."""

from __future__ import annotations

import click

from octavo.cli.options import POSITIVE


@click.command(short_help="What KV memory is used for, paged and reserved.")
@click.option("--rate", type=POSITIVE, default=2.0, show_default=True, help="Requests per second.")
@click.option("--duration", "duration_s", type=POSITIVE, default=600.0, show_default=True, help="Seconds of simulated time.")
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed makes the same requests.")
@click.option("--json", "as_json", is_flag=True, help="Print only the JSON record.")
def waste(rate: float, duration_s: float, seed: int, as_json: bool) -> None:
    """What KV memory is used for, paged and reserved.

    A simulation: the real scheduler with a model that computes nothing, on the set-up of Figures 2 and 13 of the PagedAttention paper,
    whose figures are printed beside. The last line printed is a JSON record.
    """
    from octavo.bench.waste import WasteCase, run_waste

    run_waste(WasteCase(rate, duration_s, seed), click.echo, as_json)
