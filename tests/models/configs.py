"""config.json of published models, as far as it sizes them, and the number of their weights."""

from __future__ import annotations

from typing import Any

LLAMA_2_7B: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
    "intermediate_size": 11008, "vocab_size": 32000, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "torch_dtype": "float16",
}  # fmt: skip
LLAMA_2_70B = LLAMA_2_7B | {
    "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 28672,
}  # fmt: skip
LLAMA_3_8B = LLAMA_2_7B | {
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 8192, "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
}  # fmt: skip
MISTRAL_7B: dict[str, Any] = LLAMA_2_7B | {
    "model_type": "mistral", "num_key_value_heads": 8, "intermediate_size": 14336, "max_position_embeddings": 32768,
    "sliding_window": 4096, "torch_dtype": "bfloat16",
}  # fmt: skip
GEMMA_3_1B: dict[str, Any] = {
    "model_type": "gemma3_text", "hidden_size": 1152, "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1,
    "head_dim": 256, "intermediate_size": 6912, "vocab_size": 262144, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
    "sliding_window": 512, "sliding_window_pattern": 6, "rope_theta": 1000000.0, "torch_dtype": "bfloat16",
}  # fmt: skip
SMOLLM2_135M: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
    "intermediate_size": 1536, "vocab_size": 49152, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}  # fmt: skip
OPT_13B: dict[str, Any] = {
    "model_type": "opt", "hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 40, "ffn_dim": 20480,
    "word_embed_proj_dim": 5120, "vocab_size": 50272, "max_position_embeddings": 2048, "torch_dtype": "float16",
}  # fmt: skip
BLOOM_176B: dict[str, Any] = {
    "model_type": "bloom", "hidden_size": 14336, "n_layer": 70, "n_head": 112, "vocab_size": 250880, "torch_dtype": "bfloat16",
}  # fmt: skip
GPT_2: dict[str, Any] = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}
GPT_NEOX_20B: dict[str, Any] = {
    "model_type": "gpt_neox", "hidden_size": 6144, "num_hidden_layers": 44, "num_attention_heads": 64, "intermediate_size": 24576,
    "vocab_size": 50432, "max_position_embeddings": 2048, "torch_dtype": "float16",
}  # fmt: skip
MIXTRAL_8X7B: dict[str, Any] = {
    "model_type": "mixtral", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "num_local_experts": 8, "vocab_size": 32000, "max_position_embeddings": 32768, "sliding_window": None,
    "torch_dtype": "bfloat16",
}  # fmt: skip

NUM_WEIGHTS = {  # as published with each model
    "llama-2-7b": (LLAMA_2_7B, 6_738_415_616),
    "llama-2-70b": (LLAMA_2_70B, 68_976_648_192),
    "llama-3-8b": (LLAMA_3_8B, 8_030_261_248),
    "mistral-7b": (MISTRAL_7B, 7_241_732_096),
    "gemma-3-1b": (GEMMA_3_1B, 999_885_952),
    "smollm2-135m": (SMOLLM2_135M, 134_515_008),
    "opt-13b": (OPT_13B, 12_853_473_280),
    "bloom-176b": (BLOOM_176B, 176_247_271_424),
    "gpt-2": (GPT_2, 124_439_808),
    "gpt-neox-20b": (GPT_NEOX_20B, 20_554_567_680),
    "mixtral-8x7b": (MIXTRAL_8X7B, 46_702_792_704),
}
