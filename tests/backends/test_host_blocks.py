"""Blocks that go to host memory and come back: the same bits, in the order that StepPlan documents; plans that cannot be move nothing."""

from __future__ import annotations

import threading
from array import array

import numpy as np
import pytest

from octavo.backends.base import Backend, BackendError
from octavo.config import BackendConfig, CacheConfig, EngineConfig
from octavo.core.step import BlockCopy, BlockMove, SequenceSlice, StepPlan
from tests.backends.exactness import fixture_model

NUM_BLOCKS, NUM_HOST_BLOCKS = 12, 4
PROMPT = [3 + i * 7 % 40 for i in range(40)]  # two and a half blocks


@pytest.fixture(params=[("reference", "auto"), ("cpu", "bf16"), ("cpu", "int8"), ("cpu", "f32")], ids=lambda p: "-".join(p))
def backend(request: pytest.FixtureRequest) -> Backend:
    from octavo.backends.registry import backend_class

    name, dtype = request.param
    config = EngineConfig(cache=CacheConfig(kv_cache_dtype=dtype), backend=BackendConfig(backend=name))
    backend: Backend = backend_class(name)(fixture_model("llama"), config)
    backend.allocate_kv(NUM_BLOCKS)
    backend.allocate_host_kv(NUM_HOST_BLOCKS)
    return backend


def run(backend: Backend, tokens: list[int], start: int, table: list[int], **moves: list) -> np.ndarray:
    """The log-probabilities of a few tokens after the last row, as bits."""
    piece = SequenceSlice(0, start, tokens, array("i", table), prompt_logprobs=5, next_token_ids=[1] * len(tokens))
    result = backend.execute(StepPlan(0, [piece], **moves))
    assert result.move_seconds <= result.seconds and (result.move_seconds > 0) == bool(moves.get("block_saves") or moves.get("block_loads"))
    rows = result.slices[0].prompt_logprobs
    assert rows is not None
    return np.array([[row.logprob, *row.top_logprobs] for row in rows], np.float32).view(np.uint32)


def move(backend: Backend, saves: list[tuple[int, int]] = [], loads: list[tuple[int, int]] = []) -> None:  # noqa: B006
    backend.execute(StepPlan(0, block_saves=[BlockMove(*pair) for pair in saves], block_loads=[BlockMove(*pair) for pair in loads]))


def test_a_sequence_goes_on_from_blocks_that_were_away(backend: Backend) -> None:
    expected = np.concatenate([run(backend, PROMPT[:37], 0, [0, 1, 2]), run(backend, PROMPT[37:], 37, [0, 1, 2])])
    first = run(backend, PROMPT[:37], 0, [5, 4, 3])
    move(backend, saves=[(5, 2), (4, 0), (3, 1)])
    run(backend, PROMPT[::-1], 0, [5, 4, 3])  # somebody else has them now
    loads = [BlockMove(7, 2), BlockMove(5, 0), BlockMove(9, 1)]
    last = run(backend, PROMPT[37:], 37, [7, 5, 9], block_loads=loads)
    assert np.array_equal(np.concatenate([first, last]), expected)


def test_saves_come_before_loads_and_loads_before_copies(backend: Backend) -> None:
    """One plan: block 0 leaves, block 1's earlier contents take its place, and are copied on from there."""
    run(backend, PROMPT[:16], 0, [1])
    expected = run(backend, PROMPT[16:20], 16, [1, 2])
    move(backend, saves=[(1, 3)])
    other = run(backend, PROMPT[20:36], 0, [0])
    moves = {"block_saves": [BlockMove(0, 0)], "block_loads": [BlockMove(0, 3)], "block_copies": [BlockCopy(0, 6)]}
    assert np.array_equal(run(backend, PROMPT[16:20], 16, [6, 7], **moves), expected)
    move(backend, loads=[(8, 0)])
    continued = run(backend, PROMPT[:4], 16, [8, 9])
    assert np.array_equal(run(backend, PROMPT[20:36], 0, [10]), other)
    assert np.array_equal(run(backend, PROMPT[:4], 16, [10, 11]), continued)


def test_loads_come_after_the_copies_that_were_planned_before(backend: Backend) -> None:
    """Block 0 is copied from, and into, before what was saved takes its place and that of block 5; then both are copied on."""
    run(backend, PROMPT[:16], 0, [1])
    expected = run(backend, PROMPT[16:20], 16, [1, 2])
    move(backend, saves=[(1, 3)])
    run(backend, PROMPT[20:36], 0, [0])
    other = run(backend, PROMPT[:4], 16, [0, 4])
    copies = [BlockCopy(0, 5), BlockCopy(0, 6), BlockCopy(0, 7), BlockCopy(5, 8)]
    loads = [BlockMove(0, 3, after_copies=2), BlockMove(5, 3, after_copies=3)]
    assert np.array_equal(run(backend, PROMPT[16:20], 16, [5, 2], block_copies=copies, block_loads=loads), expected)
    for block in (0, 7, 8):
        assert np.array_equal(run(backend, PROMPT[16:20], 16, [block, 2]), expected)
    assert np.array_equal(run(backend, PROMPT[:4], 16, [6, 4]), other)


