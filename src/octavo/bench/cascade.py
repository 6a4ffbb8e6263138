"""Decoding behind a shared prefix: its tiles walked once a step for all streams that share them, beside once for each.

Both ways in turn (A B A B), on the same blocks, by a switch of the cpu backend that changes no bit. Two levels:

- ``attention``: steps of attention alone (``attention_steps``), shaped as the model's layers, beside what bounds them: every key and
  value that is seen, once, at the read rate of the same run, or the operations at its peak, whichever takes longer;
- ``engine``: whole decoding steps of the model.

Bytes are counted where keys and values are walked.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from octavo.backends.cpu.backend import CpuBackend
from octavo.bench.attention_steps import AttentionSteps, Stream
from octavo.bench.limits import Limits, measure_limits
from octavo.bench.record import measured_with
from octavo.bench.steps import steps_to_end
from octavo.bench.tables import table
from octavo.core.request import SamplingParams
from octavo.engine.engine import Engine
from octavo.models.program import Attention

if TYPE_CHECKING:
    from octavo.config import EngineConfig

STREAMS = (1, 2, 4, 8, 16, 32)
SHARED = (0, 64, 256, 1024, 4096, 8192)
ENGINE_STREAMS = (4, 16)
ENGINE_SHARED = (0, 512, 4096)
_LEAST_PAIRS = 3
_ENGINE_PAIRS = 6
_ENGINE_STEPS = 3  # that one way runs before the other's turn
_WAYS = (True, False)  # together, each alone


@dataclass(frozen=True, slots=True)
class CascadeCase:
    streams: Sequence[int] = STREAMS
    shared: Sequence[int] = SHARED
    num_own: int = 64
    seconds: float = 0.3
    """For each figure of attention, both ways together."""
    engine: bool = True
    engine_streams: Sequence[int] = ENGINE_STREAMS
    engine_shared: Sequence[int] = ENGINE_SHARED


@dataclass(frozen=True, slots=True)
class Cascade:
    """One number of streams behind ``num_shared`` tokens, each with ``num_own`` more."""

    num_streams: int
    num_shared: int
    num_own: int
    together_s: float  # a step, median
    alone_s: float
    gain: float  # median of the pairs' ratios
    together_bytes: int  # walked by a step for several streams at once
    own_bytes: int  # and for one
    alone_bytes: int  # walked by a step without
    limit: str | None = None  # read | f32 | bf16
    share: float | None = None  # of the limit: least seconds of what must be read and computed / together_s
    exact_share: float | None = None  # the same with the operations that the exact arithmetic takes: bf16's second half of each query


def run_cascade(config: EngineConfig, case: CascadeCase, echo: Callable[[str], None], as_json: bool) -> None:
    """`octavo bench cascade`: the last line given to ``echo`` is the JSON record. ValueError for what does not fit, or another backend."""
    say: Callable[[str], None] = (lambda line: None) if as_json else echo
    engine = Engine.load(config)
    try:
        backend = _backend(engine)
        if case.engine:
            _check_fits(engine, case)
        limits = measure_limits(backend.threads, 0.1)
        attention = _attention(backend, engine, limits, case)
        where = f"{backend.threads} threads, {backend.isa}; memory read {limits.read_rate / 1e9:.1f} GB/s"
        say(f"{engine.model.name}: attention alone, {where}\n{_table(attention)}")
        sizes = [(n, shared) for n in case.engine_streams for shared in case.engine_shared] if case.engine else []
        whole = [_engine_case(engine, n, shared, case) for n, shared in sizes]
        if whole:
            say("\nwhole steps of decoding\n" + _table(whole))
        record = {
            "bench": "cascade", "model": engine.model.name,
            "memory_read_bytes_s": limits.read_rate, "f32_ops_s": limits.peak_rate("f32"), "bf16_ops_s": limits.peak_rate("bf16"),
            "attention": [asdict(row) for row in attention], "engine": [asdict(row) for row in whole],
            **measured_with(engine),
        }  # fmt: skip
    finally:
        engine.close()
    echo(json.dumps(record))


def _backend(engine: Engine) -> CpuBackend:
    if not isinstance(engine.backend, CpuBackend):
        raise ValueError("--backend: only cpu walks shared prefixes together")
    return engine.backend


# ---- attention alone -------------------------------------------------------------------------------------------------


def _attention(backend: CpuBackend, engine: Engine, limits: Limits, case: CascadeCase) -> list[Cascade]:
    ops = [op for op in engine.model.program.ops if isinstance(op, Attention)]
    size, dtype = backend.block_size, backend.kv_capacity(0).dtype
    num_blocks = -(-max(case.shared) // size) + max(case.streams) * _own_blocks(case, size)
    steps = AttentionSteps(backend.isa, backend.threads, ops, dtype, num_blocks, size)
    try:
        return [attention_case(steps, limits, n, shared, case) for n in case.streams for shared in case.shared]
    finally:
        steps.close()


def _own_blocks(case: CascadeCase, size: int) -> int:
    return -(-(case.num_own + 1) // size) + 1


def streams_of(num_streams: int, num_shared: int, case: CascadeCase, size: int) -> list[Stream]:
    """Whole blocks are shared; the tokens that fill no block are each stream's own, as a prefix cache has it."""
    shared, own = num_shared // size, _own_blocks(case, size)
    firsts = [shared + i * own for i in range(num_streams)]
    return [Stream(num_shared + case.num_own, [*range(shared), *range(first, first + own)]) for first in firsts]


