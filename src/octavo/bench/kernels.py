"""Speed of single kernels beside what bounds them: products on packed weights, attention over the KV cache.

One row is bound by reading the weights, many by arithmetic, those between by whichever takes longer. A share is the time that the bound
allows over the time that was taken. Weights of few rows are streamed from memory, as a decoding step does; those of many are in cache.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from octavo.backends.cpu.backend import PACKABLE
from octavo.backends.cpu.kernel_path import kernel_path
from octavo.backends.machine import available_cpus
from octavo.bench.limits import Limits, measure_limits, stream_bytes
from octavo.bench.tables import table
from octavo.config import KV_DTYPES

FORMATS = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "bf16", "f16", "f32")
ROWS = (1, 4, 16, 64, 512)
CONTEXTS = (512, 2048)
HEADS = (9, 3, 64)  # heads, KV heads, head_dim of SmolLM2-135M

_COLUMNS = 768  # in_features: whole blocks of every format
_CACHED_ROWS = 1536  # out_features of a matrix that stays in cache
_STREAMED = 4  # activation rows up to this many find the weights in memory
_BITS = {"q4_0": 4.5, "q4_1": 5, "q5_0": 5.5, "q5_1": 6, "q8_0": 8.5, "bf16": 16, "f16": 16, "f32": 32}


@dataclass(frozen=True, slots=True)
class KernelSpeed:
    kernel: str  # matmul | prefill | decode
    format: str
    rows: int  # of activations; of a prompt
    context: int | None  # attention only
    bytes: float  # of weights or KV in one call
    operations: float
    seconds: float
    limit: str | None  # what bounds it: read, int8, bf16, f32; None: this machine has no probe of it
    share: float | None  # of the limit

    @property
    def bytes_per_s(self) -> float:
        return self.bytes / self.seconds

    @property
    def operations_per_s(self) -> float:
        return self.operations / self.seconds


def matmul_speed(path: str, limits: Limits, dtype: str, rows: int, budget_s: float) -> KernelSpeed:
    from octavo.backends.cpu import _native

    streamed = rows <= _STREAMED
    out_features = int(8 * stream_bytes() / _BITS.get(dtype, 5) / _COLUMNS) // 16 * 16 if streamed else _CACHED_ROWS
    seconds, num_bytes, operations = _native.time_matmul(path, limits.threads, dtype, out_features, _COLUMNS, rows, budget_s)
    kind = "int8" if dtype.startswith("q") else "f32"
    bounds = [(num_bytes / limits.read_rate, "read")] if streamed else []
    peak = limits.peak_rate(kind)
    if peak is not None:
        bounds.append((operations / peak, kind))
    return _speed("matmul", dtype, rows, None, (num_bytes, operations, seconds), bounds)


def attention_speed(path: str, limits: Limits, kv_dtype: str, context: int, decode: bool, budget_s: float) -> KernelSpeed:
    """A whole prompt against the best peak its type could use, or one row behind a context that comes from memory."""
    from octavo.backends.cpu import _native

    rows = 1 if decode else context
    kv_bytes = stream_bytes() // limits.threads if decode else 0
    seconds, num_bytes, operations = _native.time_attention(path, limits.threads, kv_dtype, HEADS, context, rows, kv_bytes, budget_s)
    bounds = []
    if decode:
        bounds.append((num_bytes / limits.read_rate, "read"))
    else:
        kinds = ("f32",) if kv_dtype == "f32" else ("bf16", "f32")
        peaks = [(peak, kind) for kind in kinds if (peak := limits.peak_rate(kind)) is not None]
        bounds += [(operations / peak, kind) for peak, kind in sorted(peaks)[-1:]]
    return _speed("decode" if decode else "prefill", kv_dtype, rows, context, (num_bytes, operations, seconds), bounds)


def _speed(
    kernel: str, kind: str, rows: int, context: int | None, measured: tuple[float, float, float], bounds: list[tuple[float, str]]
) -> KernelSpeed:
    num_bytes, operations, seconds = measured
    bound_s, limit = max(bounds, default=(0.0, None))
    share = bound_s / seconds if limit is not None else None
    return KernelSpeed(kernel, kind, rows, context, num_bytes, operations, seconds, limit, share)


@dataclass(frozen=True, slots=True)
class KernelCases:
    formats: Sequence[str] = FORMATS
    rows: Sequence[int] = ROWS
    kv_dtypes: Sequence[str] = KV_DTYPES
    contexts: Sequence[int] = CONTEXTS


def measure_kernels(path: str, limits: Limits, cases: KernelCases, budget_s: float) -> list[KernelSpeed]:
    """Every case for about ``budget_s`` seconds each."""
    unknown = [name for name in cases.formats if name not in PACKABLE]
    if unknown:
        raise ValueError(f"format: {unknown[0]!r} cannot be packed; known: {', '.join(FORMATS)}")
    speeds = [matmul_speed(path, limits, dtype, rows, budget_s) for dtype in cases.formats for rows in cases.rows]
    for kv_dtype in cases.kv_dtypes:
        for context in cases.contexts:
            speeds += [attention_speed(path, limits, kv_dtype, context, decode, budget_s) for decode in (False, True)]
    return speeds


def run_kernels(cases: KernelCases, threads: int | None, budget_s: float, echo: Callable[[str], None], as_json: bool) -> None:
    """`octavo bench kernels`: the last line given to ``echo`` is the JSON record."""
    path = kernel_path()
    limits = measure_limits(threads or available_cpus(), budget_s)
    speeds = measure_kernels(path, limits, cases, budget_s)
    if not as_json:
        echo(f"{path}, {limits.threads} threads; memory read {limits.read_rate / 1e9:.1f} GB/s")
        echo(speed_table(speeds))
    echo(json.dumps({"bench": "kernels", "isa": path, "threads": limits.threads} | rates(limits) | speed_record(speeds)))


def rates(limits: Limits) -> dict[str, float | None]:
    """The machine's figures on the threads that compute, per second."""
    peaks = {f"{kind}_ops_s": limits.peak_rate(kind) for kind in ("int8", "bf16", "f32")}
    return {"memory_read_bytes_s": limits.read_rate} | peaks


def speed_record(speeds: list[KernelSpeed]) -> dict[str, object]:
    return {"kernels": [asdict(s) for s in speeds], "date": time.strftime("%Y-%m-%d")}


def speed_table(speeds: list[KernelSpeed]) -> str:
    rows = [("KERNEL", "FORMAT", "ROWS", "CONTEXT", "TIME", "READS", "COMPUTES", "SHARE OF LIMIT")]
    for s in speeds:
        share = f"{100 * s.share:.0f} % of {s.limit}" if s.share is not None else "-"
        reads, computes = f"{s.bytes_per_s / 1e9:.1f} GB/s", f"{s.operations_per_s / 1e12:.3f} TOP/s"
        context = "-" if s.context is None else str(s.context)
        rows.append((s.kernel, s.format, str(s.rows), context, f"{s.seconds * 1e6:.0f} us", reads, computes, share))
    return table(rows, right="..>>>>>.")
