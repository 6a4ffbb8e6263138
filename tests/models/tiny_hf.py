"""Writes tiny random models as Hugging Face folders: config.json, safetensors (one file or shards with an index), tokenizer.json.

The safetensors bytes are written here, so that a test can store bf16 and can make a header lie; test_safetensors.py checks them against
the safetensors package.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.models import tiny

NUMPY_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U8": "u1", "BOOL": "?"}
StoredTensor = tuple[str, tuple[int, ...], bytes]  # safetensors dtype, shape, data


def stored(values: np.ndarray, dtype: str) -> StoredTensor:
    """``values`` converted to a safetensors dtype; BF16 by dropping the low half of float32."""
    if dtype == "BF16":
        data = (np.ascontiguousarray(values, np.float32).view(np.uint32) >> np.uint32(16)).astype("<u2").tobytes()
    else:
        data = values.astype(NUMPY_DTYPES[dtype]).tobytes()
    return dtype, tuple(values.shape), data


def header_of(tensors: Mapping[str, StoredTensor]) -> dict[str, Any]:
    """The true header of a file with these tensors in this order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + len(data)]}
        end += len(data)
    return header


def file_bytes(header: Mapping[str, Any] | bytes, data: bytes, header_bytes: int | None = None) -> bytes:
    """A file with this header, true or not; ``header_bytes`` is the length it states."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return (len(text) if header_bytes is None else header_bytes).to_bytes(8, "little") + text + data


def safetensors_bytes(tensors: Mapping[str, StoredTensor]) -> bytes:
    return file_bytes(header_of(tensors), b"".join(data for _, _, data in tensors.values()))


def llama_weights(
    layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, tied: bool, seed: int
) -> dict[str, np.ndarray]:
    """Hugging Face's names of a llama -> float32 values."""
    rng = np.random.default_rng(seed)
    head_dim = hidden // heads
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for i in range(layers):
        layer = {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (heads * head_dim, hidden),
            "self_attn.k_proj": (kv_heads * head_dim, hidden),
            "self_attn.v_proj": (kv_heads * head_dim, hidden),
            "self_attn.o_proj": (hidden, heads * head_dim),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (ffn, hidden),
            "mlp.up_proj": (ffn, hidden),
            "mlp.down_proj": (hidden, ffn),
        }
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not tied:
        shapes["lm_head.weight"] = (vocab, hidden)
    return {name: tiny.random_tensor(name, shape, rng) for name, shape in shapes.items()}


def write_tokenizer(path: Path, vocab: int) -> None:
    """tokenizer.json with the vocabulary of ``tiny.bpe_vocabulary``."""
    tokens, _, merges = tiny.bpe_vocabulary(vocab)
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tiny.CONTROL_TOKENS])
    tokenizer.save(str(path), pretty=False)


def write_tiny_hf(
    folder: Path,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    ffn: int = 128,
    vocab: int = 512,
    dtype: str = "F32",
    seed: int = 0,
    tied: bool = False,
    shards: int = 1,
    *,
    dtypes: Mapping[str, str] | None = None,
    config_overrides: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray | None] | None = None,
) -> Path:
    """Write a llama into ``folder`` (made when absent) and return it.

    ``dtypes`` overrides ``dtype`` by tensor name; ``tensors`` replaces, adds or (None) drops; with ``shards`` above 1 the tensors are dealt
    out in turn to model-0000i-of-0000N.safetensors, with an index. A config value of None drops the key.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights: dict[str, np.ndarray | None] = {**llama_weights(layers, hidden, heads, kv_heads, ffn, vocab, tied, seed), **(tensors or {})}
    files = {name: stored(w, (dtypes or {}).get(name, dtype)) for name, w in weights.items() if w is not None}
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden, "intermediate_size": ffn,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocab,
        "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": tied,
        "bos_token_id": tiny.BOS_ID, "eos_token_id": tiny.IM_END_ID, "torch_dtype": "float32", **(config_overrides or {}),
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    tokenizer_config = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "chat_template": tiny.CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    write_tokenizer(folder / "tokenizer.json", vocab)
    if shards == 1:
        (folder / "model.safetensors").write_bytes(safetensors_bytes(files))
    else:
        write_shards(folder, files, shards)
    return folder


def write_shards(folder: Path, files: Mapping[str, StoredTensor], shards: int) -> None:
    weight_map: dict[str, str] = {}
    for no in range(shards):
        name = f"model-{no + 1:05d}-of-{shards:05d}.safetensors"
        mine = dict(list(files.items())[no::shards])
        (folder / name).write_bytes(safetensors_bytes(mine))
        weight_map |= dict.fromkeys(mine, name)
    total = sum(len(data) for _, _, data in files.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
