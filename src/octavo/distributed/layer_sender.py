"""A worker's end of transfers that go out: KV is sent while the rest of the prompt is computed.

    chunk done ─▶ its full blocks, all layers, while the next chunk is computed ─▶ ... ─▶ last chunk: layer by layer, as they are written

So beside the last chunk only what the link could not keep up with is left to be sent (Splitwise, Patel et al., ISCA 2024, section
4.3). A short prompt goes in one piece when it is done: nothing is gained by many.

The loop thread tells where a sequence's KV lies and how far it has come (``Track``), a thread for each transfer exports and sends. Blocks
may be taken from a sequence at any plan: it is preempted, or shares somebody else's copy. What was read from them meanwhile may then be
anything. So every plan is looked at *before* it is executed, and a track whose blocks have changed gets a new number; a piece that was
exported under an old one is thrown away, and exported again from where the blocks are now. What has been sent is right whatever happens
afterwards: KV depends on the tokens alone.

Owns the threads; decides neither what is sent nor whereto.
"""

from __future__ import annotations

import logging
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from octavo.backends.kv_wire import MovesKV
from octavo.distributed.kv_port import KVShape
from octavo.distributed.transport import MAX_PIECE_BYTES, Outgoing, Piece, TransferError, TransferHead

logger = logging.getLogger("octavo.distributed")

PIECE_BYTES = 2 << 20  # most of what is sent at a time, a single block of a layer apart
KEEP_ALIVE_S = 1.0


@dataclass(slots=True)
class Track:
    """A sequence whose KV goes out, as the loop thread told last. ``num_tokens``: of the prompt, whose KV is sent.

    ``pages``: of its blocks by column, flat. ``num_computed``: tokens with KV. ``step``: the step in flight, as ``MovesKV.wait_kv`` numbers
    it, which brings it to ``num_coming`` tokens; 0: none.
    """

    num_tokens: int
    pages: array[int] = field(default_factory=lambda: array("i"))
    number: int = 0  # changes when known blocks do
    num_computed: int = 0
    step: int = 0
    num_coming: int = 0
    gone: str | None = None  # why there is nothing more to send
    changed: threading.Condition = field(default_factory=threading.Condition)

    def moved(self, pages: array[int], num_computed: int, step: int = 0, num_coming: int = 0) -> None:
        """By the loop thread, before a step is executed and after it has been applied."""
        with self.changed:
            common = min(len(pages), len(self.pages))
            if len(pages) < len(self.pages) or pages[:common] != self.pages:
                self.number += 1
            self.pages, self.num_computed = pages, num_computed
            self.step, self.num_coming = step, num_coming
            self.changed.notify_all()

    def drop(self, reason: str) -> None:
        """The sequence has ended, or is not to be sent any more."""
        with self.changed:
            self.number += 1
            self.gone = self.gone or reason
            self.changed.notify_all()


