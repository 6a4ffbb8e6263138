"""Descriptions from untrusted files: every missing, wrong or unimplemented value is a FamilyError that names its key."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.models.families import FamilyError, from_gguf, from_hf
from tests.models.test_families import FAMILIES, Drop, changed, gguf_of, gguf_program, hf_of, hf_program

REQUIRED_GGUF = (
    "context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count", "attention.layer_norm_rms_epsilon",
)  # fmt: skip
REQUIRED_HF = (
    "max_position_embeddings", "hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "rms_norm_eps", "vocab_size",
)  # fmt: skip
BAD_INTEGERS = (0, -1, 1.5, "4", True, None, [4], 1 << 40, float("nan"))
BAD_FLOATS = (0.0, -1e-5, float("nan"), float("inf"), "1e-5", True, None, [1.0], 10**400)


@pytest.mark.parametrize("key", REQUIRED_GGUF)
def test_a_missing_key_of_gguf_is_named(key: str) -> None:
    with pytest.raises(FamilyError, match=f"llama.{key} is missing"):
        gguf_program("llama", {f"llama.{key}": Drop})


@pytest.mark.parametrize("key", REQUIRED_HF)
def test_a_missing_key_of_a_config_is_named(key: str) -> None:
    with pytest.raises(FamilyError, match=f"{key} is missing"):
        hf_program("llama", {key: Drop})


def test_gemma3_states_its_global_rope_base() -> None:
    with pytest.raises(FamilyError, match=r"gemma3.rope.freq_base is missing"):
        gguf_program("gemma3", {"gemma3.rope.freq_base": Drop})


@pytest.mark.parametrize("value", BAD_INTEGERS, ids=repr)
@pytest.mark.parametrize("key", ["embedding_length", "block_count", "feed_forward_length", "attention.head_count", "context_length"])
def test_sizes_out_of_range(key: str, value: Any) -> None:
    with pytest.raises(FamilyError, match=f"llama.{key}: "):
        gguf_program("llama", {f"llama.{key}": value})


@pytest.mark.parametrize("value", BAD_FLOATS, ids=lambda v: str(v)[:8])
@pytest.mark.parametrize("key", ["attention.layer_norm_rms_epsilon", "rope.freq_base"])
def test_numbers_out_of_range(key: str, value: Any) -> None:
    with pytest.raises(FamilyError, match=f"llama.{key}: "):
        gguf_program("llama", {f"llama.{key}": value})


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("attention.head_count_kv", 3, "a divisor of the number of heads"),
        ("attention.key_length", 7, "of one size"),
        ("attention.value_length", 16, "of one size"),
        ("rope.dimension_count", 10, "an integer from 2 to 8"),
        ("rope.dimension_count", 5, "an even number"),
        ("attention.sliding_window", -1, "an integer from 0"),
        ("block_count", 2**31, "2147483648 layers are stated, but the file has only 21 tensors"),
        ("block_count", 4, "4 layers of llama have at least 28 tensors, but the file has 21"),
        ("feed_forward_length", [48, 48], "an integer"),
        ("embedding_length", 64, "has shape"),
    ],
)
def test_sizes_that_do_not_fit_together(key: str, value: Any, message: str) -> None:
    with pytest.raises(FamilyError, match=message):
        gguf_program("llama", {f"llama.{key}": value})


def test_heads_of_an_odd_size() -> None:
    with pytest.raises(FamilyError, match="llama.attention.key_length: 7 is not allowed; an even number"):
        gguf_program("llama", {"llama.attention.key_length": 7, "llama.attention.value_length": 7})


def test_too_many_layers_are_refused_at_once() -> None:
    started = time.thread_time()
    for changes in ({"num_hidden_layers": 2**31}, {"num_hidden_layers": 2**31 - 1, "layer_types": Drop}):
        with pytest.raises(FamilyError, match="layers are stated"):
            hf_program("gemma3", changes)
    assert time.thread_time() - started < 5.0


def test_heads_that_multiply_beyond_any_row() -> None:
    sizes = {f"llama.attention.{key}": 4096 for key in ("head_count", "key_length", "value_length")}
    with pytest.raises(FamilyError, match="4096 heads of 4096 values are more than"):
        gguf_program("llama", sizes)


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("llama", "expert_count", 8),
        ("llama", "rope.scaling.type", "yarn"),
        ("llama", "rope.scaling.type", "longrope"),
        ("llama", "attention.scale", 0.5),
        ("llama", "logit_scale", 0.1),
        ("llama", "attn_logit_softcapping", 50.0),
        ("llama", "attention.causal", False),
        ("qwen3", "attention.sliding_window", 32),
        ("gemma3", "attn_logit_softcapping", 50.0),
        ("gemma3", "a_key_of_next_year", 1),
    ],
)
def test_what_gguf_asks_for_and_nobody_does(family: str, key: str, value: Any) -> None:
    with pytest.raises(FamilyError, match=f"{family}.{key}: {value!r}"):
        gguf_program(family, {f"{family}.{key}": value})


@pytest.mark.parametrize(
    ("key", "value"),
    [("expert_count", 0), ("rope.scaling.type", "none"), ("attention.scale", 0.0), ("attention.causal", True), ("rope.scaling.factor", 0)],
)
def test_what_gguf_switches_off_is_no_matter(key: str, value: Any) -> None:
    assert gguf_program("llama", {f"llama.{key}": value}) == gguf_program("llama")


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("llama", "hidden_act", "relu"),
        ("llama", "hidden_act", "gelu"),
        ("llama", "mlp_bias", True),
        ("llama", "num_local_experts", 8),
        ("llama", "sliding_window", 32),
        ("llama", "quantization_config", {"quant_method": "gptq"}),
        ("llama", "partial_rotary_factor", 0.5),
        ("llama", "rope_interleaved", True),
        ("qwen3", "num_experts", 128),
        ("gemma2", "use_bidirectional_attention", True),
        ("gemma3", "attn_logit_softcapping", 50.0),
        ("gemma2", "layer_types", ["sliding_attention", "chunked_attention"]),
        ("gemma2", "layer_types", ["sliding_attention"]),
        ("gemma2", "tie_word_embeddings", "yes"),
        ("llama", "head_dim", 7),
        ("llama", "num_key_value_heads", 3),
    ],
)
def test_what_a_config_asks_for_and_nobody_does(family: str, key: str, value: Any) -> None:
    with pytest.raises(FamilyError, match=f"{key}: "):
        hf_program(family, {key: value})


def test_harmless_values_of_real_configs() -> None:
    """As SmolLM2's: keys that say what is so anyway."""
    extra = {"rope_interleaved": False, "is_llama_config": True, "pretraining_tp": 1, "transformers.js_config": {}, "num_experts": 0}
    assert hf_program("llama", extra) == hf_program("llama")


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "yarn", "factor": 4.0}, "rope_type: 'yarn' is not allowed; default, linear and llama3"),
        ({"rope_type": "dynamic", "factor": 4.0}, "rope_type: 'dynamic'"),
        ({"type": "mrope", "mrope_section": [1, 2]}, "rope_type: 'mrope'"),
        ({"rope_type": "linear"}, "factor: None"),
        ({"rope_type": "linear", "factor": -2.0}, "factor: -2.0"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0}, "low_freq_factor: 4.0 .* below high"),
        ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor: None"),
        ({"rope_type": "default", "attention_factor": 1.2}, "attention_factor: 1.2"),
        ({"rope_type": "default", "partial_rotary_factor": 0.25}, "partial_rotary_factor: 0.25"),
        ({"rope_type": "default", "rope_theta": 0}, "rope_theta: 0"),
        ("linear", "'linear' is not allowed; an object"),
        ({"full_attention": 3}, "full_attention: 3 is not allowed; an object"),
    ],
)
def test_rope_settings_that_are_not_implemented(rope: Any, message: str) -> None:
    for key in ("rope_parameters", "rope_scaling"):
        with pytest.raises(FamilyError, match=message):
            hf_program("llama", {"rope_parameters": Drop} | {key: rope})


