"""A model's description as GGUF metadata states it (keys of the GGUF specification, defaults of llama.cpp).

Never reads the file: it is handed the metadata and the tensor names.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from octavo.models.decoder import RopeSpec
from octavo.models.fields import (
    REQUIRED,
    SIZE_LIMITS,
    FamilyError,
    Fields,
    as_integer,
    as_positive,
    inverse_sqrt,
    linear_scaling,
    refuse_layers_beyond,
    refused,
)
from octavo.models.program import RopeScaling

_KEYS = {
    "hidden": "embedding_length",
    "layers": "block_count",
    "ff": "feed_forward_length",
    "heads": "attention.head_count",
    "kv_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "value_dim": "attention.value_length",
    "context": "context_length",
    "eps": "attention.layer_norm_rms_epsilon",
    "vocab_size": "vocab_size",
    "rotary_dim": "rope.dimension_count",
    "rope_base": "rope.freq_base",
    "rope_base_local": "rope.freq_base_swa",
    "rope_kind": "rope.scaling.type",
    "rope_factor": "rope.scaling.factor",
    "rope_factor_old": "rope.scale_linear",
    "window": "attention.sliding_window",
    "window_pattern": "attention.sliding_window_pattern",
    "attention_softcap": "attn_logit_softcapping",
    "final_softcap": "final_logit_softcapping",
    "attention_scale": "attention.scale",
}

# Keys that change nothing that is computed here; all other keys under the architecture's prefix must be asked for by the family.
_INERT = ("vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "rope.scaling.original_context_length")
_NEUTRAL: dict[str, tuple[object, ...]] = {"attention.causal": (True,), "rope.scaling.attn_factor": (1,)}  # where "off" is not 0
_OFF: tuple[object, ...] = (None, False, 0, "", "none")

ROPE_FREQS = "rope_freqs.weight"


class GGUFFields(Fields):
    """``tensor_names`` may be a mapping to row-major shapes; ``read_tensor`` gives a small float tensor's values."""

    def __init__(
        self,
        architecture: str,
        metadata: Mapping[str, object],
        tensor_names: Collection[str],
        read_tensor: Callable[[str], Sequence[float]] | None,
    ) -> None:
        keys = {name: (f"{architecture}.{key}",) for name, key in _KEYS.items()}
        super().__init__(metadata, keys, defaults={})
        self.prefix = architecture + "."
        self.tensor_names = tensor_names
        self.read_tensor = read_tensor

    def layers(self) -> int:
        key, value = self.raw("layers")
        return refuse_layers_beyond(key, as_integer(key, value, 1, 1 << 31), self.tensor_names)

    def vocab_size(self) -> int:
        """Rows of the embedding when shapes are known, else what the metadata says."""
        shapes = self.tensor_names
        if isinstance(shapes, Mapping) and "token_embd.weight" in shapes:
            return as_integer("rows of token_embd.weight", shapes["token_embd.weight"][0], 1, SIZE_LIMITS["vocab_size"])
        tokens = self.values.get("tokenizer.ggml.tokens")
        return self.integer("vocab_size", len(tokens) if isinstance(tokens, (list, tuple)) else REQUIRED)

    def head_dim(self, hidden: int, heads: int) -> int:
        head_dim = self.integer("head_dim", hidden // heads)
        key, value = self.raw("value_dim", head_dim)
        if value != head_dim:
            raise FamilyError(refused(key, value, f"values and keys of one size ({head_dim}) are all that is implemented"))
        return head_dim

    def rotary_dim(self, head_dim: int) -> int:
        key, value = self.raw("rotary_dim", head_dim)
        rotary_dim = as_integer(key, value, 2, head_dim)
        if rotary_dim % 2:
            raise FamilyError(refused(key, value, "an even number"))
        return rotary_dim

    def tied(self) -> bool:
        return "output.weight" not in self.tensor_names

    def biases(self) -> tuple[bool, bool]:
        """(q, k and v have biases, o has one): GGUF has no key for it, the tensors say it."""
        return "blk.0.attn_q.bias" in self.tensor_names, "blk.0.attn_output.bias" in self.tensor_names

    def activation(self, default: str) -> str:
        return default  # GGUF has no key for it

    def rope(self, rotary_dim: int, default_base: float | None = 10000.0) -> RopeSpec:
        """The rotary embedding of global layers. ``default_base`` None: the file must state it."""
        base = self.positive("rope_base", REQUIRED if default_base is None else default_base)
        scaling = self._scaling()
        if ROPE_FREQS in self.tensor_names:
            if scaling.kind != "none":
                raise FamilyError(f"{ROPE_FREQS} together with {scaling.kind} rope scaling is not implemented")
            scaling = RopeScaling(kind="factors", factors=self._rope_factors(rotary_dim // 2))
        return RopeSpec(base, scaling)

    def rope_local(self, default_base: float) -> RopeSpec:
        return RopeSpec(self.positive("rope_base_local", default_base))

    def _scaling(self) -> RopeScaling:
        key, kind = self.raw("rope_kind", None)
        factor_key, factor = self.raw("rope_factor", None)
        old_key, old = self.raw("rope_factor_old", None)
        if factor is None and old is not None:
            factor_key, factor = old_key, old
        if kind not in (None, "none", "linear"):
            raise FamilyError(refused(key, kind, "none and linear are implemented"))
        if kind == "none" or factor in (None, 0):
            return RopeScaling()
        return linear_scaling(factor_key, factor)

    def _rope_factors(self, count: int) -> tuple[float, ...]:
        if self.read_tensor is None:
            raise FamilyError(f"{ROPE_FREQS} is in the file, but there is no way to read it")
        factors = tuple(self.read_tensor(ROPE_FREQS))
        if len(factors) != count:
            raise FamilyError(f"{ROPE_FREQS}: {len(factors)} values; half the rotary dimension ({count}) are needed")
        return tuple(as_positive(ROPE_FREQS, float(f)) for f in factors)

    def local_layers(self, layers: int, default_pattern: int) -> tuple[bool, ...]:
        """Which layers have the window: from a period (each last one has none) or from a list of flags."""
        key, value = self.raw("window_pattern", default_pattern)
        if isinstance(value, (list, tuple)):
            if len(value) != layers or not all(isinstance(v, (bool, int)) for v in value):
                raise FamilyError(refused(key, value, f"a period, or one flag for each of the {layers} layers"))
            return tuple(bool(v) for v in value)
        pattern = as_integer(key, value, 1, SIZE_LIMITS["window_pattern"])
        return tuple(bool((i + 1) % pattern) for i in range(layers))

    def gemma_scale(self, hidden: int, heads: int, head_dim: int, layers_27b: int) -> float:
        """Attention scale of Gemma 2 and 3. Files seldom state it; as llama.cpp, the 27B models, known by their number
        of layers, use hidden / heads in place of head_dim.
        """
        stated = self.optional_positive("attention_scale", None, zero_is_off=True)
        if stated is not None:
            return stated
        return inverse_sqrt(hidden / heads if self.layers() == layers_27b else head_dim)

    def softcap(self, name: str, default: float | None) -> float | None:
        return self.optional_positive(name, default, zero_is_off=True)

    def refuse_unread(self) -> None:
        """Every key under the architecture's prefix was asked for, is inert, or is switched off; else refuse it by name."""
        for key in self.values:  # not items(): the values of arrays under other prefixes are parsed when read
            if not key.startswith(self.prefix) or key in self.asked:
                continue
            name, value = key[len(self.prefix) :], self.values[key]
            if name in _INERT or value in _NEUTRAL.get(name, _OFF):
                continue
            raise FamilyError(f"{key}: {value!r:.80} asks for something that is not implemented for {self.prefix[:-1]}")
