"""`octavo bench serve`: one load against one server over the completions API, and its figures as text and as a JSON record.

Owns the order of a measurement: ask what is served, warm up, run, summarise. What is sent is the workload's business (``octavo.workload``),
how it is sent that of ``load``, the arithmetic that of ``latency``.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from octavo.bench.http_client import HTTPClient, HTTPError
from octavo.bench.latency import PERCENTILES, Goodput, summary
from octavo.bench.load import LoadRun
from octavo.bench.spike import Spike, run_spike
from octavo.config import ConfigError
from octavo.workload.arrivals import ClosedLoop
from octavo.workload.requests import Workload

_PROGRESS_S = 0.25


@dataclass(frozen=True, slots=True)
class ServeCase:
    """What to measure. ``described`` goes into the record as it is: the load in the words it was asked for."""

    load: Workload | Spike
    described: dict[str, Any]
    max_concurrency: int | None = None  # of an open loop
    duration_s: float | None = None
    num_warmup: int = 1
    ignore_eos: bool = True
    goodput: Goodput | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """``model`` None: the first that the server lists."""

    url: str
    model: str | None = None
    api_key: str | None = None
    timeout_s: float = 300.0


Progress = Callable[[str], None]


def run_serve(target: Target, case: ServeCase, progress: Progress | None = None) -> dict[str, Any]:
    """The record of one measurement. Raises RuntimeError when the server cannot be used at all, ConfigError for a bad URL or model.

    ``progress`` is given a line to show now and then.
    """
    return asyncio.run(_measure(target, case, progress))


async def _measure(target: Target, case: ServeCase, progress: Progress | None) -> dict[str, Any]:
    client = HTTPClient(target.url, target.api_key, target.timeout_s)
    try:
        model = await _served_model(client, target.model)
        await _warm_up(LoadRun(client, model, case.ignore_eos), case)
        run = LoadRun(client, model, case.ignore_eos)
        cpu_s = time.process_time()
        async with _reporting(run, progress):
            spiked = await _run(run, case)
        cpu_s = time.process_time() - cpu_s
    finally:
        await client.close()
    figures = summary(run.records, case.goodput)
    record = {"bench": "serve", "url": client.url, "model": model, **case.described, **figures}
    if spiked is not None:
        record["spike"] = spiked
    num_tokens = sum(len(r.event_times) for r in run.records)
    record["client_cpu_s"] = round(cpu_s, 3)
    record["client_cpu_us_per_token"] = round(1e6 * cpu_s / num_tokens, 2) if num_tokens else None
    return record | {"date": time.strftime("%Y-%m-%d")}


async def _run(run: LoadRun, case: ServeCase) -> dict[str, Any] | None:
    if isinstance(case.load, Spike):
        return await run_spike(run, case.load)
    duration = {} if case.duration_s is None else {"duration_s": case.duration_s}
    if isinstance(case.load.arrivals, ClosedLoop):
        await run.closed(case.load.requests(), case.load.arrivals.concurrency, **duration)
    else:
        await run.open(case.load.requests(), case.max_concurrency, **duration)
    return None


async def _served_model(client: HTTPClient, wanted: str | None) -> str:
    """The name to send. Raises RuntimeError for a server that cannot be reached, ConfigError for a name it does not serve."""
    try:
        answer = await client.get_json("/v1/models")
        names = [str(card["id"]) for card in answer["data"]]
    except HTTPError as error:
        if error.kind == "http_404" and wanted is not None:
            return wanted  # it lists none; whether it has this one, its answers will say
        raise RuntimeError(f"{client.url} cannot be measured: {error.kind}: {error}") from None
    except (KeyError, TypeError):
        raise RuntimeError(f"{client.url}/v1/models is no list of models") from None
    if wanted is None and not names:
        raise RuntimeError(f"{client.url} serves no model")
    if wanted is not None and wanted not in names:
        raise ConfigError(f"served_model_name: {wanted!r} is not served at {client.url}; there is: {', '.join(names) or 'nothing'}")
    return names[0] if wanted is None else wanted


async def _warm_up(run: LoadRun, case: ServeCase) -> None:
    """Requests like those to come, of other tokens, so that no prompt is in a cache before its time. Raises RuntimeError."""
    if not case.num_warmup:
        return
    load = case.load.workload() if isinstance(case.load, Spike) else case.load
    others = replace(load, arrivals=ClosedLoop(1), num_requests=case.num_warmup, seed=f"{load.seed}-warm-up")
    await run.closed(others.requests(), case.num_warmup)
    for record in run.records:
        if record.error_kind is not None:
            hint = "; --prompt-len, --output-len, --trace-max-len and --token-ids say what is sent, --warmup 0 leaves this out"
            raise RuntimeError(f"warming up failed: {record.error_kind}: {record.error_message}{hint}")


@contextlib.asynccontextmanager
async def _reporting(run: LoadRun, progress: Progress | None) -> Any:
    async def report(show: Progress) -> None:
        while True:
            await asyncio.sleep(_PROGRESS_S)
            show(progress_line(run, time.perf_counter()))

    task = asyncio.ensure_future(report(progress)) if progress is not None else None
    try:
        yield
    finally:
        if task is not None:
            task.cancel()


def progress_line(run: LoadRun, now_s: float) -> str:
    num_tokens = sum(len(record.event_times) for record in run.records)
    num_errors = sum(record.error_kind is not None for record in run.records)
    began_s = min((record.due_s for record in run.records), default=now_s)
    rate = num_tokens / (now_s - began_s) if now_s > began_s else 0.0
    done = len(run.records) - run.num_running
    return f"{done} done, {run.num_running} running, {num_errors} errors, {rate:.0f} token/s, {now_s - began_s:.0f} s"


_ROWS = (
    ("ttft_ms", "TTFT"),
    ("itl_ms", "gap (ITL)"),
    ("tpot_ms", "TPOT"),
    ("e2e_ms", "E2E"),
    ("send_delay_ms", "sent late by"),
)


def report(record: dict[str, Any]) -> list[str]:
    """The record for people, line by line."""
    lines = [f"{record['model']} at {record['url']}: {record['load']}"]
    lines.append(f"{record['num_completed']} of {record['num_requests']} requests in {record['wall_s']:.1f} s: {_rates(record)}")
    columns = ("mean", *(f"p{p}" for p in PERCENTILES), "max")
    lines.append(f"{'ms':<14}" + "".join(f"{name:>11}" for name in columns))
    for key, title in _ROWS:
        if record[key] is not None:
            lines.append(f"{title:<14}" + "".join(f"{record[key][name]:>11.2f}" for name in columns))
    return lines + _spike_lines(record) + _remarks(record)


def _rates(record: dict[str, Any]) -> str:
    rates = f"{record['output_tok_s']:.1f} output token/s, {record['total_tok_s']:.1f} with prompts, {record['request_s']:.2f} requests/s"
    cached = record["num_cached_tokens"]
    return rates + (f"; {cached} of {record['num_prompt_tokens']} prompt tokens from the cache" if cached else "")


def _spike_lines(record: dict[str, Any]) -> list[str]:
    spiked = record.get("spike")
    if spiked is None:
        return []
    if "error" in spiked:
        return [f"long prompt: {spiked['error']}: {spiked['first_error']}"]
    line = f"long prompt: TTFT {spiked['prompt_ttft_ms']:.1f} ms"
    if spiked["gap_ms"] is not None:
        line += f"; meanwhile the streams' gaps: p50 {spiked['gap_ms']['p50']:.2f} ms, worst {spiked['gap_ms']['max']:.1f} ms"
    return [line] if spiked["overlap"] else [line, "not all streams outlasted the long prompt: this case says nothing"]


def _remarks(record: dict[str, Any]) -> list[str]:
    lines = []
    if (good := record.get("goodput")) is not None:
        limits = ", ".join(f"{name} <= {limit:g} ms" for name, limit in good["limits_ms"].items())
        lines.append(f"goodput: {100 * good['share']:.1f} % of requests, {good['request_s']:.2f} requests/s within {limits}")
    if record["num_errors"]:
        kinds = ", ".join(f"{kind} {number}" for kind, number in record["errors"].items())
        lines.append(f"errors: {record['num_errors']} ({kinds}); the first: {record['first_error']}")
    if record["num_cached_tokens"] and not record.get("shared_prefix"):
        lines.append("the server knew prompts from before, though these share no prefix: another --seed makes other ones")
    if record["num_short"] and record["ignore_eos"]:
        lines.append(f"{record['num_short']} answers are shorter than asked for, in spite of ignore_eos")
    if record["client_cpu_us_per_token"] is not None:
        lines.append(f"this load generator: {record['client_cpu_us_per_token']:.1f} us of processor time per token")
    return lines
