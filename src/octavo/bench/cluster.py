"""What a front end costs by itself: many open streams, few of which get a token at a time, over workers that compute nothing.

    this process: clients ──HTTP──▶ `octavo serve --workers-listen` (its own process) ◀──control── stub workers (theirs)

First all streams are opened and lie idle, then every one gets its tokens in turn. Each event is counted where it is made and compared
where it comes out; all streams have to end as they should. The processor time and the memory are the front end's alone, as the kernel
counts them; what the kernel keeps for sockets is not in them.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from octavo.bench.http_client import HTTPClient
from octavo.bench.own_server import OwnServer, stop_process
from octavo.bench.stream_record import StreamRecord
from octavo.bench.stub_worker import token_of
from octavo.distributed.handshake import new_secret

OWN_FILES = 64  # descriptors of this process that are no streams
OPEN_AT_ONCE = 64  # requests a batch, while streams are opened
OPEN_S = 300.0  # for all of them
IDLE_S = 3.0  # that the idle front end is watched
STARTED_S = 60.0


@dataclass(frozen=True, slots=True)
class ClusterCase:
    """``rate``: events a second, of all streams. Each stream gets ``num_tokens``, from ``rate`` and ``duration_s``."""

    num_streams: int = 5000
    num_workers: int = 4
    rate: float = 2000.0
    duration_s: float = 20.0

    @property
    def num_tokens(self) -> int:
        return max(1, round(self.rate * self.duration_s / self.num_streams))


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What stub workers have to know of the front end's model."""

    path: str
    fingerprint: str
    vocab_size: int
    context: int

    @classmethod
    def of(cls, spec: str) -> ServedModel:
        """Raises ModelFileError."""
        from octavo.models.catalog import ensure_model
        from octavo.models.loading import open_model

        path = str(ensure_model(spec))
        body = open_model(path).body
        return cls(path, body.fingerprint, body.program.vocab_size, body.program.context)


@dataclass(frozen=True, slots=True)
class ClusterResult:
    """``wrong``: streams with other tokens, or in another order, than were made. ``idle_share`` and ``busy_share``: processor time of the
    front end per second, with all streams open, without and with events."""

    num_streams: int
    num_workers: int
    num_tokens: int
    open_s: float
    events_sent: int
    events_received: int
    wrong: int
    failed: dict[str, int]
    seconds: float
    idle_share: float
    busy_share: float
    cpu_us_per_event: float
    cpu_ms_per_stream: float
    bytes_per_stream: float
    rss_bytes: int

    @property
    def lost(self) -> int:
        return self.num_streams * self.num_tokens - self.events_received

    def shown(self) -> list[str]:
        """As lines of text."""
        rate = self.events_received / max(self.seconds, 1e-9)
        return [
            f"{self.num_streams} streams over {self.num_workers} stub workers, opened in {self.open_s:.1f} s",
            f"{self.events_sent} events sent, {self.events_received} received, {rate:.0f} a second",
            f"{self.lost} events lost, {self.wrong} streams wrong",
            f"front end: {self.cpu_us_per_event:.1f} us of processor time an event, {self.cpu_ms_per_stream:.2f} ms a stream to open",
            f"front end: {100 * self.busy_share:.1f} % of a core with events, {100 * self.idle_share:.1f} % with all streams idle",
            f"front end: {self.bytes_per_stream / 1024:.1f} KiB a stream, {self.rss_bytes / 2**20:.0f} MiB in all",
            *(f"{count} streams failed: {kind}" for kind, count in self.failed.items()),
        ]


