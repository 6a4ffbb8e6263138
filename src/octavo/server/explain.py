"""Where the time of requests went, over HTTP: of one answer by its id, of the last or slowest ones, and of all over a window.

Owns which requests of the engine an answer's id stands for, those of the last ones, and the stamps of what is written to clients. What is
told is the engine's (``serving.Reports``). No text of anybody is in it; that a prompt is cached for others is told with --explain-cache
alone.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import parse_qs

from octavo.core.recorded_window import OBJECTIVES
from octavo.core.request import Request
from octavo.engine.outputs import OutputEvent
from octavo.engine.replay_advice import ReplayError
from octavo.engine.serving import ReplayUnavailable, Reports, ServingEngine
from octavo.engine.step_window import MAX_WINDOW_S
from octavo.server.asgi import Message, Send
from octavo.server.errors import APIError, invalid

HELD_UP_S = 0.002  # a write takes microseconds; one that takes so long was held up by its client
MAX_LISTED = 100
MAX_STEPS_SHOWN = 512


class Delivery:
    """The writes of one answer: passes messages on and stamps them. ``made`` and ``sent`` for streams; ``done`` ends any answer."""

    def __init__(self, engine: ServingEngine, requests: Sequence[Request], send: Send) -> None:
        self._engine, self._clock, self._send = engine, engine.clock, send
        self._num_open = {request.request_id: request.params.n for request in requests}
        self._ended: list[str] = []  # requests whose last event is in what is written next

    async def send(self, message: Message) -> None:
        begin_s = self._clock.now()
        await self._send(message)
        end_s = self._clock.now()
        if end_s - begin_s > HELD_UP_S:
            self._engine.blocked((*self._num_open, *self._ended), begin_s, end_s)

    def made(self, event: OutputEvent) -> None:
        """The event's chunk will be in the next write."""
        if event.finish_reason is not None and event.request_id in self._num_open:
            self._num_open[event.request_id] -= 1
            if not self._num_open[event.request_id]:
                del self._num_open[event.request_id]
                self._ended.append(event.request_id)

    def sent(self) -> None:
        """What was made has been written."""
        if self._ended:
            ended, self._ended = self._ended, []
            now_s = self._clock.now()
            for request_id in ended:
                self._engine.delivered((request_id,), now_s)

    def done(self) -> None:
        """The whole answer has been written."""
        self._engine.delivered((*self._num_open, *self._ended), self._clock.now())


class Explainer:
    """The accounts of ``reports`` by the ids of answers."""

    def __init__(self, engine: ServingEngine, reports: Reports) -> None:
        self._engine = engine
        self._reports = reports
        self._running: dict[str, tuple[str, ...]] = {}  # an answer's id -> the engine's requests, one a prompt
        self._ended: OrderedDict[str, tuple[str, ...]] = OrderedDict()  # likewise, of answers that have ended, the oldest first
        self._num_ended = 0  # requests of those

    @contextlib.contextmanager
    def answering(self, response_id: str, requests: Sequence[Request]) -> Iterator[None]:
        """While an answer is made; it is known from then on, as long as the engine remembers its requests. A client may use one id again:
        then it is the last one's."""
        ids = tuple(request.request_id for request in requests)
        self._num_ended -= len(self._ended.pop(response_id, ()))
        self._running[response_id] = ids
        try:
            yield
        finally:
            if self._running.get(response_id) is ids:
                self._ended[response_id] = self._running.pop(response_id)
                self._num_ended += len(ids)
                self._forget()

    def _forget(self) -> None:
        """Answers so old that the engine has forgotten their requests: as many ended after them as it remembers."""
        while self._num_ended - len(next(iter(self._ended.values()))) >= self._engine.num_remembered:
            self._num_ended -= len(self._ended.popitem(last=False)[1])

    def delivery(self, requests: Sequence[Request], send: Send) -> Delivery:
        return Delivery(self._engine, requests, send)

    async def of_id(self, given: str) -> dict[str, Any]:
        """By an answer's id. Raises APIError 404 for one that is unknown, or older than what is remembered."""
        found = await self.of_call(given)
        if found is None:
            remembered = f"the last {self._engine.num_remembered} that ended and those that run are remembered"
            raise APIError(404, f"request_id: {given!r:.200} is not the id of an answer; {remembered}", "request_id", "request_not_found")
        return {"id": given, "object": "request.explanation"} | found

    async def of_call(self, response_id: str) -> dict[str, Any] | None:
        """The account of an answer; None when nothing is known."""
        request_ids = self._running.get(response_id) or self._ended.get(response_id)
        return None if request_ids is None else await self._reports.account(request_ids)

    async def listed(self, query: bytes) -> dict[str, Any]:
        """Answers by ``sort``: the recent or the slowest, at most ``limit``, of a ``state``."""
        fields = _query(query, {"sort": "recent", "limit": "10", "state": "all"})
        limit = _whole_number("limit", fields["limit"], 1, MAX_LISTED)
        _one_of("sort", fields["sort"], ("recent", "slowest"))
        _one_of("state", fields["state"], ("all", "running", "finished"))
        found = await self._reports.answers({**self._ended, **self._running}, fields["sort"], limit, fields["state"])
        return {"object": "list", "data": found}

    async def summary(self, query: bytes) -> dict[str, Any]:
        """What holds the percentiles of the last ``seconds``, what would help, the engine now, and its last ``steps``. With ``advice``
        replay, which takes seconds, what a replay of the window says would help ``objective``; else what the last one said, if any."""
        fields = _query(query, {"seconds": "60", "steps": "0", "advice": "rules", "objective": OBJECTIVES[0]})
        window_s = float(_whole_number("seconds", fields["seconds"], 1, MAX_WINDOW_S))
        num_steps = _whole_number("steps", fields["steps"], 0, MAX_STEPS_SHOWN)
        objective = fields["objective"]
        _one_of("advice", fields["advice"], ("rules", "replay"))
        _one_of("objective", objective, OBJECTIVES)
        if fields["advice"] == "replay":
            await self._replay(window_s)
        return {"object": "explain.summary"} | await self._reports.summary(window_s, num_steps, objective)

    async def _replay(self, window_s: float) -> None:
        """Have the window replayed. Raises APIError when that cannot be done."""
        try:
            await self._reports.replay(window_s)
        except ReplayUnavailable as error:
            raise APIError(501, f"advice: 'replay' is not allowed; {error}", "advice", "no_simulator") from None
        except ReplayError as error:
            raise APIError(409, f"advice: the window cannot be replayed: {error}", "advice", "not_replayable") from None


def _query(query: bytes, defaults: dict[str, str]) -> dict[str, str]:
    """The fields of a query string, each at most once. Raises APIError 400 that names the field at fault."""
    given = parse_qs(query.decode("latin-1"), keep_blank_values=True)
    for name, values in given.items():
        if name not in defaults:
            raise invalid(f"{name:.80}: it is no parameter of this route; there are: {', '.join(defaults)}", name[:80])
        if len(values) > 1:
            raise invalid(f"{name}: it is given {len(values)} times; once is allowed", name)
    return defaults | {name: values[0] for name, values in given.items()}


def _whole_number(name: str, text: str, least: int, most: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10 and least <= int(text) <= most):
        raise invalid(f"{name}: {text[:80]!r} is not allowed; a whole number from {least} to {most}", name)
    return int(text)


def _one_of(name: str, text: str, allowed: tuple[str, ...]) -> None:
    if text not in allowed:
        raise invalid(f"{name}: {text[:80]!r} is not allowed; one of {', '.join(allowed)}", name)
