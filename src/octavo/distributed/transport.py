"""How KV gets from one worker to another: what a transport has to offer, and what the two ends of a transfer say to each other.

A *transfer* brings the KV of one request's first tokens to blocks that are reserved for them elsewhere. It is named by a key and made of
*pieces*: some layers of some neighbouring blocks, each exactly once. The sender exports a piece into a buffer that the transport has
registered, and sends it; the receiver's ``Sink`` imports it from a buffer of the transport there. So a transport may have the two be the
same memory (``shm_transport``), move it over a socket (``tcp_transport``), or let a network card do it.

Nothing here knows engines or policy. A transfer that fails is over: nobody repeats pieces.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

MAX_PIECE_BYTES = 8 << 20  # what a buffer holds: at least one block of a layer, or no KV goes
KV_TRANSPORTS = ("auto", "shm", "tcp")  # what may be asked for
CHECKSUMS = ("none", "crc32", "blake2b")
CHECKSUM_BYTES = 16  # on the wire, whichever it is


class TransferError(ConnectionError):
    """A transfer cannot go on; the message says why."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Layers ``layer`` and on of blocks ``first_block`` and on, these by their number in the sequence."""

    layer: int
    num_layers: int
    first_block: int
    num_blocks: int

    @property
    def layers(self) -> range:
        return range(self.layer, self.layer + self.num_layers)

    @property
    def blocks(self) -> range:
        return range(self.first_block, self.first_block + self.num_blocks)


@dataclass(frozen=True, slots=True)
class TransferHead:
    """What a sender says of a transfer before its first piece. The receiver takes it if all of it is as expected.

    ``fingerprint``: of the backend, whose order of bytes it names. ``wire_dtype``: one of ``backends.kv_wire.WIRE_DTYPES``.
    """

    key: int
    fingerprint: str
    num_tokens: int
    wire_dtype: str = "auto"
    checksum: str = "none"

    @property
    def packed(self) -> bool:
        return self.wire_dtype == "int8"


class Outgoing(Protocol):
    """The sender's end of one transfer, for one thread. Every method may raise TransferError; then only ``close`` is left."""

    def buffer(self, num_bytes: int) -> memoryview:
        """A registered buffer of that size, at most ``MAX_PIECE_BYTES``, for the next piece. Waits until one is free."""
        ...

    def send(self, piece: Piece, data: memoryview) -> None:
        """Send what ``buffer`` gave, filled. It is the transport's again."""
        ...

    def keep_alive(self) -> None:
        """Nothing is to be sent now, but will be. To be called every second or two, so that the receiver does not give up."""
        ...

    def finish(self) -> None:
        """That was all: wait until the receiver has taken every piece."""
        ...

    def close(self) -> None:
        """Give everything back; before ``finish`` the transfer has failed. Idempotent."""
        ...


class Sink(Protocol):
    """Where a listener brings what arrives. Called from threads of the transport, for one transfer by one thread at a time."""

    def open(self, head: TransferHead) -> None:
        """A transfer begins. TransferError: it is not wanted; the sender gets the message."""
        ...

    def num_bytes(self, key: int, piece: Piece) -> int:
        """How many bytes this piece is to have. TransferError: it is not wanted."""
        ...

    def put(self, key: int, piece: Piece, data: memoryview) -> None:
        """Take a piece over before returning. TransferError: it is not wanted any more."""
        ...

    def finish(self, key: int) -> None:
        """The sender has sent all. TransferError when something is missing."""
        ...

    def failed(self, key: int, reason: str) -> None:
        """A transfer that was opened, and not finished, has ended."""
        ...


class TransportListener(Protocol):
    """``address`` is what ``Transport.connect`` takes."""

    address: str

    def close(self) -> None:
        """Take no more transfers, and end those that are on their way. Idempotent."""
        ...


class Transport(Protocol):
    """One way to move KV between workers that share ``secret``; an object serves any number of transfers, from any thread."""

    name: str

    def listen(self, host: str, sink: Sink) -> TransportListener:
        """Take transfers to this worker, at an address that others reach ``host`` by. OSError when it cannot."""
        ...

    def connect(self, address: str, head: TransferHead) -> Outgoing:
        """Begin a transfer. TransferError when the listener cannot be reached or does not want it."""
        ...


def checksum_of(name: str) -> Callable[[memoryview], bytes]:
    """What makes ``CHECKSUM_BYTES`` of a piece. ValueError for a name that is none of ``CHECKSUMS``."""
    if name == "none":
        return lambda data: bytes(CHECKSUM_BYTES)
    if name == "crc32":
        return lambda data: zlib.crc32(data).to_bytes(CHECKSUM_BYTES, "little")
    if name == "blake2b":
        return lambda data: hashlib.blake2b(data, digest_size=CHECKSUM_BYTES).digest()
    raise ValueError(f"checksum: {name!r} is not allowed; one of {', '.join(CHECKSUMS)}")
