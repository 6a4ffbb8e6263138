"""`octavo worker`: one engine for a front end that is elsewhere, or that has started it."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from octavo.cli.options import POSITIVE, add_options, engine_config, pool_size_options

if TYPE_CHECKING:
    from octavo.distributed.channel import Address
    from octavo.distributed.worker import WorkerServer

_KV_LISTEN_HELP = "Where other workers bring KV to over TCP (default: as this host is seen by the front end, at any port)."
_SECRET_HELP = "File with the cluster's secret (default: $OCTAVO_CLUSTER_SECRET)."


@click.command()
@click.option("--connect", required=True, metavar="HOST:PORT", help="Where the front end listens for workers; unix:PATH for a socket.")
@click.option("--cluster-secret-file", type=click.Path(dir_okay=False), help=_SECRET_HELP)
@click.option("--name", help="Unique among the workers (default: host and process id).")
@click.option("--role", type=click.Choice(["both", "prefill", "decode"]), default="both", show_default=True, help="What it is for.")
@click.option("--threads", type=click.IntRange(1, 1024), help="Compute threads (default: as the front end was told, else all cores).")
@click.option("--model", help="The front end's model as this host has it (default: as the front end names it).")
@add_options(pool_size_options("as the front end was told, else a quarter of the free memory, at most 4GiB"))
@click.option("--kv-listen", metavar="HOST[:PORT]", help=_KV_LISTEN_HELP)
@click.option("--kv-limit-gbps", type=POSITIVE, help="Send KV to other workers at so many gigabits a second at most.")
@click.option("--give-up-s", type=POSITIVE, help="End after so many seconds without a front end (default: look for it for ever).")
@click.option("--parent", type=click.IntRange(1), metavar="PID", help="The front end's process, which has started this one: end with it.")
def worker(
    connect: str, cluster_secret_file: str | None, name: str | None, kv_listen: str | None, kv_limit_gbps: float | None, **options: Any
) -> None:
    """Work for a front end: `octavo serve --workers-listen`. Model and settings are the front end's, but for what flags here say."""
    from octavo.distributed.channel import Address
    from octavo.distributed.handshake import read_secret
    from octavo.distributed.messages import MessageError, check_name
    from octavo.distributed.throttle import Throttle
    from octavo.distributed.worker import WorkerOptions, WorkerServer
    from octavo.distributed.worker_handover import handing_over

    try:
        address = Address.parse(connect)
    except ValueError as error:
        raise click.BadParameter(str(error).partition(": ")[2], param_hint="'--connect'") from None
    if not address.path and address.port == 0:
        raise click.BadParameter(f"{connect!r} is not allowed; a port from 1 to 65535 is needed", param_hint="'--connect'")
    name = f"{socket.gethostname()}-{os.getpid()}" if name is None else name
    try:
        check_name(name)
    except MessageError as error:
        raise click.BadParameter(str(error).partition(": ")[2], param_hint="'--name'") from None
    engine_config({field: options[field] for field in ("num_kv_blocks", "kv_cache_memory")})  # as `octavo serve` would refuse them
    listen = None if kv_listen is None else _kv_address(kv_listen)
    named, secret = WorkerOptions(name, kv_listen=listen, **options), read_secret(cluster_secret_file)
    throttle = None if kv_limit_gbps is None else Throttle(kv_limit_gbps * 1e9 / 8)
    with _spoken() if named.parent is None else contextlib.nullcontext():
        kv = handing_over(secret, throttle, 0 if listen is None else listen.port)
        sys.exit(run(WorkerServer(address, secret, named, make_kv=kv)))


def _kv_address(text: str) -> Address:
    """HOST, HOST:PORT or [IPV6]:PORT; port 0: any. Raises BadParameter."""
    from octavo.distributed.channel import Address

    for said in (text, f"{text}:0"):
        with contextlib.suppress(ValueError):
            if not (address := Address.parse(said)).path:
                return address
    raise click.BadParameter(f"{text!r} is not allowed; HOST, HOST:PORT or [IPV6]:PORT is needed", param_hint="'--kv-listen'")


@contextlib.contextmanager
def _spoken() -> Iterator[None]:
    """Say on stderr what becomes of the way to the front end: whoever starts a worker by hand waits for it."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("octavo worker: %(message)s"))
    logger = logging.getLogger("octavo.worker")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
        logger.propagate = True


def run(server: WorkerServer) -> int:
    """The exit status: 0 when told to end, ``HOPELESS`` when another try would end alike, 1 for what only lacked memory or the like."""
    import asyncio

    from octavo.distributed.process_worker import HOPELESS
    from octavo.distributed.worker import HOPELESS_ERRORS, is_passing

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, leave, number)
        await server.run()

    has_left = False

    def leave(number: int) -> None:
        nonlocal has_left
        if has_left:
            os._exit(128 + number)
        has_left = True
        server.leave(f"it got signal {number}")

    try:
        asyncio.run(serve())
    except HOPELESS_ERRORS as error:
        click.echo(f"octavo worker: {error}", err=True)
        return 1 if is_passing(error) else HOPELESS
    return 0
