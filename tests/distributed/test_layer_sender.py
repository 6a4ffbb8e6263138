"""What a worker sends: every block once, as it comes, and never what a block held after it was taken away."""

from __future__ import annotations

import random
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from octavo.core.kv_pages import PageLayout
from octavo.distributed import layer_sender
from octavo.distributed.kv_port import KVShape
from octavo.distributed.layer_sender import LayerSender, Track
from octavo.distributed.transport import Piece, TransferError, TransferHead

SIZE, LAYERS = 4, 3
WAIT_S = 120.0  # hangs are found, slow machines are forgiven
WINDOWED = PageLayout(64, 1, 1, 6, ((0, 0), (1, 0), (1, 0)))


class Memory:
    """A backend whose pages hold a byte for each layer. ``on_export`` is called in the middle of an export."""

    num_kv_layers = LAYERS

    def __init__(self, num_columns: int = 1) -> None:
        self.num_columns = num_columns
        self.pages: dict[tuple[int, int], int] = {}  # (layer, page) -> what it holds
        self.on_export: Callable[[], None] = lambda: None
        self.written = [threading.Event() for _ in range(LAYERS)]

    def fingerprint(self) -> str:
        return "model"

    def wire_layer_bytes(self, layer: int, packed: bool = False) -> int:
        return 1

    def export_kv(self, layers: range, pages: array[int], to: memoryview, packed: bool = False) -> None:
        columns = [0, self.num_columns - 1, self.num_columns - 1]
        found = [(layer, page) for layer in layers for page in pages[columns[layer] :: self.num_columns]]
        for i, place in enumerate(found):
            if i == len(found) // 2:
                self.on_export()
            to[i] = self.pages[place]

    def wait_kv(self, step: int, layer: int, timeout_s: float) -> bool:
        return self.written[layer].wait(timeout_s)


class Out:
    """The sender's end of a transfer that keeps what is sent, by layer and block."""

    def __init__(self) -> None:
        self.got: dict[tuple[int, int], int] = {}
        self.pieces: list[Piece] = []
        self.finished = self.closed = False
        self.num_alive = 0

    @property
    def now_s(self) -> float:
        """A clock that goes on with each sign of life."""
        return 0.01 * self.num_alive

    def buffer(self, num_bytes: int) -> memoryview:
        return memoryview(bytearray(num_bytes))

    def send(self, piece: Piece, data: memoryview) -> None:
        self.pieces.append(piece)
        places = [(layer, block) for layer in piece.layers for block in piece.blocks]
        for place, value in zip(places, data, strict=True):
            assert place not in self.got, f"{place} is sent twice"
            self.got[place] = value

    def keep_alive(self) -> None:
        self.num_alive += 1

    def finish(self) -> None:
        self.finished = True

    def close(self) -> None:
        self.closed = True


def truth(layer: int, block: int) -> int:
    """What block number ``block`` of the sequence holds, wherever it lies."""
    return 1 + layer * 64 + block


