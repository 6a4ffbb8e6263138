"""A model opened from disk: its program, its weights by canonical name, its tokenizer data. Opened, not computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np

    from octavo.models.chat_template import ChatTemplate
    from octavo.models.program import Program
    from octavo.models.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class WeightTensor:
    """One tensor as it lies in the file.

    ``dtype`` is GGML's name in lower case ("f32", "f16", "bf16", "q4_0", ... "q6_k"; also "f64", "i64" from safetensors).
    ``shape`` is row-major, slowest first ([out_features, in_features]). ``data`` is a read-only view of the mmap
    (uint8, exactly the tensor's bytes), kept alive by the view. ``add`` is added after widening (Gemma's 1 + w in safetensors).
    """

    name: str  # the file's own name, for messages
    dtype: str
    shape: tuple[int, ...]
    data: memoryview
    add: float = 0.0

    def float32(self) -> np.ndarray:
        """The tensor widened exactly to float32, [shape]."""
        from octavo.models.weights import widen

        return widen(self)


class ModelBody(Protocol):
    """What a backend computes: all of a model but its text."""

    fingerprint: str  # of the program, the files' headers and the beginning of each tensor
    program: Program
    weights: Mapping[str, WeightTensor]  # canonical names; exactly program.weights


@dataclass(slots=True)
class LoadedModel:
    """A ``ModelBody`` with its text."""

    name: str
    path: str
    fingerprint: str
    program: Program
    weights: Mapping[str, WeightTensor]
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    eos_token_ids: frozenset[int]
    bos_token_id: int | None
    num_params: int
    weight_bytes: int


@dataclass(slots=True)
class _Part:
    fingerprint: str
    program: Program
    weights: Mapping[str, WeightTensor]


def first_layers(body: ModelBody, num_layers: int) -> ModelBody:
    """``body`` with the program of its first layers, the final norm and the output matrix. Raises ValueError as Program.first_layers."""
    program = body.program.first_layers(num_layers)
    return _Part(f"{body.fingerprint}:{num_layers}-layers", program, {name: body.weights[name] for name in program.weights})
