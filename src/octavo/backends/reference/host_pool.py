"""Host memory for KV blocks of the reference backend: whole blocks, all layers, copied to and from its pool.

Owns the bytes of saved blocks. Never decides which block is saved, or where.
"""

from __future__ import annotations

import numpy as np

from octavo.backends.base import BackendError
from octavo.backends.block_moves import LEFT_OUT, pages_of
from octavo.core.kv_pages import PageLayout
from octavo.core.step import BlockMove

Layers = list[tuple[np.ndarray, np.ndarray]]
"""Per layer keys and values, float32 [num_pages, block_size, kv_heads, head_dim]."""


class HostPool:
    """``layers`` are those of the KV pool, which moves read and write, in the pages that ``layout`` says."""

    def __init__(self, layers: Layers, layout: PageLayout, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._num_columns = layout.num_pages
        self._columns = [column for column, _ in layout.layers for _ in range(2)]
        self._pool = [array for pair in layers for array in pair]
        self._host = [np.zeros((num_blocks, *array.shape[1:]), np.float32) for array in self._pool]

    def move(self, saves: list[BlockMove], loads: list[BlockMove]) -> None:
        """All saves (pool to host), then all loads. BackendError, and nothing is moved, for ids that neither pool has."""
        lowest = 0 if self._num_columns == 1 else LEFT_OUT
        for move in (*saves, *loads):
            pages = pages_of(move.pool_block, move.pages, self._num_columns)
            if not (all(lowest <= page < len(self._pool[0]) for page in pages) and 0 <= move.host_block < self.num_blocks):
                ids = f"block ids are 0 to {len(self._pool[0]) - 1}, host block ids 0 to {self.num_blocks - 1}"
                raise BackendError(f"block move {move.pool_block} <-> host {move.host_block}: {ids}")
        for pool, host, column in zip(self._pool, self._host, self._columns, strict=True):
            for move in saves:
                page = pages_of(move.pool_block, move.pages, self._num_columns)[column]
                if page != LEFT_OUT:
                    host[move.host_block] = pool[page]
            for move in loads:
                page = pages_of(move.pool_block, move.pages, self._num_columns)[column]
                if page != LEFT_OUT:
                    pool[page] = host[move.host_block]

    def read(self, host_block: int) -> bytes:
        """Per layer keys, then values, as they lie in memory."""
        return b"".join(host[self._checked(host_block)].tobytes() for host in self._host)

    def write(self, host_block: int, data: bytes) -> None:
        """What ``read`` gave. ValueError for another size."""
        block, size = self._checked(host_block), sum(host[0].nbytes for host in self._host)
        if len(data) != size:
            raise ValueError(f"host block: {len(data)} bytes are given, and a block has {size}")
        offset = 0
        for host in self._host:
            count = host[0].size
            host[block] = np.frombuffer(data, np.float32, count, offset).reshape(host.shape[1:])
            offset += 4 * count

    def _checked(self, host_block: int) -> int:
        if not 0 <= host_block < self.num_blocks:
            raise ValueError(f"host block {host_block}: ids are 0 to {self.num_blocks - 1}")
        return host_block
