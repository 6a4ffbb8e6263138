"""`octavo cluster`: the workers of a running server: who there is, taking one out and having it back, replacing all of them."""

from __future__ import annotations

import json
import time
from typing import Any

import click

from octavo.cli.api_client import get_json, post_json, server_options
from octavo.cli.cluster_up import up
from octavo.cli.options import Finite
from octavo.core.words import counted

_COLUMNS = ("worker", "role", "state", "host", "running", "waiting", "KV blocks", "since")
_ABSENT = {"starting": "it is being started", "failed": "it cannot run", "drained": "drained; `octavo cluster undrain` starts it again"}


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
        _wait(url, api_key, timeout, lambda cluster: _has_ended(cluster, found), worker)


@cluster.command()
@click.argument("worker")
@click.option("--wait", is_flag=True, help="Until it takes requests.")
@click.option("--timeout", type=Finite(0), default=600.0, show_default=True, help="Seconds that --wait waits at most.")
@server_options
def undrain(worker: str, wait: bool, timeout: float, url: str, api_key: str | None) -> None:
    """Have WORKER, which is being drained, take requests again; one that has ended is started again."""
    found = post_json(url, "/v1/cluster/undrain", api_key, {"worker": worker})
    if found["pid"] is None:
        click.echo(f"{worker} had ended, and is started again")
    elif found["state"] == "ready":
        click.echo(f"{worker} takes requests again")
    else:
        click.echo(f"{worker} is not drained any more; it is {found['state']}")
    if wait:
        _wait(url, api_key, timeout, lambda cluster: _takes_requests(cluster, found), worker)


@cluster.command()
@click.option("--wait", is_flag=True, help="Until all have been replaced.")
@click.option("--timeout", type=Finite(0), default=3600.0, show_default=True, help="Seconds that --wait waits at most.")
@server_options
def restart(wait: bool, timeout: float, url: str, api_key: str | None) -> None:
    """Replace the workers one after another: each is drained first, so that no request fails."""
    found = post_json(url, "/v1/cluster/restart", api_key, {})
    number = found["restart"]["of"]
    click.echo(f"{counted(number, 'worker')} {'is' if number == 1 else 'are'} being replaced, one after another")
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


def _has_ended(cluster: dict[str, Any], drained: dict[str, Any]) -> bool:
    """ClickException when it takes requests again."""
    found = _find(cluster["workers"], drained["name"])
    if found is None or found["boot_id"] != drained["boot_id"]:
        return True
    if not found["draining"]:
        raise click.ClickException(f"{found['name']} is not drained any more: somebody has it take requests again")
    return False


def _takes_requests(cluster: dict[str, Any], undrained: dict[str, Any]) -> bool:
    """ClickException when it cannot run, or is taken out again. The process that another follows may still be there, and is not it."""
    name = undrained["name"]
    found, absent = _find(cluster["workers"], name), _find(cluster["absent"], name)
    if absent is not None and absent["state"] == "failed":
        raise click.ClickException(f"{name} cannot run: {absent['reason']}")
    if found is not None and found["boot_id"] == undrained.get("follows"):
        return False
    if (found is not None and found["draining"]) or (absent is not None and absent["state"] == "drained"):
        raise click.ClickException(f"{name} is drained again")
    return found is not None and found["state"] == "ready"


def _find(entries: list[dict[str, Any]], name: str) -> dict[str, Any] | None:
    return next((entry for entry in entries if entry["name"] == name), None)


def status_lines(cluster: dict[str, Any]) -> list[str]:
    """The workers as a table, and what waits for one."""
    rows = [_row(worker) for worker in cluster["workers"]]
    widths = [max(len(row[i]) for row in (_COLUMNS, *rows)) for i in range(len(_COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in (_COLUMNS, *rows)]
    if not rows:
        lines = ["no worker is there"]
    for one in cluster["absent"]:
        lines.append(f"{one['name']} is not there: {_ABSENT[one['state']]}" + (f": {one['reason']}" if one["reason"] else ""))
    if cluster["waiting"]:
        waiting = cluster["waiting"]
        lines.append(f"{counted(waiting, 'request')} {'waits' if waiting == 1 else 'wait'} at the front end")
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
