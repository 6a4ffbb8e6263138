"""A worker's part in hand-offs: carries out what the desk orders, and says what comes of it. The ``KVSide`` of a worker.

    sender      Submit ─▶ PromptStarted ─▶ (Send: a thread sends) ─▶ first token: held, Offered ─▶ Release | Resume
    receiver    Reserve ─▶ Reserved | NoRoom ─▶ (KV arrives) ─▶ Copied ─▶ Begin | Cancel

Messages come on the event loop's thread; all that touches the scheduler is done on the engine's, between two steps, in the order of the
messages. Sending touches tracks alone, and begins at once.
An order for a key that is not known (any more) does nothing: the desk may have sent it before it heard. Only a Begin whose KV has been
lost meanwhile is answered, by CopyFailed, since nobody else would go on.

Owns the tracks of what goes out and the port of what comes in; blocks and places are ``core.transfers``'.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from octavo.backends.kv_wire import moves_kv
from octavo.core.request import FinishReason, ParameterError, Request
from octavo.core.step import StepPlan
from octavo.distributed import shm_transport
from octavo.distributed.kv_port import KVPort, KVShape
from octavo.distributed.layer_sender import LayerSender, Track
from octavo.distributed.messages import (
    Begin,
    Cancel,
    Copied,
    CopyFailed,
    FromWorker,
    NoRoom,
    Offered,
    PromptStarted,
    Release,
    Reserve,
    Reserved,
    Resume,
    Send,
    Submit,
)
from octavo.distributed.tcp_transport import TcpTransport
from octavo.distributed.throttle import Throttle
from octavo.distributed.transport import MAX_PIECE_BYTES, Transport, TransportListener
from octavo.distributed.wire import check_token_ids
from octavo.distributed.worker import MakeKV
from octavo.distributed.worker_account import account_of
from octavo.distributed.worker_engine import KVMessage, WorkerEngine, engine_id
from octavo.engine.outputs import OutputEvent

logger = logging.getLogger("octavo.worker")


@dataclass(slots=True)
class _Going:
    """A request that is to be handed over. ``layerwise``: its KV is sent while it is computed. ``num_made``: output tokens it came with."""

    key: int
    request: Request
    layerwise: bool
    num_made: int
    track: Track
    started: bool = False  # its prompt has begun
    output_token_ids: list[int] | None = None  # once it is offered


@dataclass(slots=True)
class _Coming:
    """A request that room is reserved for. ``exact``: once its KV is there, whether to the bit."""

    request: Request
    exact: bool | None = None


class WorkerHandover:
    """``transports`` by name; ``host`` is what other workers reach this one by. OSError when its port cannot be opened."""

    def __init__(self, worker: WorkerEngine, transports: Mapping[str, Transport], host: str) -> None:
        engine, backend = worker.engine, moves_kv(worker.engine.backend)
        assert backend is not None, f"the {engine.backend.name} backend moves no KV"
        self._worker, self._engine = worker, engine
        self._ways = transports
        self._backend = backend
        self._shape = KVShape.of(engine.backend.kv_capacity(0).layout, backend.num_kv_layers, engine.config.cache.block_size)
        self._port = KVPort(backend, self._shape, self._copied, lambda key, reason: self._say(CopyFailed(key, reason)))
        self._sender = LayerSender(backend, self._shape)
        # On the engine's thread:
        self._going: dict[int, _Going] = {}  # by key
        self._coming: dict[int, _Coming] = {}
        self._listeners: dict[str, TransportListener] = {}
        self._host = ""
        self.address: str | None = None
        self.transports = list(transports)
        try:
            self.listen(host)
        except BaseException:
            self.close()
            raise
        engine.loop.step_hooks = self

    # --- KVSide ---------------------------------------------------------------------------------------------------------------------------

    def listen(self, host: str) -> None:
        """See ``KVSide``."""
        if host == self._host:
            return
        for name, transport in self._ways.items():
            if name in self._listeners:
                self._listeners.pop(name).close()
            self._listeners[name] = transport.listen(host, self._port)
        self._host, self.address = host, " ".join(f"{name}={listener.address}" for name, listener in self._listeners.items())

    def submitted(self, message: Submit, request: Request) -> None:
        ticket = message.ticket
        if ticket is not None and request.params.n == 1 and request.params.beam is None:
            track = Track(len(request.prompt_token_ids) + len(message.output_token_ids))
            going = _Going(message.key, request, ticket.layerwise, len(message.output_token_ids), track)
            self._going[message.key] = going

    def take(self, message: KVMessage) -> None:
        key = message.key
        match message:
            case Reserve():
                self._do(lambda: self._reserve(message))
            case Send():
                self._send(message)
            case Begin():
                self._begin(message)
            case Release():
                self._worker.leave(key)
                self._do(lambda: self._release(key))
            case Cancel():
                self._do(lambda: self._cancel(key))
            case Resume():
                self._do(lambda: self._resume(key))

    def dropped(self, keys: Sequence[int]) -> None:
        self._do(lambda: self._drop(keys))

    def dropped_all(self) -> None:
        self._do(lambda: self._drop([*self._going, *self._coming]))

    def close(self) -> None:
        for listener in self._listeners.values():
            listener.close()
        for going in list(self._going.values()):
            going.track.drop("the worker is shutting down")

    def _do(self, action: Callable[[], object]) -> None:
        """On the engine's thread, before the next step."""

        def act() -> list[OutputEvent]:
            action()
            return []

        self._worker.thread.post(act)

    def _say(self, message: FromWorker) -> None:
        """From any thread."""
        self._worker.tell(message)

    # --- sender ---------------------------------------------------------------------------------------------------------------------------

    def _send(self, message: Send) -> None:
        """On the event loop's thread: it does not wait for the step that computes what is to be sent."""
        going, way = self._going.get(message.key), self._ways.get(message.transport)
        if going is None:
            return
        if way is None:
            self._say(CopyFailed(message.key, f"transport: {message.transport!r} is not allowed; one of {', '.join(self._ways)}"))
            return
        head = self._sender.head(message.key, going.track, message.wire_dtype, message.checksum)
        self._sender.start(
            going.track, head, lambda: way.connect(message.kv_address, head), going.layerwise,
            lambda reason: self._say(CopyFailed(message.key, reason)),
        )  # fmt: skip

    def _release(self, key: int) -> None:
        going = self._going.get(key)
        if going is not None and going.output_token_ids is not None:
            self._forget(going, "it has been handed over")
            self._engine.release(going.request.request_id)

    def _resume(self, key: int) -> None:
        """It runs on here, or, before its first token, is not to be held."""
        going = self._going.get(key)
        if going is not None:
            self._forget(going, "it is not handed over")
            if going.output_token_ids is not None:
                self._engine.loop.resume(going.request, going.output_token_ids)

    def after_step(self, events: list[OutputEvent]) -> None:
        for going in list(self._going.values()):
            if going.output_token_ids is not None:
                continue
            self._tell(going, 0)
            seq = self._engine.scheduler.transfers.sender_sequence(going.request.request_id)
            if seq is None:  # ended with its first token, or before
                self._forget(going, "the request has ended")
            elif seq.num_output_tokens > going.num_made:
                going.output_token_ids = self._engine.loop.offer(going.request.request_id)
                offered = Offered(going.key, going.output_token_ids)
                self._do(lambda said=offered: self._worker.thread.tell(self._offer, said))  # type: ignore[misc]  # behind its token's event

    def _offer(self, offered: Offered) -> None:
        """On the event loop's thread."""
        account = account_of(self._engine, engine_id(offered.key))
        self._say(msgspec.structs.replace(offered, account=account))

    def planned(self, plan: StepPlan) -> None:
        """See ``StepHooks``."""
        step = self._backend.next_kv_step() if self._going and plan.slices else 0
        for going in self._going.values():
            if going.output_token_ids is None and self._tell(going, step) and not going.started:
                going.started = True
                self._say(PromptStarted(going.key))

    def _tell(self, going: _Going, step: int) -> bool:
        """Tell the track where its sequence is; whether the plan in flight has a part of it. ``step``: of that plan, 0: there is none."""
        transfers = self._engine.scheduler.transfers
        seq = transfers.sender_sequence(going.request.request_id)
        if seq is None:
            going.track.drop("the request has ended")
            return False
        pages = transfers.pages_of(seq.block_table, self._shape.num_columns)
        num_coming = seq.num_computed + seq.num_scheduled if step else 0
        going.track.moved(pages, transfers.num_there(seq), step if seq.num_scheduled else 0, num_coming)
        return seq.num_scheduled > 0

    def _forget(self, going: _Going, reason: str) -> None:
        del self._going[going.key]
        going.track.drop(reason)

    # --- receiver -------------------------------------------------------------------------------------------------------------------------

    def _reserve(self, message: Reserve) -> None:
        transfers, key, wire = self._engine.scheduler.transfers, message.key, message.request
        request = wire.request(engine_id(key), self._engine.clock.now())
        try:
            wire.check(self._engine.backend.vocab_size)
            self._worker.check_fits(request)
            blocks = self._engine.reserve(request, message.num_tokens)
        except ParameterError as error:
            self._say(NoRoom(key, str(error)))
            return
        if blocks is None:
            self._say(NoRoom(key))
            return
        self._coming[key] = _Coming(request)
        self._port.expect(key, message.num_tokens, transfers.pages_of(blocks, self._shape.num_columns))
        self._say(Reserved(key))

    def _copied(self, key: int, exact: bool) -> None:
        """On a transport's thread."""

        coming = self._coming.get(key)
        if coming is not None:
            coming.exact = exact
            self._say(Copied(key))

    def _begin(self, message: Begin) -> None:
        """On the event loop's thread: its events are to be this worker's from the first on."""
        key = message.key

        def begin() -> list[OutputEvent]:
            coming = self._coming.get(key)
            if coming is None or coming.exact is None:
                self._say(CopyFailed(key, "its KV is not here any more"))
                return []
            self._end_coming(key)
            try:
                check_token_ids("output_token_ids", message.output_token_ids, self._engine.backend.vocab_size)
                self._engine.begin(coming.request, message.output_token_ids, coming.exact)
            except ParameterError as error:  # the front end wants what was not reserved: its fault is not to end this engine
                self._engine.scheduler.transfers.cancel(coming.request.request_id)
                self._say(CopyFailed(key, str(error)))
            return []

        self._worker.adopt(key)
        self._worker.thread.post(begin)

    def _cancel(self, key: int) -> None:
        coming = self._end_coming(key)
        if coming is not None:
            self._engine.scheduler.transfers.cancel(coming.request.request_id)

    def _end_coming(self, key: int) -> _Coming | None:
        """When this returns nothing is written to its blocks any more."""
        self._port.cancel(key)
        return self._coming.pop(key, None)

    # --- both -----------------------------------------------------------------------------------------------------------------------------

    def _drop(self, keys: Sequence[int]) -> None:
        """What is offered or reserved of them is given back; what runs is the engine's to abort."""
        for key in keys:
            self._cancel(key)
            going = self._going.get(key)
            if going is not None:
                self._forget(going, "nobody wants it any more")
                if going.output_token_ids is not None:
                    self._engine.release(going.request.request_id)
                    self._worker.thread.tell(self._worker.tell_aborted, [going.request.request_id])

    def failed(self, message: str) -> list[OutputEvent]:
        """See ``StepHooks``."""
        events = []
        for going in list(self._going.values()):
            self._forget(going, message)
            if going.output_token_ids is not None:
                self._engine.timeline.released(going.request.request_id)
                name = going.request.request_id
                events.append(OutputEvent(name, 0, "", [], finish_reason=FinishReason.ERROR, error=message))
        for key in list(self._coming):
            self._end_coming(key)
            self._say(CopyFailed(key, message))
        return events