def attention_case(steps: AttentionSteps, limits: Limits, num_streams: int, num_shared: int, case: CascadeCase) -> Cascade:
    streams = streams_of(num_streams, num_shared, case, steps.block_size)
    walked = {}
    for way in _WAYS:
        steps.native.walk_together(way)
        steps.native.count_kv_reads(True)
        steps.step(streams)
        walked[way] = steps.native.kv_reads()
        steps.native.count_kv_reads(False)
    seconds: dict[bool, list[float]] = {way: [] for way in _WAYS}
    until = time.perf_counter() + case.seconds
    while len(seconds[False]) < _LEAST_PAIRS or time.perf_counter() < until:
        for way in _WAYS:
            steps.native.walk_together(way)
            started = time.perf_counter()
            steps.step(streams)
            seconds[way].append(time.perf_counter() - started)
    row = _cascade(num_streams, num_shared, case.num_own, seconds, walked)
    limit, plain_s, exact_s = _bounds(steps, limits, streams, num_shared // steps.block_size * steps.block_size)
    return replace(row, limit=limit, share=plain_s / row.together_s, exact_share=exact_s / row.together_s)


def _bounds(steps: AttentionSteps, limits: Limits, streams: Sequence[Stream], num_shared: int) -> tuple[str | None, float, float]:
    """What bounds a step, its least seconds, and those with the operations that the exact arithmetic takes."""
    seen = streams[0].position + 1  # all alike
    read_s = operations = 0.0
    for op in steps.ops:
        in_window = min(seen, op.window or seen)
        own = min(seen - num_shared, in_window)
        operations += 4 * op.heads * op.head_dim * in_window * len(streams)
        read_s += (in_window - own + own * len(streams)) * steps.bytes_per_token / len(steps.ops) / limits.read_rate
    kinds = ("f32",) if steps.kv_dtype == "f32" else ("bf16", "f32")
    peaks = [(peak, kind) for kind in kinds if (peak := limits.peak_rate(kind)) is not None]
    if not peaks:
        return "read", read_s, read_s
    peak, kind = max(peaks)
    # A query is two bf16 numbers, both of which are multiplied with the keys (docs/exactness.md).
    doubled = 1.5 if (steps.kv_dtype, kind) == ("bf16", "bf16") else 1.0
    compute_s = operations / peak
    return (kind if compute_s > read_s else "read"), max(read_s, compute_s), max(read_s, doubled * compute_s)


# ---- whole steps -----------------------------------------------------------------------------------------------------


def _engine_case(engine: Engine, num_streams: int, num_shared: int, case: CascadeCase) -> Cascade:
    """Streams decode side by side behind one prefix; both ways take turns of a few steps."""
    backend, rng = _backend(engine), random.Random(num_shared)
    prefix = [rng.randrange(backend.vocab_size) for _ in range(num_shared)]
    num_timed = 2 * _ENGINE_PAIRS * _ENGINE_STEPS
    params = SamplingParams(temperature=0.0, max_tokens=num_timed + 4, ignore_eos=True)
    waiting = set()
    for _ in range(num_streams):
        prepared = engine.prepare([*prefix, *(rng.randrange(backend.vocab_size) for _ in range(case.num_own))], params)
        waiting.add(prepared.request.request_id)
        engine.add(prepared)
    seconds: dict[bool, list[float]] = {way: [] for way in _WAYS}
    walked: dict[bool, tuple[int, int]] = {}
    num_steps, started = -1, time.perf_counter()  # of all streams side by side; the first is not timed
    try:
        for events in steps_to_end(engine):
            took = time.perf_counter() - started
            if not waiting and num_steps < num_timed:
                if num_steps >= 0:
                    seconds[_way(num_steps)].append(took)
                    walked[_way(num_steps)] = backend.kv_reads()
                num_steps += 1
                backend.walk_together(_way(num_steps))
                backend.count_kv_reads(True)
            waiting -= {event.request_id for event in events if event.token_ids}
            started = time.perf_counter()
    finally:
        backend.walk_together(True)
        backend.count_kv_reads(False)
    return _cascade(num_streams, num_shared, case.num_own, seconds, walked)


def _way(num_steps: int) -> bool:
    return num_steps // _ENGINE_STEPS % 2 == 0


def _check_fits(engine: Engine, case: CascadeCase) -> None:
    """ValueError when streams cannot run whole and side by side."""
    size, most, longest = engine.config.cache.block_size, max(case.engine_streams), max(case.engine_shared)
    num_tokens = longest + case.num_own + 2 * _ENGINE_PAIRS * _ENGINE_STEPS + 4
    if num_tokens > engine.max_model_len:
        raise ValueError(f"--shared: {num_tokens} tokens with what is the streams' own are more than the context of {engine.max_model_len}")
    if most > engine.config.scheduler.max_num_seqs:
        raise ValueError(f"--streams: {most} cannot run side by side with --max-num-seqs {engine.config.scheduler.max_num_seqs}")
    needed = longest // size + most * (-(-(num_tokens - longest) // size) + 2)
    if needed > engine.num_kv_blocks:
        raise ValueError(f"--streams: {most} streams need {needed} KV blocks of {size} tokens, and the pool has {engine.num_kv_blocks}")


# ---- rows ------------------------------------------------------------------------------------------------------------


def _cascade(
    num_streams: int, num_shared: int, num_own: int, seconds: dict[bool, list[float]], walked: dict[bool, tuple[int, int]]
) -> Cascade:
    ratios = [alone / together for together, alone in zip(seconds[True], seconds[False], strict=True)]
    medians = statistics.median(seconds[True]), statistics.median(seconds[False])
    return Cascade(num_streams, num_shared, num_own, *medians, statistics.median(ratios), *walked[True], sum(walked[False]))


def _table(rows: Sequence[Cascade]) -> str:
    head = ("STREAMS", "SHARED", "TOGETHER", "ALONE", "GAIN", "KV READ: SHARED", "OWN", "WITHOUT", "LIMIT", "OF IT", "OF THE EXACT ONE")
    lines: list[Sequence[str]] = [head]
    for r in rows:
        figures = (f"{1e3 * r.together_s:.2f} ms", f"{1e3 * r.alone_s:.2f} ms", f"{r.gain:.2f}")
        read = tuple(f"{n / 1e6:.1f} MB" for n in (r.together_bytes, r.own_bytes, r.alone_bytes))
        shares = tuple("-" if share is None else f"{100 * share:.0f} %" for share in (r.share, r.exact_share))
        lines.append((str(r.num_streams), str(r.num_shared), *figures, *read, r.limit or "-", *shares))
    return table(lines, ">>>>>>>>.>>")


def with_sizes(case: CascadeCase, streams: Sequence[int], shared: Sequence[int]) -> CascadeCase:
    """The case with these for both levels, where some are given."""
    if streams:
        case = replace(case, streams=streams, engine_streams=streams)
    if shared:
        case = replace(case, shared=shared, engine_shared=shared)
    return case
