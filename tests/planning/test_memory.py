"""The memory calculator: published models to the byte, what real engines allocate, rooms and their inverses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo import LLM
from octavo.backends.cpu import _native
from octavo.config import CacheConfig, SchedulerConfig
from octavo.costs.kv_bytes import VALUE_BYTES, kv_layout, layer_kv_bytes
from octavo.models.outline import read_outline
from octavo.models.program import KVLayer
from octavo.planning.memory import KVSizing, MemoryNeeds, activation_bytes
from octavo.simulator.engine_spec import EngineSpec
from octavo.simulator.simulation import Simulation
from octavo.workload.requests import WorkloadRequest
from tests.models import configs
from tests.models.tiny import write_tiny_gguf
from tests.simulator.engines import LinearCost


def sizing(config: dict[str, Any], dtype: str, tmp_path: Path, **options: Any) -> KVSizing:
    path = tmp_path / "model.json"
    path.write_text(json.dumps(config))
    return KVSizing.of(read_outline(path).kv_layers, dtype, **options)


@pytest.mark.parametrize(
    ("config", "dtype", "bytes_per_token"),
    [
        (configs.LLAMA_2_7B, "f16", 524_288),
        (configs.LLAMA_2_7B, "f32", 1_048_576),
        (configs.LLAMA_2_7B, "int8", 32 * 32 * 2 * (128 + 4)),  # a scale of 4 bytes for each head's key and value
        (configs.LLAMA_2_70B, "f16", 327_680),
        (configs.LLAMA_3_8B, "bf16", 131_072),
        (configs.MISTRAL_7B, "f16", 131_072),
        (configs.GEMMA_3_1B, "bf16", 26_624),
        (configs.SMOLLM2_135M, "bf16", 23_040),
        (configs.OPT_13B, "f16", 819_200),
        (configs.BLOOM_176B, "f16", 4_014_080),
        (configs.MIXTRAL_8X7B, "bf16", 131_072),
    ],
)
def test_bytes_of_a_token_of_published_models(tmp_path: Path, config: dict[str, Any], dtype: str, bytes_per_token: int) -> None:
    found = sizing(config, dtype, tmp_path)
    assert found.bytes_per_token == bytes_per_token and isinstance(found.bytes_per_token, int)


def test_a_conversation_of_llama_2(tmp_path: Path) -> None:
    kv = sizing(configs.LLAMA_2_7B, "f16", tmp_path)
    assert kv.num_bytes(4096) == 2_147_483_648
    assert kv.num_bytes(4097) == kv.num_bytes(4096) + kv.layout.block_bytes  # whole blocks
    assert kv.num_bytes(1, 3) == 3 * 16 * 524_288


def test_windows_give_back_what_left_them(tmp_path: Path) -> None:
    """Gemma 3 1B: 22 of 26 layers have a window of 512; beyond it a token costs those four layers that see everything."""
    kv, whole = sizing(configs.GEMMA_3_1B, "bf16", tmp_path), sizing(configs.GEMMA_3_1B, "bf16", tmp_path, grouped=False)
    assert (kv.bytes_per_token, kv.bytes_per_late_token) == (26_624, 4 * 1024)
    assert whole.bytes_per_late_token == 26_624
    windows = (512 + 512 - 2) // 16 + 2  # blocks whose window part a sequence holds: a step of 512 tokens, and what its first row sees
    exact, block = 2048 * 16 * 4096 + windows * 16 * 22 * 1024, 16 * 26_624
    assert kv.num_bytes(32768) == -(-exact // block) * block  # a pool is of whole blocks
    assert kv.num_bytes(256) == whole.num_bytes(256) == 256 * 26_624


def test_a_model_that_sees_through_windows_alone(tmp_path: Path) -> None:
    """Mistral: nothing is left of a block that all layers have passed, but its id, of which there are eight for each block."""
    kv = sizing(configs.MISTRAL_7B, "f16", tmp_path)
    assert kv.bytes_per_late_token == 0
    held = (512 + 4096 - 2) // 16 + 2
    assert kv.num_blocks(32768) == max(held, 32768 // 16 // 8)
    assert kv.num_blocks(1 << 20) == (1 << 20) // 16 // 8


@given(
    st.integers(1, 9), st.integers(1, 40).map(lambda n: 2 * n), st.sampled_from(sorted(VALUE_BYTES)), st.sampled_from([16, 32, 48, 128])
)
@settings(max_examples=60, deadline=None)
def test_bytes_are_those_of_the_native_pool(kv_heads: int, head_dim: int, dtype: str, block_size: int) -> None:
    expected = _native.Model("portable", 1).bytes_per_block(block_size, dtype, [(kv_heads, head_dim)])
    assert layer_kv_bytes(KVLayer(kv_heads, head_dim), dtype, block_size) == expected


@pytest.mark.parametrize(("block_size", "dtype"), [(0, "f16"), (8, "f16"), (24, "f16"), (16, "q4")])
def test_blocks_that_no_backend_has(block_size: int, dtype: str) -> None:
    with pytest.raises(ValueError, match="is not allowed"):
        layer_kv_bytes(KVLayer(1, 64), dtype, block_size)


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32", "int8"])
@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_equal_to_what_an_engine_allocates(tmp_path: Path, arch: str, dtype: str) -> None:
    file = write_tiny_gguf(tmp_path / "m.gguf", arch, layers=6, hidden=48, heads=3, kv_heads=1, head_dim=24, ffn=32, context=512)
    outline = read_outline(file)
    needs = MemoryNeeds(outline, KVSizing.of(outline.kv_layers, dtype), 300, 5, None)
    num_blocks = needs.kv.num_blocks(300, 5)
    with LLM(str(file), num_kv_blocks=num_blocks, kv_cache_dtype=dtype, threads=1) as llm:
        capacity = llm.engine.backend.kv_capacity(0)
        assert capacity.bytes_per_block * llm.engine.num_kv_blocks == needs.kv_bytes
        assert capacity.layout == needs.kv.layout and (needs.kv.needs is not None) is (arch == "gemma3")
        assert llm.engine.model.weight_bytes == outline.weight_bytes


@pytest.mark.model
def test_equal_for_real_models(smollm2_path: Path, gemma3_path: Path) -> None:
    for path in (smollm2_path, gemma3_path):
        outline = read_outline(path)
        kv = KVSizing.of(outline.kv_layers, "int8")
        with LLM(str(path), num_kv_blocks=kv.num_blocks(1000, 2), kv_cache_dtype="int8") as llm:
            assert llm.engine.backend.kv_capacity(0).bytes_per_block * llm.engine.num_kv_blocks == kv.num_bytes(1000, 2)
            assert llm.engine.model.weight_bytes == outline.weight_bytes


LAYERS = {
    "full": (KVLayer(1, 16),) * 4,
    "mixed": (KVLayer(1, 16, 32), KVLayer(1, 16)) * 2,
    "windows": (KVLayer(1, 16, 32),) * 4,
}


@pytest.mark.parametrize("layers", LAYERS)
def test_so_many_sequences_really_have_room_at_once(layers: str) -> None:
    """In the engine's own scheduler: all decode together, and nobody is preempted."""
    kv = KVSizing.of(LAYERS[layers], "f32", 16, max_chunk=64)
    spec = EngineSpec(
        LinearCost(), kv.num_blocks(200, 5), 200, SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, admission_lookahead=1),
        CacheConfig(enable_prefix_caching=False), layout=kv.layout,
    )  # fmt: skip
    simulation = Simulation([spec])
    report = simulation.run(WorkloadRequest(0.0, [1] * 140, 60) for _ in range(5))
    simulation.engines[0].scheduler.check_invariants()
    assert (report.num_completed, report.num_preemptions) == (5, 0)


