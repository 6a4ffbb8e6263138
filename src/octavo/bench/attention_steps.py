"""Steps of attention alone: the real runner on a program without any other work, over keys and values that are there already.

A layer stores the rows' keys and values and attends; queries, keys and values are columns of a random embedding. So a step has the
threads, meetings and block tables of a real one, and what it takes is attention's.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.core.kv_pages import page_layout
from octavo.models.program import Attention

NUM_TOKENS = 64  # rows of the embedding
NUM_LOGITS = 16  # columns of what makes the last layer's result visible
_FILLED_AT_ONCE = 512  # tokens


@dataclass(frozen=True, slots=True)
class Stream:
    """A sequence with ``num_rows`` new rows, behind ``position`` others; ``block_table`` has the blocks of all."""

    position: int
    block_table: Sequence[int]
    num_rows: int = 1


class AttentionSteps:
    """Layers of ``ops`` (their widths are all alike) on ``num_blocks`` filled blocks. Close it when done: it holds threads and memory."""

    def __init__(
        self, isa: str, threads: int, ops: Sequence[Attention], kv_dtype: str, num_blocks: int, block_size: int = 16
    ) -> None:
        from octavo.backends.cpu import _native

        self.ops, self.kv_dtype, self.block_size = ops, kv_dtype, block_size
        q_dim, kv_dim = ops[0].heads * ops[0].head_dim, ops[0].kv_heads * ops[0].head_dim
        rng = random.Random(1)
        self.embedding = array("f", [rng.gauss(0, 1) for _ in range(NUM_TOKENS * (q_dim + 2 * kv_dim))])
        """[token, q | k | v]"""
        self.output = array("f", [rng.gauss(0, 1) for _ in range(NUM_LOGITS * q_dim)])
        """[logit, q_dim]"""
        rows, weights = memoryview(self.embedding).cast("B"), memoryview(self.output).cast("B")
        self.native = _native.Model(isa, threads)
        self._filler = _native.Model(self.native)
        self._slots = _native.SamplerSlots(NUM_LOGITS, 1, isa)
        for model, attends in ((self.native, True), (self._filler, False)):
            x, out = model.add_buffer(q_dim + 2 * kv_dim), model.add_buffer(q_dim)
            model.embed(model.add_embedding("f32", rows, NUM_TOKENS, q_dim + 2 * kv_dim), 1.0, x)
            for layer, op in enumerate(ops):
                model.store_kv(x, q_dim, x, q_dim + kv_dim, layer)
                if attends:
                    model.attention(layer, x, 0, out, op.heads, op.kv_heads, op.head_dim, op.scale, op.softcap or 0.0, op.window or 0)
            model.head(out, model.add_matrix("f32", weights, NUM_LOGITS, q_dim, False)[0], 0.0)
            model.pack()
        layers = [(op.kv_heads, op.head_dim) for op in ops]
        layout = page_layout([_native.Model.bytes_per_block(block_size, kv_dtype, [layer]) for layer in layers], [None] * len(layers))
        self.native.allocate_kv(num_blocks, block_size, kv_dtype, layers, layout.num_pages, layout.page_bytes, layout.layers)
        self._filler.share_kv(self.native, len(ops))
        self.bytes_per_token = _native.Model.bytes_per_block(block_size, kv_dtype, layers) // block_size
        self._fill(num_blocks, rng)

    def _fill(self, num_blocks: int, rng: random.Random) -> None:
        at_once = max(1, _FILLED_AT_ONCE // self.block_size)
        for first in range(0, num_blocks, at_once):
            blocks = range(first, min(first + at_once, num_blocks))
            tokens = array("i", [rng.randrange(NUM_TOKENS) for _ in range(len(blocks) * self.block_size)])
            self._run(self._filler, tokens, [Stream(0, blocks, len(tokens))], None)

    def step(self, streams: Sequence[Stream], logits: object | None = None, tokens: array[int] | None = None) -> None:
        """The rows of each stream. ``logits``: float32 [rows, NUM_LOGITS], to compare results by. ``tokens`` of the rows, below NUM_TOKENS;
        None: one after the other."""
        if tokens is None:
            tokens = array("i", [i % NUM_TOKENS for i in range(sum(s.num_rows for s in streams))])
        self._run(self.native, tokens, streams, logits)

    def _run(self, model: object, tokens: array[int], streams: Sequence[Stream], logits: object | None) -> None:
        tables, offsets = array("i"), array("i")
        for s in streams:
            offsets.append(len(tables))
            tables.extend(s.block_table)
        wanted = array("i", range(len(tokens)) if logits is not None else [])
        rows = array("i", [s.num_rows for s in streams])
        i, f = array("i"), array("f")
        model.step(  # type: ignore[attr-defined]
            self._slots, tokens, array("i", [s.position for s in streams]), rows, offsets, tables, wanted, i, array("I"), i,
            i, i, i, f, 0, i, f, logits, None,
        )  # fmt: skip

    def close(self) -> None:
        del self.native, self._filler
