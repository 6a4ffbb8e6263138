"""Reads GGUF files, versions 2 and 3, by mmap: metadata and tensors, split models included. Computes nothing and imports no numpy.

The file is untrusted. Every offset, count and length is compared with the bytes that are there before it is used, in Python's
unbounded integers, so nothing can wrap around, and no allocation follows a number from the file. Array values are checked for size when the
file is opened and parsed only when they are asked for. Format: ggml's docs/gguf.md; where it is silent, the rules of ggml's gguf.cpp
(tensors lie in order without gaps, at most four dimensions, no arrays of arrays).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from octavo.models.gguf_reader import ArraySpan, GGUFError, Metadata, Reader, Scalar
from octavo.models.loaded import WeightTensor
from octavo.models.model_file import BLOCK_SIZES, shown

# Names of ggml_type by number, from 0; those without an entry in BLOCK_SIZES are known by name only.
_TYPE_NAMES = """
f32 f16 q4_0 q4_1 q4_2 q4_3 q5_0 q5_1 q8_0 q8_1 q2_k q3_k q4_k q5_k q6_k q8_k iq2_xxs iq2_xs iq3_xxs iq1_s iq4_nl iq3_s iq2_s iq4_xs
i8 i16 i32 i64 f64 iq1_m bf16 q4_0_4_4 q4_0_4_8 q4_0_8_8 tq1_0 tq2_0 iq4_nl_4_4 iq4_nl_4_8 iq4_nl_8_8 mxfp4 nvfp4 q1_0
"""
GGML_TYPES: dict[int, str] = dict(enumerate(_TYPE_NAMES.split()))
_MIN_PAIR_BYTES = 8 + 1 + 4 + 1  # key length, key, value type, value
_MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8  # name length, name, number of dimensions, one dimension, type, offset
_MAX_DIMS = 4
_DEFAULT_ALIGNMENT, _MAX_ALIGNMENT = 32, 1 << 16
_SPLIT_NAME = re.compile(r"(?P<prefix>.+)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """One model: metadata, and tensors by the file's names in file order.

    ``paths`` are the parts it was read from, ``headers`` the bytes of each before its tensors.
    """

    path: Path
    metadata: Metadata
    tensors: Mapping[str, WeightTensor]
    paths: tuple[Path, ...]
    headers: tuple[memoryview, ...]
    version: int

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> GGUFFile:
        """Open a file, or the first part of a split model together with all others. Raises GGUFError.

        Tensor data stays in the file; views of it keep the file mapped.
        """
        first = _open_part(Path(path))
        count = _split_number(first, "split.count", 1)
        return first if count == 1 else _join_parts(first, count)


@dataclass(frozen=True, slots=True)
class TensorSize:
    """What a header says of a tensor; ``dtype`` and ``shape`` as in ``WeightTensor``."""

    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """What stands before the tensors: enough to size a model of which no more than the first part of the file is there."""

    path: Path
    metadata: Metadata
    tensors: Mapping[str, TensorSize]

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> GGUFHeader:
        """The header of a file, or of all parts of a split model. Each must be whole, what follows it need not be. Raises GGUFError."""
        first = _read_header(Path(path))
        count = _split_number(first, "split.count", 1)
        if count == 1:
            return first
        tensors = dict(first.tensors)
        for no, name in enumerate(_part_names(first, count)[1:], 1):
            part = _read_header(first.path.parent / name)
            _check_part(first, part, no)
            tensors.update(part.tensors)
        return cls(first.path, first.metadata, tensors)


def _read_header(path: Path) -> GGUFHeader:
    reader = Reader(path, is_whole=False)
    _check_version(reader)
    num_tensors = reader.count("Q", _MIN_TENSOR_BYTES, "number of tensors")
    metadata = _read_pairs(reader, reader.count("Q", _MIN_PAIR_BYTES, "number of metadata pairs"))
    infos = _read_tensor_infos(reader, num_tensors, _alignment(reader, metadata))
    return GGUFHeader(path, metadata, {info.name: TensorSize(info.dtype, info.shape, info.num_bytes) for info in infos})


def _open_part(path: Path) -> GGUFFile:
    reader = Reader(path)
    version = _check_version(reader)
    num_tensors = reader.count("Q", _MIN_TENSOR_BYTES, "number of tensors")
    metadata = _read_pairs(reader, reader.count("Q", _MIN_PAIR_BYTES, "number of metadata pairs"))
    tensors = _read_tensors(reader, num_tensors, _alignment(reader, metadata))
    return GGUFFile(path, metadata, tensors, (path,), (reader.data[: reader.pos],), version)


def _check_version(reader: Reader) -> int:
    magic = bytes(reader.data[:4])
    if magic != b"GGUF":
        raise reader.fail(f"starts with {magic!r}; a GGUF file starts with b'GGUF'")
    reader.pos = 4
    version = reader.number("I", "version")
    if version and version & 0xFFFF == 0:
        raise reader.fail(f"version is {version:#x}: a big-endian file; only little-endian files can be read")
    if version not in (2, 3):
        raise reader.fail(f"version is {version}; versions 2 and 3 can be read")
    return version


def _read_pairs(reader: Reader, num_pairs: int) -> Metadata:
    pairs: dict[str, Scalar | ArraySpan] = {}
    raw: dict[str, memoryview] = {}
    for index in range(num_pairs):
        start = reader.pos
        key = reader.name(f"metadata key {index}")
        if key in pairs:
            raise reader.fail(f"metadata key {shown(key)} occurs twice")
        pairs[key] = reader.value(key)
        raw[key] = reader.data[start : reader.pos]
    return Metadata(reader, pairs, raw)


def _alignment(reader: Reader, metadata: Metadata) -> int:
    value = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if type(value) is not int or not 8 <= value <= _MAX_ALIGNMENT or value & (value - 1):
        raise reader.fail(f"general.alignment is {value!r}; a power of two from 8 to {_MAX_ALIGNMENT} bytes is allowed")
    return value


@dataclass(frozen=True, slots=True)
class _TensorInfo:
    """What the file says of one tensor; ``offset`` counts from the start of the data section."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    offset: int


