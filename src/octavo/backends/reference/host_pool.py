"""Host memory for KV blocks of the reference backend: whole blocks, all layers, copied to and from its pool.

Owns the bytes of saved blocks, and how those are rounded that are kept packed: integers of 8 bits with a scale per token and kv head.
Never decides which block is saved, or where.
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
    """``layers`` are those of the KV pool, which moves read and write, in the pages of ``layout``. The last ``num_packed`` are packed."""

    def __init__(self, layers: Layers, layout: PageLayout, num_blocks: int, num_packed: int = 0) -> None:
        self.num_blocks = num_blocks + num_packed
        self._num_exact = num_blocks
        self._num_columns = layout.num_pages
        self._columns = [column for column, _ in layout.layers for _ in range(2)]
        self._pool = [array for pair in layers for array in pair]
        self._exact = [np.zeros((num_blocks, *array.shape[1:]), np.float32) for array in self._pool]
        self._codes = [np.zeros((num_packed, *array.shape[1:]), np.int8) for array in self._pool]
        self._scales = [np.zeros((num_packed, *array.shape[1:-1]), np.float32) for array in self._pool]

    def move(self, saves: list[BlockMove], loads: list[BlockMove]) -> None:
        """All saves (pool to host), then all loads. BackendError, and nothing is moved, for ids that neither pool has."""
        lowest = 0 if self._num_columns == 1 else LEFT_OUT
        for move in (*saves, *loads):
            pages = pages_of(move.pool_block, move.pages, self._num_columns)
            if not (all(lowest <= page < len(self._pool[0]) for page in pages) and 0 <= move.host_block < self.num_blocks):
                ids = f"block ids are 0 to {len(self._pool[0]) - 1}, host block ids 0 to {self.num_blocks - 1}"
                raise BackendError(f"block move {move.pool_block} <-> host {move.host_block}: {ids}")
        for i, (pool, column) in enumerate(zip(self._pool, self._columns, strict=True)):
            for move in saves:
                page, at = pages_of(move.pool_block, move.pages, self._num_columns)[column], move.host_block - self._num_exact
                if page != LEFT_OUT and at < 0:
                    self._exact[i][move.host_block] = pool[page]
                elif page != LEFT_OUT:
                    self._codes[i][at], self._scales[i][at] = pack(pool[page])
            for move in loads:
                page, at = pages_of(move.pool_block, move.pages, self._num_columns)[column], move.host_block - self._num_exact
                if page != LEFT_OUT:
                    pool[page] = self._exact[i][move.host_block] if at < 0 else unpack(self._codes[i][at], self._scales[i][at])

    def read(self, host_block: int) -> bytes:
        """Per layer keys, then values, as they lie in memory; of a packed block, of each the codes, then the scales."""
        return b"".join(array.tobytes() for array in self._arrays(host_block))

    def write(self, host_block: int, data: bytes) -> None:
        """What ``read`` of a block of the same form gave. ValueError for another size."""
        arrays = self._arrays(host_block)
        size = sum(array.nbytes for array in arrays)
        if len(data) != size:
            raise ValueError(f"host block: {len(data)} bytes are given, and a block has {size}")
        offset = 0
        for array in arrays:
            array[...] = np.frombuffer(data, array.dtype, array.size, offset).reshape(array.shape)
            offset += array.nbytes

    def _arrays(self, host_block: int) -> list[np.ndarray]:
        if not 0 <= host_block < self.num_blocks:
            raise ValueError(f"host block {host_block}: ids are 0 to {self.num_blocks - 1}")
        at = host_block - self._num_exact
        if at < 0:
            return [host[host_block] for host in self._exact]
        return [array[at] for pair in zip(self._codes, self._scales, strict=True) for array in pair]


def packed_block_bytes(layers: Layers) -> int:
    """Bytes of a packed block."""
    return sum(array[0].size + 4 * (array[0].size // array.shape[-1]) for pair in layers for array in pair)


def pack(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float32 [..., head_dim] as int8 codes and float32 scales [...]: values ~ codes * scales.

    A scale is the least number of 16 significant bits that is not below a 127th of the greatest magnitude: so codes * scales is exact, and
    packs to the same again. NaN where a value is not finite.
    """
    greatest = np.abs(values).max(-1)
    scales = ((greatest / np.float32(127)).view(np.uint32) + np.uint32(0xFF) & ~np.uint32(0xFF)).view(np.float32)
    scales = np.where(greatest < 1e-30, np.float32(0), np.where(np.isfinite(greatest), scales, np.float32(np.nan))).astype(np.float32)
    inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales > 0)
    return np.rint(np.clip(np.nan_to_num(values * inverse[..., None]), -127, 127)).astype(np.int8), scales


def unpack(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """What ``pack`` gave as float32 again."""
    return codes.astype(np.float32) * scales[..., None]
