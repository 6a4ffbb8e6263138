"""Runs token ids through the cpu backend and through emulations of what it rounds, and returns the raw logits of every row."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from octavo.backends.cpu.backend import CpuBackend
from octavo.backends.reference import ops
from octavo.backends.reference.backend import Floats, KVPool, ReferenceBackend
from octavo.config import BackendConfig, CacheConfig, EngineConfig
from octavo.core.kv_pages import PageLayout
from octavo.core.step import SequenceSlice, StepPlan
from octavo.models.loaded import LoadedModel
from octavo.models.program import Attention, Linear, Op, Program
from tests.backends.reference_runs import all_logits, chunked

FLOAT_TYPES = ("f32", "f16", "bf16")


def make_cpu(
    model: LoadedModel, compute: str = "f32", kv_dtype: str = "auto", *, threads: int = 1, block_size: int = 16, num_blocks: int = 64
) -> CpuBackend:
    """With its KV pool. The kernel path is the one that the fixture ``isa`` chose, else the machine's best."""
    cache = CacheConfig(block_size, num_kv_blocks=num_blocks, kv_cache_dtype=kv_dtype)
    backend = CpuBackend(model, EngineConfig(cache=cache, backend=BackendConfig(compute=compute, threads=threads)))
    backend.allocate_kv(num_blocks)
    return backend


def cpu_logits(backend: CpuBackend, ids: Sequence[int], block_table: Sequence[int], chunk: int | None = None, start: int = 0) -> np.ndarray:
    """Float32 [len(ids), vocab_size]: the logits of ``ids``, which stand at ``start`` of a sequence whose earlier KV is in its blocks.

    Every row is asked for by wanting the log-probability of some token after it.
    """
    rows: dict[int, np.ndarray] = {}
    backend.logits_hook = lambda _, position, logits: rows.update({position: logits.copy()})
    for step, (first, tokens) in enumerate(chunked(start, ids, chunk or len(ids))):
        piece = SequenceSlice(0, first, tokens, array("i", block_table), prompt_logprobs=0, next_token_ids=[0] * len(tokens))
        backend.execute(StepPlan(step, [piece]))
    backend.logits_hook = None
    return np.stack([rows[position] for position in range(start, start + len(ids))])


def rounded(values: Floats, dtype: str) -> Floats:
    """As the KV type keeps it: the nearest f16 or bf16 value, ties to even; [rows, n] for int8, in 127 steps to a row's greatest."""
    if dtype == "int8":
        scale = np.abs(values).max(1, keepdims=True) / np.float32(127)
        inverse = np.float32(1) / np.where(scale > 0, scale, np.float32(1))
        return (np.rint(values * inverse) * scale).astype(np.float32)
    if dtype == "f16":
        return values.astype(np.float16).astype(np.float32)
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


def quantised_activations(x: Floats) -> Floats:
    """``x`` after the rounding that packed matrices put it through: groups of 32 values, 127 steps to the greatest magnitude."""
    groups = x.reshape(-1, 32)
    greatest = np.abs(groups).max(1, keepdims=True)
    safe = np.where(greatest > 0, greatest, np.float32(1))
    q = np.clip(np.rint(groups * (np.float32(127) / safe)), -127, 127)
    return (q * (greatest / np.float32(127))).astype(np.float32).reshape(x.shape)


class RoundingPool(KVPool):
    """A KV pool that keeps numbers of 16 or 8 bits."""

    def __init__(self, program: Program, num_blocks: int, block_size: int, layout: PageLayout, dtype: str) -> None:
        super().__init__(program, num_blocks, block_size, layout)
        self._dtype = dtype

    def write(self, op: Attention, table: np.ndarray, position: int, k: Floats, v: Floats) -> None:
        k, v = (rounded(x.reshape(-1, op.head_dim), self._dtype).reshape(x.shape) for x in (k, v))
        super().write(op, table, position, k, v)


class RoundingReference(ReferenceBackend):
    """The reference with the cpu backend's roundings, each where that backend has it, and no other: activations that meet packed
    weights, and stored keys and values. ``kv_dtype`` f16, bf16, int8 or f32.
    """

    def __init__(self, model: LoadedModel, kv_dtype: str) -> None:
        super().__init__(model, EngineConfig(backend=BackendConfig(backend="reference")))
        self._packed = {name for name, tensor in model.weights.items() if tensor.dtype not in FLOAT_TYPES}
        self._kv_dtype = kv_dtype

    def allocate_kv(self, num_blocks: int) -> None:
        super().allocate_kv(num_blocks)
        if self._kv_dtype != "f32":
            self._kv = RoundingPool(self.program, num_blocks, 16, self._layout, self._kv_dtype)

    def _elementwise(self, op: Op, values: dict[str, Floats]) -> Floats:
        if isinstance(op, Linear) and op.weight in self._packed:
            x = quantised_activations(values[op.x])
            return ops.linear(x, self._weights[op.weight], None if op.bias is None else self._weights[op.bias])
        return super()._elementwise(op, values)


def rounding_logits(model: LoadedModel, ids: Sequence[int], kv_dtype: str) -> np.ndarray:
    """Float32 [len(ids), vocab_size] by ``RoundingReference``."""
    backend = RoundingReference(model, kv_dtype)
    backend.allocate_kv(-(-len(ids) // 16))
    return all_logits(backend, ids, len(ids), range(-(-len(ids) // 16)))


def plain_logits(model: LoadedModel, ids: Sequence[int]) -> np.ndarray:
    """Float32 [len(ids), vocab_size] by the reference backend."""
    backend = ReferenceBackend(model, EngineConfig(backend=BackendConfig(backend="reference")))
    num_blocks = -(-len(ids) // 16)
    backend.allocate_kv(num_blocks)
    return all_logits(backend, ids, len(ids), range(num_blocks))


def rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))
