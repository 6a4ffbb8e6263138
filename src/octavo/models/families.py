"""Model families: GGUF metadata or a Hugging Face config become a Program and the file's names for its weights.

One short function per family says how it differs from the common decoder; a new family touches this file alone unless it needs
a new op. Owns the tables of tensor names and of known architectures. Never opens a file and never reads a tensor, except the
small table of rotary factors that GGUF stores as one.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from octavo.models.decoder import Decoder, build_program, windows_where
from octavo.models.fields import FamilyError, inverse_sqrt, refused
from octavo.models.gguf_fields import ROPE_FREQS, GGUFFields
from octavo.models.hf_fields import HFFields
from octavo.models.program import Program

__all__ = ["FamilyError", "WeightSource", "describe_hf", "from_gguf", "from_hf", "known_gguf_architectures", "known_hf_model_types"]

AnyFields = GGUFFields | HFFields


@dataclass(frozen=True, slots=True)
class WeightSource:
    """Where a canonical weight is: the file's tensor name, and what is added to it after widening (Gemma's 1 + w in safetensors)."""

    file_name: str
    add: float = 0.0


@dataclass(frozen=True, slots=True)
class Family:
    """``hf_defaults``: values of fields a config may leave out (neutral names). ``hf_norm_add``: added to norm weights of safetensors."""

    name: str
    describe: Callable[[AnyFields], Decoder]
    hf_defaults: Mapping[str, object] = field(default_factory=dict)
    hf_norm_add: float = 0.0
    gguf_interleaved: bool = False


def _common(f: AnyFields, activation: str = "silu", default_rope_base: float | None = 10000.0) -> Decoder:
    """What all families share: sizes, one rotary embedding, no window, scale 1 / sqrt(head_dim)."""
    layers = f.layers()
    hidden, heads = f.integer("hidden"), f.integer("heads")
    kv_heads = f.optional_integer("kv_heads", heads) or heads
    if heads % kv_heads:
        raise FamilyError(refused(f.keys["kv_heads"][0], kv_heads, f"a divisor of the number of heads ({heads})"))
    head_dim = f.head_dim(hidden, heads)
    if head_dim % 2:
        raise FamilyError(refused(f.keys["head_dim"][0], head_dim, "an even number"))
    rotary_dim = f.rotary_dim(head_dim)
    qkv_bias, o_bias = f.biases()
    return Decoder(
        hidden=hidden, ff=f.integer("ff"), heads=heads, kv_heads=kv_heads, head_dim=head_dim, rotary_dim=rotary_dim,
        vocab_size=f.vocab_size(), context=f.integer("context"), eps=f.positive("eps"), windows=(None,) * layers,
        rope=f.rope(rotary_dim, default_rope_base), activation=f.activation(activation), attention_scale=inverse_sqrt(head_dim),
        tied=f.tied(), qkv_bias=qkv_bias, o_bias=o_bias,
    )  # fmt: skip


def _llama(f: AnyFields) -> Decoder:
    """Llama 1 to 3 (Touvron et al., 2023), SmolLM2."""
    return _common(f)


def _mistral(f: AnyFields) -> Decoder:
    """Mistral 7B (Jiang et al., 2023): Llama with one window for all layers."""
    d = _common(f)
    return replace(d, windows=(f.window(),) * d.layers)


def _qwen2(f: AnyFields) -> Decoder:
    """Qwen2 and 2.5: biases on q, k and v."""
    d = _common(f)
    return replace(d, qkv_bias=True, windows=_qwen_windows(f, d.layers))


def _qwen3(f: AnyFields) -> Decoder:
    """Qwen3: q and k normalised per head."""
    d = _common(f)
    return replace(d, qk_norm=True, windows=_qwen_windows(f, d.layers))


def _qwen_windows(f: AnyFields, layers: int) -> tuple[int | None, ...]:
    """Off unless the config says so; then for the layers from ``max_window_layers`` on. GGUF has no key for it."""
    if isinstance(f, GGUFFields):
        return (None,) * layers
    window = f.window() if f.flag("use_window", False) else None
    f.raw("window", None)
    first = f.optional_integer("max_window_layers", 28, low=0) or 0
    return windows_where(f.layer_types(layers) or tuple(i >= first for i in range(layers)), window)


def _gemma(f: AnyFields, layers_27b: int, default_rope_base: float | None) -> Decoder:
    """What Gemma 2 and 3 share: post norms, embeddings scaled by sqrt(hidden), own attention scale.

    The embedding scale is sqrt(hidden) rounded to float32; checkpoints were trained with it rounded to bfloat16, a difference that
    both transformers in float32 and llama.cpp leave out as well.
    """
    d = _common(f, "gelu_tanh", default_rope_base)
    return replace(
        d,
        post_norms=True,
        embed_scale=_float32(math.sqrt(d.hidden)),
        attention_scale=f.gemma_scale(d.hidden, d.heads, d.head_dim, layers_27b),
    )


def _gemma2(f: AnyFields) -> Decoder:
    """Gemma 2 (Gemma Team, 2024): capped scores and logits, a window on every other layer beginning with the first."""
    d = _gemma(f, layers_27b=46, default_rope_base=10000.0)
    window = f.optional_integer("window", 4096, low=0) or None
    return replace(
        d,
        attention_softcap=f.softcap("attention_softcap", 50.0),
        final_softcap=f.softcap("final_softcap", 30.0),
        windows=windows_where(f.local_layers(d.layers, default_pattern=2), window),
    )


def _gemma3(f: AnyFields) -> Decoder:
    """Gemma 3 text models (Gemma Team, 2025): five local layers to a global one, each kind with its rotary base; q and k normalised."""
    d = _gemma(f, layers_27b=62, default_rope_base=None)
    return replace(
        d,
        qk_norm=True,
        final_softcap=f.softcap("final_softcap", None),
        rope_local=f.rope_local(10000.0),
        windows=windows_where(f.local_layers(d.layers, default_pattern=6), f.window()),
    )


_GEMMA_HF: dict[str, object] = {"tied": True, "head_dim": 256, "heads": 8, "kv_heads": 4, "eps": 1e-6, "window": 4096}
_GEMMA3_HF = _GEMMA_HF | {"rope_base": 1e6, "vocab_size": 262208, "context": 131072}

LLAMA = Family("llama", _llama, gguf_interleaved=True)
MISTRAL = Family("mistral", _mistral, {"window": 4096, "kv_heads": 8}, gguf_interleaved=True)
QWEN2 = Family("qwen2", _qwen2)
QWEN3 = Family("qwen3", _qwen3, {"head_dim": 128})
GEMMA2 = Family("gemma2", _gemma2, _GEMMA_HF, hf_norm_add=1.0)
GEMMA3 = Family("gemma3", _gemma3, _GEMMA3_HF, hf_norm_add=1.0)

_NO_SIZE: dict[str, object] = {"eps": 1e-6}  # fields that size nothing: a config that is no more than read may leave them out

_HF_MODEL_TYPES = {
    "llama": LLAMA, "mistral": MISTRAL, "qwen2": QWEN2, "qwen3": QWEN3, "gemma2": GEMMA2, "gemma3": GEMMA3, "gemma3_text": GEMMA3,
}  # fmt: skip
# In GGUF Mistral is a "llama" as well, whose window counts where it is set.
_GGUF_ARCHITECTURES = {"llama": replace(MISTRAL, name="llama"), "qwen2": QWEN2, "qwen3": QWEN3, "gemma2": GEMMA2, "gemma3": GEMMA3}

# Canonical name -> (GGUF, Hugging Face) stem; weights end in ".weight", biases in ".bias".
_TOP_NAMES = {"embed": ("token_embd", "embed_tokens"), "norm_final": ("output_norm", "norm"), "output": ("output", "lm_head")}
_LAYER_NAMES = {
    "norm_attn": ("attn_norm", "input_layernorm"),
    "q": ("attn_q", "self_attn.q_proj"),
    "k": ("attn_k", "self_attn.k_proj"),
    "v": ("attn_v", "self_attn.v_proj"),
    "o": ("attn_output", "self_attn.o_proj"),
    "norm_q": ("attn_q_norm", "self_attn.q_norm"),
    "norm_k": ("attn_k_norm", "self_attn.k_norm"),
    "norm_post_attn": ("post_attention_norm", "post_attention_layernorm"),
    "norm_mlp": ("ffn_norm", "pre_feedforward_layernorm"),
    "gate": ("ffn_gate", "mlp.gate_proj"),
    "up": ("ffn_up", "mlp.up_proj"),
    "down": ("ffn_down", "mlp.down_proj"),
    "norm_post_mlp": ("post_ffw_norm", "post_feedforward_layernorm"),
}
_UNUSED_HF = (".rotary_emb.inv_freq", ".masked_bias")  # buffers that old checkpoints carry along
_HF_PREFIXES = (("model.", ""), ("model.language_model.", ""), ("language_model.model.", "language_model."), ("", ""))


def known_gguf_architectures() -> tuple[str, ...]:
    return tuple(_GGUF_ARCHITECTURES)


def known_hf_model_types() -> tuple[str, ...]:
    return tuple(_HF_MODEL_TYPES)


def from_gguf(
    metadata: Mapping[str, object],
    tensor_names: Collection[str],
    read_tensor: Callable[[str], Sequence[float]] | None = None,
) -> tuple[Program, dict[str, WeightSource]]:
    """The Program a GGUF file describes, and for each of its weights the tensor of the file.

    ``tensor_names``: all tensors of the file; as a mapping to row-major shapes these are checked as well, and the vocabulary is
    the embedding's rows. ``read_tensor`` reads ``rope_freqs.weight`` of Llama 3 files. Raises FamilyError.
    """
    architecture = metadata.get("general.architecture")
    if architecture is None:
        raise FamilyError("general.architecture is missing: a model cannot be described without it")
    family = _GGUF_ARCHITECTURES.get(architecture) if isinstance(architecture, str) else None
    if family is None:
        raise FamilyError(refused("general.architecture", architecture, f"known: {', '.join(_GGUF_ARCHITECTURES)}"))
    fields = GGUFFields(str(architecture), metadata, tensor_names, read_tensor)
    decoder = replace(family.describe(fields), interleaved=family.gguf_interleaved)
    fields.refuse_unread()
    program = _checked_program(decoder, family.name, tensor_names)
    sources = {name: WeightSource(_gguf_name(name)) for name in program.weights}
    unused = [n for n in tensor_names if n != ROPE_FREQS and not n.endswith(".attn_rot_embd.weight")]
    _check_tensors(program, sources, tensor_names, unused)
    return program, sources


def from_hf(config: Mapping[str, object], tensor_names: Collection[str]) -> tuple[Program, dict[str, WeightSource]]:
    """The Program a config.json describes, and for each of its weights the tensor of the safetensors files.

    ``tensor_names`` as in ``from_gguf``. Of a multimodal Gemma 3 the text model is taken. Raises FamilyError.
    """
    decoder, family, is_multimodal = _hf_decoder(config, tensor_names)
    program = _checked_program(decoder, family.name, tensor_names)
    prefix, head_prefix = next((p for p in _HF_PREFIXES if p[0] + "embed_tokens.weight" in tensor_names), _HF_PREFIXES[0])
    sources = {}
    for name in program.weights:
        add = family.hf_norm_add if "norm" in name else 0.0
        sources[name] = WeightSource(_hf_name(name, prefix, head_prefix, decoder.post_norms), add)
    skipped = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.") if is_multimodal else ()
    head = head_prefix + "lm_head.weight"  # a tied model's file may repeat the embedding under this name
    unused = [n for n in tensor_names if not n.startswith(skipped) and not n.endswith(_UNUSED_HF) and not (decoder.tied and n == head)]
    _check_tensors(program, sources, tensor_names, unused)
    return program, sources


def describe_hf(config: Mapping[str, object]) -> Program:
    """The Program a config.json describes, with no tensors to hold it to: what there is to know before a model is downloaded.

    Raises FamilyError.
    """
    decoder, family, _ = _hf_decoder(config, None)
    return _checked_program(decoder, family.name, None)


def _hf_decoder(config: Mapping[str, object], tensor_names: Collection[str] | None) -> tuple[Decoder, Family, bool]:
    """What a config.json describes, its family, and whether it is the text model of a larger one."""
    model_type = config.get("model_type")
    family = _HF_MODEL_TYPES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise FamilyError(refused("model_type", model_type, f"known: {', '.join(_HF_MODEL_TYPES)}"))
    text = config.get("text_config")
    if isinstance(text, Mapping):
        outer = {key: config[key] for key in ("tie_word_embeddings", "quantization_config") if key in config}
        config = {**outer, **text}
    defaults = family.hf_defaults if tensor_names is not None else {**_NO_SIZE, **family.hf_defaults}
    fields = HFFields(config, tensor_names, defaults)
    decoder = family.describe(fields)
    fields.refuse_unread()
    return decoder, family, bool(text)


def _checked_program(d: Decoder, family: str, tensor_names: Collection[str] | None) -> Program:
    if d.heads * d.head_dim > 1 << 20:
        raise FamilyError(f"{d.heads} heads of {d.head_dim} values are more than the {1 << 20} values that a row may have")
    if tensor_names is None:
        return build_program(d, family)
    least = d.layers * 7  # q, k, v, o, gate, up, down: bounds the work below by the size of the file
    if least > len(tensor_names):
        raise FamilyError(f"{d.layers} layers of {family} have at least {least} tensors, but the file has {len(tensor_names)}")
    return build_program(d, family)


def _gguf_name(name: str) -> str:
    layer, stem, suffix = _split(name)
    return f"blk.{layer}.{_LAYER_NAMES[stem][0]}{suffix}" if layer else _TOP_NAMES[stem][0] + suffix


def _hf_name(name: str, prefix: str, head_prefix: str, post_norms: bool) -> str:
    layer, stem, suffix = _split(name)
    if not layer:
        return (head_prefix if stem == "output" else prefix) + _TOP_NAMES[stem][1] + suffix
    # Without post norms the name "post_attention_layernorm" belongs to the norm before the MLP.
    inner = "post_attention_layernorm" if stem == "norm_mlp" and not post_norms else _LAYER_NAMES[stem][1]
    return f"{prefix}layers.{layer}.{inner}{suffix}"


def _split(name: str) -> tuple[str, str, str]:
    """A canonical name as (layer or "", stem, ".weight" or ".bias")."""
    layer, stem = name.split(".")[1:] if name.startswith("layers.") else ("", name)
    bias = stem.endswith("_bias")
    return layer, stem.removesuffix("_bias"), ".bias" if bias else ".weight"


def _check_tensors(program: Program, sources: Mapping[str, WeightSource], tensor_names: Collection[str], unused: list[str]) -> None:
    """Every weight is in the file, with the shape the program gives it; and the file has no tensor that nothing would read."""
    present = tensor_names if isinstance(tensor_names, Mapping) else set(tensor_names)
    missing = [s.file_name for s in sources.values() if s.file_name not in present]
    if missing:
        raise FamilyError(f"tensor {missing[0]} is missing from the file (of a {program.family} model; {len(missing)} missing in all)")
    wanted = {s.file_name for s in sources.values()}
    extra = [name for name in unused if name not in wanted]
    if extra:
        layers = len(program.kv_layers)
        raise FamilyError(f"tensor {extra[0]} has no place in a {program.family} model of {layers} layers ({len(extra)} such in all)")
    if isinstance(tensor_names, Mapping):
        for name, source in sources.items():
            shape = tuple(tensor_names[source.file_name])
            if shape != program.weights[name]:
                raise FamilyError(f"tensor {source.file_name} has shape {list(shape)}; its model needs {list(program.weights[name])}")


def _float32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])