def handing_over(secret: bytes, throttle: Throttle | None = None, port: int = 0) -> MakeKV:
    """What makes a worker's part in hand-offs, by shared memory and TCP, for workers that share ``secret``. Nothing is made for a backend
    whose KV stays where it is, or for blocks that no piece can hold: such a worker runs whole requests. ``throttle``: for measurements.
    ``port``: for TCP (0: any)."""

    def make(worker: WorkerEngine, host: str) -> WorkerHandover | None:
        kv = moves_kv(worker.engine.backend)
        if kv is None:
            logger.warning("the %s backend moves no KV to other workers", worker.engine.backend.name)
            return None
        most = max((kv.wire_layer_bytes(layer) for layer in range(kv.num_kv_layers)), default=0)
        if most > MAX_PIECE_BYTES:
            size = worker.engine.config.cache.block_size
            limit = f"a layer of a block has {most} bytes, and at most {MAX_PIECE_BYTES} go at a time"
            logger.warning("block_size: %d is too large for KV to go to other workers; %s", size, limit)
            return None
        transports: dict[str, Transport] = {"tcp": TcpTransport(secret, throttle, port=port)}
        if shm_transport.is_available():
            transports["shm"] = shm_transport.ShmTransport(secret, throttle)
        return WorkerHandover(worker, transports, host)

    return make
