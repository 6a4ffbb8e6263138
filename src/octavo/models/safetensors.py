"""Reads safetensors files by mmap: one file, or the shards that an index names. Computes nothing and imports no numpy.

The file is untrusted. A header is at most 100 MB and nested no deeper than the format needs; tensors must fill the data section
exactly, in order of offset, without overlap or gap (the rules of the safetensors library), so a truncated or lengthened file is
refused. Only the files an index names are opened, and the index must name every tensor in them: a stray file is never merged in.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.models.loaded import WeightTensor
from octavo.models.model_file import BLOCK_SIZES, ModelFileError, map_file, parse_json, read_small_file, shown

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

# safetensors' dtype -> ours
DTYPES: dict[str, str] = {
    "F64": "f64",
    "F32": "f32",
    "F16": "f16",
    "BF16": "bf16",
    "I64": "i64",
    "I32": "i32",
    "I16": "i16",
    "I8": "i8",
    "U8": "u8",
    "BOOL": "bool",
}
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
_MAX_DIMS = 8


class SafetensorsError(ModelFileError):
    """The weights cannot be read in full; the message names the file, the field or tensor, the value and the limit."""


@dataclass(frozen=True, slots=True)
class SafetensorsModel:
    """All tensors of a model by the file's names. ``paths`` are the files read, ``headers`` the bytes of each before its tensors."""

    tensors: Mapping[str, WeightTensor]
    paths: tuple[Path, ...]
    headers: tuple[memoryview, ...]

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> SafetensorsModel:
        """Open model.safetensors in ``folder``, or all shards of model.safetensors.index.json. Raises SafetensorsError.

        Tensor data stays in the files; views of it keep them mapped.
        """
        folder = Path(folder)
        if (folder / INDEX_NAME).exists():
            return _open_shards(folder)
        if not (folder / SINGLE_NAME).exists():
            raise SafetensorsError(f"{folder}: holds neither {SINGLE_NAME} nor {INDEX_NAME}")
        return open_file(folder / SINGLE_NAME)


def open_file(path: Path) -> SafetensorsModel:
    """One file: 8 bytes of header length, the header in JSON, the data."""
    data = map_file(path, 8, SafetensorsError)
    header_bytes = int.from_bytes(data[:8], "little")
    limit = min(_MAX_HEADER_BYTES, len(data) - 8)
    if header_bytes > limit:
        raise SafetensorsError(f"{path}: header length is {header_bytes}; the limit is {limit} (file of {len(data)} bytes)")
    start = 8 + header_bytes
    header = parse_json(bytes(data[8:start]), path, "header", SafetensorsError)
    entries = [_entry(name, value, path) for name, value in header.items() if name != "__metadata__"]
    tensors: dict[str, WeightTensor] = {}
    expected = 0
    for entry in sorted(entries, key=lambda entry: (entry.begin, entry.end)):
        if entry.begin != expected:
            problem = "overlaps the tensor before it" if entry.begin < expected else "leaves a gap before it"
            what = f"data_offsets of tensor {shown(entry.name)} begin at {entry.begin}"
            raise SafetensorsError(f"{path}: {what}, which {problem}; expected {expected}")
        expected = entry.end
        if start + entry.end > len(data):
            where = f"ends at offset {start + entry.end}, past the file's {len(data)} bytes"
            raise SafetensorsError(f"{path}: tensor {shown(entry.name)} {where}: the file is truncated")
        tensors[entry.name] = WeightTensor(entry.name, entry.dtype, entry.shape, data[start + entry.begin : start + entry.end])
    if start + expected != len(data):
        raise SafetensorsError(f"{path}: the tensors end at offset {start + expected}, but the file has {len(data)} bytes")
    return SafetensorsModel(tensors, (path,), (data[:start],))


@dataclass(frozen=True, slots=True)
class _Entry:
    """One tensor of a header; offsets count from the start of the data section."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def _entry(name: str, value: Any, path: Path) -> _Entry:
    def fail(message: str) -> SafetensorsError:
        return SafetensorsError(f"{path}: {message}")

    what = f"tensor {shown(name)}"
    if not name or not isinstance(value, dict):
        raise fail(f"{what}: a name and an object with dtype, shape and data_offsets are needed")
    dtype, shape, offsets = value.get("dtype"), _sizes(value.get("shape")), _sizes(value.get("data_offsets"))
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise fail(f"dtype of {what} is {shown(str(dtype))}, which cannot be read; known: {', '.join(DTYPES)}")
    if shape is None or len(shape) > _MAX_DIMS:
        raise fail(f"shape of {what} is {shown(str(value.get('shape')))}; at most {_MAX_DIMS} whole numbers from 0 are needed")
    if offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise fail(f"data_offsets of {what} are {shown(str(value.get('data_offsets')))}; two whole numbers in ascending order are needed")
    num_bytes = math.prod(shape) * BLOCK_SIZES[DTYPES[dtype]][1]
    if offsets[1] - offsets[0] != num_bytes:
        raise fail(f"data_offsets of {what} span {offsets[1] - offsets[0]} bytes, but shape {shape} of {dtype} takes {num_bytes}")
    return _Entry(name, DTYPES[dtype], tuple(shape), offsets[0], offsets[1])


def _sizes(value: Any) -> list[int] | None:
    """``value`` when it is a list of whole numbers from 0 to 2^63 - 1, else None; a JSON number may be of any length."""
    ok = isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 63 for n in value)
    return value if ok else None


def _open_shards(folder: Path) -> SafetensorsModel:
    index = folder / INDEX_NAME
    text = read_small_file(index, _MAX_HEADER_BYTES, SafetensorsError)
    weight_map = parse_json(text, index, "index", SafetensorsError).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise SafetensorsError(f"{index}: weight_map is missing or empty")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not name.endswith(".safetensors") or Path(name).name != name:
            limit = "a .safetensors file of the same folder is needed"
            raise SafetensorsError(f"{index}: weight_map puts {shown(tensor)} into {shown(str(name))}; {limit}")
    names = sorted(set(weight_map.values()))
    if SINGLE_NAME not in names and (folder / SINGLE_NAME).exists():
        problem = f"holds {SINGLE_NAME} as well as {INDEX_NAME}, which does not name it"
        raise SafetensorsError(f"{folder}: {problem}; remove the one that is not meant")
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise SafetensorsError(f"{index}: names {', '.join(missing[:3])}{more}, which {'is' if len(missing) == 1 else 'are'} not there")
    shards = {name: open_file(folder / name) for name in names}
    tensors: dict[str, WeightTensor] = {}
    for tensor, name in weight_map.items():
        if tensor not in shards[name].tensors:
            raise SafetensorsError(f"{folder / name}: tensor {shown(tensor)} is missing; {INDEX_NAME} puts it there")
        tensors[tensor] = shards[name].tensors[tensor]
    for name, shard in shards.items():
        for tensor in shard.tensors:
            if weight_map.get(tensor) != name:
                problem = f"{INDEX_NAME} does not list it there, so the index and the shards do not belong together"
                raise SafetensorsError(f"{folder / name}: tensor {shown(tensor)} is in the file, but {problem}")
    headers = tuple(header for shard in shards.values() for header in shard.headers)
    return SafetensorsModel(tensors, tuple(folder / name for name in names), headers)
