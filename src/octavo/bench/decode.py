"""Decoding of a real model against the read bandwidth measured beside it: bytes that a token must read, counted, times tokens a second."""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass, replace

from octavo.bench.offline import OfflineCase, measure
from octavo.config import BackendConfig, CacheConfig, EngineConfig, ModelConfig
from octavo.engine.engine import Engine


@dataclass(frozen=True, slots=True)
class DecodeShare:
    model: str
    kv_dtype: str
    num_prompt: int  # tokens
    num_output: int
    weight_bytes: int  # packed, read once per token
    kv_bytes: float  # read per token, on average over the output
    prefill_tok_s: float
    decode_tok_s: float
    read_rate: float  # bytes a second, the limit
    share: float  # (weight_bytes + kv_bytes) * decode_tok_s / read_rate
    cpu_share: float  # CPU seconds of the calling thread, which computes or spins, per second: 1 on a machine with nothing else to do


def decode_share(model_file: str, threads: int, read_rate: float, case: OfflineCase) -> DecodeShare:
    """One stream of ``case`` on the cpu backend: medians over its runs, after one to warm up. Seconds are of the wall clock."""
    single = replace(case, batch=1)
    cache = CacheConfig(num_kv_blocks=2 * (case.num_prompt + case.num_output) // 16 + 4)
    engine = Engine.load(EngineConfig(ModelConfig(model_file), cache, backend=BackendConfig(threads=threads)))
    try:
        rng = random.Random(1)
        measure(engine, single, rng)
        cpu_s, wall_s = time.thread_time(), time.perf_counter()
        runs = [measure(engine, single, rng) for _ in range(case.repeat)]
        cpu_share = (time.thread_time() - cpu_s) / (time.perf_counter() - wall_s)
        backend = engine.backend
        capacity = backend.kv_capacity(0)
        weight_bytes: int = backend.weight_bytes()  # type: ignore[attr-defined]
        value_bytes = capacity.bytes_per_block / cache.block_size / engine.model.program.kv_bytes_per_token(1)
        kv_bytes = value_bytes * statistics.mean(kv_values_read(engine, case.num_prompt + i) for i in range(case.num_output - 1))
        name = engine.model.name
    finally:
        engine.close()
    prefill = statistics.median(case.num_prompt / run.prefill_s for run in runs)
    decode = statistics.median((case.num_output - 1) / run.decode_s for run in runs)
    share = (weight_bytes + kv_bytes) * decode / read_rate
    shape = (case.num_prompt, case.num_output)
    return DecodeShare(name, capacity.dtype, *shape, weight_bytes, kv_bytes, prefill, decode, read_rate, share, cpu_share)


def kv_values_read(engine: Engine, position: int) -> int:
    """Values of keys and values that one token at ``position`` reads over all layers, its own included."""
    seen = position + 1
    return sum(2 * kv.kv_heads * kv.head_dim * min(seen, kv.window or seen) for kv in engine.model.program.kv_layers)