def _read_tensor_infos(reader: Reader, num_tensors: int, alignment: int) -> list[_TensorInfo]:
    """In file order, each beginning where the one before it ends."""
    infos: dict[str, _TensorInfo] = {}
    expected = 0
    for index in range(num_tensors):
        info = _read_tensor_info(reader, index)
        if info.name in infos:
            raise reader.fail(f"tensor name {shown(info.name)} occurs twice")
        infos[info.name] = info
    for info in infos.values():
        if info.offset != expected:
            raise reader.fail(_misplaced(info, expected, alignment))
        expected = _aligned(info.offset + info.num_bytes, alignment)
    return list(infos.values())


def _read_tensors(reader: Reader, num_tensors: int, alignment: int) -> dict[str, WeightTensor]:
    infos = _read_tensor_infos(reader, num_tensors, alignment)
    start = _aligned(reader.pos, alignment)
    tensors: dict[str, WeightTensor] = {}
    for info in infos:
        end = start + info.offset + info.num_bytes
        if end > reader.size:
            what = f"tensor {shown(info.name)} of {info.num_bytes} bytes"
            raise reader.fail(f"{what} ends at offset {end}, past the file's {reader.size} bytes")
        tensors[info.name] = WeightTensor(info.name, info.dtype, info.shape, reader.data[end - info.num_bytes : end])
    return tensors


def _misplaced(info: _TensorInfo, expected: int, alignment: int) -> str:
    """Why the offset of a tensor is refused: as in ggml, each must begin where the one before it ends, aligned."""
    if info.offset % alignment:
        why = f"not a multiple of the alignment {alignment}"
    elif info.offset < expected:
        why = "which overlaps the tensor before it"
    else:
        why = "which leaves a gap after the tensor before it"
    return f"offset of tensor {shown(info.name)} is {info.offset}, {why}; expected {expected}"


