"""Opens a path as a model: a GGUF file (or the first part of a split one), or a folder with config.json, safetensors and tokenizer.json.

Joins the readers, the families, the tokenizer and the chat template into a LoadedModel, after everything has been checked: a model that
cannot be served in full is refused here, by the name of what is missing or wrong, before any weight is used. Computes nothing and copies
no weights.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from octavo.models import families
from octavo.models.chat_template import ChatTemplate
from octavo.models.gguf import GGUFFile
from octavo.models.loaded import LoadedModel, WeightTensor
from octavo.models.model_file import ModelFileError, parse_json, read_small_file
from octavo.models.program import Program
from octavo.models.safetensors import SafetensorsModel
from octavo.models.tokenizer import Tokenizer

# Control tokens that end the turn of a chat model, whatever its file states as end of text (the common ones of llama.cpp's list).
END_OF_TURN_TOKENS = frozenset({"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>"})
_GGUF_EOS_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
_CONTROL_TYPES = (3, 4)  # control, user-defined
_MAX_JSON_BYTES = 64 << 20  # of config.json and its like
_SAMPLE_BYTES = 64  # of each tensor, in the fingerprint
_CHECKED_DTYPES = ("f64", "i32", "i64")  # those whose values float32 may not hold


class LoadError(ModelFileError):
    """The path holds no model that can be served; the message names the file and what is missing or wrong in it."""


@dataclass(frozen=True, slots=True)
class _Opened:
    """What either kind of model comes to: fields as in LoadedModel. ``headers``: all bytes of the files before the tensors."""

    program: Program
    weights: dict[str, WeightTensor]
    headers: tuple[memoryview, ...]
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    eos_token_ids: frozenset[int]


def load_model(path: str | os.PathLike[str], name: str | None = None) -> LoadedModel:
    """Open the model at ``path`` under ``name`` (default: the file's or folder's own name). Raises ModelFileError."""
    path = Path(path)
    if not path.exists():
        raise LoadError(f"{path}: is not there")
    is_folder = path.is_dir()
    opened = _open_folder(path) if is_folder else _open_gguf(path)
    _check_token_ids(path, opened)
    for weight in opened.weights.values():
        if weight.dtype in _CHECKED_DTYPES:
            from octavo.models.weights import check_fits

            check_fits(weight)
    return LoadedModel(
        name=name or (path.resolve().name if is_folder else path.stem),
        path=str(path),
        fingerprint=_fingerprint(opened),
        program=opened.program,
        weights=opened.weights,
        tokenizer=opened.tokenizer,
        chat_template=opened.chat_template,
        eos_token_ids=opened.eos_token_ids,
        bos_token_id=opened.tokenizer.bos_token_id,
        num_params=sum(math.prod(weight.shape) for weight in opened.weights.values()),
        weight_bytes=sum(len(weight.data) for weight in opened.weights.values()),
    )


def _open_gguf(path: Path) -> _Opened:
    if path.suffix == ".safetensors":
        raise LoadError(f"{path}: is one file of a model; give the folder that holds it, config.json and tokenizer.json")
    file = GGUFFile.open(path)
    if not file.tensors:
        raise LoadError(f"{path}: holds no tensors; a vocabulary-only file cannot be served")

    def read_tensor(name: str) -> Sequence[float]:
        values: list[float] = file.tensors[name].float32().reshape(-1).tolist()
        return values

    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    with _errors_name(path):
        program, sources = families.from_gguf(file.metadata, shapes, read_tensor)
        tokenizer = Tokenizer.from_gguf(file.metadata)
        template = _gguf_chat_template(file.metadata)
        eos_token_ids = gguf_eos_token_ids(file.metadata)
    return _Opened(program, _pick(file.tensors, sources), file.headers, tokenizer, template, eos_token_ids | tokenizer.eos_token_ids)


def _open_folder(folder: Path) -> _Opened:
    if not (folder / "config.json").exists():
        found = sorted(file.name for file in folder.glob("*.gguf"))
        hint = f"; give the path of a GGUF file in it, such as {found[0]}" if found else ""
        raise LoadError(f"{folder}: holds no config.json{hint}")
    if not (folder / "tokenizer.json").exists():
        raise LoadError(f"{folder}: holds no tokenizer.json")
    configs = {name: _read_json(folder / f"{name}.json") for name in ("config", "generation_config", "tokenizer_config")}
    model = SafetensorsModel.open(folder)
    shapes = {name: tensor.shape for name, tensor in model.tensors.items()}
    with _errors_name(folder):
        program, sources = families.from_hf(configs["config"], shapes)
        tokenizer = Tokenizer.from_folder(folder)
        template = _folder_chat_template(folder, configs["tokenizer_config"])
        eos_token_ids = hf_eos_token_ids(configs["generation_config"], configs["config"])
    return _Opened(program, _pick(model.tensors, sources), model.headers, tokenizer, template, eos_token_ids | tokenizer.eos_token_ids)


@contextmanager
def _errors_name(path: Path) -> Iterator[None]:
    """Errors of what was read (families, tokenizer, template) get the path, which those do not know."""
    try:
        yield
    except ModelFileError:
        raise
    except ValueError as exc:
        raise LoadError(f"{path}: {exc}") from exc


def _read_json(path: Path) -> dict[str, Any]:
    """The object in the file; empty when there is no such file."""
    if not path.exists():
        return {}
    return parse_json(read_small_file(path, _MAX_JSON_BYTES, LoadError), path, "file", LoadError)


def _pick(tensors: Mapping[str, WeightTensor], sources: Mapping[str, families.WeightSource]) -> dict[str, WeightTensor]:
    """Canonical name -> tensor. Families have checked that each is there, in its shape."""
    return {name: replace(tensors[source.file_name], add=source.add) for name, source in sources.items()}


def _check_token_ids(path: Path, opened: _Opened) -> None:
    """Every id the tokenizer can make, and every special one, has a row in the embedding."""
    rows = opened.program.vocab_size
    if opened.tokenizer.vocab_size > rows:
        raise LoadError(f"{path}: the tokenizer has {opened.tokenizer.vocab_size} tokens, but the embedding has {rows} rows")
    bos = () if opened.tokenizer.bos_token_id is None else (opened.tokenizer.bos_token_id,)
    for what, ids in (("begin-of-text", bos), ("end-of-text", sorted(opened.eos_token_ids))):
        for token_id in ids:
            if not 0 <= token_id < rows:
                raise LoadError(f"{path}: {what} token {token_id} is out of range; the vocabulary has {rows} tokens")


def gguf_eos_token_ids(metadata: Mapping[str, Any]) -> frozenset[int]:
    """Tokens that end a text: those the file states, and, with a chat template, control tokens known to end a turn."""
    ids = {_token_id(key, metadata[key]) for key in _GGUF_EOS_KEYS if key in metadata}
    if "tokenizer.chat_template" in metadata:
        tokens, types = metadata.get("tokenizer.ggml.tokens", ()), metadata.get("tokenizer.ggml.token_type", ())
        pairs = enumerate(zip(tokens, types, strict=False))
        ids |= {i for i, (token, kind) in pairs if token in END_OF_TURN_TOKENS and kind in _CONTROL_TYPES}
    return frozenset(ids)


def hf_eos_token_ids(*configs: Mapping[str, Any]) -> frozenset[int]:
    """All of eos_token_id (one id or several) in generation_config.json and config.json; a multimodal config keeps it in text_config."""
    ids: set[int] = set()
    for config in configs:
        text_config = config.get("text_config")
        for owner in (config, text_config if isinstance(text_config, dict) else {}):
            stated = owner.get("eos_token_id")
            if stated is not None:
                ids.update(_token_id("eos_token_id", i) for i in (stated if isinstance(stated, list) else [stated]))
    return frozenset(ids)


def _token_id(key: str, value: object) -> int:
    if type(value) is not int or value < 0:
        raise LoadError(f"{key}: {value!r} is not allowed; a token id from 0 is needed")
    return value


def _gguf_chat_template(metadata: Mapping[str, Any]) -> ChatTemplate | None:
    source = metadata.get("tokenizer.chat_template")
    if source is None:
        return None
    if not isinstance(source, str):
        raise LoadError(f"tokenizer.chat_template: a {type(source).__name__} is not allowed; text is needed")
    tokens = metadata.get("tokenizer.ggml.tokens", ())

    def text(key: str) -> str:
        token_id = metadata.get(key)
        return tokens[token_id] if type(token_id) is int and 0 <= token_id < len(tokens) else ""

    return ChatTemplate(source, text("tokenizer.ggml.bos_token_id"), text("tokenizer.ggml.eos_token_id"))


def _folder_chat_template(folder: Path, tokenizer_config: Mapping[str, Any]) -> ChatTemplate | None:
    """chat_template.jinja, else chat_template of tokenizer_config.json: text, or a list of named ones of which "default" is meant."""
    source = tokenizer_config.get("chat_template")
    if (folder / "chat_template.jinja").exists():
        source = read_small_file(folder / "chat_template.jinja", _MAX_JSON_BYTES, LoadError).decode("utf-8")
    if isinstance(source, list):
        source = next((t.get("template") for t in source if isinstance(t, dict) and t.get("name") == "default"), None)
    if source is None:
        return None
    if not isinstance(source, str):
        raise LoadError(f"chat_template of tokenizer_config.json: a {type(source).__name__} is not allowed; text is needed")

    def text(key: str) -> str:
        token = tokenizer_config.get(key)
        token = token.get("content") if isinstance(token, dict) else token
        return token if isinstance(token, str) else ""

    return ChatTemplate(source, text("bos_token"), text("eos_token"))


def _fingerprint(opened: _Opened) -> str:
    """32 hex digits that differ when the program, a file's header, or the beginning of any tensor does.

    Headers alone are not enough: two fine-tunings of one model have the same. The whole content would have to be read to be sure.
    """
    digest = hashlib.blake2b(repr(opened.program).encode(), digest_size=16)
    for part in _fingerprint_parts(opened):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def _fingerprint_parts(opened: _Opened) -> Iterable[memoryview]:
    yield from opened.headers
    for weight in opened.weights.values():
        yield weight.data[:_SAMPLE_BYTES]
