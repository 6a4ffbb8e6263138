"""`octavo top`: a running server at a glance: queue, running requests, pool, steps, what is short, what would help."""

from __future__ import annotations

import shutil
import time
from typing import Any

import click

from octavo.cli.api_client import get_json, server_options
from octavo.cli.explain import UNTOLD
from octavo.cli.options import Finite
from octavo.core.words import counted
from octavo.engine.explain import in_words

_CLEAR, _HOME, _REST = "\x1b[2J\x1b[H", "\x1b[H", "\x1b[J"
_HIDE, _SHOW = "\x1b[?25l", "\x1b[?25h"
_NOTHING = "  the time stamps of the window tell of nothing that would help by more than 2 %"
_LEVELS = " ▁▂▃▄▅▆▇█"
_COLOURS = {"prefill": "34", "decode": "32", "kv": "35", "rest": "90"}


@click.command()
@click.option("--once", is_flag=True, help="Print one picture without control codes and exit.")
@click.option("--interval", type=Finite(0.1, 3600), default=1.0, show_default=True, help="Seconds between pictures.")
@click.option("--window", type=click.IntRange(1, 600), default=60, show_default=True, help="Seconds that percentiles and advice are of.")
@server_options
def top(once: bool, interval: float, window: int, url: str, api_key: str | None) -> None:
    """Watch a running server: what it does, what is short, and what would help."""
    width = shutil.get_terminal_size((100, 30)).columns
    if once:
        click.echo("\n".join(picture(*_read(url, api_key, window, width), width, None)))
        return
    before: tuple[float, int] | None = None
    click.echo(_HIDE + _CLEAR, nl=False)
    try:
        while True:
            summary, requests = _read(url, api_key, window, width)
            now = (time.monotonic(), summary["engine"]["output_tokens"])
            rate = None if before is None else (now[1] - before[1]) / max(now[0] - before[0], 1e-9)
            before, width = now, shutil.get_terminal_size((100, 30)).columns
            click.echo(_HOME + "\n".join(line + "\x1b[K" for line in picture(summary, requests, width, rate, colours=True)) + _REST)
            time.sleep(interval)
    finally:
        click.echo(_SHOW, nl=False)


