"""Families: what a file states becomes ops; what is missing, out of range or not implemented is refused by name."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octavo.models.families import FamilyError, WeightSource, from_gguf, from_hf, known_gguf_architectures, known_hf_model_types
from octavo.models.gguf import GGUFFile
from octavo.models.program import Attention, Embed, GatedAct, Linear, Norm, Program, Rope, RopeScaling, Softcap
from octavo.models.safetensors import SafetensorsModel

PARITY = Path(__file__).resolve().parent.parent / "fixtures" / "parity"
FAMILIES = ("llama", "llama3", "mistral", "qwen2", "qwen3", "gemma2", "gemma3")
Shapes = dict[str, tuple[int, ...]]


def gguf_of(family: str) -> tuple[dict[str, Any], Shapes, Any]:
    file = GGUFFile.open(PARITY / family / "model.gguf")
    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    return dict(file.metadata), shapes, lambda name: file.tensors[name].float32().tolist()


def hf_of(family: str) -> tuple[dict[str, Any], Shapes]:
    config = json.loads((PARITY / family / "config.json").read_text())
    return config, {name: tensor.shape for name, tensor in SafetensorsModel.open(PARITY / family).tensors.items()}


def gguf_program(family: str, changes: Mapping[str, Any] | None = None) -> Program:
    """The fixture's program with metadata changed (None drops a key)."""
    metadata, shapes, read = gguf_of(family)
    return from_gguf(changed(metadata, changes), shapes, read)[0]


def hf_program(family: str, changes: Mapping[str, Any] | None = None) -> Program:
    config, shapes = hf_of(family)
    return from_hf(changed(config, changes), shapes)[0]


class Drop:
    """Marks a key that is to be taken away; None stays a value."""


def changed(values: dict[str, Any], changes: Mapping[str, Any] | None) -> dict[str, Any]:
    return {key: value for key, value in (values | dict(changes or {})).items() if value is not Drop}


def ops_of(program: Program, kind: type) -> list[Any]:
    return [op for op in program.ops if isinstance(op, kind)]


def windows(program: Program) -> list[int | None]:
    assert [op.window for op in ops_of(program, Attention)] == [kv.window for kv in program.kv_layers]
    return [kv.window for kv in program.kv_layers]


@pytest.mark.parametrize("family", FAMILIES)
def test_both_forms_give_the_same_program(family: str) -> None:
    """But for the rotary pairs of Llama, which GGUF stores interleaved, its table of factors, and 32-bit constants."""

    def normal(op: Any) -> Any:
        if isinstance(op, Rope):
            kind = "llama3" if op.scaling.kind == "factors" else op.scaling.kind
            return replace(op, interleaved=False, scaling=RopeScaling(kind, op.scaling.factor if kind == "linear" else 1.0))
        if isinstance(op, Norm):
            return replace(op, eps=round(op.eps, 9))
        return replace(op, scale=round(op.scale, 6)) if isinstance(op, Attention) else op

    a, b = gguf_program(family), hf_program(family)
    assert [normal(op) for op in a.ops] == [normal(op) for op in b.ops]
    assert (a.weights, a.kv_layers, a.hidden, a.vocab_size, a.context) == (b.weights, b.kv_layers, b.hidden, b.vocab_size, b.context)


@pytest.mark.parametrize("family", FAMILIES)
def test_sources_name_each_weight_once(family: str) -> None:
    metadata, shapes, read = gguf_of(family)
    program, sources = from_gguf(metadata, shapes, read)
    assert list(sources) == list(program.weights)
    assert {s.file_name for s in sources.values()} == set(shapes) - {"rope_freqs.weight"}
    assert all(s.add == 0.0 for s in sources.values())  # GGUF norms have Gemma's 1 in them
    config, hf_shapes = hf_of(family)
    program, sources = from_hf(config, hf_shapes)
    assert {s.file_name for s in sources.values()} == set(hf_shapes)
    assert {n for n, s in sources.items() if s.add} == {n for n in program.weights if "norm" in n and family.startswith("gemma")}


def test_names_of_norms_before_the_mlp() -> None:
    """The same name in the file is the norm before the MLP in Llama and the one after attention in Gemma."""
    for family, canonical in (("llama", "layers.1.norm_mlp"), ("gemma2", "layers.1.norm_post_attn")):
        sources = from_hf(*hf_of(family))[1]
        assert sources[canonical].file_name == "model.layers.1.post_attention_layernorm.weight"
    assert from_hf(*hf_of("gemma3"))[1]["layers.0.norm_q"] == WeightSource("model.layers.0.self_attn.q_norm.weight", 1.0)


def test_llama() -> None:
    program = gguf_program("llama")
    assert windows(program) == [None, None] and not ops_of(program, Softcap)
    assert all(op.interleaved for op in ops_of(program, Rope))
    assert not any(op.interleaved for op in ops_of(hf_program("llama"), Rope))
    assert {op.scale for op in ops_of(program, Attention)} == {1 / math.sqrt(8)}
    assert {op.activation for op in ops_of(program, GatedAct)} == {"silu"}
    assert program.weights["output"] == (272, 32) and program.ops[-1].weight == "output"
    assert ops_of(program, Embed)[0].scale == 1.0


