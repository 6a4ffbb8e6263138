"""Host memory for KV blocks of the reference backend: whole blocks, all layers, copied to and from its pool.

Owns the bytes of saved blocks. Never decides which block is saved, or where.
"""

from __future__ import annotations

import numpy as np

from octavo.backends.base import BackendError
from octavo.core.step import BlockMove

Layers = list[tuple[np.ndarray, np.ndarray]]
"""Per layer keys and values, float32 [num_blocks, block_size, kv_heads, head_dim]."""


class HostPool:
    """``layers`` are those of the KV pool, which moves read and write."""

    def __init__(self, layers: Layers, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._pool = [array for pair in layers for array in pair]
        self._host = [np.zeros((num_blocks, *array.shape[1:]), np.float32) for array in self._pool]

    def move(self, saves: list[BlockMove], loads: list[BlockMove]) -> None:
        """All saves (pool to host), then all loads. BackendError, and nothing is moved, for ids that neither pool has."""
        for move in (*saves, *loads):
            if not (0 <= move.pool_block < len(self._pool[0]) and 0 <= move.host_block < self.num_blocks):
                ids = f"block ids are 0 to {len(self._pool[0]) - 1}, host block ids 0 to {self.num_blocks - 1}"
                raise BackendError(f"block move {move.pool_block} <-> host {move.host_block}: {ids}")
        for pool, host in zip(self._pool, self._host, strict=True):
            for move in saves:
                host[move.host_block] = pool[move.pool_block]
            for move in loads:
                pool[move.pool_block] = host[move.host_block]

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
