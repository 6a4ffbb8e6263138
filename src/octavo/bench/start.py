"""What a start costs: `octavo serve` is started as a process of its own, again and again, until it answers GET /health.

ready_s counts from before the process is made to the answer, so the interpreter and every import are in it. peak_rss_bytes is the most
memory the process has held by then (VmHWM: pages of mapped files count too). The first start warms the page cache and is not counted.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from octavo.bench.own_server import STOP_S, stop_process

TIMEOUT_S = 600.0  # for a start; a large model on a cold disk takes minutes
_READY = "is ready at "


@dataclass(frozen=True, slots=True)
class Start:
    """``*_rss_bytes`` are the kernel's VmHWM, RssAnon and RssFile at the first answer; None where it does not say."""

    ready_s: float
    peak_rss_bytes: int | None
    anon_rss_bytes: int | None
    file_rss_bytes: int | None


def run_start(model: str, serve_args: Sequence[str], repeat: int, echo: Callable[[str], None], as_json: bool) -> None:
    """Start ``octavo serve --model model *serve_args`` repeat + 1 times; the last line given to ``echo`` is the JSON record.

    RuntimeError with what the server said when it ends instead of getting ready.
    """
    argv = [sys.executable, "-m", "octavo.cli.main", "serve", "--model", model, "--port", "0", *serve_args]
    starts = [start_once(argv) for _ in range(repeat + 1)][1:]
    record = _record(model, list(serve_args), starts)
    if not as_json:
        peak = record["peak_rss_bytes"]
        memory = "" if peak is None else f", peak memory {peak / 1e6:.0f} MB"
        echo(f"{model}: ready {record['ready_s']:.3f} s after the process is started{memory} (medians of {repeat})")
    echo(json.dumps(record))


def start_once(argv: Sequence[str]) -> Start:
    """One start of the server that ``argv`` runs, stopped again."""
    with tempfile.TemporaryFile("w+") as errors:
        started_s = time.perf_counter()
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            assert process.stdout is not None
            address = _wait_until_ready(process.stdout)
            if address is None:
                process.wait(STOP_S)
                errors.seek(0)
                raise RuntimeError(f"the server ended with code {process.returncode}: {errors.read().strip()[-2000:]}")
            with urllib.request.urlopen(f"{address}/health", timeout=TIMEOUT_S) as answer:
                answer.read()
            ready_s = time.perf_counter() - started_s
            return Start(ready_s, *(_status_bytes(process.pid, key) for key in ("VmHWM", "RssAnon", "RssFile")))
        finally:
            stop_process(process)


def _wait_until_ready(output: IO[str]) -> str | None:
    """The address in the server's ready line; None when it ends without one."""
    for line in output:
        if _READY in line:
            return line.split(_READY)[1].split()[0]
    return None


def _status_bytes(pid: int, key: str) -> int | None:
    """A figure of /proc/PID/status in bytes; None outside Linux."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), None)


def _record(model: str, serve_args: list[str], starts: Sequence[Start]) -> dict:
    def median(values: list[int | None]) -> int | None:
        known = [value for value in values if value is not None]
        return int(statistics.median(known)) if known else None

    return {
        "bench": "start",
        "model": model,
        "serve_args": serve_args,
        "repeat": len(starts),
        "ready_s": round(statistics.median(start.ready_s for start in starts), 4),
        "ready_s_each": [round(start.ready_s, 4) for start in starts],
        "peak_rss_bytes": median([start.peak_rss_bytes for start in starts]),
        "anon_rss_bytes": median([start.anon_rss_bytes for start in starts]),
        "file_rss_bytes": median([start.file_rss_bytes for start in starts]),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "date": time.strftime("%Y-%m-%d"),
    }
