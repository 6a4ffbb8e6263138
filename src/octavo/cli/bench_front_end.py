"""`octavo bench cluster`."""

from __future__ import annotations

import click

from octavo.cli.options import POSITIVE


@click.command(short_help="What a front end costs, over workers that compute nothing.")
@click.option("--model", "-m", default="smollm2", show_default=True, help="Whose text the front end reads; nothing of it is computed.")
@click.option("--streams", "num_streams", type=click.IntRange(1, 8000), default=5000, show_default=True, help="Streams open at once.")
@click.option("--workers", "num_workers", type=click.IntRange(1, 64), default=4, show_default=True, help="Stub workers.")
@click.option("--rate", type=POSITIVE, default=2000.0, show_default=True, help="Token events per second, of all streams.")
@click.option("--duration", "duration_s", type=POSITIVE, default=20.0, show_default=True, help="Seconds of events.")
@click.option("--json", "as_json", is_flag=True, help="Print only the JSON record.")
def cluster(model: str, num_streams: int, num_workers: int, rate: float, duration_s: float, as_json: bool) -> None:
    """What a front end costs, over workers that compute nothing.

    Opens all streams through the real server of a process of its own, leaves them idle, then has each of them get its tokens in turn, and
    counts every event. The last line printed is a JSON record; exit code 1 when an event was lost.
    """
    from octavo.bench.cluster import ClusterCase, run_cluster

    run_cluster(model, ClusterCase(num_streams, num_workers, rate, duration_s), click.echo, as_json)
