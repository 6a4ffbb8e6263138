"""A path becomes a LoadedModel, or is refused by the name of what is missing or wrong before any weight is used."""

from __future__ import annotations

import json
import shutil
from array import array
from pathlib import Path

import numpy as np
import pytest

from octavo.backends.reference.backend import ReferenceBackend
from octavo.config import CacheConfig, EngineConfig
from octavo.core.step import SequenceSlice, StepPlan
from octavo.models.loaded import LoadedModel
from octavo.models.loading import load_model
from octavo.models.model_file import ModelFileError
from octavo.models.weights import widen
from tests.models.tiny import BOS_ID, IM_END_ID, IM_START_ID, random_tensor, write_tiny_gguf
from tests.models.tiny_hf import write_tiny_hf

SMALL = {"layers": 2, "hidden": 32, "heads": 2, "kv_heads": 1, "ffn": 64, "vocab": 300}
CHAT = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
IDS = [IM_START_ID, 70, 80, 90, 100]


def logits(model: LoadedModel) -> np.ndarray:
    """Float32 [len(IDS), vocab_size] by the reference backend."""
    rows: list[np.ndarray] = []
    backend = ReferenceBackend(model, EngineConfig(cache=CacheConfig(block_size=16)))
    backend.allocate_kv(1)
    backend.logits_hook, backend.all_logits = lambda seq_id, position, row: rows.append(row.copy()), True
    backend.execute(StepPlan(0, [SequenceSlice(0, 0, IDS, array("i", [0]))]))
    return np.stack(rows)


def refused(path: Path, message: str) -> None:
    with pytest.raises(ModelFileError, match=message) as caught:
        load_model(path)
    assert str(path) in str(caught.value) or path.name in str(caught.value)


def test_gguf_becomes_a_model(tmp_path):
    path = write_tiny_gguf(tmp_path / "tiny-model.gguf", tensor_type="Q8_0", **SMALL)
    model = load_model(path)
    assert (model.name, model.path) == ("tiny-model", str(path))
    assert load_model(path, "other").name == "other"
    assert set(model.weights) == set(model.program.weights)
    assert {name: weight.shape for name, weight in model.weights.items()} == model.program.weights
    assert model.weights["layers.1.up"].name == "blk.1.ffn_up.weight" and model.weights["layers.1.up"].dtype == "q8_0"
    assert model.num_params == sum(np.prod(shape) for shape in model.program.weights.values())
    assert model.weight_bytes == sum(len(weight.data) for weight in model.weights.values())
    assert model.bos_token_id == BOS_ID and IM_END_ID in model.eos_token_ids
    assert model.chat_template is not None
    assert model.chat_template.render([{"role": "user", "content": "hello"}]) == CHAT
    ids = model.tokenizer.encode("the quick brown fox")
    assert len(ids) < 19 and model.tokenizer.decode(ids) == "the quick brown fox"
    assert np.isfinite(logits(model)).all()


def test_folder_becomes_a_model(tmp_path):
    folder = write_tiny_hf(tmp_path / "tiny-hf", dtype="BF16", shards=3, **SMALL)
    model = load_model(folder)
    assert (model.name, model.path) == ("tiny-hf", str(folder))
    assert set(model.weights) == set(model.program.weights)
    assert model.weights["layers.0.norm_mlp"].name == "model.layers.0.post_attention_layernorm.weight"
    assert model.bos_token_id == BOS_ID and IM_END_ID in model.eos_token_ids
    assert model.chat_template is not None
    assert model.chat_template.render([{"role": "user", "content": "hello"}]) == CHAT
    assert model.tokenizer.decode(model.tokenizer.encode("the quick brown fox")) == "the quick brown fox"
    assert np.isfinite(logits(model)).all()


def test_generation_config_adds_to_what_ends_a_text(tmp_path):
    folder = write_tiny_hf(tmp_path / "m", **SMALL)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert {7, 9} <= load_model(folder).eos_token_ids


