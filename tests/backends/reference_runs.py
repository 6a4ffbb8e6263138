"""Runs token ids through the reference backend in given chunks and returns the raw logits of every row."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from octavo.backends.reference.backend import ReferenceBackend
from octavo.config import CacheConfig, EngineConfig
from octavo.core.step import SequenceSlice, StepPlan
from octavo.models import families
from octavo.models.gguf import GGUFFile
from octavo.models.loaded import LoadedModel


def open_gguf_weights(path: Path) -> LoadedModel:
    """A GGUF file as a model without a tokenizer: all that a backend looks at."""
    file = GGUFFile.open(path)
    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    program, sources = families.from_gguf(file.metadata, shapes, lambda name: file.tensors[name].float32().tolist())
    weights = {name: file.tensors[source.file_name] for name, source in sources.items()}
    return LoadedModel(path.stem, str(path), "test", program, weights, None, None, frozenset(), None, 0, 0)  # type: ignore[arg-type]


def make_backend(model: LoadedModel, block_size: int = 16, num_blocks: int = 64) -> ReferenceBackend:
    backend = ReferenceBackend(model, EngineConfig(cache=CacheConfig(block_size=block_size)))
    backend.allocate_kv(num_blocks)
    return backend


def chunked(start: int, ids: Sequence[int], chunk: int) -> list[tuple[int, list[int]]]:
    """(first position, tokens) of consecutive chunks."""
    return [(start + i, list(ids[i : i + chunk])) for i in range(0, len(ids), chunk)]


def all_logits(backend: ReferenceBackend, ids: Sequence[int], chunk: int, block_table: Sequence[int], start: int = 0) -> np.ndarray:
    """Float32 [len(ids), vocab_size]: the logits of ``ids``, which stand at ``start`` of a sequence whose earlier KV is in its blocks."""
    rows: dict[int, np.ndarray] = {}

    def keep(seq_id: int, position: int, logits: np.ndarray) -> None:
        assert position not in rows
        rows[position] = logits

    backend.logits_hook, backend.all_logits = keep, True
    for step, (first, tokens) in enumerate(chunked(start, ids, chunk)):
        backend.execute(StepPlan(step, [SequenceSlice(0, first, tokens, array("i", block_table))]))
    return np.stack([rows[position] for position in range(start, start + len(ids))])
