"""A worker's part in hand-offs: carries out what the desk orders, and says what comes of it.

    sender      submitted ─▶ PromptStarted ─▶ (Send: a thread sends) ─▶ first token: held, Offered ─▶ Release | Resume
    receiver    Reserve ─▶ Reserved | NoRoom ─▶ (KV arrives) ─▶ Copied ─▶ Begin | Cancel

Everything but what transports call happens on the thread that steps, between two steps, so that the scheduler is never touched by two. An
order for a key that is not known (any more) does nothing: the desk may have sent it before it heard.

Owns the tracks of what goes out and the port of what comes in; blocks and places are ``core.transfers``'. A backend whose KV cannot be moved
has no part in this, and says so: ``can_hand_over``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from octavo.backends.kv_wire import moves_kv
from octavo.core.request import FinishReason, ParameterError, Request
from octavo.core.step import StepPlan
from octavo.distributed.kv_port import KVPort, KVShape
from octavo.distributed.layer_sender import LayerSender, Track
from octavo.distributed.messages import Copied, CopyFailed, Message, NoRoom, Offered, PromptStarted, Reserved
from octavo.distributed.transport import Transport, TransportListener
from octavo.engine.engine import Engine
from octavo.engine.outputs import OutputEvent

Post = Callable[[Callable[[], list[OutputEvent]]], None]
"""Have something done by the thread that steps, before the next step."""


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


class WorkerHandover:
    """``say`` sends a message to the desk, from any thread; ``post`` is the engine thread's. ``transports`` by name.

    Messages that follow an event, an ``Offered`` its first token, wait in ``said_after_events`` for whoever sends that step's events.
    """

    def __init__(
        self, engine: Engine, transports: Mapping[str, Transport], say: Callable[[Message], None], post: Post, checksum: str = "none"
    ) -> None:
        self.said_after_events: deque[Message] = deque()
        self._engine, self._transports, self._say, self._post, self._checksum = engine, transports, say, post, checksum
        self._going: dict[str, _Going] = {}  # by request id
        self._coming: dict[int, Request] = {}  # by key, while there is room reserved
        self._exact: dict[int, bool] = {}  # of those that have come
        self._listeners: dict[str, TransportListener] = {}
        backend = moves_kv(engine.backend)
        self.can_hand_over = backend is not None
        if backend is not None:
            shape = KVShape.of(engine.backend.kv_capacity(0).layout, backend.num_kv_layers, engine.config.cache.block_size)
            self._shape = shape
            self._port = KVPort(backend, shape, self._copied, lambda key, reason: say(CopyFailed(key, reason)))
            self._sender = LayerSender(backend, shape)
            self._backend = backend
            engine.step_hooks = self

    def listen(self, host: str) -> dict[str, str]:
        """Open this worker's port at ``host``, for every transport; addresses by transport. OSError when that cannot be."""
        if self.can_hand_over:
            for name, transport in self._transports.items():
                self._listeners[name] = transport.listen(host, self._port)
        return {name: listener.address for name, listener in self._listeners.items()}

    def close(self) -> None:
        """End all transfers. The engine's requests are its own business."""
        for listener in self._listeners.values():
            listener.close()
        for going in self._going.values():
            going.track.drop("the worker is shutting down")

    @property
    def num_offered(self) -> int:
        return sum(going.output_token_ids is not None for going in self._going.values())

    @property
    def num_reserved(self) -> int:
        return len(self._coming)

    # --- sender, on the engine's thread ---------------------------------------------------------------------------------------------------

    def ticketed(self, key: int, request: Request, layerwise: bool, num_made: int = 0) -> None:
        """``request``, just queued, is to be handed over when it has drawn its first token, or, with ``num_made`` tokens from elsewhere, its
        next. One of several choices, or of beams, runs on here."""
        if self.can_hand_over and request.params.n == 1 and request.params.beam is None:
            track = Track(len(request.prompt_token_ids) + num_made)
            self._going[request.request_id] = _Going(key, request, layerwise, num_made, track)

    def send(self, key: int, address: str, transport: str, wire_dtype: str) -> None:
        """Bring its KV to ``address``."""
        going = self._find(key)
        if going is None:
            return
        way = self._transports.get(transport)
        if way is None:
            self._say(CopyFailed(key, f"transport: {transport!r} is not allowed; one of {', '.join(self._transports)}"))
            return
        self._sender.start(
            key,
            going.track,
            lambda head: way.connect(address, head),
            going.layerwise,
            wire_dtype,
            self._checksum,
            lambda reason: self._say(CopyFailed(key, reason)),
        )

    def release(self, key: int) -> None:
        """Somebody else runs it: its blocks are free."""
        going = self._find(key)
        if going is None or going.output_token_ids is None:
            return
        self._forget(going, "it has been handed over")
        self._engine.scheduler.transfers.release(going.request.request_id)
        self._engine.timeline.handed_over(going.request.request_id)

    def resume(self, key: int) -> None:
        """It runs on here, or, before its first token, is not to be held."""
        going = self._find(key)
        if going is None:
            return
        self._forget(going, "it is not handed over")
        if going.output_token_ids is not None:
            self._engine.loop.resume(going.request, going.output_token_ids)

    # --- receiver, on the engine's thread -------------------------------------------------------------------------------------------------

    def reserve(self, key: int, request: Request, num_tokens: int) -> None:
        """Room for its KV, if there is."""
        transfers = self._engine.scheduler.transfers
        if not self.can_hand_over:
            self._say(NoRoom(key, f"the {self._engine.backend.name} backend cannot take KV from elsewhere"))
            return
        try:
            blocks = transfers.reserve(request, num_tokens)
        except ParameterError as error:
            self._say(NoRoom(key, str(error)))
            return
        if blocks is None:
            self._say(NoRoom(key))
            return
        self._coming[key] = request
        self._port.expect(key, num_tokens, transfers.pages_of(blocks, self._shape.num_columns))
        self._say(Reserved(key))

    def begin(self, key: int, output_token_ids: list[int]) -> list[OutputEvent]:
        """Its KV is there: it runs. An error event when it is not."""
        request, exact = self._coming.get(key), self._exact.get(key)
        if request is None or exact is None:
            return []
        self._end_coming(key)
        try:
            self._engine.loop.begin(request, output_token_ids, exact)
        except ParameterError as error:
            self._engine.scheduler.transfers.cancel(request.request_id)
            return [_ended(request, f"the hand-off could not be taken over: {error}")]
        self._engine.metrics.request_added(request)
        return []

    def cancel(self, key: int) -> None:
        """It does not come. When this returns nothing is written to its blocks any more."""
        request = self._end_coming(key)
        if request is not None:
            self._engine.scheduler.transfers.cancel(request.request_id)

    def _end_coming(self, key: int) -> Request | None:
        if key in self._coming:
            self._port.cancel(key)
        self._exact.pop(key, None)
        return self._coming.pop(key, None)

    def _copied(self, key: int, exact: bool) -> None:
        """On a transport's thread."""

        def arrived() -> list[OutputEvent]:
            if key in self._coming:
                self._exact[key] = exact
                self._say(Copied(key))
            return []

        self._post(arrived)

    # --- both -----------------------------------------------------------------------------------------------------------------------------

    def abort(self, key: int) -> None:
        """Nobody wants it any more: what is offered or reserved of it is given back. Running requests are aborted elsewhere."""
        self.cancel(key)
        going = self._find(key)
        if going is not None:
            self._forget(going, "the request was aborted")
            if going.output_token_ids is not None:
                self._engine.scheduler.transfers.release(going.request.request_id)
                self._engine.timeline.handed_over(going.request.request_id)

    def _find(self, key: int) -> _Going | None:
        return next((going for going in self._going.values() if going.key == key), None)

    def _forget(self, going: _Going, reason: str) -> None:
        del self._going[going.request.request_id]
        going.track.drop(reason)

    # --- StepHooks ------------------------------------------------------------------------------------------------------------------------

    def before_execute(self, plan: StepPlan) -> None:
        step = self._backend.next_kv_step() if self._going and plan.slices else 0
        for going in self._going.values():
            if self._tell(going, step) and not going.started:
                going.started = True
                self._say(PromptStarted(going.key))

    def after_step(self) -> None:
        for going in list(self._going.values()):
            if going.output_token_ids is not None:
                continue
            self._tell(going, 0)
            seq = self._engine.scheduler.transfers.sender_sequence(going.request.request_id)
            if seq is None:  # ended with its first token, or before
                self._forget(going, "the request has ended")
            elif seq.num_output_tokens > going.num_made:
                going.output_token_ids = self._engine.loop.offer(going.request.request_id)
                self.said_after_events.append(Offered(going.key, going.output_token_ids))

    def _tell(self, going: _Going, step: int) -> bool:
        """Tell the track where its sequence is; whether the plan in flight has a part of it."""
        transfers = self._engine.scheduler.transfers
        seq = transfers.sender_sequence(going.request.request_id)
        if seq is None:
            going.track.drop("the request has ended")
            return False
        pages = transfers.pages_of(seq.block_table, self._shape.num_columns)
        in_flight = step if seq.num_scheduled else 0
        going.track.moved(pages, seq.num_computed, in_flight, seq.num_computed + seq.num_scheduled if in_flight else 0)
        return seq.num_scheduled > 0

    def failed(self, message: str) -> list[OutputEvent]:
        events = []
        for going in list(self._going.values()):
            self._forget(going, message)
            if going.output_token_ids is not None:
                self._engine.timeline.handed_over(going.request.request_id)
                events.append(_ended(going.request, message))
        for key in list(self._coming):
            self._end_coming(key)
            self._say(CopyFailed(key, message))
        return events


def _ended(request: Request, message: str) -> OutputEvent:
    return OutputEvent(request.request_id, 0, "", [], finish_reason=FinishReason.ERROR, error=message)
