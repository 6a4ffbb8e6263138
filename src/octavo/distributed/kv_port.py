"""A worker's end of transfers that come in: which blocks are waited for, and what of them is there.

    expect ─▶ expected ──pieces, each exactly once──▶ complete ─▶ on_copied
                 └──cancel──▶ gone        └──anything wrong──▶ failed ─▶ on_failed

``expect`` and ``cancel`` are called by the engine's loop thread, what a transport brings by its own. A lock for each transfer sees to it
that after ``cancel`` has returned nothing is written to its blocks: they may be somebody else's at once. It waits for one piece at most.
Owns no block, and decides nothing: who gives blocks back, and when, is the desk's business.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from octavo.backends.kv_wire import WIRE_DTYPES, MovesKV
from octavo.core.kv_pages import PageLayout
from octavo.distributed.transport import Piece, TransferError, TransferHead


@dataclass(frozen=True, slots=True)
class KVShape:
    """What both ends of a transfer know of the model: ``layers[i]`` is the column of layer i, the last ``num_window`` of ``num_columns``
    are of the window part."""

    layers: tuple[int, ...]
    num_columns: int
    num_window: int
    window: int | None
    block_size: int

    @classmethod
    def of(cls, layout: PageLayout | None, num_layers: int, block_size: int) -> KVShape:
        if layout is None or layout.window is None:
            num_columns = 1 if layout is None else layout.num_pages
            return cls((0,) * num_layers if layout is None else tuple(c for c, _ in layout.layers), num_columns, 0, None, block_size)
        return cls(tuple(c for c, _ in layout.layers), layout.num_pages, layout.num_window, layout.window, block_size)

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def first_block(self, layer: int, num_tokens: int) -> int:
        """The first block whose ``layer`` is ever read again once ``num_tokens`` are computed (``PageNeeds.num_passed``)."""
        if self.window is None or self.layers[layer] < self.num_columns - self.num_window:
            return 0
        return max(0, num_tokens - self.window + 1) // self.block_size


@dataclass(slots=True)
class _Expected:
    """``pages``: of its blocks by column, flat. ``missing``: by layer, a bit for each block that is not there yet."""

    key: int
    num_tokens: int
    pages: array[int]
    missing: list[int]
    lock: threading.Lock = field(default_factory=threading.Lock)
    head: TransferHead | None = None  # once a sender has begun
    is_over: bool = False  # cancelled, failed or complete: nothing is written any more


class KVPort:
    """``on_copied(key, exact)`` and ``on_failed(key, reason)`` are called from a transport's thread, at most one of them for an expected
    transfer, and neither after its ``cancel``. ``exact``: what has come is what the sender has, bit for bit."""

    def __init__(
        self, backend: MovesKV, shape: KVShape, on_copied: Callable[[int, bool], None], on_failed: Callable[[int, str], None]
    ) -> None:
        self._backend, self._shape = backend, shape
        self._fingerprint = backend.fingerprint()
        self._on_copied, self._on_failed = on_copied, on_failed
        self._expected: dict[int, _Expected] = {}

    def expect(self, key: int, num_tokens: int, pages: array[int]) -> None:
        """KV of ``num_tokens`` tokens is to come into blocks with these ``pages``."""
        shape, num_blocks = self._shape, self._shape.num_blocks(num_tokens)
        missing = [_bits(shape.first_block(layer, num_tokens), num_blocks) for layer in range(len(shape.layers))]
        self._expected[key] = _Expected(key, num_tokens, pages, missing)

    def cancel(self, key: int) -> None:
        """It is not wanted any more, or has begun to run. Nothing of it is written from here on."""
        expected = self._expected.pop(key, None)
        if expected is not None:
            with expected.lock:
                expected.is_over = True

    def __len__(self) -> int:
        return len(self._expected)

    # --- Sink ---------------------------------------------------------------------------------------------------------------------------

    def open(self, head: TransferHead) -> None:
        expected = self._expected.get(head.key)
        if expected is None:
            raise TransferError(f"nothing is expected here under the key {head.key}")
        with expected.lock:
            if expected.is_over or expected.head is not None:
                raise TransferError(f"the transfer {head.key} is over, or has begun before")
            if head.fingerprint != self._fingerprint:
                raise TransferError(f"the KV is of {head.fingerprint!r}, this worker's of {self._fingerprint!r}")
            if head.num_tokens != expected.num_tokens or head.wire_dtype not in WIRE_DTYPES:
                limit = f"{expected.num_tokens} tokens in one of {WIRE_DTYPES} are expected"
                raise TransferError(f"the transfer {head.key} has {head.num_tokens} tokens in {head.wire_dtype!r}; {limit}")
            expected.head = head

    def num_bytes(self, key: int, piece: Piece) -> int:
        expected = self._expected_now(key)
        blocks = self._shape.num_blocks(expected.num_tokens)
        layers = len(self._shape.layers)
        if piece.num_layers < 1 or piece.num_blocks < 1 or piece.layers.stop > layers or piece.blocks.stop > blocks:
            raise TransferError(f"{piece} is not of {layers} layers and {blocks} blocks")
        packed = expected.head is not None and expected.head.packed
        return piece.num_blocks * sum(self._backend.wire_layer_bytes(layer, packed) for layer in piece.layers)

    def put(self, key: int, piece: Piece, data: memoryview) -> None:
        expected = self._expected_now(key)
        columns, wanted = self._shape.num_columns, _bits(piece.first_block, piece.blocks.stop)
        with expected.lock:
            if expected.is_over or expected.head is None:
                raise TransferError(f"the transfer {key} is not wanted any more")
            for layer in piece.layers:
                if wanted & ~expected.missing[layer]:
                    raise TransferError(f"{piece} has come before, or is not wanted")
            pages = expected.pages[piece.first_block * columns : piece.blocks.stop * columns]
            self._backend.import_kv(piece.layers, pages, data, expected.head.packed)
            for layer in piece.layers:
                expected.missing[layer] -= wanted

    def finish(self, key: int) -> None:
        expected = self._expected_now(key)
        with expected.lock:
            num_missing = sum(map(int.bit_count, expected.missing))
            if num_missing or expected.is_over or expected.head is None:
                raise TransferError(f"the transfer {key} has ended, and {num_missing} blocks of layers are missing")
            expected.is_over = True
            exact = not expected.head.packed
        self._on_copied(key, exact)

    def failed(self, key: int, reason: str) -> None:
        expected = self._expected.get(key)
        if expected is None:
            return
        with expected.lock:
            if expected.is_over:
                return
            expected.is_over = True
        self._on_failed(key, reason)

    def _expected_now(self, key: int) -> _Expected:
        expected = self._expected.get(key)
        if expected is None:
            raise TransferError(f"the transfer {key} is not wanted any more")
        return expected


def _bits(begin: int, end: int) -> int:
    """Those of blocks ``begin`` .. ``end`` - 1."""
    return (1 << end) - (1 << begin)
