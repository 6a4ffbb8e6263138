"""Packs a GGUF model anew in fewer bits, as a draft for itself or to save memory.

Owns which tensor becomes which type. Matrices of the layers get one type and the output matrix its own; everything else, norms, biases
and an embedding that is not the output matrix too, stays as it is, to the byte. So does a matrix that would not get smaller, and one whose
rows are no whole number of blocks. Metadata is the source's, but for what describes the packing and the splitting into files.

Errors of weights count by the mean square of what they are multiplied with, over a text that the model reads first: the importance matrix
of llama.cpp (tools/imatrix), the diagonal of GPTQ's Hessian (Frantar et al., 2023). Few values of a hidden state are large, and what is
lost at their weights is heard; a short text of any kind finds them. Nothing is trained.

Blocks of 256 need rows of a multiple of 256. Rows of a multiple of 32 get a type with blocks of 32 instead: q4_0, as with llama-quantize;
or, with ``few_levels``, q4_1 of which only as many codes are used as the wanted type has. That is as coarse as 2 or 3 bits and as large as
4: it shows what a kernel for fewer bits would be worth, and tests drafts that are often wrong.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

import octavo
from octavo.models.gguf import GGUFFile
from octavo.models.loaded import LoadedModel, WeightTensor
from octavo.models.loading import open_model
from octavo.models.model_file import BLOCK_SIZES, ModelFileError
from octavo.models.program import Linear, Program
from octavo.models.weights import widen, widen_rows
from octavo.quantization.activations import observe
from octavo.quantization.block_encoding import ENCODABLE, WHOLE_RANGE, EncodeError, encode
from octavo.quantization.gguf_writing import NewTensor, string_pair, uint32_pair, write_gguf

_FILE_TYPES = {"q4_0": 2, "q4_1": 3, "q2_k": 10, "q3_k": 11}  # general.file_type: llama_ftype of llama.h, for show
_LEVELS = {"q2_k": 4, "q3_k": 8}
_QUANTIZATION_VERSION = 2  # of ggml's block layouts
_PIECE_VALUES = 1 << 22  # widened at a time
_TEXT_TOKENS = 256  # the text is read in pieces of so many
_LEAST_IMPORTANCE = 1e-3  # relative to the mean: an input that was 0 in the text is not always 0

Floats = npt.NDArray[np.float32]


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


@dataclass(frozen=True, slots=True)
class Calibration:
    """``text``: of any kind the model is made for; ``num_tokens`` of it are read, from 1, or all where it has less."""

    text: str
    num_tokens: int = 512

    def pieces(self, model: LoadedModel) -> list[list[int]]:
        """Raises QuantizeError."""
        if self.num_tokens < 1:
            raise QuantizeError(f"calibration tokens: {self.num_tokens} is not allowed; at least 1")
        tokens = model.tokenizer.encode(self.text)[: self.num_tokens]
        if not tokens:
            raise QuantizeError("calibration text: has no tokens")
        return [tokens[i : i + _TEXT_TOKENS] for i in range(0, len(tokens), _TEXT_TOKENS)]


@dataclass(slots=True)
class Packed:
    """A matrix: what it was and is, in which role, and the squared error beside the squares of its values, each weighted by importance."""

    name: str  # canonical
    tensor: WeightTensor
    role: str  # "layers", "output"
    dtype: str  # the tensor's own when it is kept
    levels: int = WHOLE_RANGE
    importance: Floats | None = None  # [columns], of mean 1; None: all alike
    squared_error: float = 0.0
    squares: float = 0.0

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
                raw = encode(values, self.dtype, self.levels, self.importance).reshape(-1)
            except EncodeError as error:
                raise QuantizeError(f"tensor {self.tensor.name!r}, rows from {start}: {error}") from None
            back = widen(WeightTensor(self.tensor.name, self.dtype, values.shape, raw.data))
            importance = np.ones(columns, np.float32) if self.importance is None else self.importance
            self.squares += float((np.square(values).sum(0, dtype=np.float64) * importance).sum())
            self.squared_error += float((np.square(values - back).sum(0, dtype=np.float64) * importance).sum())
            yield raw.data


def quantize(
    source: Path,
    target: Path,
    recipe: Recipe,
    calibration: Calibration | None = None,
    overwrite: bool = False,
    progress: Callable[[str], None] = lambda what: None,
) -> list[Packed]:
    """Write the GGUF model at ``source`` to ``target`` as ``recipe`` says, and tell what became of each matrix.

    Without ``calibration`` all weights count alike. ``progress`` is called with what is being done. The same files, text and options give
    the same weights but for ties, which the order of BLAS's sums may decide. Raises ModelFileError for a source that cannot be served or
    packed and for a target that must not be written, OSError when it cannot be; nothing is left behind then.
    """
    recipe.check()
    if source.is_dir():
        raise QuantizeError(f"{source}: is a folder; only GGUF files can be packed anew")
    opened = open_model(source)
    file = GGUFFile.open(source)
    target = Path(os.path.realpath(target))  # a symbolic link stays one
    _check_target(file, target, overwrite)
    matrices = plan(opened.body.program, opened.body.weights, recipe)
    if all(one.kept for one in matrices):
        raise QuantizeError(f"{source}: nothing would get smaller as {recipe}; its matrices are {_types(matrices)}")
    if calibration is not None:
        progress("reading the text")
        _weigh(opened.read_text(), calibration, matrices)
    tensors = _tensors(file, {one.tensor.name: one for one in matrices}, progress)
    alignment = file.metadata.get("general.alignment", 32)
    assert isinstance(alignment, int)  # the reader has checked
    write_gguf(target, _pairs(file, recipe), tensors, alignment)
    return matrices


def _weigh(model: LoadedModel, calibration: Calibration, matrices: Iterable[Packed]) -> None:
    """Set the importance of the inputs of all matrices that will be packed."""
    by_name = {one.name: one for one in matrices if not one.kept}

    def observer(name: str, x: Floats) -> None:
        if name in by_name:
            mean_square = np.square(x).mean(0, dtype=np.float64)
            least = mean_square.mean() * _LEAST_IMPORTANCE
            if least > 0 and np.isfinite(least):
                by_name[name].importance = (np.maximum(mean_square, least) / mean_square.mean()).astype(np.float32)

    observe(model, calibration.pieces(model), observer)


def _tensors(file: GGUFFile, packed: Mapping[str, Packed], progress: Callable[[str], None]) -> list[NewTensor]:
    """All tensors of the file, in its order."""

    def tensor(name: str, original: WeightTensor) -> NewTensor:
        def pieces() -> Iterator[memoryview]:
            progress(name)
            yield from packed[name].pieces() if name in packed else (original.data,)

        return NewTensor(name, packed[name].dtype if name in packed else original.dtype, original.shape, pieces)

    return [tensor(name, original) for name, original in file.tensors.items()]


def plan(program: Program, weights: Mapping[str, WeightTensor], recipe: Recipe) -> list[Packed]:
    """What becomes of each matrix, in the order of the ops that read them."""
    names = list(dict.fromkeys(op.weight for op in program.ops if isinstance(op, Linear)))
    output = next(op.weight for op in reversed(program.ops) if isinstance(op, Linear))
    return [_packed(name, weights[name], "output" if name == output else "layers", recipe) for name in names]


def _packed(name: str, tensor: WeightTensor, role: str, recipe: Recipe) -> Packed:
    wanted = recipe.output if role == "output" else recipe.layers
    columns = tensor.shape[1]
    if wanted is None or columns % 32:
        return Packed(name, tensor, role, tensor.dtype)
    if columns % BLOCK_SIZES[wanted][0] == 0:
        dtype, levels = wanted, WHOLE_RANGE
    elif recipe.few_levels:
        dtype, levels = "q4_1", _LEVELS[wanted]
    else:
        dtype, levels = "q4_0", WHOLE_RANGE
    # Few levels are not about size: what counts is that the values get coarser.
    smaller = _bytes_per_value(dtype if levels == WHOLE_RANGE else wanted) < _bytes_per_value(tensor.dtype)
    return Packed(name, tensor, role, dtype, levels) if smaller else Packed(name, tensor, role, tensor.dtype)


def _bytes_per_value(dtype: str) -> float:
    values, num_bytes = BLOCK_SIZES[dtype]
    return num_bytes / values


def _types(packed: Iterable[Packed]) -> str:
    return ", ".join(sorted({one.tensor.dtype for one in packed}))


def _check_target(file: GGUFFile, target: Path, overwrite: bool) -> None:
    if not target.parent.is_dir():
        raise QuantizeError(f"{target}: its folder is not there")
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
