"""`octavo cluster`: the workers of a running server: who there is, taking one out, replacing all of them."""

from __future__ import annotations

import json
import time
from typing import Any

import click

from octavo.cli.api_client import get_json, post_json, server_options
from octavo.cli.cluster_up import up
from octavo.cli.options import Finite

_COLUMNS = ("worker", "role", "state", "host", "running", "waiting", "KV blocks", "since")


@click.group()
def cluster() -> None:
    """See to the workers of a running server."""


@cluster.command()
@click.option("--json", "as_json", is_flag=True, help="As the server has it.")
@server_options
def status(as_json: bool, url: str, api_key: str | None) -> None:
    """Show the workers: their roles, states and loads."""
    found = get_json(url, "/v1/cluster", api_key)
    click.echo(json.dumps(found) if as_json else "\n".join(status_lines(found)))


@cluster.command()
@click.argument("worker")
@click.option("--wait", is_flag=True, help="Until it has ended.")
@click.option("--timeout", type=Finite(0), default=600.0, show_default=True, help="Seconds that --wait waits at most.")
@server_options
def drain(worker: str, wait: bool, timeout: float, url: str, api_key: str | None) -> None:
    """Have WORKER take no more requests, and end when those it has are done."""
    found = post_json(url, "/v1/cluster/drain", api_key, {"worker": worker})
    click.echo(f"{found['name']} takes no more requests; it has {found['attempts']}")
    if wait:
        _wait(url, api_key, timeout, lambda cluster: worker not in _names(cluster) or _boot(cluster, worker) != found["boot_id"], worker)


@cluster.command()
@click.option("--wait", is_flag=True, help="Until all have been replaced.")
@click.option("--timeout", type=Finite(0), default=3600.0, show_default=True, help="Seconds that --wait waits at most.")
@server_options
def restart(wait: bool, timeout: float, url: str, api_key: str | None) -> None:
    """Replace the workers one after another: each is drained first, so that no request fails."""
    found = post_json(url, "/v1/cluster/restart", api_key, {})
    click.echo(f"{len(found['workers'])} workers are being replaced, one after another")
    if wait:
        _wait(url, api_key, timeout, _has_restarted, "the restart")


def _wait(url: str, api_key: str | None, timeout_s: float, is_done: Any, what: str) -> None:
    """ClickException when that takes too long."""
    deadline_s = time.monotonic() + timeout_s
    while not is_done(get_json(url, "/v1/cluster", api_key)):
        if time.monotonic() > deadline_s:
            raise click.ClickException(f"{what} is not done after {timeout_s:g} s; it goes on")
        time.sleep(0.2)
    click.echo("done")


def _has_restarted(cluster: dict[str, Any]) -> bool:
    """ClickException when it has ended early."""
    if cluster["restart"] is None and cluster["restart_error"] is not None:
        raise click.ClickException(cluster["restart_error"])
    return cluster["restart"] is None


def _names(cluster: dict[str, Any]) -> list[str]:
    return [worker["name"] for worker in cluster["workers"]]


def _boot(cluster: dict[str, Any], name: str) -> str:
    return str(next(worker["boot_id"] for worker in cluster["workers"] if worker["name"] == name))


def status_lines(cluster: dict[str, Any]) -> list[str]:
    """The workers as a table, and what waits for one."""
    rows = [_row(worker) for worker in cluster["workers"]]
    widths = [max(len(row[i]) for row in (_COLUMNS, *rows)) for i in range(len(_COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in (_COLUMNS, *rows)]
    if not rows:
        lines = ["no worker is there"]
    if cluster["waiting"]:
        lines.append(f"{cluster['waiting']} requests wait at the front end")
    if cluster["restart"] is not None:
        lines.append(f"a rolling restart is going on: {cluster['restart']['done']} of {cluster['restart']['of']} are new")
    elif cluster["restart_error"] is not None:
        lines.append(cluster["restart_error"])
    return lines


def _row(worker: dict[str, Any]) -> tuple[str, ...]:
    load = worker["load"]
    state = worker["state"] + (", draining" if worker["draining"] else "") + (f" ({worker['reason']})" if worker["reason"] else "")
    blocks = f"{load['used_blocks']} of {load['kv_blocks']}" if load else "-"
    counts = (str(load["running"]), str(load["waiting"])) if load else ("-", "-")
    return worker["name"], worker["role"], state, worker["host"], *counts, blocks, f"{worker['age_s']:.0f} s"


cluster.add_command(up)