@given(st.sampled_from(sorted(LAYERS)), st.integers(1, 500), st.integers(0, 300), st.sampled_from([16, 64]))
@settings(max_examples=60, deadline=None)
def test_most_sequences_is_the_inverse_of_blocks(layers: str, context: int, num_blocks: int, max_chunk: int) -> None:
    kv = KVSizing.of(LAYERS[layers], "bf16", 16, max_chunk)
    most = kv.sequences_in(num_blocks, context)
    assert most == 0 or kv.num_blocks(context, most) <= num_blocks
    assert kv.num_blocks(context, most + 1) > num_blocks


@given(st.sampled_from(sorted(LAYERS)), st.integers(1, 500), st.integers(1, 20))
@settings(max_examples=40, deadline=None)
def test_more_never_takes_less(layers: str, context: int, num_sequences: int) -> None:
    kv, whole = (KVSizing.of(LAYERS[layers], "bf16", grouped=grouped) for grouped in (True, False))
    assert kv.num_bytes(context, num_sequences) <= kv.num_bytes(context + 1, num_sequences)
    assert kv.num_bytes(context, num_sequences) < kv.num_bytes(context, num_sequences + 1)
    assert kv.num_bytes(context, num_sequences) <= whole.num_bytes(context, num_sequences)


def test_room_beside_the_weights(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_text(json.dumps(configs.LLAMA_2_7B))
    outline = read_outline(path)
    needs = MemoryNeeds(outline, KVSizing.of(outline.kv_layers, "f16"), 4096, 1, 1000)
    room = outline.weight_bytes + 1000
    assert needs.total_bytes == room + (2 << 30)
    assert [needs.sequences_in(room + n) for n in (-1, 0, (2 << 30) - 1, 2 << 30, 5 << 30)] == [0, 0, 0, 1, 2]
    assert json.loads(json.dumps(needs.to_dict(), allow_nan=False))["kv_bytes"] == 2 << 30


def test_activations_are_those_of_the_widest_op(tmp_path: Path) -> None:
    """A llama: the residual stream, gate, up, and what becomes of them are alive at once."""
    program = read_outline(write_tiny_gguf(tmp_path / "m.gguf", hidden=64, ffn=128, vocab=512)).program
    assert program is not None
    assert activation_bytes(program, 10, 3) == 2 * 10 * (64 + 3 * 128) + 4 * 3 * 512


def test_pages_of_a_model(tmp_path: Path) -> None:
    layout = kv_layout(LAYERS["mixed"], "f32", 16)
    assert (layout.num_full, layout.num_window, layout.page_bytes) == (1, 1, 2 * 2 * 16 * 16 * 4)
    assert kv_layout(LAYERS["mixed"], "f32", 16, grouped=False).num_pages == 1
