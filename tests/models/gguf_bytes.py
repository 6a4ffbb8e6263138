"""Builds small GGUF files byte by byte, so that a test can make any single field lie."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_FORMATS = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "B", U64: "Q", I64: "q", F64: "d"}


def string(text: str | bytes, length: int | None = None) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw) if length is None else length) + raw


def scalar(kind: int, value: object) -> bytes:
    """A value with its type before it."""
    body = string(value) if kind == STRING else struct.pack("<" + _FORMATS[kind], value)  # type: ignore[arg-type]
    return struct.pack("<I", kind) + body


def array(kind: int, values: list, count: int | None = None) -> bytes:
    body = b"".join(string(v) if kind == STRING else struct.pack("<" + _FORMATS[kind], v) for v in values)
    return struct.pack("<IIQ", ARRAY, kind, len(values) if count is None else count) + body


@dataclass
class Tensor:
    name: str | bytes
    dims: list[int]  # fastest first
    type_number: int = 0
    offset: int | None = None  # None: where it belongs
    num_dims: int | None = None
    num_bytes: int | None = None  # None: 4 bytes a value


@dataclass
class GGUFBytes:
    """A valid file of about 1 KB until a field is changed."""

    pairs: list[tuple[str | bytes, bytes]] = field(
        default_factory=lambda: [
            ("general.architecture", scalar(STRING, "llama")),
            ("llama.block_count", scalar(U32, 1)),
            ("llama.rope.freq_base", scalar(F32, 10000.0)),
            ("flag", scalar(BOOL, 1)),
            ("tokens", array(STRING, ["a", "bb", "", "ü"])),
            ("scores", array(F32, [0.0, -1.5])),
            ("flags", array(BOOL, [1, 0])),
        ]
    )
    tensors: list[Tensor] = field(default_factory=lambda: [Tensor("a.weight", [8, 4]), Tensor("b.weight", [5]), Tensor("c.weight", [32])])
    magic: bytes = b"GGUF"
    version: int = 3
    num_tensors: int | None = None
    num_pairs: int | None = None
    alignment: int = 32

    def build(self) -> bytes:
        head = self.magic + struct.pack("<I", self.version)
        head += struct.pack("<Q", len(self.tensors) if self.num_tensors is None else self.num_tensors)
        head += struct.pack("<Q", len(self.pairs) if self.num_pairs is None else self.num_pairs)
        head += b"".join(string(key) + value for key, value in self.pairs)
        data = b""
        for t in self.tensors:
            num_values = 1
            for dim in t.dims:
                num_values *= dim
            size = min(num_values * 4, 4096) if t.num_bytes is None else t.num_bytes
            offset = len(data) if t.offset is None else t.offset
            head += string(t.name) + struct.pack("<I", len(t.dims) if t.num_dims is None else t.num_dims)
            head += b"".join(struct.pack("<Q", dim) for dim in t.dims) + struct.pack("<IQ", t.type_number, offset)
            data += bytes(i % 251 for i in range(size)) + bytes(-size % self.alignment)
        return head + bytes(-len(head) % self.alignment) + data
