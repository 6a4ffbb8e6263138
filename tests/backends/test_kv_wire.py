"""KV that leaves one backend's blocks and comes into another's: the same bits, any pieces, while steps run."""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Sequence

import numpy as np
import pytest

from octavo.backends.base import Backend
from octavo.backends.kv_wire import MovesKV, moves_kv
from octavo.config import BackendConfig, CacheConfig, EngineConfig
from octavo.core.step import SequenceSlice, StepPlan
from tests.backends.exactness import fixture_model
from tests.engine.scripted import Bigram

KINDS = [("reference", "auto"), ("cpu", "bf16"), ("cpu", "f16"), ("cpu", "int8"), ("cpu", "f32")]
PROMPT = [3 + i * 7 % 40 for i in range(40)]  # two and a half blocks
MORE = [5, 9, 2, 11]
WAIT_S = 120.0  # hangs are found, slow machines are forgiven


def make(kind: tuple[str, str], threads: int = 1) -> MovesKV:
    from octavo.backends.registry import backend_class

    name, dtype = kind
    options = BackendConfig(backend=name) if name == "reference" else BackendConfig(backend=name, threads=threads)
    backend: Backend = backend_class(name)(fixture_model("llama"), EngineConfig(cache=CacheConfig(kv_cache_dtype=dtype), backend=options))
    backend.allocate_kv(12)
    moving = moves_kv(backend)
    assert moving is not None
    return moving


@pytest.fixture(params=KINDS, ids="-".join)
def kind(request: pytest.FixtureRequest) -> tuple[str, str]:
    return request.param


def run(backend: Backend, tokens: list[int], start: int, table: Sequence[int]) -> np.ndarray:
    """The log-probabilities of a few tokens after each row, as bits."""
    piece = SequenceSlice(0, start, tokens, array("i", table), prompt_logprobs=5, next_token_ids=[1] * len(tokens))
    rows = backend.execute(StepPlan(0, [piece])).slices[0].prompt_logprobs
    assert rows is not None
    return np.array([[row.logprob, *row.top_logprobs] for row in rows], np.float32).view(np.uint32)


def carry(src: MovesKV, dst: MovesKV, layers: range, src_blocks: Sequence[int], dst_blocks: Sequence[int], packed: bool = False) -> bytes:
    num_bytes = len(src_blocks) * sum(src.wire_layer_bytes(layer, packed) for layer in layers)
    data = bytearray(num_bytes)
    src.export_kv(layers, array("i", src_blocks), data, packed)
    dst.import_kv(layers, array("i", dst_blocks), memoryview(data), packed)
    return bytes(data)


def test_a_sequence_goes_on_elsewhere(kind: tuple[str, str]) -> None:
    src, dst = make(kind), make(kind, threads=2)
    run(src, PROMPT, 0, [3, 1, 2])
    expected = run(src, MORE, len(PROMPT), [3, 1, 2])
    run(dst, PROMPT[::-1], 0, [7, 0, 9])  # what was there before
    for layer in range(src.num_kv_layers):  # layer by layer, and the last block by itself
        carry(src, dst, range(layer, layer + 1), [3, 1], [9, 0])
    carry(src, dst, range(src.num_kv_layers), [2], [7])
    assert np.array_equal(run(dst, MORE, len(PROMPT), [9, 0, 7]), expected)


def test_the_order_is_layer_by_layer_and_block_by_block(kind: tuple[str, str]) -> None:
    backend = make(kind)
    run(backend, PROMPT, 0, [3, 1, 2])
    layers = range(backend.num_kv_layers)
    whole = carry(backend, backend, layers, [3, 1], [5, 6])
    single = [carry(backend, backend, range(layer, layer + 1), [block], [8]) for layer in layers for block in (3, 1)]
    assert b"".join(single) == whole


