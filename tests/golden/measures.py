"""Holds logits against golden values made in float32 by another implementation, along the golden path.

A golden file has 14 prompts with 48 greedy tokens each and, for each of them, the five best log-probabilities; a text's
log-probability token by token; and texts with their token ids. Because a token's logits depend only on the tokens before it, one pass over
prompt + golden tokens gives what 48 requests of one token each would.
"""

from __future__ import annotations

import json
import math
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from octavo.backends.cpu.backend import CpuBackend
from octavo.config import BackendConfig, EngineConfig
from octavo.core.step import SequenceSlice, StepPlan
from octavo.models.loaded import LoadedModel

FOLDER = Path(__file__).parent
FAR_OFF_NATS = 0.35
BOS = 2  # of the Gemma file, the only one with bos


@dataclass(frozen=True)
class Gates:
    """Worst values that pass."""

    top1: float
    far_off: int
    rms_lp: float
    nll_mean_diff: float


@dataclass(frozen=True)
class Measures:
    top1: float  # share of positions whose best token is the golden one
    far_off: int  # others that the golden run puts more than 0.35 nats below its best, or out of its five best
    rms_lp: float  # root mean square of (ours - golden) log-probability of the golden token
    nll_mean_diff: float

    def failures(self, gates: Gates) -> list[str]:
        out = []
        if self.top1 < gates.top1:
            out.append(f"top1 {self.top1:.4f} < {gates.top1}")
        if self.far_off > gates.far_off:
            out.append(f"far_off {self.far_off} > {gates.far_off}")
        if self.rms_lp > gates.rms_lp:
            out.append(f"rms_lp {self.rms_lp:.4f} > {gates.rms_lp}")
        if abs(self.nll_mean_diff) > gates.nll_mean_diff:
            out.append(f"nll_mean_diff {self.nll_mean_diff:.5f} > {gates.nll_mean_diff}")
        return out


def load(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.json").read_text())


def measure(model: LoadedModel, golden: dict[str, Any], compute: str) -> Measures:
    backend = CpuBackend(model, EngineConfig(backend=BackendConfig(compute=compute)))
    backend.allocate_kv(256)
    try:
        same = far = total = 0
        squares: list[float] = []
        for prompt in golden["prompts"]:
            ids = ([BOS] if prompt["bos"] else []) + prompt["ids"]
            rows = log_probabilities(backend, ids + prompt["greedy"])
            for k, token in enumerate(prompt["greedy"]):
                row, top = rows[len(ids) - 1 + k], dict(map(tuple, prompt["top5"][k]))
                best = int(row.argmax())
                total += 1
                same += best == token
                far += best != token and (best not in top or top[token] - top[best] > FAR_OFF_NATS)
                if (row > row[token]).sum() < 5:  # as a server reports its five best
                    squares.append((row[token] - top[token]) ** 2)
        ids = golden["nll"]["ids"]
        rows = log_probabilities(backend, ids)
        diffs = [-rows[i][ids[i + 1]] - nll for i, nll in enumerate(golden["nll"]["per_token"])]
    finally:
        backend.close()
    return Measures(same / total, far, math.sqrt(sum(squares) / len(squares)), sum(diffs) / len(diffs))


def log_probabilities(backend: CpuBackend, ids: list[int]) -> list[np.ndarray]:
    """float64 [vocab_size] of each row but the last."""
    rows: list[np.ndarray] = []

    def keep(_seq_id: int, _position: int, logits: np.ndarray) -> None:
        shifted = logits.astype(np.float64) - logits.max()
        rows.append(shifted - np.log(np.exp(shifted).sum()))

    backend.logits_hook = keep
    table = array("i", range(-(-len(ids) // backend.block_size)))
    backend.execute(StepPlan(0, [SequenceSlice(0, 0, ids[:-1], table, prompt_logprobs=0, next_token_ids=ids[1:])]))
    return rows
