"""`octavo bench handoff`: what a hand-off costs an answer, with KV sent while the prompt is computed or when it is done.

One worker alone answers first; then, over each link, a prefill and a decode worker answer the same prompts, whose KV goes *serial* or
*layer-wise* (Splitwise, Patel et al., ISCA 2024, section 4.3 and figure 14). Requests come one at a time, so that what is seen is the
hand-off and nothing else:

    second-token delay   the gap between first and second token, over the median later gap of the worker alone
    end-to-end overhead  the whole answer, over that of the worker alone

Owns front ends and their workers, one after the other. The link is the workers' own throttle, that of network namespaces which are made for
it, or one between machines.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from octavo.bench.netns import Network, NetworkError
from octavo.bench.tables import table
from octavo.config import EngineConfig
from octavo.core.request import FinishReason, SamplingParams
from octavo.distributed.channel import Address
from octavo.distributed.cluster_engine import ClusterEngine
from octavo.distributed.cluster_options import ClusterOptions, HandoverOptions
from octavo.distributed.fleet import LivenessLimits
from octavo.distributed.handoff import HandoffLimits
from octavo.distributed.handshake import new_secret
from octavo.distributed.process_worker import LocalProcesses
from octavo.engine.event_stream import EngineUnavailable
from octavo.models.loading import open_model

SERIAL = 1 << 30  # no prompt is so long
PATIENT = LivenessLimits(suspect_s=60.0, stall_s=120.0, gone_s=600.0)
ALONE, WAYS = "alone", ("serial", "layer-wise")


class HandoffBenchError(RuntimeError):
    """The bench cannot go on; the message says why."""


@dataclass(frozen=True, slots=True)
class HandoffCase:
    """``links``: gigabits a second between the workers, one after the other (None: all that there is). ``in_namespaces``: each worker on a
    host of its own, made of a network namespace whose link is as fast; else a prefill worker holds its KV back. ``listen``: workers are
    started elsewhere, and connect there."""

    prompts: tuple[int, ...]
    num_output: int
    repeat: int
    transport: str
    wire_dtype: str
    threads: int
    links: tuple[float | None, ...] = (None,)
    in_namespaces: bool = False
    listen: Address | None = None
    secret: bytes | None = None


@dataclass(slots=True)
class Timed:
    """One answer: seconds of its events since it was sent, and its tokens."""

    times_s: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.times_s, self.times_s[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class Row:
    """Medians in milliseconds of one way, link and prompt length. ``second_ms``: the gap between first and second token; ``gap_ms``: of
    later ones. ``second_over`` and ``e2e_over``: in per cent over the worker alone."""

    way: str
    link_gbps: float | None
    num_prompt: int
    kv_bytes: int
    ttft_ms: float
    second_ms: float
    gap_ms: float
    e2e_ms: float
    second_over: float | None = None
    e2e_over: float | None = None


def run_handoff(config: EngineConfig, case: HandoffCase, say: Callable[[str], None], as_json: bool) -> dict[str, Any]:
    """Measure all ways over all links; the record, whose JSON is the last line said. Raises HandoffBenchError."""
    rows = measure_handoff(config, case, (lambda line: None) if as_json else say)
    record = {"bench": "handoff", "model": config.model.model, "case": _described(case), "rows": [asdict(row) for row in rows]}
    if not as_json:
        say(table_of(rows))
    say(json.dumps(record))
    return record


def measure_handoff(config: EngineConfig, case: HandoffCase, say: Callable[[str], None]) -> list[Row]:
    """A row for each way, link and prompt length, alone first. Raises HandoffBenchError."""
    try:
        return asyncio.run(_Bench(config, case, say).run())
    except (NetworkError, EngineUnavailable) as error:
        raise HandoffBenchError(str(error)) from error


def _described(case: HandoffCase) -> dict[str, Any]:
    names = ("num_output", "repeat", "transport", "wire_dtype", "threads", "links")
    link = "outside" if case.listen is not None else "namespaces" if case.in_namespaces else "throttle"
    return {name: getattr(case, name) for name in names} | {"link": link}


class _Bench:
    """One run. What the worker alone has answered, and in what time, is what the others are held to."""

    def __init__(self, config: EngineConfig, case: HandoffCase, say: Callable[[str], None]) -> None:
        self._config, self._case, self._say = config, case, say
        self._model = open_model(config.model.model).read_text()
        self._network: Network | None = None
        self._answers: dict[int, list[list[int]]] = {}  # by prompt length
        self._alone: dict[int, Row] = {}

    async def run(self) -> list[Row]:
        with contextlib.ExitStack() as stack:
            if self._case.in_namespaces:
                self._network = stack.enter_context(Network(2))
            rows = await self._measure(ALONE, None)
            for link_gbps in self._case.links:
                for host in self._network.hosts if self._network is not None else ():
                    host.throttle(link_gbps)
                for way in WAYS:
                    rows += await self._measure(way, link_gbps)
        return rows

    async def _measure(self, way: str, link_gbps: float | None) -> list[Row]:
        """All prompts, by workers of their own: no cache has seen them."""
        case, rows = self._case, list[Row]()
        engine = self._front_end(way, link_gbps)
        engine.start()
        try:
            await self._ready(engine, way)
            for num_prompt in case.prompts:
                answers = [await _answer(engine, num_prompt, case.num_output, i) for i in range(case.repeat + 1)][1:]  # one warms up
                tokens = [one.token_ids for one in answers]
                if case.wire_dtype == "auto" and self._answers.setdefault(num_prompt, tokens) != tokens:
                    raise HandoffBenchError(f"{way}: a prompt of {num_prompt} tokens has another answer than that of one worker")
                row = _row(way, link_gbps, num_prompt, engine.limits.kv_bytes_per_token, answers, self._alone.get(num_prompt))
                self._alone.setdefault(num_prompt, row)
                rows.append(row)
                over = "" if link_gbps is None else f" over {link_gbps:g} Gb/s"
                self._say(f"{way}{over}, {num_prompt} tokens: first {row.ttft_ms:.1f} ms, second {row.second_ms:.1f} ms later")
            stats = engine.handovers.desk.stats
            if way != ALONE and stats.num_handed_over < len(case.prompts) * (case.repeat + 1):
                raise HandoffBenchError(f"{way}: not every answer was handed over: {stats}")
        finally:
            await engine.stop()
        return rows

    def _front_end(self, way: str, link_gbps: float | None) -> ClusterEngine:
        case = self._case
        min_layerwise = SERIAL if way == "serial" else 1
        limits = HandoffLimits(reserve_s=300.0, copy_s=300.0, prompt_s=3600.0)
        options = ClusterOptions(
            liveness=PATIENT,
            handover=HandoverOptions(case.transport, case.wire_dtype, "none", min_layerwise, limits, may_borrow=False),
        )
        if case.listen is not None:
            assert case.secret is not None, "workers from elsewhere need a secret"
            engine = ClusterEngine(self._model, self._config, case.listen, case.secret, options)
            if way == ALONE:
                engine.flights.handovers = None  # whoever has the prompt goes on itself
            return engine
        secret, folder = new_secret(), tempfile.mkdtemp(prefix="octavo-")
        address = Address(path=str(Path(folder) / "workers")) if self._network is None else Address(self._network.address, 0)
        workers = self._workers(way, link_gbps, secret)
        return ClusterEngine(self._model, self._config, address, secret.encode(), options, workers, lambda: Path(folder).rmdir())

    def _workers(self, way: str, link_gbps: float | None, secret: str) -> LocalProcesses:
        """The decode worker is on the second host, where there are hosts."""
        roles = {"worker-0": "both"} if way == ALONE else {"prefill-0": "prefill", "decode-0": "decode"}
        command = [sys.executable, "-m", "octavo.cli.main", "worker"]
        network = self._network
        if network is None:
            limit = [] if link_gbps is None else ["--kv-limit-gbps", str(link_gbps)]
            return LocalProcesses(roles, secret, self._case.threads, command + limit)
        hosts = {name: network.hosts[role == "decode"] for name, role in roles.items()}
        return LocalProcesses(roles, secret, self._case.threads, command, lambda name, argv: hosts[name].command(argv))

    async def _ready(self, engine: ClusterEngine, way: str) -> None:
        """Wait for the workers that ``way`` needs."""
        if self._case.listen is not None:
            self._say(f"{way}: waiting at {self._case.listen} for a prefill and a decode worker")
        await engine.ready()
        while self._case.listen is not None and not {"prefill", "decode"} <= set(engine.roles().values()):
            await asyncio.sleep(0.1)
        longest, most = max(self._case.prompts) + self._case.num_output, engine.limits.max_total_tokens
        if longest > most:
            raise HandoffBenchError(f"prompt: {max(self._case.prompts)} tokens and their answer are {longest}; a worker holds {most}")


async def _answer(engine: ClusterEngine, num_prompt: int, num_output: int, number: int) -> Timed:
    """One request, alone in the cluster, whose prompt no cache has."""
    prompt = [3 + (number * 7919 + num_prompt * 31 + j * j * 7 + j * 13) % (engine.limits.vocab_size - 3) for j in range(num_prompt)]
    params = engine.check_params(SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True))
    prepared = engine.prepare_checked(prompt, params, f"{num_prompt}-{number}")
    timed, began_s = Timed(), time.perf_counter()
    stream = engine.submit([prepared])
    try:
        while not stream.finished:
            for event in await stream.read():
                if event.finish_reason is FinishReason.ERROR:
                    raise HandoffBenchError(f"a prompt of {num_prompt} tokens failed: {event.error}")
                if event.token_ids:
                    timed.times_s.append(time.perf_counter() - began_s)
                    timed.token_ids += event.token_ids
    finally:
        engine.abort(stream)
    if len(timed.times_s) < 3:
        raise HandoffBenchError(f"a prompt of {num_prompt} tokens: {len(timed.times_s)} events have no gap behind the second token")
    return timed


def _row(way: str, link_gbps: float | None, num_prompt: int, token_bytes: int, answers: Sequence[Timed], alone: Row | None) -> Row:
    """``token_bytes``: of the KV of a token; ``alone``: the row of one worker, unless this is it."""

    def median_ms(values: Sequence[float]) -> float:
        return 1000 * statistics.median(values)

    ttft_ms, second_ms = median_ms([one.times_s[0] for one in answers]), median_ms([one.gaps_s[0] for one in answers])
    gap_ms, e2e_ms = median_ms([gap for one in answers for gap in one.gaps_s[1:]]), median_ms([one.times_s[-1] for one in answers])
    second_over = None if alone is None else 100 * (second_ms / alone.gap_ms - 1)
    e2e_over = None if alone is None else 100 * (e2e_ms / alone.e2e_ms - 1)
    return Row(way, link_gbps, num_prompt, num_prompt * token_bytes, ttft_ms, second_ms, gap_ms, e2e_ms, second_over, e2e_over)


def table_of(rows: Sequence[Row]) -> str:
    """By prompt length: the worker alone, then the links in their order."""
    lines: list[tuple[str, ...]] = [
        ("prompt", "KV MB", "link Gb/s", "way", "first ms", "second ms", "later gaps ms", "whole ms", "second token", "end to end")
    ]
    for row in sorted(rows, key=lambda row: row.num_prompt):  # stable: as they were measured
        over = [f"{value:+.1f} %" if value is not None else "" for value in (row.second_over, row.e2e_over)]
        link = "" if row.link_gbps is None else f"{row.link_gbps:g}"
        figures = (f"{row.ttft_ms:.1f}", f"{row.second_ms:.2f}", f"{row.gap_ms:.2f}", f"{row.e2e_ms:.1f}")
        lines.append((str(row.num_prompt), f"{row.kv_bytes / 1e6:.1f}", link, row.way, *figures, *over))
    return table(lines, right=">>> >>>>>>")
