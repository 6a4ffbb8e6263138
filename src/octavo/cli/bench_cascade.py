"""`octavo bench cascade`: decoding behind a shared prefix, its tiles walked once for all streams or once for each."""

from __future__ import annotations

from typing import Any

import click

from octavo.cli.options import POSITIVE, engine_config, engine_options, model_options, refuse_given
from octavo.cli.progress import fetched

_STREAMS_HELP = "Streams side by side; may be given more than once (default: 1 to 32 for attention, 4 and 16 for whole steps)."
_SHARED_HELP = "Tokens they share; may be given more than once (default: 0 to 8192 for attention, 0, 512 and 4096 for whole steps)."
_SECONDS_HELP = "Time for each figure of attention."


@click.command(short_help="Decoding behind a shared prefix, walked once or once for each stream.")
@model_options
@click.option("--streams", type=click.IntRange(1, 1024), multiple=True, help=_STREAMS_HELP)
@click.option("--shared", type=click.IntRange(0, 1 << 20), multiple=True, help=_SHARED_HELP)
@click.option("--own", "num_own", type=click.IntRange(0), default=64, show_default=True, help="Tokens of its own behind them.")
@click.option("--seconds", type=POSITIVE, default=0.3, show_default=True, help=_SECONDS_HELP)
@click.option("--attention-only", is_flag=True, help="Leave out whole steps of the model.")
@click.option("--json", "as_json", is_flag=True, help="Print only the JSON record.")
@engine_options
def cascade(
    streams: tuple[int, ...], shared: tuple[int, ...], num_own: int, seconds: float, attention_only: bool, as_json: bool, **options: Any
) -> None:
    """Decoding behind a shared prefix, walked once a step for all streams or once for each, in turn.

    Steps of attention alone, shaped as the model's, beside what memory and arithmetic allow in the same run, with the bytes of keys and
    values that were walked; then whole steps of the model. The last line printed is a JSON record.
    """
    refuse_given(("no_enable_prefix_caching", "backend"), "prefixes are shared in the cpu backend's cache")
    from octavo.bench.cascade import CascadeCase, run_cascade, with_sizes

    case = with_sizes(CascadeCase(num_own=num_own, seconds=seconds, engine=not attention_only), streams, shared)
    run_cascade(fetched(engine_config(options)), case, click.echo, as_json)
