"""What arrives at a worker: each block of each layer once, nothing that is not expected, and nothing after it was cancelled."""

from __future__ import annotations

import threading
import tracemalloc
from array import array
from dataclasses import replace

import pytest

from octavo.core.kv_pages import PageLayout
from octavo.distributed.kv_port import KVPort, KVShape
from octavo.distributed.transport import Piece, TransferError, TransferHead

LAYERS, BYTES = 3, 8
WAIT_S = 120.0  # hangs are found, slow machines are forgiven
WINDOWED = PageLayout(64, 1, 1, 20, ((0, 0), (1, 0), (1, 0)))  # layers 1 and 2 see 20 positions


class Memory:
    """A backend's KV, for what a port wants of it: what was imported where, and a gate that an import can be held at."""

    num_kv_layers = LAYERS

    def __init__(self) -> None:
        self.imports: list[tuple[range, list[int], bytes, bool]] = []
        self.entered, self.leave = threading.Event(), threading.Event()
        self.leave.set()

    def fingerprint(self) -> str:
        return "model"

    def wire_layer_bytes(self, layer: int, packed: bool = False) -> int:
        return BYTES // 2 if packed else BYTES

    def import_kv(self, layers: range, pages: array[int], data: memoryview, packed: bool = False) -> None:
        self.entered.set()
        assert self.leave.wait(WAIT_S)
        self.imports.append((layers, list(pages), bytes(data), packed))


class Port:
    """A port with what it has told."""

    def __init__(self, layout: PageLayout | None = None) -> None:
        self.memory, self.copied, self.failed = Memory(), list[tuple[int, bool]](), list[tuple[int, str]]()
        shape = KVShape.of(layout, LAYERS, 16)
        self.port = KVPort(
            self.memory, shape, lambda key, exact: self.copied.append((key, exact)), lambda key, why: self.failed.append((key, why))  # type: ignore[arg-type]
        )  # fmt: skip

    def put(self, piece: Piece, key: int = 7, fill: int = 1) -> None:
        self.port.put(key, piece, memoryview(bytes([fill]) * self.port.num_bytes(key, piece)))


HEAD = TransferHead(7, "model", 40)
ALL = Piece(0, LAYERS, 0, 3)


def expecting(layout: PageLayout | None = None) -> Port:
    port = Port(layout)
    port.port.expect(7, 40, array("i", [5, 6, 8] if layout is None else [5, 50, 6, 60, 8, 80]))
    port.port.open(HEAD)
    return port


def test_pieces_go_to_the_blocks_that_are_reserved() -> None:
    port = expecting()
    port.put(Piece(0, 1, 0, 2), fill=1)
    port.put(Piece(1, 2, 0, 3), fill=2)
    with pytest.raises(TransferError, match="1 blocks of layers are missing"):
        port.port.finish(7)
    port.put(Piece(0, 1, 2, 1), fill=3)
    port.port.finish(7)
    assert port.memory.imports == [
        (range(1), [5, 6], b"\1" * 16, False), (range(1, 3), [5, 6, 8], b"\2" * 48, False), (range(1), [8], b"\3" * 8, False)
    ]  # fmt: skip
    assert port.copied == [(7, True)] and port.failed == []
    port.port.failed(7, "the connection was lost")
    assert port.failed == [], "what is complete cannot fail"


def test_of_window_layers_only_what_is_read_again_is_wanted() -> None:
    """40 tokens, a window of 20: the next row reads positions 21 and on, so not block 0."""
    port = expecting(WINDOWED)
    port.put(Piece(0, 1, 0, 3))
    with pytest.raises(TransferError, match="has come before, or is not wanted"):
        port.put(Piece(1, 1, 0, 1))
    port.put(Piece(1, 2, 1, 2))
    port.port.finish(7)
    assert [pages for _, pages, _, _ in port.memory.imports] == [[5, 50, 6, 60, 8, 80], [6, 60, 8, 80]]


