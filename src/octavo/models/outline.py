"""What a model takes, told before it is there: from its config.json alone, or from the first part of a GGUF file.

Reads what describes a model and never a weight. What can be served has a Program, with the bytes of each of its weights, so that it can be
priced step by step; a few architectures that cannot are sized all the same (``unserved``).
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from octavo.models import families
from octavo.models.fields import FamilyError, refused
from octavo.models.gguf import GGUFHeader
from octavo.models.gguf_fields import ROPE_FREQS
from octavo.models.model_file import ModelFileError, parse_json, read_small_file
from octavo.models.program import KVLayer, Program
from octavo.models.safetensors import INDEX_NAME, SINGLE_NAME, SafetensorsError, SafetensorsModel
from octavo.models.unserved import model_size, sized_model_types

_MAX_CONFIG_BYTES = 16 << 20
_BYTES_OF = {"float32": 4, "float16": 2, "bfloat16": 2}  # of a number, by a config's torch_dtype
_ASSUMED_BYTES = 2


class OutlineError(ModelFileError):
    """A model cannot be sized from what is there; the message names the file, the field and the limit."""


@dataclass(frozen=True, slots=True)
class ModelOutline:
    """``weight_bytes``: of the weights as they lie in a file; ``weights_from``: where that is known from. ``program`` None: the model can
    be sized, not served. ``sizes``: bytes of each of the program's weights by its name."""

    name: str
    architecture: str
    kv_layers: tuple[KVLayer, ...]
    context: int
    weight_bytes: int
    weights_from: str
    program: Program | None = None
    sizes: Mapping[str, int] | None = None


def read_outline(path: str | os.PathLike[str]) -> ModelOutline:
    """Of a GGUF file (the first part of it will do), a config.json, or a folder that holds one. Raises ModelFileError, which names it."""
    path = Path(path)
    if not path.exists():
        raise OutlineError(f"{path}: is not there")
    try:
        if path.is_dir():
            if not (path / "config.json").exists():
                raise OutlineError(f"{path}: holds no config.json")
            return _of_config(path / "config.json", path.resolve().name)
        return _of_config(path, _name_of(path)) if path.suffix == ".json" else _of_gguf(path)
    except FamilyError as error:
        raise OutlineError(f"{path}: {error}") from None


def _name_of(config: Path) -> str:
    return config.resolve().parent.name if config.name == "config.json" else config.stem


# --- GGUF -------------------------------------------------------------------------------------------------------------------------------


def _of_gguf(path: Path) -> ModelOutline:
    header = GGUFHeader.read(path)
    if not header.tensors:
        raise OutlineError(f"{path}: holds no tensors; a vocabulary-only file has nothing to size")
    shapes = {name: tensor.shape for name, tensor in header.tensors.items()}

    def read_tensor(name: str) -> Sequence[float]:
        """Factors of rotary frequencies, the one thing that a description reads from a tensor. They size nothing, and may not be there."""
        return (1.0,) * math.prod(shapes[name])

    program, sources = families.from_gguf(header.metadata, shapes, read_tensor)
    sizes = {name: header.tensors[source.file_name].num_bytes for name, source in sources.items()}
    by_type: dict[str, int] = {}
    for name, tensor in header.tensors.items():
        if name != ROPE_FREQS:
            by_type[tensor.dtype] = by_type.get(tensor.dtype, 0) + tensor.num_bytes
    largest = max(by_type, key=lambda dtype: by_type[dtype])
    weights_from = f"the GGUF header, mostly {largest}"
    architecture = str(header.metadata["general.architecture"])
    total = sum(sizes.values())
    return ModelOutline(path.stem, architecture, program.kv_layers, program.context, total, weights_from, program, sizes)


# --- config.json ------------------------------------------------------------------------------------------------------------------------


def _of_config(path: Path, name: str) -> ModelOutline:
    config = parse_json(read_small_file(path, _MAX_CONFIG_BYTES, OutlineError), path, "file", OutlineError)
    model_type = str(config.get("model_type"))
    if config.get("kv_lora_rank") is not None or model_type in sized_model_types():
        size = model_size(config)
        bytes_each, weights_from = _bytes_of_number(config)
        return ModelOutline(name, model_type, size.kv_layers, size.context, size.num_weights * bytes_each, weights_from)
    if model_type not in families.known_hf_model_types():
        known = ", ".join((*families.known_hf_model_types(), *sized_model_types()))
        raise FamilyError(refused("model_type", config.get("model_type"), f"known: {known}"))
    why_not = ""
    if path.name == "config.json" and any((path.parent / file).exists() for file in (SINGLE_NAME, INDEX_NAME)):
        try:
            return _of_folder(path.parent, config, name)
        except SafetensorsError as error:  # on their way, perhaps
            why_not = f"; the files beside it cannot be read: {error}"
    program = families.describe_hf(config)
    bytes_each, weights_from = _bytes_of_number(config)
    weights_from += why_not
    sizes = {weight: math.prod(shape) * bytes_each for weight, shape in program.weights.items()}
    return ModelOutline(name, model_type, program.kv_layers, program.context, sum(sizes.values()), weights_from, program, sizes)


def _of_folder(folder: Path, config: Mapping[str, object], name: str) -> ModelOutline:
    """With the weights beside it, these say how large they are."""
    model = SafetensorsModel.open(folder)
    program, sources = families.from_hf(config, {name: tensor.shape for name, tensor in model.tensors.items()})
    sizes = {weight: len(model.tensors[source.file_name].data) for weight, source in sources.items()}
    total, model_type = sum(sizes.values()), str(config.get("model_type"))
    return ModelOutline(name, model_type, program.kv_layers, program.context, total, "the safetensors files", program, sizes)


def _bytes_of_number(config: Mapping[str, object]) -> tuple[int, str]:
    """(bytes of a weight's number, where that is known from)."""
    text = config.get("text_config")
    for part in (config, text if isinstance(text, Mapping) else {}):
        for key in ("torch_dtype", "dtype"):
            value = part.get(key)
            if value is None:
                continue
            if not isinstance(value, str) or value not in _BYTES_OF:
                raise FamilyError(refused(key, value, f"one of {', '.join(_BYTES_OF)}"))
            return _BYTES_OF[value], f"config.json, {value}"
    return _ASSUMED_BYTES, f"config.json, {_ASSUMED_BYTES} bytes a number, since it states no torch_dtype"
