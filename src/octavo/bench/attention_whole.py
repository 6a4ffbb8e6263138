"""Attention of a whole prompt, tile by tile as the engine has it, beside the same with all scores written out.

Three things are told apart: whether the result is the same (against float64 with all scores, and to the bit when the prompt comes in
pieces), how the memory grows with the prompt, and how long it takes beside NumPy, whose scores are a matrix [heads, rows, rows].
"""

from __future__ import annotations

import gc
import statistics
import time
from array import array
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from octavo.backends.cpu.backend import CpuBackend
from octavo.bench.attention_steps import NUM_LOGITS, NUM_TOKENS, AttentionSteps, Stream
from octavo.engine.engine import Engine
from octavo.models.program import Attention

PIECES = (37, 251, 64)  # rows of the pieces in turn, when a prompt comes in pieces
_BLOCK = 16


@dataclass(frozen=True, slots=True)
class WholePrompt:
    """``error``: the largest difference of the result to float64, in parts of the largest value. ``peak_bytes``: what the process grew by
    at most while the step ran; None where the system does not tell. ``scores_bytes``: of all scores in float32."""

    num_rows: int
    error: float
    same_in_pieces: bool
    peak_bytes: int | None
    scores_bytes: int
    tiled_s: float
    scores_s: float


@dataclass(frozen=True, slots=True)
class Shape:
    """A layer of attention, and what computes it."""

    isa: str
    threads: int
    op: Attention

    @classmethod
    def of(cls, engine: Engine) -> Shape:
        """The first layer of the engine's model. ValueError for a backend that is not the cpu's, or attention with a window or softcap."""
        if not isinstance(engine.backend, CpuBackend):
            raise ValueError(f"backend: {engine.backend.name} computes no tiles; cpu does")
        op = next(op for op in engine.model.program.ops if isinstance(op, Attention))
        if op.window is not None or op.softcap:
            raise ValueError(f"model: {engine.model.name} has attention with a window or softcap, which is not known here")
        return cls(engine.backend.isa, engine.backend.threads, op)

    def __str__(self) -> str:
        return f"{self.op.heads} heads, {self.op.kv_heads} KV heads of {self.op.head_dim}"


def measure_whole(shape: Shape, num_rows: int, repeat: int) -> WholePrompt:
    """A prompt of ``num_rows`` with float32 keys and values; times are medians of ``repeat``, in turn, after one of each to warm up."""
    op = shape.op
    table = range(-(-num_rows // _BLOCK))
    whole = [Stream(0, table, num_rows)]
    with closing(AttentionSteps(shape.isa, shape.threads, [shape.op], "f32", len(table), _BLOCK)) as steps:
        peak_bytes = growth_bytes(lambda: steps.step(whole))
        logits = np.empty((num_rows, NUM_LOGITS), np.float32)
        steps.step(whole, logits)
        in_pieces = _in_pieces(steps, table, num_rows)
        inputs = _inputs(steps, op, num_rows)
        wanted = with_scores(inputs, op, np.float64)
        tiled, scores = list[float](), list[float]()
        for _ in range(1 + repeat):
            tiled.append(_seconds(lambda: steps.step(whole)))
            scores.append(_seconds(lambda: with_scores(inputs, op, np.float32)))
    error = float(np.abs(logits - wanted).max() / np.abs(wanted).max())
    scores_bytes = 4 * op.heads * num_rows * num_rows
    medians = statistics.median(tiled[1:]), statistics.median(scores[1:])
    return WholePrompt(num_rows, error, bool(np.array_equal(logits, in_pieces)), peak_bytes, scores_bytes, *medians)


def peak_growth(shape: Shape, num_rows: int) -> int | None:
    """``WholePrompt.peak_bytes`` alone, of a prompt whose scores would fill the memory."""
    table = range(-(-num_rows // _BLOCK))
    with closing(AttentionSteps(shape.isa, shape.threads, [shape.op], "f32", len(table), _BLOCK)) as steps:
        return growth_bytes(lambda: steps.step([Stream(0, table, num_rows)]))


def _in_pieces(steps: AttentionSteps, table: range, num_rows: int) -> np.ndarray:
    logits, start, turn = np.empty((num_rows, NUM_LOGITS), np.float32), 0, 0
    while start < num_rows:
        end = min(start + PIECES[turn % len(PIECES)], num_rows)
        tokens = array("i", [i % NUM_TOKENS for i in range(start, end)])
        steps.step([Stream(start, table, end - start)], logits[start:end], tokens)
        start, turn = end, turn + 1
    return logits


@dataclass(frozen=True, slots=True)
class _Inputs:
    q: np.ndarray  # float32 [rows, heads, head_dim]
    k: np.ndarray  # float32 [rows, kv_heads, head_dim]
    v: np.ndarray
    output: np.ndarray  # float32 [NUM_LOGITS, heads * head_dim]


def _inputs(steps: AttentionSteps, op: Attention, num_rows: int) -> _Inputs:
    q_dim, kv_dim = op.heads * op.head_dim, op.kv_heads * op.head_dim
    embedding = np.frombuffer(steps.embedding, np.float32).reshape(NUM_TOKENS, q_dim + 2 * kv_dim)
    x = embedding[np.arange(num_rows) % NUM_TOKENS]
    q, k, v = np.split(x, [q_dim, q_dim + kv_dim], axis=1)
    shape = (num_rows, -1, op.head_dim)
    output = np.frombuffer(steps.output, np.float32).reshape(NUM_LOGITS, q_dim)
    return _Inputs(q.reshape(shape), k.reshape(shape), v.reshape(shape), output)


def with_scores(inputs: _Inputs, op: Attention, dtype: type) -> np.ndarray:
    """Causal attention with all scores in memory: ``dtype`` [rows, NUM_LOGITS]."""
    group = op.heads // op.kv_heads
    q, k, v = (_by_head(part, dtype) for part in (inputs.q, inputs.k, inputs.v))
    k, v = np.repeat(k, group, axis=0), np.repeat(v, group, axis=0)
    scores = q @ k.swapaxes(1, 2)
    scores *= op.scale
    scores[:, np.triu(np.ones(scores.shape[1:], bool), 1)] = -np.inf
    scores -= scores.max(axis=2, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=2, keepdims=True)
    out = (scores @ v).swapaxes(0, 1).reshape(len(inputs.q), -1)
    return np.asarray(out @ inputs.output.astype(dtype).T)


def _by_head(x: np.ndarray, dtype: type) -> np.ndarray:
    """[heads, rows, head_dim]"""
    return np.ascontiguousarray(x.astype(dtype).swapaxes(0, 1))


def growth_bytes(work: Callable[[], object]) -> int | None:
    """By how much the memory of this process grows at most while ``work`` runs; None where the system does not tell (it is Linux's)."""
    gc.collect()  # what is freed meanwhile would be taken off the growth
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the high-water mark begins anew
        before = _status_bytes("VmRSS")
        work()
        return max(0, _status_bytes("VmHWM") - before)
    except OSError:
        return None


def _status_bytes(name: str) -> int:
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(name + ":"):
                return 1024 * int(line.split()[1])
    raise OSError(f"{name} is not in /proc/self/status")


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
