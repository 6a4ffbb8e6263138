"""`octavo bench handoff`: what a hand-off costs an answer, with KV sent while the prompt is computed or when it is done.

Three ways answer the same prompts: one worker alone, and a prefill with a decode worker whose KV goes *serial* or *layer-wise* (Splitwise,
Patel et al., ISCA 2024, section 4.3 and figure 14). Requests come one at a time, so that what is seen is the hand-off and nothing else:

    second-token delay   the gap between first and second token, over the median gap of the worker alone
    end-to-end overhead  the whole answer, over that of the worker alone

Owns front ends and their workers, one way after the other; the link is a real one, or the workers' own throttle.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

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
from octavo.models.loading import open_model

SERIAL = 1 << 30  # no prompt is so long
PATIENT = LivenessLimits(suspect_s=60.0, stall_s=120.0, gone_s=600.0)
WAYS = ("alone", "serial", "layer-wise")


class HandoffBenchError(RuntimeError):
    """The bench cannot go on; the message says why."""


@dataclass(frozen=True, slots=True)
class HandoffCase:
    """``link_gbps``: what prefill workers may send (None: all they can). ``listen``: workers are started elsewhere, and connect there."""

    prompts: tuple[int, ...]
    num_output: int
    repeat: int
    transport: str
    wire_dtype: str
    threads: int
    link_gbps: float | None = None
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
    """Medians in milliseconds of one way and prompt length. ``second_ms``: the gap between first and second token; ``gap_ms``: of later
    ones. ``second_over`` and ``e2e_over``: in per cent over the worker alone."""

    way: str
    num_prompt: int
    kv_bytes: int
    ttft_ms: float
    second_ms: float
    gap_ms: float
    e2e_ms: float
    second_over: float | None = None
    e2e_over: float | None = None


def run_handoff(config: EngineConfig, case: HandoffCase, say: Callable[[str], None], as_json: bool) -> dict[str, Any]:
    """Measure all ways; the record, whose JSON is the last line said. Raises HandoffBenchError."""
    import json

    rows = measure_handoff(config, case, (lambda line: None) if as_json else say)
    record = {"bench": "handoff", "model": config.model.model, "case": _described(case), "rows": [asdict(row) for row in rows]}
    if not as_json:
        say(table_of(rows))
    say(json.dumps(record))
    return record


def measure_handoff(config: EngineConfig, case: HandoffCase, say: Callable[[str], None]) -> list[Row]:
    """A row for each way and prompt length, alone first. Raises HandoffBenchError."""
    return asyncio.run(_measure(config, case, say))


def _described(case: HandoffCase) -> dict[str, Any]:
    names = ("num_output", "repeat", "transport", "wire_dtype", "threads", "link_gbps")
    return {name: getattr(case, name) for name in names} | {"link": "outside" if case.listen is not None else "own"}


async def _measure(config: EngineConfig, case: HandoffCase, say: Callable[[str], None]) -> list[Row]:
    rows, texts, plain = list[Row](), dict[int, list[int]](), dict[int, Row]()
    for way in WAYS:
        engine = _front_end(config, case, way)
        engine.start()
        try:
            await _ready(engine, case, way, say)
            for num_prompt in case.prompts:
                answers = [await _answer(engine, num_prompt, case.num_output, i) for i in range(case.repeat + 1)][1:]  # one warms up
                tokens = answers[0].token_ids
                if case.wire_dtype == "auto" and texts.setdefault(num_prompt, tokens) != tokens:
                    raise HandoffBenchError(f"{way}: a prompt of {num_prompt} tokens has another answer than that of one worker")
                row = _row(engine, way, num_prompt, answers, plain.get(num_prompt))
                plain.setdefault(num_prompt, row)
                rows.append(row)
                say(f"{way}, {num_prompt} tokens: first {row.ttft_ms:.1f} ms, second {row.second_ms:.1f} ms later")
            stats = engine.handovers.desk.stats
            if way != "alone" and stats.num_handed_over < len(case.prompts) * (case.repeat + 1):
                raise HandoffBenchError(f"{way}: not every answer was handed over: {stats}")
        finally:
            await engine.stop()
    return rows


def _front_end(config: EngineConfig, case: HandoffCase, way: str) -> ClusterEngine:
    min_layerwise = 1 if way == "layer-wise" else SERIAL
    limits = HandoffLimits(300.0, 300.0, 300.0, 3600.0)
    handover = HandoverOptions(case.transport, case.wire_dtype, "none", min_layerwise, limits, may_borrow=False)
    options = ClusterOptions(liveness=PATIENT, handover=handover)
    model = open_model(config.model.model).read_text()
    if case.listen is not None:
        assert case.secret is not None, "workers from elsewhere need a secret"
        engine = ClusterEngine(model, config, case.listen, case.secret, options)
        if way == "alone":
            engine.flights.handovers = None  # the prefill worker goes on itself
        return engine
    command = [sys.executable, "-m", "octavo.cli.main", "worker"]
    if case.link_gbps is not None:
        command += ["--kv-limit-gbps", str(case.link_gbps)]
    roles = {"worker-0": "both"} if way == "alone" else {"prefill-0": "prefill", "decode-0": "decode"}
    secret, folder = new_secret(), tempfile.mkdtemp(prefix="octavo-")
    return ClusterEngine(
        model, config, Address(path=str(Path(folder) / "workers")), secret.encode(), options,
        LocalProcesses(roles, secret, case.threads, command), lambda: Path(folder).rmdir(),
    )  # fmt: skip


async def _ready(engine: ClusterEngine, case: HandoffCase, way: str, say: Callable[[str], None]) -> None:
    """Wait for the workers that ``way`` needs. Those from elsewhere stay for all ways."""
    await engine.ready()
    if case.listen is None:
        return
    wanted = {"prefill", "decode"}
    say(f"{way}: waiting at {engine.control.address} for a prefill and a decode worker")
    while not wanted <= set(engine.roles().values()):
        await asyncio.sleep(0.1)


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
    return timed


def _row(engine: ClusterEngine, way: str, num_prompt: int, answers: Sequence[Timed], plain: Row | None) -> Row:
    def median_ms(values: Sequence[float]) -> float:
        return 1000 * statistics.median(values)

    ttft_ms, second_ms = (median_ms([one.times_s[0] for one in answers]), median_ms([one.gaps_s[0] for one in answers]))
    gap_ms, e2e_ms = median_ms([gap for one in answers for gap in one.gaps_s[1:]]), median_ms([one.times_s[-1] for one in answers])
    kv_bytes = num_prompt * engine.limits.kv_bytes_per_token
    if plain is None:
        return Row(way, num_prompt, kv_bytes, ttft_ms, second_ms, gap_ms, e2e_ms)
    second_over, e2e_over = 100 * (second_ms / plain.gap_ms - 1), 100 * (e2e_ms / plain.e2e_ms - 1)
    return Row(way, num_prompt, kv_bytes, ttft_ms, second_ms, gap_ms, e2e_ms, second_over, e2e_over)


def table_of(rows: Sequence[Row]) -> str:
    head = ("prompt", "KV MB", "way", "first ms", "second ms", "later gaps ms", "whole ms", "second token", "end to end")
    lines: list[tuple[str, ...]] = [head]
    for row in sorted(rows, key=lambda row: (row.num_prompt, WAYS.index(row.way))):
        over = [f"{value:+.1f} %" if value is not None else "" for value in (row.second_over, row.e2e_over)]
        figures = (f"{row.ttft_ms:.1f}", f"{row.second_ms:.2f}", f"{row.gap_ms:.2f}", f"{row.e2e_ms:.1f}")
        lines.append((str(row.num_prompt), f"{row.kv_bytes / 1e6:.1f}", row.way, *figures, *over))
    return table(lines, right=">> >>>>>>")