def test_fingerprint_tells_models_apart_and_is_the_same_again(tmp_path):
    write_tiny_gguf(tmp_path / "a.gguf", seed=1, **SMALL)
    write_tiny_gguf(tmp_path / "b.gguf", seed=2, **SMALL)  # the same header, other weights
    write_tiny_gguf(tmp_path / "c.gguf", seed=1, **SMALL, metadata_overrides={"llama.rope.freq_base": 5000.0})
    (tmp_path / "elsewhere").mkdir()
    shutil.copy(tmp_path / "a.gguf", tmp_path / "elsewhere" / "other.gguf")
    prints = [load_model(tmp_path / name).fingerprint for name in ("a.gguf", "b.gguf", "c.gguf", "elsewhere/other.gguf")]
    assert prints[0] == prints[3] and len(set(prints)) == 3


# GGUF: merges missing, tied output, a missing tensor, vocabulary only.
def test_tied_gguf_equals_its_untied_twin(tmp_path):
    rng = np.random.default_rng(3)
    embedding = random_tensor("token_embd.weight", (SMALL["vocab"], SMALL["hidden"]), rng)
    tied = write_tiny_gguf(tmp_path / "tied.gguf", tied=True, tensors={"token_embd.weight": embedding}, **SMALL)
    twin = {name: widen(weight) for name, weight in weights_by_file_name(load_model(tied)).items()}
    untied = write_tiny_gguf(tmp_path / "untied.gguf", tensors={**twin, "output.weight": embedding}, **SMALL)
    assert "output" not in load_model(tied).weights and "output" in load_model(untied).weights
    np.testing.assert_array_equal(logits(load_model(tied)), logits(load_model(untied)))


def weights_by_file_name(model: LoadedModel):
    return {weight.name: weight for weight in model.weights.values()}


def test_file_without_a_chat_template_has_none(tmp_path):
    path = write_tiny_gguf(tmp_path / "m.gguf", metadata_overrides={"tokenizer.chat_template": None}, **SMALL)
    assert load_model(path).chat_template is None


@pytest.mark.parametrize("name", ["blk.1.ffn_up.weight", "blk.0.attn_norm.weight", "output_norm.weight", "token_embd.weight"])
def test_missing_tensor_is_named(tmp_path, name):
    refused(write_tiny_gguf(tmp_path / "m.gguf", tensors={name: None}, **SMALL), name.replace(".", r"\."))


def test_tensor_of_another_shape_is_named(tmp_path):
    wrong = {"blk.1.ffn_up.weight": np.zeros((64, 64), np.float32)}
    refused(write_tiny_gguf(tmp_path / "m.gguf", tensors=wrong, **SMALL), r"blk\.1\.ffn_up\.weight.*\[64, 64\].*\[64, 32\]")


def test_missing_merges_are_named(tmp_path):
    refused(write_tiny_gguf(tmp_path / "m.gguf", metadata_overrides={"tokenizer.ggml.merges": None}, **SMALL), r"tokenizer\.ggml\.merges")


def test_vocabulary_only_file_is_refused(tmp_path):
    path = write_tiny_gguf(tmp_path / "m.gguf", tensors=dict.fromkeys(all_tensor_names(tmp_path)), **SMALL)
    refused(path, "holds no tensors; a vocabulary-only file cannot be served")


def all_tensor_names(folder: Path) -> list[str]:
    return list(weights_by_file_name(load_model(write_tiny_gguf(folder / "all.gguf", **SMALL))))


def test_tokenizer_larger_than_the_embedding_is_refused(tmp_path):
    rows = {"token_embd.weight": np.zeros((280, 32), np.float32), "output.weight": np.zeros((280, 32), np.float32)}
    path = write_tiny_gguf(tmp_path / "m.gguf", tensors=rows, metadata_overrides={"llama.vocab_size": None}, **SMALL)
    refused(path, "the tokenizer has 300 tokens, but the embedding has only 280 rows")


def test_embedding_larger_than_the_tokenizer_is_padded(tmp_path):
    rows = {"token_embd.weight": np.zeros((320, 32), np.float32), "output.weight": np.zeros((320, 32), np.float32)}
    path = write_tiny_gguf(tmp_path / "m.gguf", tensors=rows, metadata_overrides={"llama.vocab_size": None}, **SMALL)
    model = load_model(path)
    assert model.program.vocab_size == model.tokenizer.vocab_size == 320
    assert model.tokenizer.decode([319]) == ""


