"""`octavo bench handoff`: what handing an answer from a prefill to a decode worker costs it."""

from __future__ import annotations

from typing import Any

import click

from octavo.cli.options import POSITIVE, engine_config, engine_options, model_options
from octavo.cli.progress import fetched

_LISTEN_HELP = (
    "Workers are started elsewhere and connect to this HOST:PORT: one of role prefill, one decode. Each way ends them, so start them in a "
    "loop: while octavo worker --connect HOST:PORT --role prefill; do :; done"
)
_LINK_HELP = "Hold KV back to so many gigabits a second, as a slower link would; given several times, one after the other."
_NAMESPACES_HELP = "Each worker in a network namespace of its own, with links of --link-gbps: needs root, and the ip and tc commands."


@click.command(short_help="What handing an answer to another worker costs it.")
@model_options
@click.option("--prompt", "prompts", type=click.IntRange(1), multiple=True, default=(128, 512, 1024, 2048, 4096), show_default=True,
              help="Prompt tokens.")  # fmt: skip
@click.option("--output", "num_output", type=click.IntRange(3), default=64, show_default=True, help="Output tokens.")
@click.option("--repeat", type=click.IntRange(1), default=3, show_default=True, help="Measured answers; medians are reported.")
@click.option("--transport", type=click.Choice(["tcp", "shm"]), default="tcp", show_default=True, help="How KV goes.")
@click.option("--wire-dtype", type=click.Choice(["auto", "int8"]), default="auto", show_default=True, help="KV on its way.")
@click.option("--link-gbps", "links", type=POSITIVE, multiple=True, help=_LINK_HELP)
@click.option("--namespaces", "in_namespaces", is_flag=True, help=_NAMESPACES_HELP)
@click.option("--listen", metavar="HOST:PORT", help=_LISTEN_HELP)
@click.option("--cluster-secret-file", type=click.Path(dir_okay=False), help="File with the secret, for --listen.")
@click.option("--json", "as_json", is_flag=True, help="Print only the JSON record.")
@engine_options
def handoff(
    prompts: tuple[int, ...], num_output: int, repeat: int, transport: str, wire_dtype: str, links: tuple[float, ...], in_namespaces: bool,
    listen: str | None, cluster_secret_file: str | None, as_json: bool, **options: Any,
) -> None:  # fmt: skip
    """What handing an answer from a prefill to a decode worker costs it: serial, and layer by layer beside the prompt.

    One worker alone answers the same prompts first. Answers that differ end the bench. The last line printed is a JSON record.
    """
    config = engine_config(options)
    from octavo.bench.handoff import HandoffBenchError, HandoffCase, run_handoff
    from octavo.distributed.channel import Address
    from octavo.distributed.handshake import read_secret

    try:
        address = None if listen is None else Address.parse(listen)
    except ValueError as error:
        raise click.BadParameter(str(error).partition(": ")[2], param_hint="'--listen'") from None
    if address is not None and (links or in_namespaces):
        hint = "'--link-gbps'" if links else "'--namespaces'"
        raise click.BadParameter("workers that are started elsewhere have a link of their own", param_hint=hint)
    if in_namespaces and transport != "tcp":
        raise click.BadParameter("there is no shared memory between hosts; tcp goes with --namespaces", param_hint="'--transport'")
    secret = None if address is None else read_secret(cluster_secret_file)
    threads = config.backend.threads or 1
    case = HandoffCase(
        tuple(sorted(set(prompts))), num_output, repeat, transport, wire_dtype, threads, links or (None,), in_namespaces, address, secret
    )
    try:
        run_handoff(fetched(config), case, click.echo, as_json)
    except HandoffBenchError as error:
        raise click.ClickException(str(error)) from None
