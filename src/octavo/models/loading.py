"""Opens a path as a model: a GGUF file (or the first part of a split one), or a folder with config.json, safetensors and tokenizer.json.

Joins the readers, the families, the tokenizer and the chat template into a LoadedModel, after everything has been checked: a model that
cannot be served in full is refused here, by the name of what is missing or wrong. Program and weights come first, so that a backend can
take them while the text is read. Computes nothing and copies no weights.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from octavo.models import families
from octavo.models.chat_template import ChatTemplate
from octavo.models.gguf import GGUFFile
from octavo.models.loaded import LoadedModel, ModelBody, WeightTensor
from octavo.models.model_file import ModelFileError, parse_json, read_small_file
from octavo.models.program import Program
from octavo.models.safetensors import SafetensorsModel
from octavo.models.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_MAX_CONFIG_BYTES = 16 << 20
_SAMPLE_BYTES = 64  # of each tensor, in the fingerprint
_CHECKED_DTYPES = ("f64", "i32", "i64")  # those whose values float32 may not hold


class LoadError(ModelFileError):
    """The path holds no model that can be served; the message names the file and what is missing or wrong in it."""


@dataclass(slots=True)
class _Body:
    """A ``ModelBody``."""

    fingerprint: str
    program: Program
    weights: Mapping[str, WeightTensor]


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model whose program and weights have been checked, and whose text has not been read yet.

    Reading a tokenizer can take longer than all else, so that whoever loads may do other work on ``body`` beside it.
    """

    path: Path
    body: ModelBody
    _read_tokenizer: Callable[[], Tokenizer]

    def read_text(self, name: str | None = None) -> LoadedModel:
        """The whole model, under ``name`` (default: the file's or folder's own name). Raises ModelFileError."""
        path, body, is_folder = self.path, self.body, self.path.is_dir()
        with _errors_name(path):
            tokenizer = self._read_tokenizer()
        _check_vocabulary(path, body.program, tokenizer, may_exceed=is_folder)
        source = tokenizer.chat_template_source
        template = None if source is None else ChatTemplate(source, tokenizer.bos_token, tokenizer.eos_token)
        return LoadedModel(
            name=name or (path.resolve().name if is_folder else path.stem),
            path=str(path),
            fingerprint=body.fingerprint,
            program=body.program,
            weights=body.weights,
            tokenizer=tokenizer,
            chat_template=template,
            eos_token_ids=tokenizer.eos_token_ids,
            bos_token_id=tokenizer.bos_token_id,
            num_params=sum(math.prod(weight.shape) for weight in body.weights.values()),
            weight_bytes=sum(len(weight.data) for weight in body.weights.values()),
        )


def load_model(path: str | os.PathLike[str], name: str | None = None) -> LoadedModel:
    """Open the model at ``path`` under ``name`` (default: the file's or folder's own name). Raises ModelFileError."""
    return open_model(path).read_text(name)


def open_model(path: str | os.PathLike[str]) -> OpenedModel:
    """Open the model at ``path``, its text aside. Raises ModelFileError."""
    path = Path(path)
    if not os.path.exists(path):
        raise LoadError(f"{path}: is not there")
    opened = _open_folder(path) if path.is_dir() else _open_gguf(path)
    _check_values(opened.body.weights.values())
    return opened


def _open_gguf(path: Path) -> OpenedModel:
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
    body = _body(program, _pick(file.tensors, sources), file.headers)
    return OpenedModel(path, body, lambda: Tokenizer.from_gguf(file.metadata))


def _open_folder(folder: Path) -> OpenedModel:
    if not (folder / "config.json").exists():
        found = sorted(file.name for file in folder.glob("*.gguf"))
        hint = f"; give the path of a GGUF file in it, such as {found[0]}" if found else ""
        raise LoadError(f"{folder}: holds no config.json{hint}")
    if not (folder / "tokenizer.json").exists():
        raise LoadError(f"{folder}: holds no tokenizer.json")
    text = read_small_file(folder / "config.json", _MAX_CONFIG_BYTES, LoadError)
    config = parse_json(text, folder / "config.json", "file", LoadError)
    model = SafetensorsModel.open(folder)
    shapes = {name: tensor.shape for name, tensor in model.tensors.items()}
    with _errors_name(folder):
        program, sources = families.from_hf(config, shapes)
    body = _body(program, _pick(model.tensors, sources), model.headers)
    return OpenedModel(folder, body, lambda: Tokenizer.from_folder(folder))


@contextmanager
def _errors_name(path: Path) -> Iterator[None]:
    """Errors in what was read (families, tokenizer) get the path, which those do not know."""
    try:
        yield
    except ModelFileError:
        raise
    except ValueError as exc:
        raise LoadError(f"{path}: {exc}") from exc


def _pick(tensors: Mapping[str, WeightTensor], sources: Mapping[str, families.WeightSource]) -> dict[str, WeightTensor]:
    """Canonical name -> tensor. Families have checked that each is there, in its shape."""
    return {name: replace(tensors[source.file_name], add=source.add) for name, source in sources.items()}


def _check_vocabulary(path: Path, program: Program, tokenizer: Tokenizer, may_exceed: bool) -> None:
    """Rows of the embedding beyond the tokenizer's tokens become ids without text; tokens beyond its rows are refused.

    Folders ``may_exceed``: published ones name tokens without a row (Gemma 3's image token beside its text models). A request whose
    prompt has such a token is refused, as every id outside the vocabulary is; a model that starts or ends its texts with one, here.
    """
    rows, tokens = program.vocab_size, tokenizer.vocab_size
    if tokens > rows and not may_exceed:
        raise LoadError(f"{path}: the tokenizer has {tokens} tokens, but the embedding has only {rows} rows")
    special = (tokenizer.bos_token_id, *sorted(tokenizer.eos_token_ids))
    outside = [token_id for token_id in special if token_id is not None and token_id >= rows]
    if outside:
        raise LoadError(f"{path}: token {outside[0]} begins or ends texts, but the embedding has only {rows} rows")
    if tokens > rows:
        log.warning("%s: %d tokens of the tokenizer have no row in the embedding; prompts with them are refused", path, tokens - rows)
    tokenizer.pad_to(rows)


def _check_values(weights: Iterable[WeightTensor]) -> None:
    """Refuse values that float32 cannot hold, of the types that have any; numpy is imported only where there is one."""
    checked = [weight for weight in weights if weight.dtype in _CHECKED_DTYPES]
    if checked:
        from octavo.models.weights import check_fits

        for weight in checked:
            check_fits(weight)


def _body(program: Program, weights: Mapping[str, WeightTensor], headers: Iterable[memoryview]) -> _Body:
    """With a fingerprint of 32 hex digits that differ when the program, a file's header, or the beginning of any tensor does.

    Headers alone are not enough: two fine-tunings of one model have the same. The whole content would have to be read to be sure.
    """
    digest = hashlib.blake2b(repr(program).encode(), digest_size=16)
    for part in (*headers, *(weight.data[:_SAMPLE_BYTES] for weight in weights.values())):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return _Body(digest.hexdigest(), program, weights)
