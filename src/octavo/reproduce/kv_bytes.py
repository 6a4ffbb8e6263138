"""NVIDIA's introduction to LLM inference (2023): the KV cache of Llama-2-7B, by the formula and by its general form with KV heads."""

from __future__ import annotations

from octavo.reproduce.figure import ARITHMETIC, Figure, Line, Plot, Row
from octavo.reproduce.setup import Setup
from octavo.simulator.dense_models import LLAMA2_7B, LLAMA2_70B, SMOLLM2_135M, DenseModel

NUMBER = 1
NAME = "kv-bytes"
CONTEXT = 4096


def run(setup: Setup) -> Figure:
    per_token = LLAMA2_7B.kv_bytes_per_token()
    whole = CONTEXT * per_token
    weights = 2 * LLAMA2_7B.num_params
    rows = [
        Row(f"{LLAMA2_7B.name}, KV of {CONTEXT} tokens", "2.0 GiB", f"{whole / 2**30:.1f} GiB", f"{whole / 2**30:.1f}" == "2.0"),
        Row(f"{LLAMA2_7B.name}, KV of one token", "512 KiB", _kib(per_token), _kib(per_token) == "512 KiB"),
        Row(f"{LLAMA2_7B.name}, weights", "about 14 GB", f"{weights / 1e9:.1f} GB", abs(weights / 14e9 - 1) < 0.05),
    ]
    for model in (LLAMA2_70B, SMOLLM2_135M):
        shape = f"{model.layers} layers, {model.kv_heads} KV heads of {model.head_dim}"
        rows.append(Row(f"{model.name}, KV of one token ({shape})", "", f"{model.kv_bytes_per_token():,} B"))
        by_heads = model.kv_bytes_per_token() * model.heads // model.kv_heads
        rows.append(Row(f"{model.name}, by the published formula, which counts all {model.heads} heads", "", f"{by_heads:,} B"))
    models = (LLAMA2_7B, LLAMA2_70B, SMOLLM2_135M)
    plot = Plot("KV cache of one sequence", "GiB", lines=tuple(map(_line, models)), x_label="tokens", log_x=True, log_y=True)
    how = "2 (keys and values) * layers * KV heads * head size * 2 bytes; no model is loaded."
    notes = ("The published formula counts query heads, which is right only where every head has keys and values of its own.",)
    return Figure(NUMBER, "KV cache of Llama-2-7B", ARITHMETIC, how, rows, (plot,), notes)


def _kib(num_bytes: int) -> str:
    return f"{num_bytes / 1024:g} KiB"


def _line(model: DenseModel) -> Line:
    return Line(model.name, tuple((2.0**power, 2.0**power * model.kv_bytes_per_token() / 2**30) for power in range(7, 18)))