@pytest.mark.parametrize("key", ["tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id"])
def test_special_token_outside_the_vocabulary_is_refused(tmp_path, key):
    path = write_tiny_gguf(tmp_path / "m.gguf", metadata_overrides={key: 300}, **SMALL)
    refused(path, rf"{key}: 300 is not allowed")


def test_unknown_architecture_is_named_with_the_known_ones(tmp_path):
    path = write_tiny_gguf(tmp_path / "m.gguf", "mamba", **SMALL)
    refused(path, r"general\.architecture: 'mamba' .*llama")


@pytest.mark.parametrize("name", ["none.gguf", "no/such/folder", "x" * 5000])
def test_path_that_is_not_there_is_refused(tmp_path, name):
    with pytest.raises(ModelFileError, match="is not there"):
        load_model(tmp_path / name)


def test_other_files_are_refused(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"PK\x03\x04" + bytes(100))
    refused(tmp_path / "model.bin", "a GGUF file starts with b'GGUF'")
    folder = write_tiny_hf(tmp_path / "hf", **SMALL)
    refused(folder / "model.safetensors", "give the folder that holds it")


# Folders.
def test_folder_without_config_is_refused_with_a_hint(tmp_path):
    refused(tmp_path, "holds no config.json$")
    write_tiny_gguf(tmp_path / "m.gguf", **SMALL)
    refused(tmp_path, r"holds no config.json; give the path of a GGUF file in it, such as m\.gguf")


def test_folder_may_name_tokens_without_a_row(tmp_path, caplog):
    """As published Gemma 3 text models do; but not such a token to end texts with."""
    few = {"model.embed_tokens.weight": np.zeros((299, 32), np.float32), "lm_head.weight": np.zeros((299, 32), np.float32)}
    folder = write_tiny_hf(tmp_path / "m", tensors=few, config_overrides={"vocab_size": 299}, **SMALL)
    model = load_model(folder)
    assert model.program.vocab_size == 299 and model.tokenizer.vocab_size == 300
    assert "1 tokens of the tokenizer have no row in the embedding" in caplog.text
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 299}))
    refused(folder, "token 299 begins or ends texts, but the embedding has only 299 rows")


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "model.safetensors"])
def test_folder_without_a_file_is_refused_by_its_name(tmp_path, name):
    folder = write_tiny_hf(tmp_path / "m", **SMALL)
    (folder / name).unlink()
    refused(folder, name.replace(".", r"\."))


@pytest.mark.parametrize("text", ["", "[]", "{", '{"model_type": "llama", "model_type": "llama"}', "[" * 100_000])
def test_bad_config_is_refused(tmp_path, text):
    folder = write_tiny_hf(tmp_path / "m", **SMALL)
    (folder / "config.json").write_text(text)
    refused(folder, "config.json")


def test_tied_folder_shares_the_embedding(tmp_path):
    tied = load_model(write_tiny_hf(tmp_path / "tied", tied=True, **SMALL))
    embedding = widen(tied.weights["embed"])
    untied = load_model(write_tiny_hf(tmp_path / "untied", tensors={"lm_head.weight": embedding}, **SMALL))
    assert "output" not in tied.weights and "output" in untied.weights
    np.testing.assert_array_equal(logits(tied), logits(untied))


def test_untied_folder_without_lm_head_is_refused(tmp_path):
    refused(write_tiny_hf(tmp_path / "m", tensors={"lm_head.weight": None}, **SMALL), r"lm_head\.weight")


def test_missing_shard_is_refused(tmp_path):
    folder = write_tiny_hf(tmp_path / "m", shards=2, **SMALL)
    (folder / "model-00002-of-00002.safetensors").unlink()
    refused(folder, r"model-00002-of-00002\.safetensors, which is not there")


def test_folder_tensor_of_another_shape_is_named(tmp_path):
    wrong = {"model.layers.1.mlp.up_proj.weight": np.zeros((64, 16), np.float32)}
    refused(write_tiny_hf(tmp_path / "m", tensors=wrong, **SMALL), r"model\.layers\.1\.mlp\.up_proj\.weight.*\[64, 16\].*\[64, 32\]")