def test_llama3_rope_scaling() -> None:
    scaling = ops_of(hf_program("llama3"), Rope)[0].scaling
    assert scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 32)
    factors = ops_of(gguf_program("llama3"), Rope)[0].scaling.factors
    assert factors[0] == 1.0 and 1.0 < factors[1] < 8.0 and factors[2:] == (8.0, 8.0)


def test_transformers_4_spells_rope_scaling_otherwise() -> None:
    config, _ = hf_of("llama3")
    rope = dict(config["rope_parameters"])
    old = {"rope_parameters": Drop, "rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    assert hf_program("llama3", old).ops == hf_program("llama3").ops
    rope["type"] = rope.pop("rope_type")
    assert hf_program("llama3", old | {"rope_scaling": rope}).ops == hf_program("llama3").ops


def test_mistral_window_is_on_every_layer_or_none() -> None:
    assert windows(gguf_program("mistral")) == windows(hf_program("mistral")) == [8, 8]
    assert windows(hf_program("mistral", {"sliding_window": None})) == [None, None]
    assert windows(gguf_program("mistral", {"llama.attention.sliding_window": 0})) == [None, None]


def test_qwen2_has_biases_and_its_window_is_off_unless_asked_for() -> None:
    program = hf_program("qwen2", {"sliding_window": 8})
    assert windows(program) == [None, None]
    assert [op.bias for op in ops_of(program, Linear)[:4]] == ["layers.0.q_bias", "layers.0.k_bias", "layers.0.v_bias", None]
    on = {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}
    assert windows(hf_program("qwen2", on | {"layer_types": Drop})) == [None, 8]
    assert windows(hf_program("qwen3", on | {"layer_types": ["sliding_attention", "full_attention"]})) == [8, None]


def test_qwen3_normalises_heads_before_rope() -> None:
    program = gguf_program("qwen3")
    q_norm = next(op for op in ops_of(program, Norm) if op.weight == "layers.0.norm_q")
    assert (q_norm.dim, q_norm.groups) == (16, 4)
    assert next(op for op in ops_of(program, Rope) if op.x == q_norm.out).heads == 4


def test_gemma2() -> None:
    program = hf_program("gemma2")
    assert windows(program) == [8, None]
    assert {op.softcap for op in ops_of(program, Attention)} == {50.0}
    assert program.ops[-1] == Softcap("logits", "logits_raw", 272, 30.0)
    assert {op.scale for op in ops_of(program, Attention)} == {1 / math.sqrt(24)}
    assert ops_of(program, Embed)[0].scale == pytest.approx(math.sqrt(32), rel=1e-7)
    assert {op.activation for op in ops_of(program, GatedAct)} == {"gelu_tanh"}
    uncapped = hf_program("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None})
    assert not ops_of(uncapped, Softcap) and ops_of(uncapped, Attention)[0].softcap is None


def test_gemma2_files_of_before_the_caps_were_stated_have_llama_cpp_s_defaults() -> None:
    left_out = ("attn_logit_softcapping", "final_logit_softcapping", "attention.sliding_window", "attention.scale")
    program = gguf_program("gemma2", {f"gemma2.{key}": Drop for key in left_out})
    attention = ops_of(program, Attention)[0]
    assert (attention.softcap, attention.window, attention.scale) == (50.0, 4096, 0.25)
    assert ops_of(program, Softcap)[0].cap == 30.0


def test_gemma3_local_and_global_layers_have_their_own_rope() -> None:
    for program in (gguf_program("gemma3"), hf_program("gemma3")):
        assert windows(program) == [8, None, 8]
        local, other = RopeScaling(), RopeScaling("linear", 8.0)
        assert [(op.base, op.scaling) for op in ops_of(program, Rope)[::2]] == [(1e4, local), (1e6, other), (1e4, local)]


def test_gemma3_spellings_of_transformers_4() -> None:
    old = {
        "rope_parameters": Drop, "layer_types": Drop, "_sliding_window_pattern": Drop, "sliding_window_pattern": 2,
        "rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }  # fmt: skip
    assert hf_program("gemma3", old).ops == hf_program("gemma3").ops


def test_gemma3_six_layer_pattern_by_default() -> None:
    metadata, shapes, _ = gguf_of("gemma3")
    layer = {name: shape for name, shape in shapes.items() if name.startswith("blk.0.")}
    for i in range(13):
        shapes |= {name.replace("blk.0.", f"blk.{i}."): shape for name, shape in layer.items()}
    more = changed(metadata, {"gemma3.block_count": 13, "gemma3.attention.sliding_window_pattern": Drop})
    assert windows(from_gguf(more, shapes)[0]) == ([8] * 5 + [None]) * 2 + [8]
    flags = more | {"gemma3.attention.sliding_window_pattern": tuple(i == 3 for i in range(13))}
    assert windows(from_gguf(flags, shapes)[0]) == [8 if i == 3 else None for i in range(13)]


@pytest.mark.parametrize(("family", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_27b_models_scale_by_hidden_over_heads(family: str, layers: int) -> None:
    metadata, shapes, _ = gguf_of(family)
    layer = {name: shape for name, shape in shapes.items() if name.startswith("blk.0.")}
    for i in range(layers):
        shapes |= {name.replace("blk.0.", f"blk.{i}."): shape for name, shape in layer.items()}
    program = from_gguf(changed(metadata, {f"{family}.block_count": layers, f"{family}.attention.scale": Drop}), shapes)[0]
    assert {op.scale for op in ops_of(program, Attention)} == {1 / math.sqrt(32 / 4)}


@pytest.mark.parametrize(
    ("prefix", "head"), [("model.language_model.", ""), ("language_model.model.", "language_model."), ("", "")]
)
def test_the_text_model_of_a_multimodal_gemma3(prefix: str, head: str) -> None:
    config, shapes = hf_of("gemma3")
    names = {name.replace("model.", prefix, 1): shape for name, shape in shapes.items()}
    vision = {"model.vision_tower.x.weight": (3, 3), "multi_modal_projector.y": (1,)} if prefix else {}
    # As in the published files, fields that have their class default are left out of text_config, and the head is tied.
    text = changed(config, {key: Drop for key in ("tie_word_embeddings", "hidden_activation", "attention_bias", "rms_norm_eps")})
    outer = {"model_type": "gemma3", "text_config": text, "vision_config": {}}
    program, sources = from_hf(outer, names | vision)
    assert program == hf_program("gemma3")
    assert sources["embed"].file_name == prefix + "embed_tokens.weight"
    untied = outer | {"tie_word_embeddings": False, "text_config": text}
    with pytest.raises(FamilyError, match=f"tensor {head}lm_head.weight is missing"):
        from_hf(untied, names | vision)


def test_partial_rotary_of_gguf() -> None:
    assert {op.rotary_dim for op in ops_of(gguf_program("llama", {"llama.rope.dimension_count": 4}), Rope)} == {4}


def test_biases_of_attention() -> None:
    config, shapes = hf_of("llama")
    for i in range(2):
        for name, rows in (("q", 32), ("k", 16), ("v", 16), ("o", 32)):
            shapes[f"model.layers.{i}.self_attn.{name}_proj.bias"] = (rows,)
    program, sources = from_hf(config | {"attention_bias": True}, shapes)
    assert [op.bias for op in ops_of(program, Linear)[:4]] == [f"layers.0.{n}_bias" for n in "qkvo"]
    assert sources["layers.1.o_bias"].file_name == "model.layers.1.self_attn.o_proj.bias"
    with pytest.raises(FamilyError, match=r"tensor model.layers.0.self_attn.q_proj.bias has no place"):
        from_hf(config, shapes)


def test_tied_output() -> None:
    metadata, shapes, _ = gguf_of("llama")
    del shapes["output.weight"]
    program, sources = from_gguf(metadata, shapes)
    assert program.ops[-1].weight == "embed" and "output" not in sources
    config, hf_shapes = hf_of("llama")
    assert from_hf(config | {"tie_word_embeddings": True}, hf_shapes)[0].ops[-1].weight == "embed"  # the file's copy is not read
    del hf_shapes["lm_head.weight"]
    assert from_hf(config | {"tie_word_embeddings": True}, hf_shapes)[0].ops[-1].weight == "embed"
    for tied in ({}, {"tie_word_embeddings": False}):
        with pytest.raises(FamilyError, match=r"tensor lm_head.weight is missing"):
            from_hf(changed(config, {"tie_word_embeddings": Drop}) | tied, hf_shapes)


def test_vocabulary_without_shapes() -> None:
    metadata, shapes, _ = gguf_of("qwen3")
    names = list(shapes)
    assert from_gguf(metadata, names)[0].vocab_size == 272
    assert from_gguf(changed(metadata, {"qwen3.vocab_size": Drop}), names)[0].vocab_size == 272  # the number of tokens
    with pytest.raises(FamilyError, match=r"qwen3.vocab_size is missing"):
        from_gguf(changed(metadata, {"qwen3.vocab_size": Drop, "tokenizer.ggml.tokens": Drop}), names)


def test_unknown_architectures_are_named_beside_the_known() -> None:
    with pytest.raises(FamilyError, match=f"general.architecture: 'mamba' is not allowed; known: {', '.join(known_gguf_architectures())}"):
        from_gguf({"general.architecture": "mamba"}, [])
    with pytest.raises(FamilyError, match=f"model_type: 'mamba' is not allowed; known: {', '.join(known_hf_model_types())}"):
        from_hf({"model_type": "mamba"}, [])
    with pytest.raises(FamilyError, match=r"general.architecture is missing"):
        from_gguf({}, [])
    for value in (None, 3, ["llama"]):
        with pytest.raises(FamilyError, match="model_type"):
            from_hf({"model_type": value}, [])
        with pytest.raises(FamilyError, match="general.architecture"):
            from_gguf({"general.architecture": value}, [])