def _read(url: str, api_key: str | None, window: int, width: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    num_steps = max(1, min(512, width - 12))
    summary = get_json(url, f"/v1/explain/summary?seconds={window}&steps={num_steps}", api_key)
    requests = get_json(url, "/v1/requests?state=running&sort=slowest&limit=12", api_key)
    return summary, requests["data"]


def picture(
    summary: dict[str, Any], requests: list[dict[str, Any]], width: int, tokens_per_s: float | None, colours: bool = False
) -> list[str]:
    """The lines of a picture, none longer than ``width`` characters as shown."""
    engine = summary["engine"]
    rate = "" if tokens_per_s is None else f"   {tokens_per_s:.0f} token/s"
    head = f"octavo top   {engine['model']}   {engine['running']} running, {engine['waiting']} waiting{rate}"
    workers = summary.get("workers", [])
    lines = [head[:width], "", *_pool(engine, width), *_workers(workers, width)]
    lines += [*_all_steps(summary.get("steps", []), [worker["name"] for worker in workers], width, colours), ""]
    rest = [*_bottlenecks(summary), "", *_requests(requests, engine), "", *_advice(summary)]
    return lines + [line if len(line) <= width else line[: width - 1] + "…" for line in rest]


def _bar(parts: list[tuple[str, float]], width: int) -> str:
    """Shares as runs of their characters, the rest blank; any share above nothing is seen."""
    bar = ""
    for character, share in parts:
        bar += character * min(width - len(bar), max(round(share * width), 1 if share > 0 else 0))
    return bar.ljust(width)


def _pool(engine: dict[str, Any], width: int) -> list[str]:
    blocks, seqs, room = engine["kv_blocks"], engine["max_num_seqs"], max(10, width - 60)
    if not blocks:
        return ["  no worker is there"]
    pool = _bar([("#", engine["kv_used"] / blocks), ("-", engine["kv_cached"] / blocks)], room)
    places = _bar([("#", min(1.0, engine["running"] / seqs))], room)
    used = f"{engine['kv_used']} used, {engine['kv_cached']} cached of {blocks}"
    return [
        f"  KV pool [{pool}] {used}"[:width],
        f"  places  [{places}] {engine['running']} of {seqs}; {engine['preemptions']} preemptions"[:width],
    ]


def _workers(workers: list[dict[str, Any]], width: int) -> list[str]:
    """Of a cluster, what each of its workers has to do."""
    lines = []
    for worker in workers:
        engine, room = worker["engine"], max(10, width - 60)
        bar = _bar([("#", engine["kv_used"] / engine["kv_blocks"]), ("-", engine["kv_cached"] / engine["kv_blocks"])], room)
        said = f"{engine['running']} running, {engine['waiting']} waiting"
        lines.append(f"  {worker['name'][:20]:<20} {worker['role']:<7} [{bar}] {said}"[:width])
    return lines


def _all_steps(steps: list[dict[str, Any]], workers: list[str], width: int, colours: bool) -> list[str]:
    """Those of each worker, where there are some."""
    if not workers:
        return _steps(steps, width, colours)
    lines = []
    for name in workers:
        head, *rest = _steps([step for step in steps if step["worker"] == name], width, colours)
        lines += [f"  {name[:width - 2]}", head, *rest]
    return lines


def _steps(steps: list[dict[str, Any]], width: int, colours: bool) -> list[str]:
    """Seconds of the last steps as a row of bars, coloured by what took most; below, who that was."""
    if not steps:
        return ["  steps   none yet"]
    steps = steps[-max(1, width - 12) :]
    longest = max(max(step["seconds"] for step in steps), 1e-9)
    kinds = [_kind(step) for step in steps]
    bars = [_LEVELS[max(1, round(step["seconds"] / longest * (len(_LEVELS) - 1)))] for step in steps]
    if colours:
        bars = [f"\x1b[{_COLOURS[kind]}m{bar}\x1b[0m" for kind, bar in zip(kinds, bars, strict=True)]
    letters = "".join({"prefill": "p", "decode": "d", "kv": "k", "rest": "."}[kind] for kind in kinds)
    mean_ms = 1000 * sum(step["seconds"] for step in steps) / len(steps)
    said = f"          {counted(len(steps), 'step')}, mean {mean_ms:.1f} ms, longest {1000 * longest:.1f} ms"
    said += " (p: prompts, d: tokens, k: KV moves, .: host)"
    return [f"  steps   {''.join(bars)}", f"          {letters}", said[:width]]


def _kind(step: dict[str, Any]) -> str:
    rest_s = step["seconds"] - step["prefill_s"] - step["decode_s"] - step["kv_s"]
    parts = {"prefill": step["prefill_s"], "decode": step["decode_s"], "kv": step["kv_s"], "rest": rest_s}
    return max(parts, key=lambda kind: parts[kind])


def _bottlenecks(summary: dict[str, Any]) -> list[str]:
    num_requests, num_gaps = counted(summary["num_requests"], "request"), counted(summary["num_gaps"], "gap")
    lines = [f"  last {summary['window_s']:.0f} s: {num_requests} ended, {num_gaps} between tokens"]
    for name, percentiles in (("first token", summary["ttft"]), ("token gap", summary["itl"])):
        for quantile, held in percentiles.items():
            shares = ", ".join(f"{bottleneck} {100 * share:.0f} %" for bottleneck, share in list(held["shares"].items())[:3])
            lines.append(f"  {name:<12} {quantile} {1000 * held['seconds']:>9.1f} ms   held by {shares}")
    return lines


def _requests(requests: list[dict[str, Any]], engine: dict[str, Any]) -> list[str]:
    if not requests:
        return ["  no request runs"]
    lines = [f"  {'request':<40} {'state':<8} {'age':>8} {'prompt':>7} {'made':>6}  mainly"]
    for one in requests:
        counts = f"{one['wall_s']:>7.2f}s {one['prompt_tokens']:>7} {one['completion_tokens']:>6}"
        lines.append(f"  {one['id'][:40]:<40} {one['state']:<8} {counts}  {one['main_cause']}")
    more = engine["running"] + engine["waiting"] - len(requests)
    return [*lines, f"  and {more} more"] if more > 0 else lines


def _advice(summary: dict[str, Any]) -> list[str]:
    """By the time stamps of the window; and by the last replay, if there has been one."""
    lines = ["  would help, by the time stamps of the window (mean wall time of a request):" if summary["advice"] else _NOTHING]
    lines += [_gain(one) for one in summary["advice"][:4]]
    replay = summary.get("replay")
    if replay is None:
        held = {percentiles[name]["bottleneck"] for percentiles in (summary["ttft"], summary["itl"]) for name in percentiles}
        untold = [] if summary["advice"] else [f"  {UNTOLD[one]}" for one in UNTOLD if one in held]
        return [*lines, *untold, "  octavo explain --advise replays the last minutes with one switch changed at a time"]
    best = [one for one in replay["advice"] if one["gain_s"] > 0][:4]
    error = "" if replay["error"] is None else f", {100 * replay['error']:.1f} % off"
    is_told = all(one["told"] for one in replay["advice"])
    nothing = "" if best else " nothing would help" if is_told else " no gain is above its error; octavo explain --advise tells them all"
    lines.append(f"  by a replay of {counted(replay['num_requests'], 'request')}, {replay['age_s']:.0f} s ago{error}:{nothing}")
    return lines + [_gain(one) for one in best]


def _gain(one: dict[str, Any]) -> str:
    return f"    {in_words(one['gain_s']):>8} less  {one['change']}: {one['why']}"
