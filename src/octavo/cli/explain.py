"""`octavo explain`: where the time of requests of a running server went."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

import click

from octavo.cli.api_client import get_json, server_options

BAR = 30  # characters of the whole wall time


@click.command()
@click.argument("request_id", required=False)
@click.option("--last", is_flag=True, help="The last request.")
@click.option("--slowest", type=click.IntRange(1, 100), help="So many requests, the slowest of those that the server remembers.")
@click.option("--json", "as_json", is_flag=True, help="As the server has it.")
@server_options
def explain(request_id: str | None, last: bool, slowest: int | None, as_json: bool, url: str, api_key: str | None) -> None:
    """Say where the time of a request went: by the id of its answer, the last one, or the slowest."""
    if (request_id is not None) + last + (slowest is not None) != 1:
        raise click.UsageError("one of REQUEST_ID, --last and --slowest is needed")
    ids = [request_id] if request_id is not None else _ids(url, api_key, slowest)
    for place, one in enumerate(ids):
        account = get_json(url, f"/v1/requests/{quote(one, safe='')}/explain", api_key)
        if as_json:
            click.echo(json.dumps(account))
        else:
            click.echo(("\n" if place else "") + "\n".join(account_lines(account)))


def _ids(url: str, api_key: str | None, slowest: int | None) -> list[str]:
    query = "sort=recent&limit=1" if slowest is None else f"sort=slowest&limit={slowest}"
    found = [entry["id"] for entry in get_json(url, f"/v1/requests?{query}", api_key)["data"]]
    if not found:
        raise click.ClickException("the server has had no request yet")
    return found


def account_lines(account: dict[str, Any]) -> list[str]:
    """The account of a request as lines of text."""
    wall_s, ttft_s = account["wall_s"], account["ttft_s"]
    first = "no token yet" if ttft_s is None else f"first token after {ttft_s:.3f} s"
    lines = [f"{account['id']}: {wall_s:.3f} s ({account['state']}, {first}); mainly {account['main_cause']} [{account['bottleneck']}]"]
    for part in account["causes"]:
        share = part["seconds"] / wall_s if wall_s else 0.0
        if share >= 0.001 or part["cause"] == "remainder":
            bar = "#" * round(BAR * max(share, 0.0))
            lines.append(f"  {part['cause']:<16} {part['seconds']:>10.4f} s {100 * share:>5.1f} %  {bar:<{BAR}}  {part['detail']}".rstrip())
    lines += advice_lines(account["advice"])
    return lines


def advice_lines(advice: list[dict[str, Any]]) -> list[str]:
    return [f"  would help: {one['change']}: {one['gain_s']:.3f} s less ({one['why']}; from {one['basis']})" for one in advice]