def _aligned(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


def _read_tensor_info(reader: Reader, index: int) -> _TensorInfo:
    name = reader.name(f"name of tensor {index}")
    what = f"tensor {shown(name)}"
    num_dims = reader.number("I", f"number of dimensions of {what}")
    if not 1 <= num_dims <= _MAX_DIMS:
        raise reader.fail(f"number of dimensions of {what} is {num_dims}; from 1 to {_MAX_DIMS} are allowed")
    dims = [reader.number("Q", f"dimension {i} of {what}") for i in range(num_dims)]
    number = reader.number("I", f"type of {what}")
    dtype = GGML_TYPES.get(number, "unknown")
    if dtype not in BLOCK_SIZES:
        known = ", ".join(known.upper() for known in GGML_TYPES.values() if known in BLOCK_SIZES)
        raise reader.fail(f"type of {what} is {number} ({dtype.upper()}), which cannot be read; known: {known}")
    num_bytes = _num_bytes(reader, what, dtype, dims)
    offset = reader.number("Q", f"offset of {what}")
    return _TensorInfo(name, dtype, tuple(reversed(dims)), num_bytes, offset)


def _num_bytes(reader: Reader, what: str, dtype: str, dims: list[int]) -> int:
    """Bytes of a tensor whose fastest dimension is ``dims[0]``; at most what the file holds."""
    block_values, block_bytes = BLOCK_SIZES[dtype]
    num_values = 1
    for i, dim in enumerate(dims):
        if dim == 0:
            raise reader.fail(f"dimension {i} of {what} is 0; at least 1 is needed")
        num_values *= dim
    if dims[0] % block_values:
        raise reader.fail(f"dimension 0 of {what} is {dims[0]}; {dtype.upper()} needs a multiple of {block_values}")
    num_bytes = num_values // block_values * block_bytes
    if reader.is_whole and num_bytes > reader.size:
        raise reader.fail(f"dimensions {dims} of {what} take {num_bytes} bytes, but the whole file has {reader.size}")
    return num_bytes


def _split_number(part: GGUFFile | GGUFHeader, key: str, default: int | None = None) -> int:
    value = part.metadata.get(key, default)
    if type(value) is not int or value < 0:
        raise GGUFError(f"{part.path}: {key} is {value!r}; a split model needs a whole number there")
    return value


def _part_names(first: GGUFFile | GGUFHeader, count: int) -> list[str]:
    """Names of the files of a model of which ``first`` is the first of ``count`` parts: name-00001-of-0000N.gguf and so on, all there."""
    match = _SPLIT_NAME.fullmatch(first.path.name)
    if match is None or int(match["count"]) != count:
        raise GGUFError(
            f"{first.path}: split.count is {count}, so this file is one part of a model; "
            f"its name must end in -00001-of-{count:05d}.gguf and the other parts must lie beside it"
        )
    names = [f"{match['prefix']}-{no:05d}-of-{count:05d}.gguf" for no in range(1, count + 1)]
    if int(match["no"]) != 1 or _split_number(first, "split.no") != 0:
        raise GGUFError(f"{first.path}: is not the first part of its model; open {names[0]}")
    missing = [name for name in names if not (first.path.parent / name).exists()]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise GGUFError(f"{first.path}: split.count is {count}, but {', '.join(missing[:3])}{more} is not there")
    return names


def _join_parts(first: GGUFFile, count: int) -> GGUFFile:
    """The whole model of which ``first`` is the first of ``count`` parts."""
    names = _part_names(first, count)
    parts = [first] + [_open_part(first.path.parent / name) for name in names[1:]]
    tensors: dict[str, WeightTensor] = {}
    for no, part in enumerate(parts):
        _check_part(first, part, no)
        for name, tensor in part.tensors.items():
            if name in tensors:
                raise GGUFError(f"{part.path}: tensor {shown(name)} is in an earlier part too")
            tensors[name] = tensor
    total = _split_number(first, "split.tensors.count")
    if len(tensors) != total:
        raise GGUFError(f"{first.path}: split.tensors.count is {total}, but the {count} parts hold {len(tensors)} tensors")
    headers = tuple(header for part in parts for header in part.headers)
    return GGUFFile(first.path, first.metadata, tensors, tuple(part.path for part in parts), headers, first.version)


def _check_part(first: GGUFFile | GGUFHeader, part: GGUFFile | GGUFHeader, no: int) -> None:
    """Refuse a part that is out of place or says something else than the first about anything both speak of."""
    if _split_number(part, "split.no") != no:
        raise GGUFError(f"{part.path}: split.no is {part.metadata['split.no']!r}; a part with this name needs {no}")
    for key in part.metadata:
        if key != "split.no" and key in first.metadata and part.metadata[key] != first.metadata[key]:
            raise GGUFError(f"{part.path}: belongs to another model than {first.path.name}: they differ in {key}")
    for key in ("split.count", "split.tensors.count"):
        if key not in part.metadata:
            raise GGUFError(f"{part.path}: {key} is missing, so this is no part of {first.path.name}")