def test_packed_is_near_and_stays_the_same(kind: tuple[str, str]) -> None:
    src, dst = make(kind), make(kind)
    layers = range(src.num_kv_layers)
    run(src, PROMPT, 0, [3, 1, 2])
    sent = carry(src, dst, layers, [3, 1, 2], [0, 1, 2], packed=True)
    exact = kind[1] == "int8"
    if not exact:
        assert len(sent) < 3 * sum(src.wire_layer_bytes(layer) for layer in layers)
    again = bytearray(len(sent))
    dst.export_kv(layers, array("i", [0, 1]), memoryview(again)[: len(sent) // 3 * 2], True)
    other = bytearray(len(sent) // 3 * 2)
    src.export_kv(layers, array("i", [3, 1]), other, True)
    assert again[: len(other)] == other  # the loss does not add up
    near = run(dst, MORE, len(PROMPT), [0, 1, 2]).view(np.float32)
    plain = run(src, MORE, len(PROMPT), [3, 1, 2]).view(np.float32)
    assert np.array_equal(near, plain) if exact else np.allclose(near, plain, atol=0.1) and not np.array_equal(near, plain)


def test_what_cannot_be_is_refused(kind: tuple[str, str]) -> None:
    backend = make(kind)
    layers, size = range(backend.num_kv_layers), sum(backend.wire_layer_bytes(layer) for layer in range(backend.num_kv_layers))
    for pages, which, num_bytes in (([12], layers, size), ([-1], layers, size), ([0], layers, size - 1), ([0], range(0, 99), size),
                                    ([0], range(1, 1), 0)):  # fmt: skip
        for move in (backend.export_kv, backend.import_kv):
            with pytest.raises(ValueError, match="KV"):
                move(which, array("i", pages), bytearray(num_bytes))
    with pytest.raises(ValueError, match="layer"):
        backend.wire_layer_bytes(backend.num_kv_layers)
    with pytest.raises(ValueError, match="layer"):
        backend.wait_kv(1, -1, 0.0)


def test_a_backend_without_kv_says_so() -> None:
    assert moves_kv(Bigram.__new__(Bigram)) is None


def test_layers_of_the_running_step_can_be_waited_for(kind: tuple[str, str]) -> None:
    """A thread waits for each layer of the next step, exports it at once, and all of it equals what is there when the step is done."""
    backend = make(kind, threads=2)
    last, taken = backend.num_kv_layers - 1, list[bytes]()
    step = backend.next_kv_step()
    assert not backend.wait_kv(step, 0, 0.0)

    def follow() -> None:
        for layer in range(last + 1):
            assert backend.wait_kv(step, layer, WAIT_S)
            data = bytearray(3 * backend.wire_layer_bytes(layer))
            backend.export_kv(range(layer, layer + 1), array("i", [3, 1, 2]), data)
            taken.append(bytes(data))

    thread = threading.Thread(target=follow)
    thread.start()
    run(backend, PROMPT, 0, [3, 1, 2])
    thread.join(WAIT_S)
    data = bytearray(3 * sum(backend.wire_layer_bytes(layer) for layer in range(last + 1)))
    backend.export_kv(range(last + 1), array("i", [3, 1, 2]), data)
    assert b"".join(taken) == bytes(data)
    assert backend.next_kv_step() == step + 1 and backend.wait_kv(step, last, 0.0) and not backend.wait_kv(step + 1, 0, 0.0)
    run(backend, MORE, 40, [3, 1, 2])
    assert backend.wait_kv(step, last, 0.0), "an earlier step is done"


def test_waiting_lets_the_step_begin(kind: tuple[str, str]) -> None:
    """The waiting thread holds no lock that the step needs."""
    backend, seen = make(kind), list[bool]()
    step = backend.next_kv_step()  # before: the thread may begin after the step has
    thread = threading.Thread(target=lambda: seen.append(backend.wait_kv(step, 0, WAIT_S)))
    thread.start()
    time.sleep(0.05)
    run(backend, MORE, 0, [0])
    thread.join(WAIT_S)
    assert seen == [True]