# What is in the file, and what is computed in.
def test_the_same_weights_in_every_type_give_the_logits_of_their_values(tmp_path):
    """Weights that bf16 holds exactly: every wider type must give the very same logits, mixed types too."""
    values = {}
    for name, weight in weights_by_file_name(load_model(write_tiny_hf(tmp_path / "drawn", dtype="BF16", **SMALL))).items():
        values[name] = widen(weight)
        values[name][np.abs(values[name]) < 2.0**-14] = 0.0  # f16 holds the others exactly
    norms = {name: "F32" for name in values if "norm" in name}
    variants = {"f32": ("F32", {}), "bf16": ("BF16", {}), "f16": ("F16", {}), "mixed": ("BF16", norms)}
    variants["f64"] = ("BF16", {"model.layers.0.mlp.up_proj.weight": "F64"})
    results = {}
    for label, (dtype, dtypes) in variants.items():
        folder = write_tiny_hf(tmp_path / label, dtype=dtype, dtypes=dtypes, tensors=values, **SMALL)
        results[label] = logits(load_model(folder))
    for label, result in results.items():
        np.testing.assert_array_equal(result, results["f32"], err_msg=label)


def test_integer_weights_are_their_values(tmp_path):
    name = "model.layers.1.input_layernorm.weight"
    ones = {name: np.ones(32, np.float32)}
    plain = load_model(write_tiny_hf(tmp_path / "a", tensors=ones, **SMALL))
    integer = load_model(write_tiny_hf(tmp_path / "b", tensors=ones, dtypes={name: "I64"}, **SMALL))
    assert integer.weights["layers.1.norm_attn"].dtype == "i64"
    np.testing.assert_array_equal(logits(plain), logits(integer))


def test_q8_0_and_bf16_side_by_side(tmp_path):
    types = {"blk.0.ffn_up.weight": "BF16", "output.weight": "F16"}
    model = load_model(write_tiny_gguf(tmp_path / "m.gguf", tensor_type="Q8_0", tensor_types=types, **SMALL))
    assert {weight.dtype for weight in model.weights.values()} == {"q8_0", "bf16", "f16", "f32"}
    assert np.isfinite(logits(model)).all()


@pytest.mark.parametrize("value,dtype", [(1e5, "bf16"), (1e-8, "bf16"), (1e5, "f32")])
def test_weights_beyond_f16_are_kept(tmp_path, value, dtype):
    """Where a cast to f16 on the way would give infinity or zero."""
    name = "model.layers.0.self_attn.q_proj.weight"
    large = {name: np.full((32, 32), value, np.float32)}
    model = load_model(write_tiny_hf(tmp_path / "m", dtype=dtype.upper(), tensors=large, **SMALL))
    widened = widen(model.weights["layers.0.q"])
    np.testing.assert_allclose(widened, value, rtol=2.0**-7)
    assert np.isfinite(logits(model)).all()


@pytest.mark.parametrize("dtype,value,message", [("F64", 1e39, r"f64 value 1e\+39"), ("I64", 2**24 + 1, "i64 value 16777217")])
def test_values_that_do_not_fit_are_refused_at_load_by_name(tmp_path, dtype, value, message):
    name = "model.layers.1.mlp.down_proj.weight"
    wide = {name: np.full((32, 64), value, np.float64)}
    folder = write_tiny_hf(tmp_path / "m", tensors=wide, dtypes={name: dtype}, **SMALL)
    with pytest.raises(ModelFileError, match=rf"{name}.*{message}"):
        load_model(folder)


def test_type_that_cannot_be_read_is_refused_at_load(tmp_path):
    folder = write_tiny_hf(tmp_path / "m", **SMALL)
    content = (folder / "model.safetensors").read_bytes().replace(b'"dtype": "F32"', b'"dtype": "F8_"', 1)
    (folder / "model.safetensors").write_bytes(content)
    refused(folder, "'F8_', which cannot be read; known: F64")


# Split models.
def test_split_part_that_is_not_there_is_refused(tmp_path):
    path = tmp_path / "m-00001-of-00003.gguf"
    write_tiny_gguf(path, metadata_overrides={"split.no": 0, "split.count": 3, "split.tensors.count": 60}, **SMALL)
    write_tiny_gguf(tmp_path / "m-00003-of-00003.gguf", metadata_overrides={"split.no": 2, "split.count": 3}, **SMALL)
    refused(path, r"m-00002-of-00003\.gguf is not there")
    whole = path.rename(tmp_path / "m.gguf")
    refused(whole, r"split\.count is 3")
