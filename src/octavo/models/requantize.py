"""Packs a GGUF model anew in fewer bits, as a draft for itself or to save memory.

Owns which tensor becomes which type. Matrices of the layers get one type and the output matrix its own; everything else, norms, biases
and an embedding that is not the output matrix too, stays as it is, to the byte. So does a matrix that would not get smaller, and one whose rows
are no whole number of blocks. Metadata is the source's, but for what describes the packing and the splitting into files. No activations are
looked at, and nothing is trained.

Blocks of 256 need rows of a multiple of 256. Rows of a multiple of 32 get a type with blocks of 32 instead: q4_0, as with llama-quantize;
or, with ``few_levels``, q4_1 of which only as many codes are used as the wanted type has. That is as coarse as 2 or 3 bits and as large as
4: it shows what a kernel for fewer bits would be worth, and tests drafts that are often wrong.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import octavo
from octavo.models.block_encoding import ENCODABLE, WHOLE_RANGE, EncodeError, encode
from octavo.models.gguf import GGUFFile
from octavo.models.gguf_writing import NewTensor, string_pair, uint32_pair, write_gguf
from octavo.models.loaded import WeightTensor
from octavo.models.loading import open_model
from octavo.models.model_file import BLOCK_SIZES, ModelFileError
from octavo.models.program import Linear, Program
from octavo.models.weights import widen, widen_rows

_FILE_TYPES = {"q4_0": 2, "q4_1": 3, "q2_k": 10, "q3_k": 11}  # general.file_type: llama_ftype of llama.h, for show
_LEVELS = {"q2_k": 4, "q3_k": 8}
_QUANTIZATION_VERSION = 2  # of ggml's block layouts
_PIECE_VALUES = 1 << 22  # widened at a time


class QuantizeError(ModelFileError):
    """The file cannot be packed as was asked; the message names the file, the tensor or the option, and why."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """``layers``: type of the layers' matrices. ``output``: of the output matrix; None: as it is. Types are those of ``ENCODABLE``."""

    layers: str
    output: str | None
    few_levels: bool = False

    def check(self) -> None:
        """Raise QuantizeError for a recipe that contradicts itself."""
        for option, dtype in (("type", self.layers), ("output_type", self.output)):
            if dtype is not None and dtype not in ENCODABLE:
                raise QuantizeError(f"{option}: {dtype!r} is not allowed; known: {', '.join(sorted(ENCODABLE))}")
        if self.few_levels and not {self.layers, self.output} & _LEVELS.keys():
            raise QuantizeError(f"few_levels: has no meaning without {' or '.join(_LEVELS)}")

    def __str__(self) -> str:
        return f"layers {self.layers}, output {self.output or 'as it was'}" + (", few levels" if self.few_levels else "")