def test_rope_factors_of_gguf() -> None:
    metadata, shapes, read = gguf_of("llama3")
    with pytest.raises(FamilyError, match="no way to read it"):
        from_gguf(metadata, shapes)
    for values, message in (([1.0] * 3, "3 values; half the rotary dimension"), ([1.0, 0.0, 1.0, 1.0], r"rope_freqs.weight: 0.0")):
        with pytest.raises(FamilyError, match=message):
            from_gguf(metadata, shapes, lambda name, values=values: values)
    with pytest.raises(FamilyError, match="together with linear rope scaling"):
        from_gguf(metadata | {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}, shapes, read)


@pytest.mark.parametrize("family", FAMILIES)
def test_any_tensor_taken_away_is_missed_and_any_added_is_noticed(family: str) -> None:
    metadata, shapes, read = gguf_of(family)
    for name in shapes:
        if name in ("output.weight", "rope_freqs.weight") or ".attn_q.bias" in name:
            continue  # tells of a tied output, of no scaling, and (blk.0) of no biases
        fewer = {n: s for n, s in shapes.items() if n != name}
        with pytest.raises(FamilyError, match=f"tensor {name} is missing|vocab"):
            from_gguf(metadata, fewer, read)
    with pytest.raises(FamilyError, match=r"tensor blk.9.attn_q.weight has no place in a \w+ model of \d layers"):
        from_gguf(metadata, shapes | {"blk.9.attn_q.weight": (32, 32)}, read)
    config, hf_shapes = hf_of(family)
    for name in hf_shapes:
        with pytest.raises(FamilyError, match=f"tensor .*{name.removeprefix('model.')} is missing"):
            from_hf(config, {n: s for n, s in hf_shapes.items() if n != name})
    with pytest.raises(FamilyError, match=r"tensor model.layers.0.mlp.experts.0.up_proj.weight has no place"):
        from_hf(config, hf_shapes | {"model.layers.0.mlp.experts.0.up_proj.weight": (3, 3)})


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_any_shape_that_lies_is_noticed(family: str) -> None:
    metadata, shapes, read = gguf_of(family)
    for name, shape in shapes.items():
        if name == "token_embd.weight" and "output.weight" not in shapes:
            continue  # its rows are the vocabulary, and no other tensor of a tied model has as many
        with pytest.raises(FamilyError, match="has shape"):
            from_gguf(metadata, shapes | {name: (shape[0] + 2, *shape[1:])}, read)


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.integers(0, 300), st.floats(), st.text(max_size=4),
    st.lists(st.integers(0, 2), max_size=4).map(tuple), st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
)  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_no_value_does_anything_but_pass_or_be_refused(data: st.DataObject) -> None:
    family = data.draw(st.sampled_from(FAMILIES))
    if data.draw(st.booleans()):
        metadata, shapes, read = gguf_of(family)
        keys = [key for key in metadata if key.startswith(metadata["general.architecture"] + ".")]
        changes = data.draw(st.dictionaries(st.sampled_from(keys), VALUES, min_size=1, max_size=3))
        describe = lambda: from_gguf(changed(metadata, changes), shapes, read)  # noqa: E731
    else:
        config, shapes = hf_of(family)
        changes = data.draw(st.dictionaries(st.sampled_from(sorted(config)), VALUES, min_size=1, max_size=3))
        describe = lambda: from_hf(changed(config, changes), shapes)  # noqa: E731
    try:
        program, sources = describe()
    except FamilyError:
        return
    assert program.check() is program and set(sources) == set(program.weights)
