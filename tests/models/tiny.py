"""Writes tiny random GGUF models for tests, with the ``gguf`` package as the writer: real layouts, real tokenizer data, small sizes.

Every tensor is drawn from ``numpy.random.default_rng(seed)``: matrices with standard deviation 1/sqrt(in_features), norm weights near 1.
The same seed and sizes give the same file. The vocabulary is a working byte-level BPE: ids 0..2 are the control tokens of
``CONTROL_TOKENS``, then the 256 bytes, then merges learnt from ``CORPUS``, then unused fillers up to ``vocab``.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np

CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BOS_ID, IM_START_ID, IM_END_ID = 0, 1, 2
MIN_VOCAB = len(CONTROL_TOKENS) + 256
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = (
    "the quick brown fox jumps over the lazy dog and runs into the forest where nobody knows what is the capital of France "
    "Paris is a city in the north of the country and the answer to this question is known to everyone who reads the story once "
    "upon a time there was a small model that could write one word after another without any thought about tomorrow "
    "system user assistant you are a helpful assistant hello world please tell me about yourself thank you very much "
    "numbers are written with digits and other things are written with letters so that machines can count them all night long"
)
_ARCH_METADATA: dict[str, dict[str, Any]] = {
    "gemma2": {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "attention.sliding_window": 32},
    "gemma3": {"attention.sliding_window": 32},
}
_GEMMA = ("gemma2", "gemma3")
_T = gguf.GGUFValueType
_SCALARS = {bool: _T.BOOL, int: _T.UINT32, float: _T.FLOAT32, str: _T.STRING}
# K-quants have no quantizer in the package: random blocks instead. dtype -> (f16 scale offset, f16 min offset, spread of d = 1, min / d).
_K_LAYOUT = {
    "Q2_K": (80, 82, 12.0, 1.5),
    "Q3_K": (108, None, 43.0, 0.0),
    "Q4_K": (0, 2, 250.0, 7.5),
    "Q5_K": (0, 2, 500.0, 15.5),
    "Q6_K": (208, None, 1370.0, 0.0),
}


def byte_alphabet() -> list[str]:
    """GPT-2's printable character for each byte value."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    extra = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(extra)) for b in range(256)]


def byte_vocabulary(pieces: Sequence[str] = ()) -> tuple[list[str], list[str]]:
    """(tokens, merges): the control tokens, the 256 bytes, and a token for each of ``pieces`` and for what its merges pass through."""
    alphabet = byte_alphabet()
    tokens, merges = [*CONTROL_TOKENS, *alphabet], list[str]()
    for piece in ("\x00\x01", *pieces):  # a file without merges is refused, so there is always one
        spelled = [alphabet[b] for b in piece.encode()]
        for size in range(2, len(spelled) + 1):
            if "".join(spelled[:size]) not in tokens:
                merges.append(f"{''.join(spelled[: size - 1])} {spelled[size - 1]}")
                tokens.append("".join(spelled[:size]))
    return tokens, merges


def bpe_vocabulary(vocab: int) -> tuple[list[str], list[int], list[str]]:
    """Tokens, GGUF token types and merges ("a b", in order) of a byte-level BPE with ``vocab`` entries."""
    if vocab < MIN_VOCAB:
        raise ValueError(f"vocab: {vocab} is too small; at least {MIN_VOCAB}")
    alphabet = byte_alphabet()
    words = [[alphabet[b] for b in word.encode()] for w in CORPUS.split() for word in (" " + w, w)]
    tokens = [*CONTROL_TOKENS, *alphabet]
    merges: list[str] = []
    while len(tokens) < vocab:
        pairs = Counter(pair for word in words for pair in itertools.pairwise(word))
        if not pairs:
            break
        left, right = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(f"{left} {right}")
        if left + right not in tokens:
            tokens.append(left + right)
        words = [_merged(word, left, right) for word in words]
    types = [gguf.TokenType.CONTROL] * len(CONTROL_TOKENS) + [gguf.TokenType.NORMAL] * (len(tokens) - len(CONTROL_TOKENS))
    unused = vocab - len(tokens)
    return tokens + [f"<|unused_{i}|>" for i in range(unused)], [int(t) for t in types] + [int(gguf.TokenType.UNUSED)] * unused, merges


def _merged(word: list[str], left: str, right: str) -> list[str]:
    out: list[str] = []
    i = 0
    while i < len(word):
        pair = word[i] == left and i + 1 < len(word) and word[i + 1] == right
        out.append(left + right if pair else word[i])
        i += 2 if pair else 1
    return out


