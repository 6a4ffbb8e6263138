"""Gemma 2 written straight down from its formula, in float64, and a tiny model of it on which everything in the formula is felt.

The formula sees the whole sequence at once, with a mask: no cache, no blocks, no chunks. The model's weights are scaled so that both caps
bite, and its attention scale is not 1 / sqrt(head_dim).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from octavo.models.gguf import GGUFFile
from tests.models.tiny import random_tensor, tensor_shapes, write_tiny_gguf

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FF, VOCAB = 3, 32, 4, 2, 16, 64, 272
GAINS = {"attn_q.weight": 2.5, "attn_k.weight": 2.5, "output_norm.weight": 3.0}


@dataclass(frozen=True)
class Settings:
    attention_cap: float | None = 50.0
    final_cap: float | None = 30.0
    window: int | None = 32
    window_on: str = "even"  # which layers: even, odd, all
    scale: float = 24**-0.5


def cap(x: np.ndarray, limit: float | None) -> np.ndarray:
    return x if limit is None else limit * np.tanh(x / limit)


def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * weight


def rotate(x: np.ndarray) -> np.ndarray:
    """x[T, heads, HEAD_DIM] by position, pairs (i, i + HEAD_DIM / 2), base 10000."""
    half = HEAD_DIM // 2
    angles = np.arange(len(x))[:, None] * 10000.0 ** (-np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def attention(x: np.ndarray, w: dict[str, np.ndarray], layer: int, s: Settings) -> np.ndarray:
    """x[T, HIDDEN] -> [T, HIDDEN]."""
    length = len(x)
    q = rotate((x @ w[f"blk.{layer}.attn_q.weight"].T).reshape(length, HEADS, HEAD_DIM))
    k = rotate((x @ w[f"blk.{layer}.attn_k.weight"].T).reshape(length, KV_HEADS, HEAD_DIM)).repeat(HEADS // KV_HEADS, 1)
    v = (x @ w[f"blk.{layer}.attn_v.weight"].T).reshape(length, KV_HEADS, HEAD_DIM).repeat(HEADS // KV_HEADS, 1)
    scores = cap(np.einsum("thd,shd->hts", q, k) * s.scale, s.attention_cap)
    distance = np.arange(length)[:, None] - np.arange(length)
    seen = distance >= 0
    if s.window is not None and s.window_on in ("all", "odd" if layer % 2 else "even"):
        seen &= distance < s.window
    weights = np.exp(np.where(seen, scores, -np.inf) - np.where(seen, scores, -np.inf).max(-1, keepdims=True))
    mixed = np.einsum("hts,shd->thd", weights / weights.sum(-1, keepdims=True), v)
    return mixed.reshape(length, -1) @ w[f"blk.{layer}.attn_output.weight"].T


def mlp(x: np.ndarray, w: dict[str, np.ndarray], layer: int) -> np.ndarray:
    gate, up = x @ w[f"blk.{layer}.ffn_gate.weight"].T, x @ w[f"blk.{layer}.ffn_up.weight"].T
    act = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
    return (act * up) @ w[f"blk.{layer}.ffn_down.weight"].T


def formula(w: dict[str, np.ndarray], ids: list[int], s: Settings) -> np.ndarray:
    """Logits [len(ids), VOCAB] of a Gemma 2 model, float64."""
    h = w["token_embd.weight"][ids] * np.sqrt(HIDDEN)
    for layer in range(LAYERS):
        blk = f"blk.{layer}."
        attended = attention(norm(h, w[blk + "attn_norm.weight"]), w, layer, s)
        h = h + norm(attended, w[blk + "post_attention_norm.weight"])
        h = h + norm(mlp(norm(h, w[blk + "ffn_norm.weight"]), w, layer), w[blk + "post_ffw_norm.weight"])
    return cap(norm(h, w["output_norm.weight"]) @ w["token_embd.weight"].T, s.final_cap)


def write_model(path: Path) -> Path:
    """The model that ``formula`` describes with the default settings."""
    rng = np.random.default_rng(7)
    shapes = tensor_shapes("gemma2", LAYERS, HIDDEN, HEADS, KV_HEADS, FF, VOCAB, True, HEAD_DIM)
    tensors = {name: random_tensor(name, shape, rng) for name, shape in shapes.items()}
    for name, values in tensors.items():
        values *= np.float32(next((g for suffix, g in GAINS.items() if name.endswith(suffix)), 1.0))
    tensors["token_embd.weight"] *= np.float32(np.sqrt(HIDDEN))
    return write_tiny_gguf(
        path, "gemma2", LAYERS, HIDDEN, HEADS, KV_HEADS, FF, VOCAB, head_dim=HEAD_DIM,
        tensors=tensors, metadata_overrides={"gemma2.attention.scale": 24**-0.5},
    )  # fmt: skip


def read_weights(path: Path) -> dict[str, np.ndarray]:
    """What ``formula`` takes: float64 by the file's names."""
    return {name: tensor.float32().astype(np.float64) for name, tensor in GGUFFile.open(path).tensors.items()}
