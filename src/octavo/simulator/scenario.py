"""Engines of a simulation from what a user says: coefficients fitted on a machine; how many, in which roles; limits."""

from __future__ import annotations

import re
from dataclasses import replace

from octavo.config import CacheConfig, SchedulerConfig
from octavo.costs.coefficients import Coefficients
from octavo.simulator.engine_spec import EngineSpec

MEMORY_SHARE = 0.9  # of a machine's memory that weights, activations and KV may take


def fitted_engine(
    coefficients: Coefficients, num_blocks: int, max_model_len: int, scheduler: SchedulerConfig, cache: CacheConfig, kv_bytes: int = 0
) -> EngineSpec:
    """An engine whose steps cost what they cost where ``coefficients`` were fitted. ``kv_bytes``: of a token's KV, for hand-offs."""
    wake_s = coefficients.wake_s
    return EngineSpec(
        coefficients, num_blocks, max_model_len, scheduler, cache, name="fitted", kv_bytes_per_token=kv_bytes, wake_s=wake_s
    )


def engines(spec: EngineSpec, num_engines: int, roles: str | None = None) -> list[EngineSpec]:
    """``num_engines`` alike, or by ``roles``: "prefill=N,decode=M", of which both are needed. Raises ValueError."""
    if roles is None:
        if num_engines < 1:
            raise ValueError(f"engines: {num_engines} is not allowed; at least 1")
        return [replace(spec, name=f"{spec.name}-{i}") for i in range(num_engines)]
    match = re.fullmatch(r"prefill=(\d+),decode=(\d+)", roles.replace(" ", ""))
    counts = {"prefill": int(match[1]), "decode": int(match[2])} if match else {}
    if not counts or min(counts.values()) < 1:
        raise ValueError(f"roles: {roles!r} is not allowed; prefill=N,decode=M with at least one of each")
    return [replace(spec, name=f"{role}-{i}", role=role) for role, count in counts.items() for i in range(count)]


def parse_slo(text: str) -> dict[str, float]:
    """Limits in seconds by the names of ``Slo``'s fields, from "ttft=0.5,itl=0.05" (also e2e, gap). Raises ValueError."""
    limits = dict[str, float]()
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        try:
            limit = float(value)
        except ValueError:
            limit = -1.0
        if name not in ("ttft", "itl", "e2e", "gap") or f"{name}_s" in limits or not 0.0 < limit < float("inf"):
            raise ValueError(f"slo: {part!r} is not allowed; ttft, itl, e2e or gap = seconds above 0, each once, separated by commas")
        limits[f"{name}_s"] = limit
    return limits