def tensor_shapes(
    arch: str, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, tied: bool, head_dim: int
) -> dict[str, tuple[int, ...]]:
    """GGUF tensor name -> row-major shape, in file order."""
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocab, hidden), "output_norm.weight": (hidden,)}
    if not (tied or arch in _GEMMA):
        shapes["output.weight"] = (vocab, hidden)
    for i in range(layers):
        layer: dict[str, tuple[int, ...]] = {"attn_norm.weight": (hidden,)}
        for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            layer[f"attn_{name}.weight"] = (count * head_dim, hidden)
            if arch == "qwen2":
                layer[f"attn_{name}.bias"] = (count * head_dim,)
            if arch in ("qwen3", "gemma3") and name != "v":
                layer[f"attn_{name}_norm.weight"] = (head_dim,)
        layer["attn_output.weight"] = (hidden, heads * head_dim)
        if arch in _GEMMA:
            layer |= {"post_attention_norm.weight": (hidden,), "post_ffw_norm.weight": (hidden,)}
        layer["ffn_norm.weight"] = (hidden,)
        layer |= {"ffn_gate.weight": (ffn, hidden), "ffn_up.weight": (ffn, hidden), "ffn_down.weight": (hidden, ffn)}
        shapes |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def random_tensor(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Float32 values for one tensor: norms near 1, biases near 0, matrices with spread 1/sqrt(in_features)."""
    values = rng.standard_normal(shape, dtype=np.float32)
    if len(shape) == 2:
        return values / np.float32(np.sqrt(shape[-1]))
    return values * np.float32(0.1) + np.float32("norm" in name)


def encode_tensor(values: np.ndarray, tensor_type: str, rng: np.random.Generator) -> np.ndarray:
    """``values`` in GGML type ``tensor_type``: a float array for F32 and F16, else uint8 [..., bytes per row].

    K-quants are random blocks of about the same spread, not an approximation of ``values``.
    """
    qtype = gguf.GGMLQuantizationType[tensor_type]
    if tensor_type not in _K_LAYOUT:
        return np.ascontiguousarray(gguf.quants.quantize(values, qtype))
    block_values, block_bytes = gguf.GGML_QUANT_SIZES[qtype]
    if values.shape[-1] % block_values:
        raise ValueError(f"{tensor_type} needs rows of a multiple of {block_values} values, not {values.shape[-1]}")
    blocks = rng.integers(0, 256, (values.size // block_values, block_bytes), dtype=np.uint8)
    scale_at, min_at, spread, min_ratio = _K_LAYOUT[tensor_type]
    d = (rng.uniform(0.5, 1.5, (len(blocks), 1)) * values.std() / spread).astype(np.float16)
    blocks[:, scale_at : scale_at + 2] = d.view(np.uint8)
    if min_at is not None:
        blocks[:, min_at : min_at + 2] = (d * np.float16(min_ratio)).view(np.uint8)
    return blocks.reshape(*values.shape[:-1], -1)


def model_metadata(
    arch: str, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, head_dim: int, context: int
) -> dict[str, Any]:
    """All metadata of the file but ``general.architecture``, which the writer adds itself."""
    tokens, token_types, merges = bpe_vocabulary(vocab)
    sizes: dict[str, Any] = {
        "context_length": context,
        "embedding_length": hidden,
        "block_count": layers,
        "feed_forward_length": ffn,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0 if arch != "gemma3" else 1000000.0,
        "rope.dimension_count": head_dim,
        "vocab_size": vocab,
    }
    return {
        "general.name": f"tiny-{arch}",
        **{f"{arch}.{key}": value for key, value in (sizes | _ARCH_METADATA.get(arch, {})).items()},
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": token_types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": BOS_ID,
        "tokenizer.ggml.eos_token_id": IM_END_ID,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def write_tiny_gguf(
    path: str | Path,
    arch: str = "llama",
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    ffn: int = 128,
    vocab: int = 512,
    tensor_type: str = "F32",
    seed: int = 0,
    tied: bool = False,
    metadata_overrides: Mapping[str, Any] | None = None,
    *,
    head_dim: int | None = None,
    context: int = 256,
    tensor_types: Mapping[str, str] | None = None,
    tensors: Mapping[str, np.ndarray | None] | None = None,
) -> Path:
    """Write a model of architecture llama, qwen2, qwen3, gemma2 or gemma3 and return its path.

    ``tensor_type`` (GGML's name) holds for matrices, vectors stay F32; ``tensor_types`` overrides it by tensor name.
    ``tensors`` replaces (array), adds (new name) or drops (None) tensors. ``metadata_overrides`` does the same with metadata values;
    a value may also be a pair (value, gguf.GGUFValueType). Gemma models are always tied.
    """
    rng = np.random.default_rng(seed)
    head_dim = head_dim or hidden // heads
    replaced = dict(tensors or {})
    shapes = tensor_shapes(arch, layers, hidden, heads, kv_heads, ffn, vocab, tied, head_dim)
    drawn: dict[str, np.ndarray | None] = {name: random_tensor(name, shape, rng) for name, shape in shapes.items()}
    metadata = model_metadata(arch, layers, hidden, heads, kv_heads, ffn, vocab, head_dim, context) | dict(metadata_overrides or {})
    writer = gguf.GGUFWriter(str(path), arch)
    for key, value in metadata.items():
        _add_metadata(writer, key, value)
    for name, values in (drawn | replaced).items():
        if values is None:
            continue
        kind = (tensor_types or {}).get(name, tensor_type if values.ndim == 2 else "F32")
        if values.dtype == np.float32:
            writer.add_tensor(name, encode_tensor(values, kind, rng), raw_dtype=gguf.GGMLQuantizationType[kind])
        else:  # integers and float64 as they are
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(path)


def _add_metadata(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, tuple):
        writer.add_key_value(key, *value)
    elif isinstance(value, list):
        if value:  # the writer cannot type an empty array, and neither do real files carry one
            writer.add_array(key, value)
    else:
        writer.add_key_value(key, value, _SCALARS[type(value)])
