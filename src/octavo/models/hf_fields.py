"""A model's description as a Hugging Face config.json states it (transformers 4 and 5 spellings, its class defaults).

Never reads the file: it is handed the parsed config and the tensor names.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from octavo.models.decoder import RopeSpec
from octavo.models.fields import (
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

_KEYS: dict[str, tuple[str, ...]] = {
    "hidden": ("hidden_size",),
    "layers": ("num_hidden_layers",),
    "ff": ("intermediate_size",),
    "heads": ("num_attention_heads",),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "context": ("max_position_embeddings",),
    "eps": ("rms_norm_eps",),
    "vocab_size": ("vocab_size",),
    "rope_base": ("rope_theta",),
    "rope_base_local": ("rope_local_base_freq",),
    "rope_scaling": ("rope_scaling",),
    "rope_parameters": ("rope_parameters",),
    "window": ("sliding_window",),
    "use_window": ("use_sliding_window",),
    "window_pattern": ("sliding_window_pattern", "_sliding_window_pattern"),
    "max_window_layers": ("max_window_layers",),
    "layer_types": ("layer_types",),
    "attention_softcap": ("attn_logit_softcapping",),
    "final_softcap": ("final_logit_softcapping",),
    "query_scalar": ("query_pre_attn_scalar",),
    "activation": ("hidden_activation", "hidden_act"),
    "attention_bias": ("attention_bias",),
    "tied": ("tie_word_embeddings",),
}

# Keys that change what is computed, with the values that switch them off: refused otherwise unless the family asks for them.
_FEATURES: dict[str, tuple[object, ...]] = {
    "quantization_config": (None,),
    "compression_config": (None,),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "n_routed_experts": (None, 0),
    "num_experts_per_tok": (None, 0),
    "moe_intermediate_size": (None, 0),
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "use_qk_norm": (None, False),
    "qk_layernorm": (None, False),
    "rope_interleaved": (None, False),
    "partial_rotary_factor": (None, 1),
    "no_rope_layers": (None, []),
    "use_mrope": (None, False),
    "sliding_window": (None, 0),
    "use_sliding_window": (None, False),
    "layer_types": (None,),
    "attention_chunk_size": (None,),
    "use_bidirectional_attention": (None, False),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "query_pre_attn_scalar": (None,),
    "attention_multiplier": (None,),
    "embedding_multiplier": (None, 1),
    "residual_multiplier": (None, 1),
    "logits_scaling": (None, 1),
    "logit_scale": (None, 1),
    "attn_temperature_tuning": (None, False),
    "clip_qkv": (None,),
    "alibi": (None, False),
}

_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
_LLAMA3_FIELDS = ("factor", "low_freq_factor", "high_freq_factor")
_ROPE_COMMON = {"rope_theta", "rope_type", "type", "original_max_position_embeddings"}


class HFFields(Fields):
    """``tensor_names`` None: the config is all that there is."""

    def __init__(self, config: Mapping[str, object], tensor_names: Collection[str] | None, defaults: Mapping[str, object]) -> None:
        super().__init__(config, _KEYS, defaults)
        self.tensor_names = tensor_names

    def layers(self) -> int:
        key, value = self.raw("layers")
        return refuse_layers_beyond(key, as_integer(key, value, 1, 1 << 31), self.tensor_names)

    def vocab_size(self) -> int:
        return self.integer("vocab_size")

    def head_dim(self, hidden: int, heads: int) -> int:
        head_dim = self.optional_integer("head_dim")
        if head_dim is None and hidden % heads:
            raise FamilyError(refused("num_attention_heads", heads, f"a divisor of hidden_size ({hidden}) where head_dim is not given"))
        return head_dim or hidden // heads

    def rotary_dim(self, head_dim: int) -> int:
        return head_dim

    def tied(self) -> bool:
        return self.flag("tied", False)

    def biases(self) -> tuple[bool, bool]:
        bias = self.flag("attention_bias", False)
        return bias, bias

    def activation(self, default: str) -> str:
        key, value = self.raw("activation", None)
        if value is None:
            return default
        if not isinstance(value, str) or value not in _ACTIVATIONS:
            raise FamilyError(refused(key, value, f"implemented: {', '.join(_ACTIVATIONS)}"))
        return _ACTIVATIONS[value]

    def rope(self, rotary_dim: int, default_base: float | None = 10000.0) -> RopeSpec:
        """The rotary embedding of global layers (``rope_parameters`` as in transformers 5, else ``rope_theta`` and ``rope_scaling``)."""
        key, params = self._rope_parameters("full_attention")
        if "rope_theta" not in params:
            default = {} if default_base is None else {"default": default_base}
            params = {"rope_theta": self.positive("rope_base", **default), **params}
        else:
            self.raw("rope_base", None)
        return RopeSpec(as_positive(key + ".rope_theta", params["rope_theta"]), self._scaling(key, params))

    def rope_local(self, default_base: float) -> RopeSpec:
        key, params = self._rope_parameters("sliding_attention")
        base = params["rope_theta"] if "rope_theta" in params else self.positive("rope_base_local", default_base)
        return RopeSpec(as_positive(key + ".rope_theta", base), self._scaling(key, params))

    def _rope_parameters(self, layer_type: str) -> tuple[str, Mapping[str, object]]:
        """The rotary settings of one kind of layer, {} when there are none; older configs scale global layers only."""
        key, params = self.raw("rope_parameters", None)
        if params is None:
            key, params = self.raw("rope_scaling", None)
            if layer_type == "sliding_attention":
                return key, {}
        if params is None:
            return key, {}
        if isinstance(params, Mapping) and ("full_attention" in params or "sliding_attention" in params):
            key, params = f"{key}.{layer_type}", params.get(layer_type) or {}
        if not isinstance(params, Mapping):
            raise FamilyError(refused(key, params, "an object"))
        return key, params

    def _scaling(self, key: str, params: Mapping[str, object]) -> RopeScaling:
        kind = params.get("rope_type", params.get("type", "default"))
        if kind in ("default", None):
            fields: tuple[str, ...] = ()
            scaling = RopeScaling()
        elif kind == "linear":
            fields = ("factor",)
            scaling = linear_scaling(f"{key}.factor", params.get("factor"))
        elif kind == "llama3":
            fields = _LLAMA3_FIELDS
            scaling = self._llama3(key, params)
        else:
            raise FamilyError(refused(f"{key}.rope_type", kind, "default, linear and llama3 are implemented"))
        for name, value in params.items():
            neutral = value is None or (name == "partial_rotary_factor" and value == 1)
            if name not in _ROPE_COMMON and name not in fields and not neutral:
                raise FamilyError(f"{key}.{name}: {value!r:.80} asks for something that {kind} rope scaling does not have")
        return scaling

    def _llama3(self, key: str, params: Mapping[str, object]) -> RopeScaling:
        factor, low, high = (as_positive(f"{key}.{name}", params.get(name)) for name in _LLAMA3_FIELDS)
        if low >= high:
            raise FamilyError(refused(f"{key}.low_freq_factor", low, f"below high_freq_factor ({high})"))
        context = params.get("original_max_position_embeddings", self.integer("context"))
        context = as_integer(f"{key}.original_max_position_embeddings", context, 1, SIZE_LIMITS["context"])
        return RopeScaling("llama3", factor, low, high, context)

    def local_layers(self, layers: int, default_pattern: int) -> tuple[bool, ...]:
        """Which layers have the window: ``layer_types`` when given, else all but each ``pattern``-th."""
        pattern = self.optional_integer("window_pattern", default_pattern) or default_pattern
        return self.layer_types(layers) or tuple(bool((i + 1) % pattern) for i in range(layers))

    def layer_types(self, layers: int) -> tuple[bool, ...]:
        """``layer_types`` as flags (true: has the window), empty when the config has none."""
        key, value = self.raw("layer_types", None)
        if value is None:
            return ()
        kinds = ("full_attention", "sliding_attention")
        if not isinstance(value, (list, tuple)) or len(value) != layers or any(v not in kinds for v in value):
            raise FamilyError(refused(key, value, f"a list of {layers} entries, each one of {', '.join(kinds)}"))
        return tuple(v == "sliding_attention" for v in value)

    def gemma_scale(self, hidden: int, heads: int, head_dim: int, layers_27b: int) -> float:
        return inverse_sqrt(self.positive("query_scalar", 256))

    def softcap(self, name: str, default: float | None) -> float | None:
        return self.optional_positive(name, default)

    def refuse_unread(self) -> None:
        """Every feature the config switches on was asked for by the family; else refuse it by name."""
        for key, neutral in _FEATURES.items():
            if key in self.values and key not in self.asked and self.values[key] not in neutral:
                raise FamilyError(f"{key}: {self.values[key]!r:.80} asks for something that is not implemented for this family")
