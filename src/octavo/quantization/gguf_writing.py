"""Writes GGUF files, version 3: metadata pairs as bytes, tensors piece by piece.

Owns the layout of the file and its appearance: it is written under another name in the same folder, and renamed when it is whole and on
the disk, so that a file of the wanted name is complete. A write that fails leaves nothing behind. Knows no types but their sizes.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from octavo.models.gguf import GGML_TYPES
from octavo.models.model_file import BLOCK_SIZES

_UINT32, _STRING = 4, 8  # GGUF value types
_TYPE_NUMBERS = {name: number for number, name in GGML_TYPES.items()}

Pieces = Iterable[bytes | memoryview]


@dataclass(frozen=True, slots=True)
class NewTensor:
    """``shape`` is row-major, [rows, columns] of a matrix; ``pieces()`` are its bytes in order, asked for once."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: Callable[[], Pieces]

    @property
    def num_bytes(self) -> int:
        values, num_bytes = BLOCK_SIZES[self.dtype]
        return math.prod(self.shape) // values * num_bytes


def string_pair(key: str, value: str) -> bytes:
    """A metadata pair as it lies in a file."""
    return _string(key) + struct.pack("<I", _STRING) + _string(value)


def uint32_pair(key: str, value: int) -> bytes:
    """As ``string_pair``."""
    return _string(key) + struct.pack("<II", _UINT32, value)


def write_gguf(path: Path, pairs: Mapping[str, bytes | memoryview], tensors: Sequence[NewTensor], alignment: int) -> None:
    """Write the file at ``path``, or replace the one that is there. ``pairs``: each whole, by key, ``general.alignment`` as given.

    Raises OSError, what ``pieces`` raises, and ValueError for pieces that are not the tensor's bytes; the file is then as it was.
    """
    scratch = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(scratch, "xb") as file:
            at = file.write(_header(pairs, tensors, alignment))
            for tensor in tensors:
                at += file.write(bytes(-at % alignment))
                begin = at
                for piece in tensor.pieces():
                    at += file.write(piece)
                if at - begin != tensor.num_bytes:
                    raise ValueError(f"tensor {tensor.name!r}: {at - begin} bytes were given; {tensor.dtype} needs {tensor.num_bytes}")
            file.write(bytes(-at % alignment))
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def _header(pairs: Mapping[str, bytes | memoryview], tensors: Sequence[NewTensor], alignment: int) -> bytes:
    parts: list[bytes | memoryview] = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(pairs)), *pairs.values()]
    offset = 0  # from the first tensor's
    for tensor in tensors:
        dims = tensor.shape[::-1]
        parts.append(_string(tensor.name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims))
        parts.append(struct.pack("<IQ", _TYPE_NUMBERS[tensor.dtype], offset))
        offset += tensor.num_bytes + -tensor.num_bytes % alignment
    return b"".join(parts)


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw
