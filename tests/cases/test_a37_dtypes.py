"""What is in the file is what is computed with, or an error that names the tensor (A37).

16-bit weights are widened exactly, norms, softmax and logits are float32. There is no dtype option: ``compute`` fast keeps weights as the
file has them and stores keys and values in bf16 (``kv_cache_dtype`` auto), f32 widens all.
"""

from __future__ import annotations

from array import array
from pathlib import Path

import numpy as np
import pytest

from octavo.backends.cpu.backend import CpuBackend
from octavo.config import EngineConfig
from octavo.core.step import SequenceSlice, SlotOpen, StepPlan
from octavo.models.loaded import LoadedModel
from octavo.models.loading import load_model
from octavo.models.model_file import ModelFileError
from tests.backends.cpu_runs import cpu_logits, make_cpu, plain_logits, rms, rounded
from tests.backends.reference_runs import open_gguf_weights
from tests.cases.harness import GREEDY
from tests.models.tiny import write_tiny_gguf
from tests.models.tiny_hf import llama_weights, write_tiny_hf

SIZES = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 128, "vocab": 272}
IDS = np.random.default_rng(2).integers(0, 272, 33).tolist()
TABLE = (2, 0, 1)
NORM = "model.layers.1.input_layernorm.weight"


def weights_for(dtype: str) -> dict[str, np.ndarray]:
    """Random weights that this dtype holds exactly."""
    values = llama_weights(**SIZES, tied=False, seed=5)
    if dtype == "F32":
        return values
    bits = {name: rounded(v, dtype.lower()) for name, v in values.items()}
    return {name: v.astype(np.float32) for name, v in bits.items()}


def logits_of(model: LoadedModel, compute: str, kv_dtype: str = "auto") -> np.ndarray:
    return cpu_logits(make_cpu(model, compute, kv_dtype), IDS, TABLE)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_sixteen_bit_files_are_their_float32_twins(tmp_path: Path, dtype: str) -> None:
    tensors = weights_for(dtype)
    narrow = load_model(write_tiny_hf(tmp_path / "narrow", **SIZES, dtype=dtype, tensors=tensors))
    wide = load_model(write_tiny_hf(tmp_path / "wide", **SIZES, dtype="F32", tensors=tensors))
    assert {t.dtype for t in narrow.weights.values()} == {dtype.lower()} and {t.dtype for t in wide.weights.values()} == {"f32"}
    for compute, kv_dtype in (("fast", "f16"), ("fast", "bf16"), ("fast", "f32"), ("f32", "f32")):
        assert logits_of(narrow, compute, kv_dtype).tobytes() == logits_of(wide, compute, kv_dtype).tobytes()


def test_mixed_files(tmp_path: Path) -> None:
    """Norms F32 or F64 or whole numbers, the rest BF16."""
    tensors = weights_for("BF16") | {NORM: np.tile(np.float32([1, 2, 3, 1]), 16)}
    wide = load_model(write_tiny_hf(tmp_path / "wide", **SIZES, tensors=tensors))
    want = {compute: logits_of(wide, compute).tobytes() for compute in ("fast", "f32")}
    norms = {name: "F32" for name in tensors if "norm" in name}
    odd = [{NORM: "F64"}, {NORM: "I64"}, {"model.embed_tokens.weight": "F64"}, {"lm_head.weight": "F64", NORM: "I64"}]
    for i, change in enumerate(odd):
        mixed = load_model(write_tiny_hf(tmp_path / f"mixed{i}", **SIZES, dtype="BF16", dtypes=norms | change, tensors=tensors))
        assert {t.dtype for t in mixed.weights.values()} == {"f32", "bf16", *(c.lower() for c in change.values())}
        assert {compute: logits_of(mixed, compute).tobytes() for compute in want} == want


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_large_and_small_weights_stay_what_they_are(tmp_path: Path, dtype: str) -> None:
    """1e5 is past float16 and 1e-8 below it. The two meet in one product, so the MLP's output is of ordinary size."""
    tensors = weights_for("BF16")
    for i in range(2):
        tensors[f"model.layers.{i}.mlp.up_proj.weight"] *= np.float32(2**17)
        tensors[f"model.layers.{i}.mlp.down_proj.weight"] *= np.float32(2**-17)
    tensors["model.layers.0.self_attn.o_proj.weight"] *= np.float32(2**-27)
    scaled = load_model(write_tiny_hf(tmp_path / "scaled", **SIZES, dtype=dtype, tensors=tensors))
    exact = plain_logits(scaled, IDS)
    assert np.abs(logits_of(scaled, "f32") - exact).max() < 1e-4
    assert logits_of(scaled, "fast", "f32").tobytes() == logits_of(scaled, "f32").tobytes()
    assert rms(logits_of(scaled, "fast", "f16") - exact) < 1e-3 * rms(exact)  # f16 keys and values alone


