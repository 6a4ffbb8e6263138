"""Bytes that keys and values take in a pool, by the type they are kept in: what the cpu backend allocates, without its native module.

A tile holds 16 tokens of one head: keys, then values whose head dimension is padded to 16, then, of int8, a float32 scale for each token's
key and value (``native/src/kernels/kernels.h``, ``kv_tile_layout``). Layers begin on cache lines.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from octavo.core.kv_pages import LAYER_ALIGNMENT, PageLayout, page_layout
from octavo.models.program import KVLayer

TILE_TOKENS = 16
VALUE_BYTES = {"bf16": 2, "f16": 2, "f32": 4, "int8": 1}  # of one number, without scales
_SCALE_BYTES = 4


def layer_kv_bytes(kv: KVLayer, dtype: str, block_size: int) -> int:
    """Bytes of a block of ``block_size`` tokens in one layer. ``block_size`` is a multiple of 16, ``dtype`` one of ``VALUE_BYTES``."""
    if block_size < TILE_TOKENS or block_size % TILE_TOKENS:
        raise ValueError(f"block_size: {block_size} is not allowed; a multiple of {TILE_TOKENS} tokens")
    if dtype not in VALUE_BYTES:
        raise ValueError(f"kv_dtype: {dtype!r} is not allowed; one of {', '.join(VALUE_BYTES)}")
    padded = -(-kv.head_dim // TILE_TOKENS) * TILE_TOKENS
    tile = TILE_TOKENS * (kv.head_dim + padded) * VALUE_BYTES[dtype]
    if dtype == "int8":
        tile += 2 * TILE_TOKENS * _SCALE_BYTES
    num_bytes = tile * kv.kv_heads * (block_size // TILE_TOKENS)
    return -(-num_bytes // LAYER_ALIGNMENT) * LAYER_ALIGNMENT


def kv_layout(kv_layers: Seq[KVLayer], dtype: str, block_size: int, grouped: bool = True) -> PageLayout:
    """Pages of a block of a model, layers with a window in a part of their own unless ``grouped`` is off. Raises ValueError."""
    layer_bytes = [layer_kv_bytes(kv, dtype, block_size) for kv in kv_layers]
    return page_layout(layer_bytes, [kv.window for kv in kv_layers], grouped)
