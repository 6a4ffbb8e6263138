"""Architectures that can be sized and not served: those of published measurements, and of models that people ask about first.

From a config.json to the shape of its KV and the number of its weights. No Program: nothing here can be run or priced step by step. The
numbers of weights are those of the published models, to the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from octavo.models.fields import MOST_LAYERS, SIZE_LIMITS, FamilyError, as_integer, refused
from octavo.models.program import KVLayer

Config = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class ModelSize:
    """``context``: positions that the model was trained for."""

    kv_layers: tuple[KVLayer, ...]
    num_weights: int
    context: int


def sized_model_types() -> tuple[str, ...]:
    return tuple(_SIZES)


def model_size(config: Config) -> ModelSize:
    """The size of the model that a config.json describes. FamilyError names the field that is missing, wrong or unknown."""
    rank = config.get("kv_lora_rank")
    if rank is not None:
        raise FamilyError(refused("kv_lora_rank", rank, "latent attention keeps no keys and values by head, which are all that is sized"))
    model_type = config.get("model_type")
    size = _SIZES.get(model_type) if isinstance(model_type, str) else None
    if size is None:
        raise FamilyError(refused("model_type", model_type, f"sized as well as those that are served: {', '.join(_SIZES)}"))
    return size(config)


def _number(config: Config, *keys: str, default: int | None = None, high: int = SIZE_LIMITS["vocab_size"]) -> int:
    """An integer from 1, by the first of ``keys`` that the config has."""
    key = next((key for key in keys if config.get(key) is not None), keys[0])
    value = config.get(key)
    if value is None:
        if default is None:
            raise FamilyError(f"{key} is missing: a model cannot be sized without it")
        return default
    return as_integer(key, value, 1, high)


def _kv_layers(config: Config, layers: int, hidden: int, heads: int, kv_heads: int, window: int | None = None) -> tuple[KVLayer, ...]:
    if hidden % heads:
        raise FamilyError(refused("number of heads", heads, f"a divisor of the hidden size ({hidden})"))
    head_dim = _number(config, "head_dim", default=hidden // heads, high=SIZE_LIMITS["head_dim"])
    return (KVLayer(kv_heads, head_dim, window),) * layers


def _opt(c: Config) -> ModelSize:
    """OPT (Zhang et al., 2022): learned positions with two to spare, biases everywhere, tied output."""
    layers, hidden, heads = _number(c, "num_hidden_layers", high=MOST_LAYERS), _number(c, "hidden_size"), _number(c, "num_attention_heads")
    ff, context = _number(c, "ffn_dim"), _number(c, "max_position_embeddings")
    width = _number(c, "word_embed_proj_dim", default=hidden)
    ends = _number(c, "vocab_size") * width + (context + 2) * hidden + (2 * width * hidden if width != hidden else 0)
    has_norm = c.get("do_layer_norm_before", True) is not False and c.get("_remove_final_layer_norm") is not True
    layer = 4 * (hidden * hidden + hidden) + 2 * hidden * ff + ff + hidden + 4 * hidden
    return ModelSize(_kv_layers(c, layers, hidden, heads, heads), ends + layers * layer + (2 * hidden if has_norm else 0), context)


def _bloom(c: Config) -> ModelSize:
    """BLOOM (BigScience, 2022): no positions to learn (ALiBi), a norm behind the embedding, tied output."""
    layers, heads = _number(c, "n_layer", "num_hidden_layers", high=MOST_LAYERS), _number(c, "n_head", "num_attention_heads")
    hidden = _number(c, "hidden_size", "n_embed")
    num_weights = _number(c, "vocab_size") * hidden + 2 * hidden + layers * (12 * hidden * hidden + 13 * hidden) + 2 * hidden
    return ModelSize(_kv_layers(c, layers, hidden, heads, heads), num_weights, _number(c, "seq_length", default=2048))


def _gpt2(c: Config) -> ModelSize:
    """GPT-2 (Radford et al., 2019): learned positions, tied output."""
    layers, heads, hidden = _number(c, "n_layer", high=MOST_LAYERS), _number(c, "n_head"), _number(c, "n_embd")
    context, ff = _number(c, "n_positions", "n_ctx"), _number(c, "n_inner", default=4 * hidden)
    layer = 4 * hidden * hidden + 4 * hidden + 2 * hidden * ff + ff + hidden + 4 * hidden
    num_weights = (_number(c, "vocab_size") + context) * hidden + layers * layer + 2 * hidden
    return ModelSize(_kv_layers(c, layers, hidden, heads, heads), num_weights, context)


def _gpt_neox(c: Config) -> ModelSize:
    """GPT-NeoX (Black et al., 2022): rotary positions, biases everywhere, an output matrix of its own."""
    layers, hidden, heads = _number(c, "num_hidden_layers", high=MOST_LAYERS), _number(c, "hidden_size"), _number(c, "num_attention_heads")
    ff, ends = _number(c, "intermediate_size"), 1 if c.get("tie_word_embeddings") is True else 2
    layer = 4 * (hidden * hidden + hidden) + 2 * hidden * ff + ff + hidden + 4 * hidden
    num_weights = ends * _number(c, "vocab_size") * hidden + layers * layer + 2 * hidden
    return ModelSize(_kv_layers(c, layers, hidden, heads, heads), num_weights, _number(c, "max_position_embeddings"))


def _mixtral(c: Config) -> ModelSize:
    """Mixtral (Jiang et al., 2024): Mistral's attention, and experts, all of which are kept in memory."""
    layers, hidden, heads = _number(c, "num_hidden_layers", high=MOST_LAYERS), _number(c, "hidden_size"), _number(c, "num_attention_heads")
    kv_heads, experts = _number(c, "num_key_value_heads", default=heads), _number(c, "num_local_experts")
    window = None if c.get("sliding_window") in (None, 0) else _number(c, "sliding_window", high=SIZE_LIMITS["window"])
    kv_layers, ends = _kv_layers(c, layers, hidden, heads, kv_heads, window), 1 if c.get("tie_word_embeddings") is True else 2
    head_dim = kv_layers[0].head_dim
    attention = 2 * hidden * head_dim * (heads + kv_heads)
    layer = attention + experts * 3 * hidden * _number(c, "intermediate_size") + experts * hidden + 2 * hidden
    num_weights = ends * _number(c, "vocab_size") * hidden + layers * layer + hidden
    return ModelSize(kv_layers, num_weights, _number(c, "max_position_embeddings"))


_SIZES: dict[str, Callable[[Config], ModelSize]] = {
    "opt": _opt, "bloom": _bloom, "gpt2": _gpt2, "gpt_neox": _gpt_neox, "mixtral": _mixtral,
}  # fmt: skip