@dataclass(slots=True)
class Packed:
    """A matrix: what it was and is, in which role, and the squared error beside the squares of its values."""

    tensor: WeightTensor
    role: str  # "layers", "output"
    dtype: str  # the tensor's own when it is kept
    levels: int = WHOLE_RANGE
    squared_error: float = field(default=0.0)
    squares: float = field(default=0.0)

    @property
    def kept(self) -> bool:
        return self.dtype == self.tensor.dtype and self.levels == WHOLE_RANGE

    @property
    def num_bytes(self) -> int:
        return NewTensor("", self.dtype, self.tensor.shape, tuple).num_bytes

    def pieces(self) -> Iterator[memoryview]:
        """The bytes as they will lie in the file; the errors are known when all have been taken. Raises QuantizeError."""
        if self.kept:
            yield self.tensor.data
            return
        rows, columns = self.tensor.shape
        step = max(1, _PIECE_VALUES // columns)
        for start in range(0, rows, step):
            values = widen_rows(self.tensor, range(start, min(start + step, rows)))
            try:
                raw = encode(values, self.dtype, self.levels)
            except EncodeError as error:
                raise QuantizeError(f"tensor {self.tensor.name!r}, rows from {start}: {error}") from None
            back = widen(WeightTensor(self.tensor.name, self.dtype, values.shape, memoryview(raw.reshape(-1))))
            self.squares += float(np.square(values, dtype=np.float64).sum())
            self.squared_error += float(np.square(values - back, dtype=np.float64).sum())
            yield memoryview(raw.reshape(-1))


def quantize(
    source: Path, target: Path, recipe: Recipe, overwrite: bool = False, progress: Callable[[str], None] = lambda name: None
) -> list[Packed]:
    """Write the GGUF model at ``source`` to ``target`` as ``recipe`` says, and tell what became of each matrix.

    ``progress`` is called with the name of each tensor. Raises ModelFileError for a source that cannot be served or packed and for a
    target that must not be written, OSError when it cannot be; nothing is left behind then.
    """
    recipe.check()
    if source.is_dir():
        raise QuantizeError(f"{source}: is a folder; only GGUF files can be packed anew")
    body = open_model(source).body
    file = GGUFFile.open(source)
    _check_target(file, target, overwrite)
    packed = {one.tensor.name: one for one in plan(body.program, body.weights.__getitem__, recipe)}
    if all(one.kept for one in packed.values()):
        raise QuantizeError(f"{source}: nothing would get smaller as {recipe}; its matrices are {_types(packed.values())}")

    def tensor(name: str, original: WeightTensor) -> NewTensor:
        def pieces() -> Iterator[memoryview]:
            progress(name)
            yield from packed[name].pieces() if name in packed else (original.data,)

        return NewTensor(name, packed[name].dtype if name in packed else original.dtype, original.shape, pieces)

    alignment = file.metadata.get("general.alignment", 32)
    assert isinstance(alignment, int)  # the reader has checked
    write_gguf(target, _pairs(file, recipe), [tensor(name, original) for name, original in file.tensors.items()], alignment)
    return list(packed.values())


def plan(program: Program, weight: Callable[[str], WeightTensor], recipe: Recipe) -> list[Packed]:
    """What becomes of each matrix, in the order of the ops that read them."""
    names = list(dict.fromkeys(op.weight for op in program.ops if isinstance(op, Linear)))
    output = next(op.weight for op in reversed(program.ops) if isinstance(op, Linear))
    return [_packed(weight(name), "output" if name == output else "layers", recipe) for name in names]


def _packed(tensor: WeightTensor, role: str, recipe: Recipe) -> Packed:
    wanted = recipe.output if role == "output" else recipe.layers
    columns = tensor.shape[1]
    if wanted is None or columns % 32:
        return Packed(tensor, role, tensor.dtype)
    if columns % BLOCK_SIZES[wanted][0] == 0:
        dtype, levels = wanted, WHOLE_RANGE
    elif recipe.few_levels:
        dtype, levels = "q4_1", _LEVELS[wanted]
    else:
        dtype, levels = "q4_0", WHOLE_RANGE
    # Few levels are not about size: what counts is that the values get coarser.
    smaller = _bytes_per_value(dtype if levels == WHOLE_RANGE else wanted) < _bytes_per_value(tensor.dtype)
    return Packed(tensor, role, dtype, levels) if smaller else Packed(tensor, role, tensor.dtype)


def _bytes_per_value(dtype: str) -> float:
    values, num_bytes = BLOCK_SIZES[dtype]
    return num_bytes / values


def _types(packed: Iterable[Packed]) -> str:
    return ", ".join(sorted({one.tensor.dtype for one in packed}))


def _check_target(file: GGUFFile, target: Path, overwrite: bool) -> None:
    if not target.exists():
        return
    if any(os.path.samefile(path, target) for path in file.paths):
        raise QuantizeError(f"{target}: is the file that is read; write to another one")
    if not target.is_file():
        raise QuantizeError(f"{target}: is there and no regular file")
    if not overwrite:
        raise QuantizeError(f"{target}: is there already, and is not overwritten unasked")


def _pairs(file: GGUFFile, recipe: Recipe) -> dict[str, bytes | memoryview]:
    """The source's metadata, in its order. All is in one file now."""
    pairs: dict[str, bytes | memoryview] = {
        key: pair for key, pair in file.metadata.raw.items() if not key.startswith("split.")
    }
    pairs["general.quantization_version"] = uint32_pair("general.quantization_version", _QUANTIZATION_VERSION)
    pairs["general.file_type"] = uint32_pair("general.file_type", _FILE_TYPES[recipe.layers])
    pairs["general.quantized_by"] = string_pair("general.quantized_by", f"octavo {octavo.__version__}: {recipe}")
    return pairs
