"""The bytes of a GGUF file one field after the other, each compared with what is there before it is used; and metadata out of them.

Knows how fields lie and not which belong together: what a file has to have is ``gguf``'s business.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from octavo.models.model_file import ModelFileError, map_file, shown

Scalar = int | float | bool | str | bytes
Value = Scalar | tuple[Scalar, ...]

_SCALAR_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_HEADER_BYTES = 24  # magic, version, number of tensors, number of metadata pairs
_MAX_NAME_BYTES = 65535  # of a key or a tensor name


class GGUFError(ModelFileError):
    """The file is not a GGUF file that can be read in full; the message names the file, the field, the value and the limit."""


@dataclass(frozen=True, slots=True)
class ArraySpan:
    """Where an array that has not been parsed lies: ``count`` values of ``kind``, the first at ``start``, none past ``end``."""

    kind: int
    count: int
    start: int
    end: int


class Metadata(Mapping[str, Value]):
    """Key -> value; arrays are tuples, parsed when first asked for and then kept.

    Strings are text and must be UTF-8; only a string in an array may be something else (tokens may) and then stays ``bytes``.
    """

    def __init__(self, reader: Reader, values: dict[str, Scalar | ArraySpan], raw: dict[str, memoryview]) -> None:
        self.raw = raw  # each pair as it lies in the file: key, type and value
        self._reader = reader
        self._spans = values
        self._parsed: dict[str, tuple[Scalar, ...]] = {}

    def __getitem__(self, key: str) -> Value:
        value = self._spans[key]
        if not isinstance(value, ArraySpan):
            return value
        if key not in self._parsed:
            self._parsed[key] = self._reader.array(value, key)
        return self._parsed[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._spans)

    def __len__(self) -> int:
        return len(self._spans)

    def __contains__(self, key: object) -> bool:
        return key in self._spans

    def array_length(self, key: str) -> int | None:
        """Number of values of an array, which is not parsed for that; None when the key is absent or no array."""
        value = self._spans.get(key)
        return value.count if isinstance(value, ArraySpan) else None


class Reader:
    """A position that moves through the bytes of one file and never past their end."""

    def __init__(self, path: Path, is_whole: bool = True) -> None:
        """``is_whole``: the tensors' data is there as well, and has to be."""
        self.path = path
        self.is_whole = is_whole
        self.data = map_file(path, _HEADER_BYTES, GGUFError)
        self.size = len(self.data)
        self.pos = 0

    def fail(self, message: str) -> GGUFError:
        return GGUFError(f"{self.path}: {message}")

    def need(self, num_bytes: int, field: str) -> None:
        if num_bytes > self.size - self.pos:
            raise self.fail(f"{field} takes {num_bytes} bytes at offset {self.pos}, but only {self.size - self.pos} are left in the file")

    def number(self, fmt: str, field: str) -> int:
        """One little-endian number of struct format ``fmt``."""
        self.need(struct.calcsize(fmt), field)
        (value,) = struct.unpack_from("<" + fmt, self.data, self.pos)
        self.pos += struct.calcsize(fmt)
        return value

    def count(self, fmt: str, min_bytes_each: int, field: str) -> int:
        """A count of things that take at least ``min_bytes_each`` in the rest of the file."""
        count = self.number(fmt, field)
        left = self.size - self.pos
        if count > left // min_bytes_each:
            raise self.fail(f"{field} is {count}, but the {left} bytes left in the file hold at most {left // min_bytes_each}")
        return count

    def string(self, field: str) -> str:
        length = self.count("Q", 1, f"length of {field}")
        self.pos += length
        return self.text(self.pos - length, self.pos, field)

    def name(self, field: str) -> str:
        """A key or tensor name: 1 to 65535 bytes."""
        start = self.pos + 8
        name = self.string(field)
        if not 1 <= self.pos - start <= _MAX_NAME_BYTES:
            raise self.fail(f"length of {field} is {self.pos - start}; from 1 to {_MAX_NAME_BYTES} bytes are allowed")
        return name

    def text(self, start: int, end: int, field: str) -> str:
        try:
            return str(self.data[start:end], "utf-8")
        except UnicodeDecodeError as exc:
            raise self.fail(f"{field} at offset {start} is not valid UTF-8: {exc.reason}") from None

    def value(self, key: str) -> Scalar | ArraySpan:
        """The value of metadata ``key``; an array is measured and left where it is."""
        kind = self.number("I", f"type of {shown(key)}")
        if kind == _STRING:
            return self.string(f"value of {shown(key)}")
        if kind == _ARRAY:
            return self.span(key)
        if kind == _BOOL:
            return self.boolean(self.number("B", f"value of {shown(key)}"), key)
        if kind not in _SCALAR_FORMATS:
            raise self.fail(f"type of {shown(key)} is {kind}; GGUF knows value types 0 to 12")
        return self.number(_SCALAR_FORMATS[kind], f"value of {shown(key)}")

    def boolean(self, value: int, key: str) -> bool:
        if value > 1:
            raise self.fail(f"value of {shown(key)} is {value}; a boolean is 0 or 1")
        return bool(value)

    def span(self, key: str) -> ArraySpan:
        kind = self.number("I", f"element type of array {shown(key)}")
        if kind == _ARRAY:
            raise self.fail(f"{shown(key)} is an array of arrays; only arrays of numbers or strings can be read")
        if kind != _STRING and kind not in _SCALAR_FORMATS:
            raise self.fail(f"element type of array {shown(key)} is {kind}; GGUF knows value types 0 to 12")
        each = 8 if kind == _STRING else struct.calcsize(_SCALAR_FORMATS[kind])
        count = self.count("Q", each, f"length of array {shown(key)}")
        start = self.pos
        self.pos = self.end_of_strings(count, key) if kind == _STRING else start + count * each
        return ArraySpan(kind, count, start, self.pos)

    def end_of_strings(self, count: int, key: str) -> int:
        """Where the array of ``count`` strings at the position ends. Lengths stand between the strings, so each must be visited."""
        unpack, data, pos, last = struct.Struct("<Q").unpack_from, self.data, self.pos, self.size - 8
        for index in range(count):
            if pos > last:
                raise self.fail(f"{shown(key)} has {count} strings, but the file ends in number {index}, at offset {pos}")
            pos += 8 + unpack(data, pos)[0]
        if pos > self.size:
            raise self.fail(f"{shown(key)}: its last string ends at offset {pos}, past the file's {self.size} bytes")
        return pos

    def array(self, span: ArraySpan, key: str) -> tuple[Scalar, ...]:
        """All values of a span that ``span`` has measured."""
        if span.kind == _STRING:
            return tuple(self.strings(span))
        if span.kind == _BOOL:
            return tuple(self.boolean(byte, key) for byte in self.data[span.start : span.end])
        return struct.unpack_from(f"<{span.count}{_SCALAR_FORMATS[span.kind]}", self.data, span.start)

    def strings(self, span: ArraySpan) -> list[str | bytes]:
        """All strings of a span: cut out of one copy of it, which is several times faster than out of a view."""
        unpack, data, pos = struct.Struct("<Q").unpack_from, bytes(self.data[span.start : span.end]), 0
        out: list[str | bytes] = []
        append = out.append
        for _ in range(span.count):
            start = pos + 8
            pos = start + unpack(data, pos)[0]
            try:
                append(data[start:pos].decode())
            except UnicodeDecodeError:
                append(data[start:pos])
        return out