def test_host_blocks_can_be_read_and_written_while_steps_run(backend: Backend) -> None:
    expected = run(backend, PROMPT[:20], 0, [0, 1])
    move(backend, saves=[(0, 1)])
    data = backend.read_host_block(1)
    assert len(data) == backend.kv_capacity(0).bytes_per_block
    reads: list[bytes] = []

    def copy_around() -> None:
        for _ in range(50):
            backend.write_host_block(2, data)
            reads.append(backend.read_host_block(2))

    thread = threading.Thread(target=copy_around)
    thread.start()
    for _ in range(10):
        run(backend, PROMPT[:20], 0, [3, 4], block_saves=[BlockMove(3, 0)])
    thread.join()
    assert len(reads) == 50 and set(reads) == {data}
    again = run(backend, PROMPT[16:20], 16, [8, 9], block_loads=[BlockMove(8, 2)])
    assert np.array_equal(again, expected[16:])


@pytest.fixture(params=[("reference", "auto"), ("cpu", "bf16"), ("cpu", "f16"), ("cpu", "f32")], ids=lambda p: "-".join(p))
def packing(request: pytest.FixtureRequest) -> Backend:
    """Two host blocks as they are, and two that are packed."""
    from octavo.backends.registry import backend_class

    name, dtype = request.param
    config = EngineConfig(cache=CacheConfig(kv_cache_dtype=dtype, block_size=32), backend=BackendConfig(backend=name))
    backend: Backend = backend_class(name)(fixture_model("llama"), config)
    backend.allocate_kv(NUM_BLOCKS)
    backend.allocate_host_kv(2, 2)
    return backend


def test_packed_blocks_are_smaller_and_round_once(packing: Backend) -> None:
    """What comes back differs in the last bits; saved again, packed or not, it is the same to the bit."""
    expected = run(packing, [*PROMPT, *PROMPT[:6]], 0, [0, 1])
    move(packing, saves=[(0, 2), (0, 0)])
    packed, exact = packing.read_host_block(2), packing.read_host_block(0)
    assert len(packed) == packing.packed_block_bytes() and len(exact) == packing.kv_capacity(0).bytes_per_block
    assert 1.4 < len(exact) / len(packed) < 4.0
    move(packing, loads=[(4, 2), (6, 0)])
    restored = run(packing, [*PROMPT[32:], *PROMPT[:6]], 32, [4, 5])
    assert not np.array_equal(restored, expected[32:]), "a test that tells nothing"
    assert np.abs(restored.view(np.float32) - expected[32:].view(np.float32)).max() < 0.05
    assert np.array_equal(run(packing, [*PROMPT[32:], *PROMPT[:6]], 32, [6, 7]), expected[32:])
    move(packing, saves=[(4, 3), (4, 1)])
    assert packing.read_host_block(3) == packed
    move(packing, loads=[(8, 1)])
    assert np.array_equal(run(packing, [*PROMPT[32:], *PROMPT[:6]], 32, [8, 9]), restored)


def test_packed_blocks_go_out_as_bytes_and_come_back(packing: Backend) -> None:
    run(packing, PROMPT[:32], 0, [0])
    move(packing, saves=[(0, 3)])
    data = packing.read_host_block(3)
    move(packing, loads=[(2, 3)])
    expected = run(packing, PROMPT[32:], 32, [2, 3])
    packing.write_host_block(2, data)
    assert packing.read_host_block(2) == data and packing.read_host_block(0) != data
    move(packing, loads=[(4, 2)])
    assert np.array_equal(run(packing, PROMPT[32:], 32, [4, 5]), expected)
    size = packing.packed_block_bytes()
    with pytest.raises(ValueError, match=f"{size - 1} bytes are given, and a block has {size}"):
        packing.write_host_block(2, data[1:])
    with pytest.raises((BackendError, ValueError), match="host block ids 0 to 3"):
        move(packing, saves=[(0, 4)])


@pytest.mark.parametrize("pair", [(-1, 0), (NUM_BLOCKS, 0), (0, -1), (0, NUM_HOST_BLOCKS)])
def test_ids_that_are_in_neither_pool_move_nothing(backend: Backend, pair: tuple[int, int]) -> None:
    run(backend, PROMPT[:16], 0, [0])
    move(backend, saves=[(0, 0)])
    before = backend.read_host_block(0)
    run(backend, PROMPT[16:32], 0, [1])
    for plan in ({"saves": [(1, 0), pair]}, {"saves": [(1, 0)], "loads": [pair]}):
        with pytest.raises((BackendError, ValueError), match="block ids are 0 to 11, host block ids 0 to 3"):
            move(backend, **plan)
    assert backend.read_host_block(0) == before


def test_refusals(backend: Backend) -> None:
    with pytest.raises(BackendError, match="host pool"):
        backend.allocate_host_kv(1)
    for block in (-1, NUM_HOST_BLOCKS):
        with pytest.raises(ValueError, match=f"host block {block}: ids are 0 to 3"):
            backend.read_host_block(block)
    size = backend.kv_capacity(0).bytes_per_block
    for data in (b"", bytes(size - 1), bytes(size + 1)):
        with pytest.raises(ValueError, match=f"{len(data)} bytes are given, and a block has {size}"):
            backend.write_host_block(0, data)
