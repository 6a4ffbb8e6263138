"""What every reader of model files shares: the base error, a read-only map of a file, strict JSON, and how many bytes a tensor takes.

Standard library only, and no format is known here. A path is mapped only when it is a regular file: opening a FIFO would hang.
"""

from __future__ import annotations

import json
import mmap
import os
import stat
from pathlib import Path
from typing import Any


class ModelFileError(ValueError):
    """A model on disk cannot be used as it is; the message names the file, the field, the value and the limit."""


# dtype -> (values per block, bytes per block); names are GGML's in lower case, plus safetensors' u8 and bool.
BLOCK_SIZES: dict[str, tuple[int, int]] = {
    "f32": (1, 4),
    "f16": (1, 2),
    "bf16": (1, 2),
    "q4_0": (32, 18),
    "q4_1": (32, 20),
    "q5_0": (32, 22),
    "q5_1": (32, 24),
    "q8_0": (32, 34),
    "q2_k": (256, 84),
    "q3_k": (256, 110),
    "q4_k": (256, 144),
    "q5_k": (256, 176),
    "q6_k": (256, 210),
    "i8": (1, 1),
    "i16": (1, 2),
    "i32": (1, 4),
    "i64": (1, 8),
    "f64": (1, 8),
    "u8": (1, 1),
    "bool": (1, 1),
}


def shown(text: str, limit: int = 80) -> str:
    """``text`` quoted for a message; a long one, which a damaged file may hold, is cut."""
    return repr(text) if len(text) <= limit else f"{text[:limit]!r}... ({len(text)} characters)"


def map_file(path: str | os.PathLike[str], min_bytes: int, error: type[ModelFileError]) -> memoryview:
    """The file's bytes as a read-only view that keeps the map alive; ``error`` when it is no regular file of at least ``min_bytes``."""
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise error(f"{path}: {'a folder' if stat.S_ISDIR(status.st_mode) else 'not a regular file'}, where a file is needed")
        if status.st_size < min_bytes:
            raise error(f"{path}: file of {status.st_size} bytes is too short; the header alone takes {min_bytes}")
        with open(path, "rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except OSError as exc:
        raise error(f"{path}: cannot be read: {exc.strerror or exc}") from exc


def read_small_file(path: Path, limit_bytes: int, error: type[ModelFileError]) -> bytes:
    """All bytes of a regular file of at most ``limit_bytes``."""
    data = map_file(path, 1, error)
    if len(data) > limit_bytes:
        raise error(f"{path}: file of {len(data)} bytes; the limit is {limit_bytes}")
    return bytes(data)


def parse_json(text: bytes, path: Path, what: str, error: type[ModelFileError]) -> dict[str, Any]:
    """A JSON object in which no key occurs twice, at any depth. The decoder's recursion limit bounds the depth."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            seen: set[str] = set()
            for name, _ in pairs:
                if name in seen:
                    raise error(f"{path}: {shown(name)} occurs twice in the {what}")
                seen.add(name)
        return result

    try:
        parsed = json.loads(text.decode("utf-8-sig"), object_pairs_hook=unique)
    except RecursionError:
        raise error(f"{path}: {what} is nested too deep") from None
    except ModelFileError:
        raise
    except ValueError as exc:  # bad UTF-8, bad JSON, a number of thousands of digits
        raise error(f"{path}: {what} is not valid JSON: {exc}") from None
    if not isinstance(parsed, dict):
        raise error(f"{path}: {what} is a JSON {type(parsed).__name__}, where an object is needed")
    return parsed
