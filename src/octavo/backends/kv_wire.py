"""KV that goes from one backend to another: what a backend offers that can give and take it, block by block and layer by layer.

A backend without these methods computes all of a request itself, or nothing of it.
"""

from __future__ import annotations

from array import array
from typing import Protocol, TypeAlias, cast

from octavo.backends.base import Backend

Buffer: TypeAlias = "bytearray | memoryview"

WIRE_DTYPES = ("auto", "int8")
"""auto: as the pool keeps it, so that what arrives is what was sent, bit for bit. int8: rounded, with a scale per token and kv head."""


class MovesKV(Backend, Protocol):
    """A backend whose KV can be given to, and taken from, a backend of the same fingerprint.

    On the wire KV lies layer by layer, block by block; within a block in the backend's own order, which the fingerprint names. A block is
    always whole: what lies behind its last token is of no meaning.

    ``export_kv``, ``import_kv`` and ``wait_kv`` may be called from any thread while steps run, and let other threads run meanwhile. The
    caller sees to it that exported blocks are not written, and imported ones not read, by then.
    """

    num_kv_layers: int

    def wire_layer_bytes(self, layer: int, packed: bool = False) -> int:
        """Bytes of one layer of one block. ``packed``: in int8. ValueError for a layer that there is not."""
        ...

    def export_kv(self, layers: range, pages: array[int], to: Buffer, packed: bool = False) -> None:
        """Copy ``layers`` of some blocks, given by their ``pages`` (int32 [blocks][columns], flat), to ``to``, which is just as large.

        Of columns that none of the layers lies in, pages may be anything. ValueError for what the pool does not have, or another size.
        """
        ...

    def import_kv(self, layers: range, pages: array[int], data: Buffer, packed: bool = False) -> None:
        """Fill blocks with what ``export_kv`` gave of as many; as there."""
        ...

    def next_kv_step(self) -> int:
        """The number of the next step that computes something, for ``wait_kv``. Asked between steps."""
        ...

    def wait_kv(self, step: int, layer: int, timeout_s: float) -> bool:
        """Wait until that step has written the keys and values of ``layer`` for all its rows; whether it has within the time."""
        ...


def moves_kv(backend: Backend) -> MovesKV | None:
    """``backend`` as one that can, or None."""
    return cast(MovesKV, backend) if hasattr(backend, "export_kv") else None
