"""Makes tests/fixtures/parity: tiny random models of every family, in safetensors and GGUF, with the logits transformers computes.

Run it in an environment of its own, with torch first and exactly this version:

    python3 -m venv /tmp/oracle
    /tmp/oracle/bin/pip install torch==2.13.0
    /tmp/oracle/bin/pip install transformers gguf numpy safetensors tokenizers
    /tmp/oracle/bin/python scripts/make_parity_fixtures.py

The tests need neither torch nor transformers. Weights are drawn so that what tells families apart is felt: windows are shorter
than the prompts, caps bite, the attention scale is not 1 / sqrt(head_dim), rotary scaling acts on some frequencies and not on others.
The GGUF file is written from the same weights as llama.cpp's converter would: its tensor names, q and k of Llama and Mistral permuted
for interleaved rotary pairs, Gemma's norms with their 1 added, Llama 3's rotary scaling as the tensor rope_freqs.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from tests.models import tiny  # noqa: E402

OUT = ROOT / "tests" / "fixtures" / "parity"
SEED = 20260101
VOCAB, HIDDEN, FF, LAYERS, HEADS, KV_HEADS = 272, 32, 48, 2, 4, 2
WINDOW = 8  # shorter than the prompts
PROMPT_LENGTHS = (44, 41)
LIMIT_BYTES = 3_000_000

COMMON = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": FF, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS, "max_position_embeddings": 256, "bos_token_id": tiny.BOS_ID, "eos_token_id": tiny.IM_END_ID,
    "pad_token_id": None,
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One model. ``config``: beside COMMON; ``gains``: factor on the spread of matrices whose name ends so; ``metadata``: GGUF keys
    that say what ``config`` says.
    """

    name: str
    model: str
    architecture: str
    config: Mapping[str, Any] = field(default_factory=dict)
    gains: Mapping[str, float] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def gemma(self) -> bool:
        return self.architecture.startswith("gemma")