class Sent:
    """A transfer on its way, on a thread."""

    def __init__(self, num_tokens: int, layerwise: bool = True, layout: PageLayout | None = None) -> None:
        self.memory = Memory(1 if layout is None else 2)
        self.track, self.out, self.failure = Track(num_tokens), Out(), list[str]()
        sender = LayerSender(self.memory, KVShape.of(layout, LAYERS, SIZE), WAIT_S)  # type: ignore[arg-type]
        head = sender.head(7, self.track)
        assert head == TransferHead(7, "model", num_tokens)
        self.thread = sender.start(self.track, head, lambda: self.out, layerwise, self.failure.append)

    def place(self, pages: list[int], num_computed: int, step: int = 0, num_coming: int = 0, layers: range = range(LAYERS)) -> None:
        """The sequence's blocks lie there, and hold what they should as far as they are computed."""
        for block in range(-(-num_computed // SIZE)):
            for layer in layers:
                self.memory.pages[layer, pages[block]] = truth(layer, block)
        self.track.moved(array("i", pages), num_computed, step, num_coming)

    def until(self, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline_s, "it does not come"
            time.sleep(0.005)

    def done(self, num_blocks: int) -> None:
        self.thread.join(WAIT_S)
        assert self.failure == [] and self.out.finished and self.out.closed
        assert self.out.got == {(layer, block): truth(layer, block) for layer in range(LAYERS) for block in range(num_blocks)}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_sender, "KEEP_ALIVE_S", 0.01)


def test_finished_chunks_go_while_the_next_is_computed_and_then_layer_by_layer() -> None:
    sent = Sent(18)
    sent.place([9, 8], 0, step=1, num_coming=8)
    sent.until(lambda: sent.out.num_alive > 1)
    assert sent.out.pieces == []
    sent.place([9, 8, 7, 6], 8, step=2, num_coming=15)
    sent.until(lambda: len(sent.out.got) == 6)
    sent.place([9, 8, 7, 6, 5], 15, step=3, num_coming=18)
    sent.until(lambda: len(sent.out.got) == 9)  # the block that is not full comes with the last step
    for layer in range(LAYERS):
        for block, page in ((3, 6), (4, 5)):
            sent.memory.pages[layer, page] = truth(layer, block)
        sent.memory.written[layer].set()
        sent.until(lambda layer=layer: len(sent.out.got) == 9 + 2 * (layer + 1))
    sent.done(5)


def test_a_short_prompt_goes_in_one_piece_when_it_is_done() -> None:
    sent = Sent(10, layerwise=False)
    sent.place([3, 4, 5], 8, step=1, num_coming=10)
    sent.until(lambda: sent.out.num_alive > 1)
    assert sent.out.pieces == []
    sent.place([3, 4, 5], 10)
    sent.done(3)
    assert sent.out.pieces == [Piece(0, LAYERS, 0, 3)]


def test_of_window_layers_only_what_is_read_again_goes() -> None:
    """18 tokens, a window of 6: the next row reads positions 13 and on, so block 3 and on."""
    sent = Sent(18, layout=WINDOWED)
    pages = [page for block in range(5) for page in (10 + block, 20 + block if block >= 3 else -1)]
    for block in range(5):
        sent.memory.pages[0, 10 + block] = truth(0, block)
        for layer in (1, 2):
            sent.memory.pages[layer, 20 + block] = truth(layer, block)
    sent.track.moved(array("i", pages), 18)
    sent.thread.join(WAIT_S)
    wanted = {(0, block) for block in range(5)} | {(layer, block) for layer in (1, 2) for block in (3, 4)}
    assert sent.out.got == {place: truth(*place) for place in wanted} and sent.failure == []


def test_what_was_read_from_blocks_that_were_taken_away_is_thrown_away() -> None:
    """In the middle of an export the sequence is preempted and somebody else writes its blocks; it comes back elsewhere."""
    sent, taken = Sent(12), list[int]()

    def take() -> None:
        if not taken:
            taken.append(1)
            sent.track.moved(array("i"), 0)  # before the plan is executed
            for layer in range(LAYERS):
                for page in (1, 2, 3):
                    sent.memory.pages[layer, page] = 255

    sent.memory.on_export = take
    sent.place([1, 2, 3], 12)
    sent.until(lambda: bool(taken))
    time.sleep(0.05)
    assert sent.out.got == {} or 255 not in sent.out.got.values()
    sent.track.moved(array("i", [5, 6, 7]), 0)  # allocated, and not computed yet
    time.sleep(0.05)
    assert 255 not in sent.out.got.values()
    sent.place([5, 6, 7], 12)
    sent.done(3)


def test_a_sequence_that_has_ended_is_not_sent() -> None:
    sent = Sent(12)
    sent.place([1, 2, 3], 8)
    sent.until(lambda: len(sent.out.got) == 6)
    sent.track.drop("the request was aborted")
    sent.thread.join(WAIT_S)
    assert sent.failure == ["the request was aborted"] and sent.out.closed and not sent.out.finished


def test_a_prompt_that_makes_no_progress_is_given_up() -> None:
    track, out, failure = Track(12), Out(), list[str]()
    sender = LayerSender(Memory(), KVShape.of(None, LAYERS, SIZE), 0.05, lambda: out.now_s)  # type: ignore[arg-type]
    sender.start(track, sender.head(7, track), lambda: out, True, failure.append).join(WAIT_S)
    assert failure == ["the prompt has made no progress for 0.05 s"] and out.num_alive == 6


def test_a_prompt_that_is_slow_and_goes_on_is_waited_for() -> None:
    """Its KV goes in one piece at its end: that takes as long as it takes, while no part of it takes ``stall_s``."""
    now_s = 0.0
    memory, track, out = Memory(), Track(12), Out()
    sender = LayerSender(memory, KVShape.of(None, LAYERS, SIZE), 1.0, lambda: now_s)  # type: ignore[arg-type]
    failure = list[str]()
    thread = sender.start(track, sender.head(7, track), lambda: out, False, failure.append)
    memory.pages = {(layer, block): truth(layer, block) for layer in range(LAYERS) for block in range(3)}
    for num_computed in range(1, 13):
        num_alive = out.num_alive
        deadline_s = time.monotonic() + WAIT_S
        while out.num_alive < num_alive + 2:  # it has not looked since the last move
            assert time.monotonic() < deadline_s
            time.sleep(0.005)
        now_s += 0.9
        track.moved(array("i", [0, 1, 2]), num_computed)
    thread.join(WAIT_S)
    assert failure == [] and out.finished and now_s > 10.0


def test_a_receiver_that_cannot_be_reached() -> None:
    failure = list[str]()

    def connect() -> Any:
        raise TransferError("nobody is there")

    sender, track = LayerSender(Memory(), KVShape.of(None, LAYERS, SIZE)), Track(4)  # type: ignore[arg-type]
    sender.start(track, sender.head(7, track), connect, True, failure.append).join(WAIT_S)
    assert failure == ["nobody is there"]


def test_large_parts_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_sender, "PIECE_BYTES", 4)
    sent = Sent(36, layerwise=False)
    sent.place(list(range(9)), 36)
    sent.done(9)
    assert all(piece.num_layers * piece.num_blocks <= 4 for piece in sent.out.pieces)


def lives(seed: int) -> Iterator[tuple[list[int], int, int, int]]:
    """(pages, computed, step, coming) after each move of a sequence of 30 tokens that is preempted now and then."""
    rng = random.Random(seed)
    computed, base, step = 0, 0, 0
    while computed < 30:
        if computed and rng.random() < 0.3:
            computed, base = 0, base + 100
            yield [], 0, 0, 0
        coming, step = min(30, computed + rng.randint(3, 11)), step + 1
        pages = [base + i for i in range(-(-coming // SIZE))]
        yield pages, computed, step, coming
        computed = coming
        yield pages, computed, 0, 0


@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens_to_a_sequence_what_is_sent_is_right(seed: int) -> None:
    """Blocks that are taken away are overwritten as soon as the track has been told; layers are written one by one."""
    sent, held = Sent(30), list[int]()
    for pages, computed, step, coming in lives(seed):
        sent.place(pages, computed, step, coming)
        for page in set(held) - set(pages):
            for layer in range(LAYERS):
                sent.memory.pages[layer, page] = 255
        held = pages
        for layer in range(LAYERS):
            for block in range(computed // SIZE, len(pages)) if step else ():
                sent.memory.pages[layer, pages[block]] = truth(layer, block)
            if coming == 30:
                sent.memory.written[layer].set()
            time.sleep(0.001)
    sent.done(8)


def test_a_thread_that_cannot_be_had_is_a_transfer_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is no error of whoever begins it: that is the worker's connection to its front end."""

    def no_more(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    def connect() -> Out:
        raise AssertionError("nobody runs")

    sender, track, failure = LayerSender(Memory(), KVShape.of(None, LAYERS, SIZE)), Track(4), list[str]()  # type: ignore[arg-type]
    monkeypatch.setattr(threading.Thread, "start", no_more)
    sender.start(track, sender.head(7, track), connect, True, failure.append)
    assert failure == ["can't start new thread"]
