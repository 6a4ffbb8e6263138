"""Flags of a front end whose engine runs in workers, and the plan that they make. Explicit code, one option per field."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from octavo.cli.options import POSITIVE, Finite, add_options, bad_flag, refuse_given
from octavo.config import ConfigError
from octavo.distributed.router import ROUTERS
from octavo.distributed.transport import CHECKSUMS, KV_TRANSPORTS

if TYPE_CHECKING:
    from octavo.config import EngineConfig
    from octavo.distributed.cluster_engine import ClusterEngine
    from octavo.distributed.cluster_file import ClusterFile
    from octavo.distributed.local_cluster import ClusterPlan

    OpenCluster = Callable[[EngineConfig, str, Callable[[], object]], ClusterEngine]

_WORKERS_HELP = "Worker processes on this host: a number, or prefill=N,decode=N (default: the engine runs in the server's process)."
_MAX_HELP = "Start more workers while there is more to do, up to so many, and end them again: as --workers (default: as many as that)."
_RAY_HELP = "Have Ray place the workers, on any of its nodes (extra ray; $RAY_ADDRESS, a running Ray of this host, or a new one)."
_LISTEN_HELP = "Where workers connect to, HOST:PORT (default: a socket that only this user's processes on this host reach)."
_SECRET_HELP = "File with the secret that workers prove to know (default: $OCTAVO_CLUSTER_SECRET, or a new one for --workers alone)."
_ROUTER_HELP = "Who gets a request. soonest: by what is cached there and what waits."
_WAIT_HELP = "Seconds that a request waits while there is no worker."
_SUSPECT_HELP = "Seconds of silence after which a worker's streams go on elsewhere."
_STALL_HELP = "Seconds of one step after which they do."
_TRANSPORT_HELP = "How KV goes from prefill to decode workers. auto: shm between workers of one host, else tcp."
_WIRE_HELP = "KV on its way. auto: as it is stored, bit for bit; int8: rounded, smaller."
_CHECKSUM_HELP = "Over each piece of KV on its way."
_LAYERWISE_HELP = "Prompt tokens from which KV is sent while the prompt is computed; shorter ones go in one piece."
_BORROW_HELP = "Workers of one role never take on the other, however busy its own are."
_RESERVE_HELP = "Seconds that an answer waits for a decode worker with room; then its prefill worker makes it."
_COPY_HELP = "Seconds that its KV may take from its first token on."

_HANDOFF_FLAGS = (
    "kv_transport", "kv_wire_dtype", "kv_checksum", "handoff_min_layerwise", "no_borrow_workers", "handoff_reserve_s", "handoff_copy_s",
)  # fmt: skip
_CLUSTER_FLAGS = (
    "ray", "max_workers", "cluster_secret_file", "router", "worker_wait_s", "worker_suspect_s", "worker_stall_s", *_HANDOFF_FLAGS,
)  # fmt: skip


def cluster_options(function: Callable) -> Callable:
    """--workers and what goes with it."""
    return add_options(
        [
            click.option("--workers", metavar="N|prefill=N,decode=N", help=_WORKERS_HELP),
            click.option("--ray", is_flag=True, help=_RAY_HELP),
            click.option("--max-workers", metavar="N|prefill=N,decode=N", help=_MAX_HELP),
            click.option("--workers-listen", metavar="HOST:PORT", help=_LISTEN_HELP),
            click.option("--cluster-secret-file", type=click.Path(dir_okay=False), help=_SECRET_HELP),
            click.option("--router", type=click.Choice(ROUTERS), default="soonest", show_default=True, help=_ROUTER_HELP),
            click.option("--worker-wait-s", type=Finite(0), default=30.0, show_default=True, help=_WAIT_HELP),
            click.option("--worker-suspect-s", type=Finite(0.6, 86400), default=1.0, show_default=True, help=_SUSPECT_HELP),
            click.option("--worker-stall-s", type=POSITIVE, default=60.0, show_default=True, help=_STALL_HELP),
            click.option("--kv-transport", type=click.Choice(KV_TRANSPORTS), default="auto", show_default=True, help=_TRANSPORT_HELP),
            click.option("--kv-wire-dtype", type=click.Choice(["auto", "int8"]), default="auto", show_default=True, help=_WIRE_HELP),
            click.option("--kv-checksum", type=click.Choice(CHECKSUMS), default="none", show_default=True, help=_CHECKSUM_HELP),
            click.option("--handoff-min-layerwise", type=click.IntRange(1), default=512, show_default=True, help=_LAYERWISE_HELP),
            click.option("--no-borrow-workers", is_flag=True, help=_BORROW_HELP),
            click.option("--handoff-reserve-s", type=POSITIVE, default=30.0, show_default=True, help=_RESERVE_HELP),
            click.option("--handoff-copy-s", type=POSITIVE, default=30.0, show_default=True, help=_COPY_HELP),
        ]
    )(function)


def cluster_plan(options: dict[str, Any]) -> ClusterPlan | None:
    """What the flags ask for; None: the engine runs in this process. Raises BadParameter that names the flag."""
    if options["workers"] is None and (options["ray"] or options["workers_listen"] is None):
        refuse_given(_CLUSTER_FLAGS, "it does nothing without --workers")
        return None
    from octavo.distributed.channel import Address
    from octavo.distributed.cluster_options import ClusterOptions, HandoverOptions, parse_most, parse_workers
    from octavo.distributed.fleet import LivenessLimits
    from octavo.distributed.handoff import HandoffLimits
    from octavo.distributed.local_cluster import ClusterPlan

    try:
        workers = {} if options["workers"] is None else parse_workers(options["workers"])
    except ConfigError as error:
        raise bad_flag(error) from None
    try:
        listen = None if options["workers_listen"] is None else Address.parse(options["workers_listen"])
    except ValueError as error:
        raise click.BadParameter(str(error).partition(": ")[2], param_hint="'--workers-listen'") from None
    if workers.keys() == {"both"} and listen is None:  # workers that come from elsewhere may have roles
        refuse_given(_HANDOFF_FLAGS, "it does nothing where all workers do both; it goes with --workers prefill=N,decode=N")
    try:
        scale = {} if options["max_workers"] is None else parse_most(options["max_workers"], workers)
    except ConfigError as error:
        raise bad_flag(error) from None
    suspect_s = options["worker_suspect_s"]
    liveness = LivenessLimits(suspect_s, options["worker_stall_s"], max(30.0, 10 * suspect_s))
    limits = HandoffLimits(reserve_s=options["handoff_reserve_s"], copy_s=options["handoff_copy_s"])
    kv = (options["kv_transport"], options["kv_wire_dtype"], options["kv_checksum"])
    handover = HandoverOptions(*kv, options["handoff_min_layerwise"], limits, not options["no_borrow_workers"])
    routing = {"worker_wait_s": options["worker_wait_s"], "router": options["router"]}
    chosen = ClusterOptions(liveness=liveness, handover=handover, scale=scale, **routing)
    return ClusterPlan(workers, listen, options["cluster_secret_file"], chosen)


def engine_opener(options: dict[str, Any], described: ClusterFile | None = None) -> OpenCluster | None:
    """What makes the engine that the flags ask for, of the workers' configuration, the path of the model on this host, and what is to be
    called meanwhile; None: the engine runs in this process. ``described`` says more of workers on Ray than flags can. Raises BadParameter
    that names the flag."""
    plan = cluster_plan(options)
    if plan is None:
        return None
    if not options["ray"]:
        from octavo.distributed.local_cluster import open_cluster

        return lambda config, path, beside: _announced(open_cluster(config, path, plan, beside))
    from octavo.distributed.open_on_ray import open_on_ray

    cluster = described or _on_ray(options["model"], plan)
    return lambda config, path, beside: _announced(open_on_ray(config, path, cluster, plan.options, beside))


def _announced(engine: ClusterEngine) -> ClusterEngine:
    """It says where workers connect to before any has: whoever starts them has to know, and the server has nothing to say until then."""
    engine.announce = lambda text: click.echo(f"octavo: {text}", err=True)
    return engine


def _on_ray(model: str, plan: ClusterPlan) -> ClusterFile:
    from octavo.distributed.cluster_file import ClusterFile, Ray, WorkerGroup

    if plan.listen is not None and plan.listen.path:
        raise click.BadParameter("workers on Ray need HOST:PORT", param_hint="'--workers-listen'")
    groups = tuple(WorkerGroup(role, number) for role, number in plan.workers.items())
    secret_file = None if plan.secret_file is None else Path(plan.secret_file)
    host, port = (None, 0) if plan.listen is None else (plan.listen.host, plan.listen.port)
    return ClusterFile(model, groups, secret_file, host, port, ray=Ray())
