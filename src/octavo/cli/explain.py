"""`octavo explain`: where the time of requests of a running server went."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

import click

from octavo.cli.api_client import get_json, server_options
from octavo.cli.options import refuse_given
from octavo.core.recorded_window import OBJECTIVES
from octavo.core.words import counted
from octavo.engine.explain import in_words

_SHOWN_SHARE = 0.001  # of the wall time
BAR = 30  # characters of the whole wall time
REPLAY_S = 300.0  # that a replay may take, its waiting for another one included
UNTOLD = {
    "kv_capacity": "what more KV blocks would gain, the time stamps cannot tell: a replay can",
    "queue": "what more places or workers would gain, the time stamps cannot tell: a replay can",
}
"""By the bottleneck, where the rules have no advice: those before it in the queue would have had to be computed all the same."""
NAMES = {
    "wall": "mean time from arrival to the last token",
    "ttft_p50": "median time to the first token",
    "ttft_p99": "99th percentile of the time to the first token",
    "itl_p50": "median of the requests' mean time between tokens",
    "itl_p99": "99th percentile of the requests' mean time between tokens",
    "throughput": "time per output token of all requests together",
}


@click.command()
@click.argument("request_id", required=False)
@click.option("--last", is_flag=True, help="The last request.")
@click.option("--slowest", type=click.IntRange(1, 100), help="So many answers, the slowest of those that the server remembers.")
@click.option("--advise", is_flag=True, help="What would help: the last --window seconds replayed with one switch changed at a time.")
@click.option("--window", type=click.IntRange(1, 600), default=600, show_default=True, help="Seconds that --advise is about.")
@click.option("--objective", type=click.Choice(OBJECTIVES), default=OBJECTIVES[0], show_default=True, help="What --advise ranks by.")
@click.option("--json", "as_json", is_flag=True, help="As the server has it.")
@server_options
def explain(**options: Any) -> None:
    """Say where the time of a request went: by the id of its answer, the last one, or the slowest. With --advise, what would have helped
    the requests of the last minutes: they are run again in a simulator."""
    request_id, slowest, url, api_key = (options[name] for name in ("request_id", "slowest", "url", "api_key"))
    _check_together(options)
    if options["advise"]:
        _advise(options)
        return
    ids = [request_id] if request_id is not None else _ids(url, api_key, slowest)
    for place, one in enumerate(ids):
        account = get_json(url, f"/v1/requests/{quote(one, safe='')}/explain", api_key)
        if options["as_json"]:
            click.echo(json.dumps(account))
        else:
            click.echo(("\n" if place else "") + "\n".join(account_lines(account)))


def _check_together(options: dict[str, Any]) -> None:
    """One way to say which requests, and no flag without a meaning."""
    ways = {"REQUEST_ID": "request_id", "--last": "last", "--slowest": "slowest", "--advise": "advise"}
    given = [way for way, name in ways.items() if options[name] not in (None, False)]
    if len(given) != 1:
        told = f"{' and '.join(given)} go not together; " if given else ""
        raise click.UsageError(f"{told}one of REQUEST_ID, --last, --slowest and --advise is needed")
    if not options["advise"]:
        refuse_given(("window", "objective"), "it has no meaning without --advise")


def _ids(url: str, api_key: str | None, slowest: int | None) -> list[str]:
    query = "sort=recent&limit=1" if slowest is None else f"sort=slowest&limit={slowest}"
    found = [entry["id"] for entry in get_json(url, f"/v1/requests?{query}", api_key)["data"]]
    if not found:
        raise click.ClickException("the server has had no request yet")
    return found


def _advise(options: dict[str, Any]) -> None:
    path = f"/v1/explain/summary?seconds={options['window']}&advice=replay&objective={options['objective']}"
    replay = get_json(options["url"], path, options["api_key"], REPLAY_S)["replay"]
    click.echo(json.dumps(replay) if options["as_json"] else "\n".join(replay_lines(replay)))


def replay_lines(replay: dict[str, Any]) -> list[str]:
    """What a replay of a window says, as lines of text."""
    num_requests = counted(replay["num_requests"], "request")
    told = f"{num_requests} of the last {replay['window_s']:.0f} s replayed, {replay['num_compared']} of them compared"
    if replay["error"] is None:
        return [f"{told}; they tell nothing of {NAMES[replay['objective']]}"]
    lines = [
        told,
        f"{NAMES[replay['objective']]}: measured {in_words(replay['measured_s'])}, replayed {in_words(replay['replayed_s'])}: "
        f"the replay is {100 * replay['error']:.1f} % off",
    ]
    width = max((len(one["change"]) for one in replay["advice"]), default=0)
    for one in replay["advice"]:
        gain = f"{in_words(one['gain_s'])} less" if one["gain_s"] > 0 else "nothing" if one["told"] else "not told"
        lines.append(f"  {one['change']:<{width}} {gain:>16}   {one['why']}")
    lines += [f"  not tried, for want of time: {change}" for change in replay["skipped"]]
    return lines + [f"  ({note})" for note in replay["notes"]]


def account_lines(account: dict[str, Any]) -> list[str]:
    """The account of a request as lines of text."""
    wall_s, ttft_s = account["wall_s"], account["ttft_s"]
    first = "no token yet" if ttft_s is None else f"first token after {ttft_s:.3f} s"
    where = f" on {', then '.join(account['workers'])}" if account.get("workers") else ""
    held = f"mainly {account['main_cause']} [{account['bottleneck']}]"
    lines = [f"{account['id']}: {wall_s:.3f} s{where} ({account['state']}, {first}); {held}"]
    small_s = list[float]()
    for part in account["causes"]:
        share = part["seconds"] / wall_s if wall_s else 0.0
        if share < _SHOWN_SHARE and part["cause"] != "remainder":
            small_s.append(part["seconds"])
            continue
        bar = "#" * round(BAR * max(share, 0.0))
        lines.append(f"  {part['cause']:<16} {part['seconds']:>10.4f} s {100 * share:>5.1f} %  {bar:<{BAR}}  {part['detail']}".rstrip())
    if small_s:
        lines.append(f"  and {counted(len(small_s), 'cause')} below 0.1 %, {in_words(sum(small_s))} together; --json has all")
    untold = UNTOLD.get(account["bottleneck"]) if not account["advice"] else None
    return [*lines, *advice_lines(account["advice"]), *([f"  {untold}; octavo explain --advise replays it"] if untold else [])]


def advice_lines(advice: list[dict[str, Any]]) -> list[str]:
    return [f"  would help: {one['change']}: {one['gain_s']:.3f} s less ({one['why']}; from {one['basis']})" for one in advice]