class LayerSender:
    """``clock``: monotonic seconds. ``stall_s``: a sequence that makes no progress for so long is given up."""

    def __init__(self, backend: MovesKV, shape: KVShape, stall_s: float = 120.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._backend, self._shape, self._stall_s, self._clock = backend, shape, stall_s, clock
        self._fingerprint = backend.fingerprint()

    def head(self, key: int, track: Track, wire_dtype: str = "auto", checksum: str = "none") -> TransferHead:
        """What the receiver is told first of a transfer."""
        return TransferHead(key, self._fingerprint, track.num_tokens, wire_dtype, checksum)

    def start(
        self, track: Track, head: TransferHead, connect: Callable[[], Outgoing], layerwise: bool, on_failed: Callable[[str], None]
    ) -> threading.Thread:
        """As ``send``, on a thread of its own. That all has come is the receiver's to say; that there is no thread, ``on_failed``'s."""

        def run() -> None:
            try:
                self.send(track, head, connect, layerwise)
            except TransferError as error:
                on_failed(str(error))
            except Exception as error:
                logger.error("KV of the transfer %d could not be sent", head.key, exc_info=error)
                on_failed(f"{type(error).__name__}: {error}")

        thread = threading.Thread(target=run, name=f"octavo-kv-out-{head.key}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no more of them, or no memory for one
            on_failed(str(error))
        return thread

    def send(self, track: Track, head: TransferHead, connect: Callable[[], Outgoing], layerwise: bool) -> None:
        """Send what ``track`` has and gets, to who ``connect`` connects to. Raises TransferError."""
        out = connect()
        try:
            _Transfer(self._backend, self._shape, track, head.packed, out, self._stall_s, self._clock).run(layerwise)
            out.finish()
        finally:
            out.close()


class _Transfer:
    """One transfer, by one thread."""

    def __init__(
        self,
        backend: MovesKV,
        shape: KVShape,
        track: Track,
        packed: bool,
        out: Outgoing,
        stall_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._backend, self._shape, self._track, self._out = backend, shape, track, out
        self._packed, self._stall_s, self._clock = packed, stall_s, clock
        self._num_tokens = track.num_tokens
        self._last = shape.num_blocks(track.num_tokens)
        self._num_layers = len(shape.layers)
        self._layer_bytes = [backend.wire_layer_bytes(layer, self._packed) for layer in range(self._num_layers)]

    def run(self, layerwise: bool) -> None:
        sent = 0  # leading blocks that are sent, all layers of them
        while sent < self._last:
            ready, step = self._wait(sent, layerwise)
            self._send_layers(range(self._num_layers), sent, ready)
            sent = ready
            if step:
                for layer in range(self._num_layers):
                    self._await_layer(step, layer)
                    self._send_layers(range(layer, layer + 1), sent, self._last, step)
                sent = self._last

    def _wait(self, sent: int, layerwise: bool) -> tuple[int, int]:
        """(leading blocks that may be sent, the step that writes all that are left, or 0), once there is something to be sent."""
        track, size, since, num_seen = self._track, self._shape.block_size, self._clock(), 0
        while True:
            with track.changed:
                if track.num_computed != num_seen:
                    num_seen, since = track.num_computed, self._clock()
                if track.gone is not None:
                    raise TransferError(track.gone)
                if track.num_computed >= self._num_tokens:
                    return self._last, 0
                full = track.num_computed // size
                if layerwise and track.step and track.num_coming >= self._num_tokens:
                    return max(sent, full), track.step
                if layerwise and full > sent:
                    return full, 0
                track.changed.wait(KEEP_ALIVE_S)
            self._keep_alive(since)

    def _await_layer(self, step: int, layer: int) -> None:
        since = self._clock()
        while not self._backend.wait_kv(step, layer, KEEP_ALIVE_S):
            with self._track.changed:
                if self._track.gone is not None:
                    raise TransferError(self._track.gone)
            self._keep_alive(since)

    def _keep_alive(self, since: float) -> None:
        if self._clock() - since > self._stall_s:
            raise TransferError(f"the prompt has made no progress for {self._stall_s:g} s")
        self._out.keep_alive()

    def _send_layers(self, layers: range, begin: int, end: int, step: int = 0) -> None:
        """``step``: it writes them, and has, of these layers."""
        for piece in self._pieces(layers, begin, end):
            self._send_piece(piece, step)

    def _pieces(self, layers: range, begin: int, end: int) -> Iterator[Piece]:
        """Blocks ``begin`` .. ``end`` - 1 of ``layers``, without what nobody reads: neighbouring layers together while they are small."""
        layer = layers.start
        while layer < layers.stop:
            first = max(begin, self._shape.first_block(layer, self._num_tokens))
            stop, num_bytes = layer, 0
            while stop < layers.stop and max(begin, self._shape.first_block(stop, self._num_tokens)) == first:
                num_bytes += self._layer_bytes[stop] * max(0, end - first)
                if stop > layer and num_bytes > PIECE_BYTES:
                    break
                stop += 1
            most = max(1, min(PIECE_BYTES, MAX_PIECE_BYTES) // sum(self._layer_bytes[layer:stop]))
            for block in range(first, end, most):
                yield Piece(layer, stop - layer, block, min(most, end - block))
            layer = stop

    def _send_piece(self, piece: Piece, step: int) -> None:
        num_bytes = piece.num_blocks * sum(self._layer_bytes[layer] for layer in piece.layers)
        data, since = self._out.buffer(num_bytes), self._clock()
        while not self._export(piece, data, step):
            self._wait_for_blocks(piece, since)
        self._out.send(piece, data)

    def _export(self, piece: Piece, data: memoryview, step: int) -> bool:
        """Whether the blocks were there, and the sequence's own until all was copied."""
        track, columns = self._track, self._shape.num_columns
        with track.changed:
            if track.gone is not None:
                raise TransferError(track.gone)
            if track.num_computed < self._num_needed(piece) and not (step and track.step == step):
                return False
            number, pages = track.number, track.pages[piece.first_block * columns : piece.blocks.stop * columns]
        self._backend.export_kv(piece.layers, pages, data, self._packed)
        with track.changed:
            return number == track.number

    def _wait_for_blocks(self, piece: Piece, since: float) -> None:
        """Its blocks were taken from it: they are computed again, or found again."""
        track = self._track
        with track.changed:
            track.changed.wait_for(lambda: track.gone is not None or track.num_computed >= self._num_needed(piece), KEEP_ALIVE_S)
        self._keep_alive(since)

    def _num_needed(self, piece: Piece) -> int:
        """Tokens whose KV its blocks hold, and those before it."""
        return min(piece.blocks.stop * self._shape.block_size, self._num_tokens)