CASES = (
    Case("llama", "Llama", "llama", {"tie_word_embeddings": False}),
    Case("llama3", "Llama", "llama", {"tie_word_embeddings": False, "rope_parameters": LLAMA3_ROPE}, {}, {"rope.freq_base": 500.0}),
    Case(
        "mistral", "Mistral", "llama", {"tie_word_embeddings": False, "sliding_window": WINDOW, "head_dim": HIDDEN // HEADS},
        {}, {"attention.sliding_window": WINDOW},
    ),
    Case("qwen2", "Qwen2", "qwen2", {"tie_word_embeddings": True, "rms_norm_eps": 1e-5}, {}, {"attention.layer_norm_rms_epsilon": 1e-5}),
    Case("qwen3", "Qwen3", "qwen3", {"tie_word_embeddings": True, "head_dim": 16}),
    Case(
        "gemma2", "Gemma2", "gemma2", {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": WINDOW},
        {"q_proj.weight": 5.0, "k_proj.weight": 5.0, "model.norm.weight": 4.0},
        {
            "attention.sliding_window": WINDOW, "attention.scale": 24**-0.5, "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    Case(
        "gemma3", "Gemma3ForCausalLM:Gemma3TextConfig", "gemma3",
        {
            "head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": WINDOW, "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        {},
        {
            "attention.sliding_window": WINDOW, "attention.sliding_window_pattern": 2, "attention.scale": 24**-0.5, "rope.freq_base": 1e6,
            "rope.scaling.type": "linear", "rope.scaling.factor": 8.0,
        },
    ),
)  # fmt: skip


def build_model(case: Case, rng: np.random.Generator) -> transformers.PreTrainedModel:
    """The model in float32 with weights drawn from ``rng``, so that torch's generators do not matter."""
    model_class, _, config_class = case.model.partition(":")
    model_class = model_class if config_class else model_class + "ForCausalLM"
    config = getattr(transformers, config_class or f"{case.model}Config")(**COMMON | case.config)
    config._attn_implementation = "eager"
    model = getattr(transformers, model_class)(config).to(torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            gain = next((g for suffix, g in case.gains.items() if name.endswith(suffix)), 1.0)
            parameter.copy_(torch.from_numpy(draw(name, tuple(parameter.shape), case.gemma, gain, rng)))
    return model


def draw(name: str, shape: tuple[int, ...], gemma: bool, gain: float, rng: np.random.Generator) -> np.ndarray:
    """Norm factors near ``gain``, biases near 0, embeddings of spread 1 (small for Gemma, which scales them up), matrices by fan-in."""
    values = rng.standard_normal(shape, dtype=np.float32)
    if "norm" in name:
        return np.float32(0.1) * values + np.float32(gain - 1.0 if gemma else gain)
    if len(shape) == 1:
        return np.float32(0.5) * values
    if "embed_tokens" in name:
        return values
    return values * np.float32(gain / math.sqrt(shape[1]))


def make_case(case: Case, prompts: list[np.ndarray]) -> None:
    folder = OUT / case.name
    folder.mkdir(parents=True)
    model = build_model(case, np.random.default_rng(SEED))
    model.save_pretrained(folder)
    write_tokenizer(folder / "tokenizer.json")
    # Drop what only records how the folder was made.
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
    (folder / "generation_config.json").unlink(missing_ok=True)
    write_gguf(folder / "model.gguf", case, model)
    arrays = {}
    for i, ids in enumerate(prompts):
        with torch.no_grad():
            logits = model(torch.from_numpy(ids[None])).logits[0]
        arrays |= {f"ids_{i}": ids.astype(np.int32), f"logits_{i}": logits.to(torch.float32).numpy()}
        print(f"{case.name}: largest logit {np.abs(arrays[f'logits_{i}']).max():.2f}, spread {arrays[f'logits_{i}'].std():.2f}")
    np.savez(folder / "logits.npz", **arrays)


def write_tokenizer(path: Path) -> None:
    tokens, _, merges = tiny.bpe_vocabulary(VOCAB)
    pairs = [tuple(merge.split(" ")) for merge in merges]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tiny.CONTROL_TOKENS])
    tokenizer.save(str(path), pretty=False)


def write_gguf(path: Path, case: Case, model: transformers.PreTrainedModel) -> None:
    writer = gguf.GGUFWriter(str(path), case.architecture)
    head_dim = model.config.head_dim if getattr(model.config, "head_dim", None) else HIDDEN // HEADS
    layers = model.config.num_hidden_layers
    context = model.config.max_position_embeddings
    metadata = tiny.model_metadata(case.architecture, layers, HIDDEN, HEADS, KV_HEADS, FF, VOCAB, head_dim, context)
    metadata[f"{case.architecture}.attention.layer_norm_rms_epsilon"] = model.config.rms_norm_eps
    metadata |= {f"{case.architecture}.{key}": value for key, value in case.metadata.items()}
    for key, value in metadata.items():
        tiny._add_metadata(writer, key, value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[case.architecture.upper()], layers)
    for name, parameter in model.named_parameters():  # tied weights come once
        values = parameter.detach().numpy()
        if case.gemma and "norm" in name:
            values = values + np.float32(1.0)
        if case.architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            values = interleave_pairs(values, HEADS if "q_proj" in name else KV_HEADS)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), np.ascontiguousarray(values))
    if case.config.get("rope_parameters") is LLAMA3_ROPE:
        writer.add_tensor("rope_freqs.weight", llama3_factors(head_dim))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleave_pairs(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head reordered from (i, i + d/2) pairs to (2i, 2i + 1) pairs."""
    rows = weight.reshape(heads, 2, -1, weight.shape[1])
    return rows.swapaxes(1, 2).reshape(weight.shape)


def llama3_factors(head_dim: int) -> np.ndarray:
    """Divisors of the inverse frequencies, float32 [head_dim / 2], as llama.cpp's converter computes them."""
    r, context = LLAMA3_ROPE, LLAMA3_ROPE["original_max_position_embeddings"]
    low, high = r["low_freq_factor"], r["high_freq_factor"]
    factors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * r["rope_theta"] ** (i / head_dim)
        if wavelength < context / high:
            factors.append(1.0)
        elif wavelength > context / low:
            factors.append(r["factor"])
        else:
            smooth = (context / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / r["factor"] + smooth))
    return np.array(factors, np.float32)


def main() -> None:
    torch.set_num_threads(1)
    if OUT.exists():
        shutil.rmtree(OUT)
    rng = np.random.default_rng(SEED)
    prompts = [rng.integers(0, VOCAB, length) for length in PROMPT_LENGTHS]
    for case in CASES:
        make_case(case, prompts)
    size = sum(f.stat().st_size for f in OUT.rglob("*") if f.is_file())
    print(f"{OUT}: {size} bytes (torch {torch.__version__}, transformers {transformers.__version__})")
    if size > LIMIT_BYTES:
        raise SystemExit(f"the fixtures take {size} bytes; the limit is {LIMIT_BYTES}")


if __name__ == "__main__":
    main()
