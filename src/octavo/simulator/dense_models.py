"""Transformers by their published shapes: what they compute, read and keep, without a file of weights.

For simulations of models that papers measured and nobody here runs. Counts what a family's program would count, from a few numbers; plain
data, no machine.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.costs.program_work import AttentionWork, ProgramWork


@dataclass(frozen=True, slots=True)
class DenseModel:
    """A decoder of equal layers. ``is_gated``: the feed-forward part has a gate matrix beside the one that widens. ``ties_output``: the
    output matrix is the table of embeddings. Norms and biases, far below a percent, are not counted."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    is_gated: bool = False
    ties_output: bool = True

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def _layer_params(self) -> int:
        kv = self.kv_heads * self.head_dim
        return self.hidden * (2 * self.hidden + 2 * kv) + (3 if self.is_gated else 2) * self.hidden * self.ffn

    @property
    def num_params(self) -> int:
        """Numbers in matrices and embeddings."""
        return self.layers * self._layer_params + (1 if self.ties_output else 2) * self.hidden * self.vocab

    def kv_bytes_per_token(self, bytes_per_value: int = 2) -> int:
        """2 (keys and values) * layers * KV heads * head size * bytes."""
        return 2 * self.layers * self.kv_heads * self.head_dim * bytes_per_value

    def work(self, bytes_per_value: int = 2) -> ProgramWork:
        """Per row and step, with weights, KV and values between ops of ``bytes_per_value``."""
        linear, output = self.layers * self._layer_params, self.hidden * self.vocab
        kv = self.kv_heads * self.head_dim
        values = 4 * self.hidden + 2 * kv + (2 if self.is_gated else 1) * self.ffn  # outputs of q, o, down and attention; of k, v; of up
        return ProgramWork(
            linear_ops=2.0 * linear,
            linear_bytes=float(bytes_per_value * linear),
            output_ops=2.0 * output,
            output_bytes=float(bytes_per_value * output),
            activation_bytes=2.0 * bytes_per_value * self.layers * values,
            logit_bytes=4.0 * self.vocab,
            attention=(AttentionWork(4.0 * self.hidden * self.layers, float(self.kv_bytes_per_token(bytes_per_value))),),
        )


OPT_13B = DenseModel("OPT-13B", 40, 5120, 40, 40, 20480, 50272)
OPT_66B = DenseModel("OPT-66B", 64, 9216, 72, 72, 36864, 50272)
OPT_175B = DenseModel("OPT-175B", 96, 12288, 96, 96, 49152, 50272)
GPT_175B = DenseModel("GPT-3 175B", 96, 12288, 96, 96, 49152, 50257)
LLAMA_13B = DenseModel("LLaMA-13B", 40, 5120, 40, 40, 13824, 32000, is_gated=True, ties_output=False)
LLAMA2_7B = DenseModel("Llama-2-7B", 32, 4096, 32, 32, 11008, 32000, is_gated=True, ties_output=False)
LLAMA2_70B = DenseModel("Llama-2-70B", 80, 8192, 64, 8, 28672, 32000, is_gated=True, ties_output=False)
YI_34B = DenseModel("Yi-34B", 60, 7168, 56, 8, 20480, 64000, is_gated=True, ties_output=False)
SMOLLM2_135M = DenseModel("SmolLM2-135M", 30, 576, 9, 3, 1536, 49152, is_gated=True)
