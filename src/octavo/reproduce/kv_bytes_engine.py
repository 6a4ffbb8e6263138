"""The same formula of the KV cache, held to what the engine on this machine allocates for a model of its own."""

from __future__ import annotations

from contextlib import closing

from octavo.config import KV_DTYPES, CacheConfig, EngineConfig, ModelConfig
from octavo.engine.engine import Engine
from octavo.reproduce.figure import MEASURED, Figure, Row
from octavo.reproduce.setup import Setup

NUMBER = 1
NAME = "kv-bytes-engine"
BYTES = {"f32": 4.0, "bf16": 2.0, "f16": 2.0}  # of a number; int8 has scales beside its numbers, of which the formula knows nothing
NUM_BLOCKS = 64


def run(setup: Setup) -> Figure:
    rows, shape = list[Row](), ""
    for dtype in KV_DTYPES:
        config = EngineConfig(ModelConfig(setup.model), CacheConfig(num_kv_blocks=NUM_BLOCKS, kv_cache_dtype=dtype))
        with closing(Engine.load(config)) as engine:
            layers = engine.model.program.kv_layers
            numbers = sum(2 * layer.kv_heads * layer.head_dim for layer in layers)
            per_token = engine.backend.kv_capacity(0).bytes_per_block / config.cache.block_size
            shape = f"{engine.model.name}: {len(layers)} layers, {layers[0].kv_heads} KV heads of {layers[0].head_dim}"
        by_formula = BYTES.get(dtype)
        published = "" if by_formula is None else f"{numbers * by_formula:,.0f} B"
        ours = f"{per_token:,.0f} B" if per_token == int(per_token) else f"{per_token:,.1f} B"
        rows.append(Row(f"KV of one token, {dtype}", published, ours, None if by_formula is None else ours == published))
    how = f"{shape}. Bytes of a block that the CPU backend's pool is made of, over its 16 tokens; published: the formula, with KV heads."
    notes = ("int8 keeps a scale for each head of each token, which the formula does not count.",)
    return Figure(NUMBER, "KV cache of a model here, as it is allocated", MEASURED, how, rows, notes=notes)
