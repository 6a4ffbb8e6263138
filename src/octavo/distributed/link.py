"""One worker that is connected to a front end: what is known of it, and the questions to it that wait for an answer."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from octavo.distributed.channel import Channel
from octavo.distributed.fleet import Worker
from octavo.distributed.kv_ways import KVPlace
from octavo.distributed.messages import Answer, Ask, FromWorker, Load, Ready, shown_reason
from octavo.distributed.told_load import ToldLoad

MAX_QUESTIONS = 64  # without an answer


class AskError(RuntimeError):
    """A worker did not answer, or could not; the message says why."""


@dataclass(slots=True, eq=False)
class Link:
    """One worker that is connected. ``kv``: where it takes KV. ``view``: as routers see it. ``keys``: attempts that it has. ``is_leaving``:
    it was told to end, so that its end is nobody's fault. ``wants_to_leave``: it said Goodbye. ``is_refused``: it may not join.
    ``has_begun_keys``: it has told its whole prefix cache anew. ``heard_s``: when its channel had got something last, at the last look."""

    channel: Channel[FromWorker]
    worker: Worker
    ready: Ready | None = None
    kv: KVPlace = KVPlace({}, ())
    view: ToldLoad = field(default_factory=lambda: ToldLoad(-1))
    load: Load = field(default_factory=Load)
    keys: set[int] = field(default_factory=set)
    is_leaving: bool = False
    wants_to_leave: bool = False
    is_refused: bool = False
    has_begun_keys: bool = False
    heard_s: float = 0.0
    _questions: dict[int, asyncio.Future[bytes]] = field(default_factory=dict)  # by number

    @property
    def name(self) -> str:
        return self.worker.name

    @property
    def index(self) -> int:
        return self.worker.index

    @property
    def takes_requests(self) -> bool:
        return self.worker.takes_requests and not self.is_leaving

    # --- questions ----------------------------------------------------------------------------------------------------------------------

    async def ask(self, number: int, what: str, args: bytes, timeout_s: float) -> bytes:
        """The answer, as JSON. ``number``: of no other question to any process of this worker; ``args``: JSON. Raises AskError."""
        if len(self._questions) >= MAX_QUESTIONS:
            raise AskError(f"worker {self.name} has {MAX_QUESTIONS} questions to answer already")
        answer = self._questions[number] = asyncio.get_running_loop().create_future()
        try:
            self.channel.send(Ask(number, what, args))
            return await asyncio.wait_for(answer, timeout_s)
        except TimeoutError:
            raise AskError(f"worker {self.name} has not answered within {timeout_s:g} s") from None
        finally:
            del self._questions[number]

    def answered(self, message: Answer) -> None:
        """What nobody has asked, or waits for any more, changes nothing."""
        answer = self._questions.get(message.number)
        if answer is None or answer.done():
            return
        if message.error is None:
            answer.set_result(message.body)
        else:
            answer.set_exception(AskError(f"worker {self.name}: {shown_reason(message.error)}"))

    def leave_unanswered(self) -> None:
        """It is gone: whoever waits for an answer is told."""
        for question in self._questions.values():
            if not question.done():
                question.set_exception(AskError(f"worker {self.name} is gone"))
