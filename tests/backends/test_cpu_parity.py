"""The cpu backend computes what the reference does, on every kernel path: exactly where it does not round, and with the roundings it
documents where it does.

What it rounds: keys and values to the KV type (and with some of these queries and weights, less: ``unemulated_share``), and activations
that meet packed weights to 8 bits in groups of 32. ``RoundingReference`` does the same in NumPy, so that anything else (a scale of the
wrong group, a minimum left out) shows at full size. Summation order makes a value a last bit larger or smaller; now and then that tips
a rounding to the other side, by one step of one value, which later rows then see. So two runs are held to agree in their best row, and
to differ, all in all, by a fraction of what rounding itself does.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.models.loaded import LoadedModel
from octavo.models.loading import load_model
from octavo.models.program import Linear
from tests.backends.cpu_runs import cpu_logits, make_cpu, plain_logits, rms, rounding_logits
from tests.backends.reference_runs import open_gguf_weights
from tests.backends.test_parity import FAMILIES, PARITY, expected
from tests.models.tiny import write_tiny_gguf

TOLERANCE = 1e-4
TABLE = (7, 2, 4, 1, 3)  # 80 positions, in no order
IDS = np.random.default_rng(11).integers(3, 259, 40).tolist()
BLOCK_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
SUPER_BLOCK_TYPES = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
TypedModel = Callable[..., LoadedModel]


def assert_differs_by_summation_order(got: np.ndarray, want: np.ndarray) -> None:
    assert np.abs(got - want).max() < TOLERANCE * max(1.0, float(np.abs(want).max()) / 10)


def assert_same_but_for_tipped_roundings(got: np.ndarray, emulated: np.ndarray, exact: np.ndarray, share: float = 0.5) -> None:
    assert np.abs(got - emulated).max(1).min() < TOLERANCE / 4 * max(1.0, float(np.abs(exact).max()))
    assert rms(got - emulated) < rms(emulated - exact) * share


def unemulated_share(isa: str, kv_dtype: str) -> float:
    """What the roundings that ``RoundingReference`` leaves out may do beside those that it has.

    On avx512_bf16 attention over bf16 KV rounds the weights of a row to bf16: as V is rounded, so at most as much again. Row 0 has one
    weight, which is 1, and stays exact. The 16 bits of queries and weights over int8 KV are far below the 8 of the keys and values.
    """
    return 1.0 if (isa, kv_dtype) == ("avx512_bf16", "bf16") else 0.5


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("form", ["safetensors", "gguf"])
def test_logits_equal_those_of_transformers(isa: str, family: str, form: str) -> None:
    backend = make_cpu(load_model(PARITY / family / "model.gguf" if form == "gguf" else PARITY / family), num_blocks=8)
    for prompt in (0, 1):
        ids, logits = expected(family, prompt)
        assert np.abs(cpu_logits(backend, ids, TABLE) - logits).max() < TOLERANCE
    backend.close()


@pytest.mark.parametrize("kv_dtype", ["f16", "bf16", "int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_narrow_kv_rounds_keys_and_values_and_little_else(isa: str, family: str, kv_dtype: str) -> None:
    model = load_model(PARITY / family)
    ids, logits = expected(family, 0)
    got = cpu_logits(make_cpu(model, "f32", kv_dtype, num_blocks=8), ids, TABLE)
    assert_same_but_for_tipped_roundings(got, rounding_logits(model, ids, kv_dtype), logits, unemulated_share(isa, kv_dtype))


@pytest.mark.parametrize("tensor_type", ["F32", "F16", "BF16"])
def test_float_weights_are_computed_with_as_they_are(isa: str, tensor_type: str, tmp_path: Path) -> None:
    """16-bit weights are widened exactly, so fast and exact mode do the same operations."""
    model = open_gguf_weights(write_tiny_gguf(tmp_path / "m.gguf", tensor_type=tensor_type, vocab=263, layers=1))
    exact = cpu_logits(make_cpu(model, "f32"), IDS, TABLE)
    assert_differs_by_summation_order(exact, plain_logits(model, IDS))
    assert cpu_logits(make_cpu(model, "fast", "f32"), IDS, TABLE).tobytes() == exact.tobytes()
    fast = cpu_logits(make_cpu(model, "fast"), IDS, TABLE)
    assert_same_but_for_tipped_roundings(fast, rounding_logits(model, IDS, "bf16"), exact, unemulated_share(isa, "bf16"))


@pytest.fixture(scope="module")
def typed_model(tmp_path_factory: pytest.TempPathFactory) -> TypedModel:
    """One model a type. Q2_K to Q6_K are random valid blocks: the package that writes the files cannot quantise to them."""
    folder = tmp_path_factory.mktemp("types")
    made: dict[str, LoadedModel] = {}

    def make(tensor_type: str) -> LoadedModel:
        if tensor_type not in made:
            path = folder / f"{tensor_type}.gguf"
            made[tensor_type] = open_gguf_weights(write_tiny_gguf(path, hidden=256, ffn=256, vocab=263, layers=1, tensor_type=tensor_type))
        return made[tensor_type]

    return make


@pytest.fixture(scope="module")
def oracle() -> Callable[[LoadedModel], tuple[np.ndarray, np.ndarray]]:
    """(exact logits, logits with the roundings of fast mode on f32 KV), once a model."""
    made: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def compute(model: LoadedModel) -> tuple[np.ndarray, np.ndarray]:
        if id(model) not in made:
            made[id(model)] = plain_logits(model, IDS), rounding_logits(model, IDS, "f32")
        return made[id(model)]

    return compute


@pytest.mark.parametrize("tensor_type", BLOCK_TYPES + SUPER_BLOCK_TYPES)
def test_packed_weights(isa: str, tensor_type: str, typed_model: TypedModel, oracle: Callable) -> None:
    model = typed_model(tensor_type)
    exact, emulated = oracle(model)
    assert_differs_by_summation_order(cpu_logits(make_cpu(model, "f32"), IDS, TABLE), exact)
    fast = cpu_logits(make_cpu(model, "fast", "f32"), IDS, TABLE)
    assert_same_but_for_tipped_roundings(fast, emulated, exact)
    assert 0 < rms(fast - exact) < activation_noise(model) * rms(exact)
    assert cpu_logits(make_cpu(model, "fast", "f32", threads=2), IDS, TABLE, chunk=7).tobytes() == fast.tobytes()


def activation_noise(model: LoadedModel) -> float:
    """What 8-bit activations may do to the logits, as a share of their rms.

    A group of 32 normal values has its greatest at 2.07 standard deviations; rounding to 127 steps of that is uniform noise of
    2.07 / 127 / sqrt(12) = 0.47 % of the group's rms. Each product adds its own, independently; the factor 2 is for values that are
    less even.
    """
    num_products = sum(isinstance(op, Linear) for op in model.program.ops)
    return 2 * 0.0047 * num_products**0.5


def test_noise_bound_is_not_met_by_a_coarser_rounding(typed_model: TypedModel, oracle: Callable) -> None:
    """The bound above would catch activations of 6 bits."""
    model = typed_model("Q8_0")
    exact, emulated = oracle(model)
    assert 4 * rms(emulated - exact) > activation_noise(model) * rms(exact)


SHAPES: dict[str, dict[str, Any]] = {
    "qwen2 biases": {"arch": "qwen2", "hidden": 32, "heads": 2, "kv_heads": 1, "ffn": 48},
    "qwen3 norms": {"arch": "qwen3", "hidden": 32, "heads": 2, "kv_heads": 1, "ffn": 48, "head_dim": 24},
    "gemma2 caps": {"arch": "gemma2", "hidden": 32, "heads": 2, "kv_heads": 1, "ffn": 48, "layers": 3},
    "gemma3 windows": {"arch": "gemma3", "hidden": 32, "heads": 2, "kv_heads": 1, "ffn": 48, "layers": 7},
    "heads of 8, rows that are no multiple of 16": {"hidden": 40, "heads": 5, "kv_heads": 5, "ffn": 72},
    "heads of 2": {"hidden": 6, "heads": 3, "kv_heads": 1, "ffn": 5},
    "heads of 80": {"hidden": 160, "heads": 2, "kv_heads": 1, "ffn": 33},
    "one KV head of twelve": {"hidden": 48, "heads": 12, "kv_heads": 1, "ffn": 31, "head_dim": 16},
    "as many KV heads as heads": {"hidden": 64, "heads": 8, "kv_heads": 8, "ffn": 64},
    "tied": {"hidden": 32, "heads": 2, "kv_heads": 2, "ffn": 32, "tied": True},
    "packed and float side by side": {
        "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 72, "tensor_type": "Q4_1",
        "tensor_types": {
            "blk.0.ffn_down.weight": "F32", "blk.1.ffn_down.weight": "BF16", "blk.0.attn_v.weight": "F16", "output.weight": "Q8_0",
        },
    },
    "packed output alone": {"hidden": 32, "heads": 2, "kv_heads": 1, "ffn": 32, "tensor_types": {"output.weight": "Q5_1"}},
    "float output alone": {
        "hidden": 32, "heads": 2, "kv_heads": 1, "ffn": 32, "tensor_type": "Q8_0", "tensor_types": {"output.weight": "F32"},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_odd_shapes(isa: str, name: str, tmp_path: Path) -> None:
    sizes = {"layers": 2, "vocab": 263} | SHAPES[name]
    model = open_gguf_weights(write_tiny_gguf(tmp_path / "m.gguf", **sizes))
    exact = plain_logits(model, IDS)
    assert_differs_by_summation_order(cpu_logits(make_cpu(model, "f32"), IDS, TABLE), exact)
    fast = cpu_logits(make_cpu(model, "fast"), IDS, TABLE)
    assert_same_but_for_tipped_roundings(fast, rounding_logits(model, IDS, "bf16"), exact, unemulated_share(isa, "bf16"))


def test_an_output_matrix_that_shares_its_rows_with_nothing(isa: str, tmp_path: Path) -> None:
    """The vocabulary is no multiple of 16: what lies past it in the last block of rows is no token."""
    model = open_gguf_weights(write_tiny_gguf(tmp_path / "m.gguf", hidden=32, heads=2, kv_heads=1, ffn=32, vocab=261, layers=1))
    weights = model.weights["output"].float32()
    assert weights.shape == (261, 32)
    logits = cpu_logits(make_cpu(model), IDS, TABLE)
    assert logits.shape == (len(IDS), 261) and np.isfinite(logits).all() and (np.abs(logits).max(0) > 0).all()