@pytest.mark.parametrize(
    "piece", [Piece(0, 4, 0, 1), Piece(3, 1, 0, 1), Piece(0, 1, 0, 4), Piece(0, 1, 3, 1), Piece(0, 0, 0, 1), Piece(0, 1, 0, 0)]
)
def test_pieces_that_there_are_not(piece: Piece) -> None:
    with pytest.raises(TransferError, match="is not of 3 layers and 3 blocks"):
        expecting().port.num_bytes(7, piece)


def test_a_piece_comes_once() -> None:
    port = expecting()
    port.put(Piece(0, 2, 1, 1))
    for again in (Piece(1, 1, 1, 1), Piece(0, 1, 0, 3)):
        with pytest.raises(TransferError, match="has come before"):
            port.put(again)


@pytest.mark.parametrize(
    ("head", "why"),
    [
        (replace(HEAD, key=8), "nothing is expected here under the key 8"),
        (replace(HEAD, fingerprint="other"), "the KV is of 'other', this worker's of 'model'"),
        (replace(HEAD, num_tokens=41), "40 tokens in one of"),
        (replace(HEAD, wire_dtype="int4"), "40 tokens in one of"),
    ],
)
def test_a_transfer_that_is_not_the_expected_one(head: TransferHead, why: str) -> None:
    port = Port()
    port.port.expect(7, 40, array("i", [5, 6, 8]))
    with pytest.raises(TransferError, match=why):
        port.port.open(head)
    port.port.open(HEAD)
    with pytest.raises(TransferError, match="is over, or has begun before"):
        port.port.open(HEAD)


def test_rounded_kv_is_said_to_be() -> None:
    port = Port()
    port.port.expect(7, 40, array("i", [5, 6, 8]))
    port.port.open(replace(HEAD, wire_dtype="int8"))
    assert port.port.num_bytes(7, ALL) == 3 * 3 * BYTES // 2
    port.put(ALL)
    port.port.finish(7)
    assert port.copied == [(7, False)] and port.memory.imports[0][3]


def test_after_a_cancel_nothing_is_written() -> None:
    port = expecting()
    port.port.cancel(7)
    for act in (lambda: port.put(ALL), lambda: port.port.finish(7), lambda: port.port.open(HEAD)):
        with pytest.raises(TransferError):
            act()
    port.port.failed(7, "it was refused")
    assert port.memory.imports == port.copied == port.failed == [] and len(port.port) == 0


def test_a_cancel_waits_for_the_piece_that_is_being_written() -> None:
    """Its blocks are somebody else's when it returns: so not before the import has."""
    port = expecting()
    port.memory.leave.clear()
    writing = threading.Thread(target=port.put, args=(ALL,))
    writing.start()
    assert port.memory.entered.wait(WAIT_S)
    cancelled = threading.Event()

    def cancel() -> None:
        port.port.cancel(7)
        cancelled.set()

    cancelling = threading.Thread(target=cancel)
    cancelling.start()
    assert not cancelled.wait(0.05) and port.memory.imports == []
    port.memory.leave.set()
    assert cancelled.wait(WAIT_S) and len(port.memory.imports) == 1
    writing.join(WAIT_S)
    cancelling.join(WAIT_S)


def test_a_failure_is_told_once() -> None:
    port = expecting()
    port.port.failed(7, "cut")
    port.port.failed(7, "cut again")
    with pytest.raises(TransferError):
        port.put(ALL)
    assert port.failed == [(7, "cut")] and port.copied == []


def test_a_long_prompt_that_is_to_come_takes_next_to_no_memory() -> None:
    """An engine's loop thread makes room for it, and all its streams wait meanwhile."""
    port = KVPort(Memory(), KVShape((0,) * 80, 1, 0, None, 16), lambda key, exact: None, lambda key, reason: None)  # type: ignore[arg-type]
    tracemalloc.start()
    try:
        port.expect(7, 131_072, array("i"))
        assert tracemalloc.get_traced_memory()[0] < 200_000
    finally:
        tracemalloc.stop()
