"""Workers of a tiny model in one process, with a desk that hands over between them: all but the control channels is real."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from collections.abc import Set as AbstractSet
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from octavo.core.request import FinishReason, SamplingParams
from octavo.distributed.handoff import HandoffLimits
from octavo.distributed.handover import HandoverDesk, Moving, Order, OrderKind
from octavo.distributed.kv_ways import addresses_of
from octavo.distributed.messages import (
    Begin,
    Cancel,
    Copied,
    CopyFailed,
    Event,
    Events,
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
    Ticket,
    WireRequest,
)
from octavo.distributed.transport import Transport
from octavo.distributed.worker_engine import WorkerEngine
from octavo.distributed.worker_handover import WorkerHandover
from octavo.engine.engine import Engine
from octavo.engine.llm import make_config

SENDER, RECEIVER = 0, 1
LIMITS = HandoffLimits(reserve_s=600.0, copy_s=600.0)  # a busy machine is no reason to give up


class Answer:
    """What a client has got of one request."""

    def __init__(self, request: WireRequest) -> None:
        self.request = request
        self.token_ids: list[int] = []
        self.text = ""
        self.logprobs: list[float] = []
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None
        self.by: list[int] = []  # the workers that its events came from, in order
        self.over = False

    def take(self, worker: int, event: Event) -> None:
        assert self.finish_reason is None, "an event after the last"
        self.token_ids += event.token_ids
        self.text += event.text
        self.logprobs += [entry.logprob for entry in event.logprobs or ()]
        if self.by[-1:] != [worker]:
            self.by.append(worker)
        if event.finish_reason is not None:
            self.finish_reason, self.error = event.finish_reason, event.error
            self.over = True


class Cluster:
    """``order_hook`` sees every order before it is sent; False: it is lost."""

    def __init__(self, engines: list[Engine], transports: Callable[[], dict[str, Transport]], transport: str, wire_dtype: str) -> None:
        self.desk: HandoverDesk[int] = HandoverDesk(LIMITS, self._choose)
        self.said: list[tuple[int, FromWorker]] = []
        self.answers: dict[int, Answer] = {}
        self.order_hook: Callable[[Order[int]], bool] = lambda order: True
        self.fault: BaseException | None = None
        self._transport, self._wire_dtype = transport, wire_dtype
        self.workers: list[WorkerEngine] = []
        self.sides: list[WorkerHandover] = []
        for index, engine in enumerate(engines):

            def send(message: FromWorker, worker: int = index) -> None:
                try:
                    self._take(worker, message)
                except BaseException as error:
                    self.fault = self.fault or error
                    raise

            worker = WorkerEngine(engine, send, lambda reason: None)
            side = WorkerHandover(worker, transports(), "127.0.0.1")
            worker.kv = side
            self.workers.append(worker)
            self.sides.append(side)

    def _choose(self, moving: Moving[int], away: AbstractSet[int]) -> int | None:
        return None if RECEIVER in away else RECEIVER

    def submit(
        self, prompt: list[int], params: SamplingParams, layerwise: bool = True, ticket: bool = True, worker: int = SENDER
    ) -> Answer:
        key = len(self.answers) + 1
        engine = self.workers[worker].engine
        prepared = engine.prepare(prompt, params, f"r{key}")
        answer = self.answers[key] = Answer(WireRequest.of(prepared.request))
        self.workers[worker].submit(Submit(key, answer.request, ticket=Ticket(layerwise) if ticket else None))
        return answer

    def abort(self, key: int) -> None:
        """The client has gone."""
        self._follow(self.desk.withdraw(key, time.monotonic()))
        for worker in self.workers:
            worker.abort([key])

    def key_of(self, answer: Answer) -> int:
        return next(key for key, one in self.answers.items() if one is answer)

    def _take(self, worker: int, message: FromWorker) -> None:
        now = time.monotonic()
        self.said.append((worker, message))
        match message:
            case Events():
                for event in message.events:
                    if event.finish_reason is FinishReason.ABORT:
                        continue  # ``abort`` has ended it: this has its account alone
                    self.answers[event.key].take(worker, event)
                    if event.finish_reason is not None:
                        self._follow(self.desk.withdraw(event.key, now))
            case PromptStarted():
                num_tokens = len(self.answers[message.key].request.prompt_token_ids)
                self.desk.offered(message.key, message.key, worker, num_tokens, num_tokens, now)
            case Offered():
                self._follow(self.desk.drew(message.key, message.output_token_ids, now))
            case Reserved():
                self._follow(self.desk.reserved(message.key, worker, now))
            case NoRoom():
                self._follow(self.desk.no_room(message.key, worker, now, message.reason is not None))
            case Copied():
                self._follow(self.desk.copied(message.key, now))
            case CopyFailed():
                self._follow(self.desk.failed(message.key, message.reason, now))
        self._follow(self.desk.tick(now))
        self.desk.check_invariants()

    def _follow(self, orders: list[Order[int]]) -> None:
        for order in orders:
            if self.order_hook(order):
                side, key = self.sides[order.worker], order.moving.key
                side.take(self._message(order, key))

    def _message(self, order: Order[int], key: int) -> Any:
        if order.kind is OrderKind.RESERVE:
            return Reserve(key, self.answers[key].request, order.moving.num_tokens)
        if order.kind is OrderKind.SEND:
            address = addresses_of(self.sides[RECEIVER].address or "")[self._transport]
            return Send(key, address, self._transport, self._wire_dtype)
        if order.kind is OrderKind.BEGIN:
            return Begin(key, order.moving.output_token_ids)
        return {OrderKind.RELEASE: Release, OrderKind.CANCEL: Cancel, OrderKind.RESUME: Resume}[order.kind](key)

    def heard(self, kind: type[FromWorker]) -> list[tuple[int, Any]]:
        return [(worker, message) for worker, message in self.said if isinstance(message, kind)]

    async def until(self, condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():
                if self.fault is not None:
                    raise self.fault
                await asyncio.sleep(0.002)

    async def answered(self, *answers: Answer) -> None:
        await self.until(lambda: all(answer.over for answer in answers))

    async def quiet(self) -> None:
        """Nothing is left anywhere: no block, no place, no transfer."""

        def is_quiet() -> bool:
            schedulers = [worker.engine.scheduler for worker in self.workers]
            return not len(self.desk) and all(
                not s.has_work and not s.num_used_blocks and not s.num_reserved and not s.num_offered for s in schedulers
            )

        await self.until(is_quiet)
        for worker, side in zip(self.workers, self.sides, strict=True):
            worker.engine.scheduler.check_invariants()
            assert not side._going and not side._coming and not len(side._port), "something is kept"


@asynccontextmanager
async def running(
    engines: list[Engine], transports: Callable[[], dict[str, Transport]], transport: str = "shm", wire_dtype: str = "auto"
) -> AsyncIterator[Cluster]:
    cluster = Cluster(engines, transports, transport, wire_dtype)
    for worker in cluster.workers:
        worker.thread.start()
        worker.begin_connection()
    try:
        yield cluster
    finally:
        for worker in cluster.workers:
            await worker.close()


def tiny_engine(path: Path, **options: Any) -> Engine:
    return Engine.load(make_config(str(path), **{"num_kv_blocks": 96, "max_num_seqs": 8, "threads": 1, **options}))