def allowed_streams(wanted: int) -> int:
    """So many streams this process has descriptors for, having raised its limit to what it may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + OWN_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return wanted if soft == resource.RLIM_INFINITY else max(1, min(wanted, soft - OWN_FILES))


class Stubs:
    """The stub workers' process. ``counts`` is what it said last."""

    def __init__(self, connect: str, secret_file: str, case: ClusterCase, model: ServedModel) -> None:
        argv = [sys.executable, "-m", "octavo.bench.stub_workers", "--connect", connect, "--secret-file", secret_file]
        argv += ["--workers", str(case.num_workers), "--rate", str(case.rate)]
        argv += ["--fingerprint", model.fingerprint, "--vocab-size", str(model.vocab_size)]
        argv += ["--max-model-len", str(model.context)]
        self.counts = {"attempts": 0, "events": 0}
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Stubs:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        stop_process(self._process)

    def go(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.counts = json.loads(line)


def usage_of(pid: int) -> tuple[float, int]:
    """Seconds of processor time that a process has used, and bytes of memory that it holds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), pages * os.sysconf("SC_PAGE_SIZE")


def run_cluster(spec: str, case: ClusterCase, say: Callable[[str], None], as_json: bool = False) -> ClusterResult:
    """``spec`` names the model. Raises RuntimeError when the server does not start, streams cannot be opened, or an event is lost."""
    model = ServedModel.of(spec)
    num_streams = allowed_streams(case.num_streams)
    if num_streams < case.num_streams and not as_json:
        say(f"only {num_streams} streams: the process may not have more files open (ulimit -Hn)")
    case = ClusterCase(num_streams, case.num_workers, case.rate, case.duration_s)
    with tempfile.TemporaryDirectory(prefix="octavo-bench-") as folder:
        secret_file, address = f"{folder}/secret", f"unix:{folder}/workers"
        Path(secret_file).touch(0o600)
        Path(secret_file).write_text(new_secret())
        flags = ["--model", model.path, "--workers-listen", address, "--cluster-secret-file", secret_file, "--worker-suspect-s", "30"]
        with Stubs(address, secret_file, case, model) as stubs:
            own = OwnServer(flags)
            with own as url:
                result = asyncio.run(_measure(url, own.pid, stubs, case, model.vocab_size))
    if not as_json:
        for line in result.shown():
            say(line)
    say(json.dumps(asdict(result) | {"lost": result.lost}))
    if result.lost or result.wrong or result.failed:
        num_failed = sum(result.failed.values())
        whole = num_streams * case.num_tokens
        raise RuntimeError(f"{result.lost} of {whole} events were lost; {num_failed} streams failed, {result.wrong} were wrong")
    return result


def prompt_of(place: int) -> list[int]:
    """Of stream number ``place``, from 0."""
    return [1 + place % 101, 1 + place % 103, 1 + place % 107, 1]


def texts_of(place: int, num_tokens: int, vocab_size: int) -> list[str]:
    """Of its events."""
    return [f" {token_of(prompt_of(place), k, vocab_size)}" for k in range(num_tokens)]


async def _measure(url: str, pid: int, stubs: Stubs, case: ClusterCase, vocab_size: int) -> ClusterResult:
    client = HTTPClient(url, timeout_s=OPEN_S + case.duration_s)
    await _all_workers(client, case.num_workers)
    cpu_s, rss_bytes = usage_of(pid)
    begin_s = time.perf_counter()
    records, streams = await _open(client, stubs, case)
    open_s = time.perf_counter() - begin_s
    open_cpu_s, open_rss_bytes = usage_of(pid)
    await asyncio.sleep(IDLE_S)
    idle_cpu_s, _ = usage_of(pid)
    go_s = time.perf_counter()
    stubs.go()
    await asyncio.gather(*streams)
    seconds = time.perf_counter() - go_s
    end_cpu_s, end_rss_bytes = usage_of(pid)
    await asyncio.sleep(0.5)  # until the stubs have said what they sent
    await client.close()
    received = sum(len(record.event_times) for record in records)
    wrong = sum(record.texts != texts_of(place, case.num_tokens, vocab_size) for place, record in enumerate(records))
    failed = Counter(record.error_kind for record in records if record.error_kind is not None)
    return ClusterResult(
        case.num_streams, case.num_workers, case.num_tokens, open_s, stubs.counts["events"], received, wrong, dict(failed), seconds,
        (idle_cpu_s - open_cpu_s) / IDLE_S, (end_cpu_s - idle_cpu_s) / seconds, 1e6 * (end_cpu_s - idle_cpu_s) / max(1, received),
        1e3 * (open_cpu_s - cpu_s) / case.num_streams, (open_rss_bytes - rss_bytes) / case.num_streams, end_rss_bytes,
    )  # fmt: skip


async def _all_workers(client: HTTPClient, num_workers: int) -> None:
    """Until all of them may get requests."""
    deadline_s = time.perf_counter() + STARTED_S
    while sum(worker["state"] == "ready" for worker in (await client.get_json("/v1/cluster"))["workers"]) < num_workers:
        if time.perf_counter() > deadline_s:
            raise RuntimeError(f"the stub workers have not joined within {STARTED_S:g} s")
        await asyncio.sleep(0.1)


async def _open(client: HTTPClient, stubs: Stubs, case: ClusterCase) -> tuple[list[StreamRecord], list[asyncio.Task[None]]]:
    """All streams, which have reached the workers and have no token yet."""
    records, streams = list[StreamRecord](), list[asyncio.Task[None]]()
    deadline_s = time.perf_counter() + OPEN_S
    while stubs.counts["attempts"] < case.num_streams:
        behind = len(records) - stubs.counts["attempts"]
        for _ in range(min(OPEN_AT_ONCE, case.num_streams - len(records)) if behind < 8 * OPEN_AT_ONCE else 0):
            record = StreamRecord(4, case.num_tokens, texts=[])
            body = {"prompt": prompt_of(len(records)), "max_tokens": case.num_tokens, "stream": True, "ignore_eos": True}
            records.append(record)
            streams.append(asyncio.create_task(client.stream("/v1/completions", json.dumps(body).encode(), record)))
        await asyncio.sleep(0.02)
        broken = next((record for record in records if record.error_kind is not None), None)
        if broken is not None:
            raise RuntimeError(f"a stream was not opened: {broken.error_message}")
        if time.perf_counter() > deadline_s or not stubs.is_alive:
            raise RuntimeError(f"only {stubs.counts['attempts']} of {case.num_streams} streams have reached a worker")
    return records, streams