def test_activations_past_float16_are_computed_and_keys_past_it_are_an_error(tmp_path: Path) -> None:
    """Keys near 1e6 do not fit an f16 cache: never a made-up answer. The other KV types hold them."""
    tensors = weights_for("BF16")
    tensors["model.layers.0.self_attn.k_proj.weight"] *= np.float32(2**20)
    tensors["model.layers.0.self_attn.q_proj.weight"] *= np.float32(2**-20)
    model = load_model(write_tiny_hf(tmp_path / "m", **SIZES, dtype="BF16", tensors=tensors))
    exact = plain_logits(model, IDS)
    for kv_dtype, limit in (("f32", 1e-5), ("bf16", 1e-2), ("int8", 2e-2)):
        assert rms(logits_of(model, "fast", kv_dtype) - exact) < limit * rms(exact)
    slot = SlotOpen(0, GREEDY, 1, IDS, [])
    for kv_dtype, fits in (("f16", False), ("bf16", True), ("int8", True)):
        backend = make_cpu(model, "fast", kv_dtype)
        (result,) = backend.execute(StepPlan(0, [SequenceSlice(0, 0, IDS, array("i", TABLE), 1, [0])], slot_opens=[slot])).slices
        assert (result.error is None) == fits and len(result.token_ids) == fits


def test_a_value_that_float32_does_not_hold_is_refused_by_name(tmp_path: Path) -> None:
    tensors = {name: values.astype(np.float64) for name, values in llama_weights(**SIZES, tied=False, seed=5).items()}
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = 1e39
    folder = write_tiny_hf(tmp_path / "m", **SIZES, dtype="F64", tensors=tensors)
    with pytest.raises(ModelFileError, match=r"model\.layers\.1\.mlp\.up_proj\.weight.*1e\+39.*does not fit float32"):
        CpuBackend(load_model(folder), EngineConfig())


@pytest.mark.usefixtures("isa")
def test_packed_and_sixteen_bit_tensors_side_by_side(tmp_path: Path) -> None:
    kinds = {"blk.0.attn_q.weight": "BF16", "blk.0.ffn_down.weight": "F16", "blk.1.attn_output.weight": "F32", "output.weight": "BF16"}
    model = open_gguf_weights(write_tiny_gguf(tmp_path / "m.gguf", vocab=272, tensor_type="Q8_0", tensor_types=kinds))
    assert {t.dtype for t in model.weights.values()} == {"q8_0", "bf16", "f16", "f32"}
    exact = plain_logits(model, IDS)
    assert np.abs(logits_of(model, "f32") - exact).max() < 1e-4
    assert rms(logits_of(model, "fast") - exact) < 0.03 * rms(exact)


def test_auto_is_what_it_is_said_to_be(tmp_path: Path) -> None:
    model = open_gguf_weights(write_tiny_gguf(tmp_path / "m.gguf", vocab=272, layers=1))
    for compute, kv_dtype in (("fast", "bf16"), ("f32", "f32")):
        auto, named = make_cpu(model, compute), make_cpu(model, compute, kv_dtype)
        assert auto.kv_capacity(1 << 20) == named.kv_capacity(1 << 20) and auto.kv_capacity(1 << 20).dtype == kv_dtype
        assert auto.fingerprint() == named.fingerprint()
        assert cpu_logits(auto, IDS, TABLE).tobytes() == cpu_logits(named, IDS, TABLE).tobytes()
