"""One KV block as bytes in a file: a header that says whose block it is, its tokens, its payload, and a checksum over all of it.

    magic 8 | version u32 | num_tokens u32 | payload_bytes u64 | store id 32 | key 32 | parent key 32
    tokens int32[num_tokens] | payload[payload_bytes] | blake2b-128 of everything before it

Integers are little-endian; tokens are in the byte order of the machine, as they are hashed into keys (the store id differs with it).
The checksum is blake2b, not a CRC: a block that passes is the one that was written, whatever the disk did to it in between, and wrong
keys and values would be wrong text. ``hashlib`` computes it at about 1 GB/s without the interpreter lock, many times faster than a block
is computed.

Knows bytes alone: no paths, no policy.
"""

from __future__ import annotations

import struct
from hashlib import blake2b
from typing import BinaryIO

from octavo.core.kv_tiers import BlockRef

MAGIC = b"octavoKV"
VERSION = 1
CHECKSUM_BYTES = 16
_HEADER = struct.Struct("<8sIIQ32s32s32s")
_TOKEN_BYTES = 4


class BlockFileError(ValueError):
    """The bytes are not the block that was asked for; the message says what differs."""


def file_bytes(num_tokens: int, payload_bytes: int) -> int:
    """Size of the file of a block."""
    return _HEADER.size + _TOKEN_BYTES * num_tokens + payload_bytes + CHECKSUM_BYTES


def encode(store_id: bytes, ref: BlockRef, payload: bytes) -> tuple[bytes, bytes]:
    """(what stands before the payload, what stands after it)."""
    num_tokens = len(ref.tokens) // _TOKEN_BYTES
    head = _HEADER.pack(MAGIC, VERSION, num_tokens, len(payload), store_id, ref.key, ref.parent_key) + ref.tokens
    return head, _checksum(head, payload)


def read(file: BinaryIO, store_id: bytes, ref: BlockRef, payload_bytes: int) -> bytes:
    """The payload in an open file. BlockFileError unless it is, to the bit, the block ``ref`` of this store."""
    head_size = _HEADER.size + len(ref.tokens)
    head, payload, tail = file.read(head_size), file.read(payload_bytes), file.read(CHECKSUM_BYTES + 1)
    if len(head) != head_size or len(payload) != payload_bytes or len(tail) != CHECKSUM_BYTES:
        raise BlockFileError(f"it does not have {head_size + payload_bytes + CHECKSUM_BYTES} bytes")
    magic, version, num_tokens, num_bytes, store, key, parent_key = _HEADER.unpack_from(head)
    for name, found, wanted in (
        ("magic", magic, MAGIC),
        ("version", version, VERSION),
        ("store id", store, store_id),
        ("key", key, ref.key),
        ("parent key", parent_key, ref.parent_key),
        ("number of tokens", num_tokens, len(ref.tokens) // _TOKEN_BYTES),
        ("payload size", num_bytes, payload_bytes),
    ):
        if found != wanted:
            raise BlockFileError(f"its {name} is {_shown(found)} instead of {_shown(wanted)}")
    if head[_HEADER.size :] != ref.tokens:
        raise BlockFileError("its tokens are others")
    if tail != _checksum(head, payload):
        raise BlockFileError("its checksum does not fit its contents")
    return payload


def _checksum(head: bytes, payload: bytes) -> bytes:
    digest = blake2b(head, digest_size=CHECKSUM_BYTES, person=b"octavo-kvfile")
    digest.update(payload)
    return digest.digest()


def _shown(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)
