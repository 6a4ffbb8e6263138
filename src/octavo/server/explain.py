"""Where the time of requests went, over HTTP: of one answer by its id, of the last or slowest ones, and of all over a window.

Owns which requests of the engine an answer's id stands for, those of the last ones, and the stamps of what is written to clients. The
accounts are ``engine.explain``'s, the advice is an ``Advisor``'s. No text of anybody is in them; that a prompt is cached for others is told
with --explain-cache alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from urllib.parse import parse_qs

from octavo.core.recorded_window import OBJECTIVES
from octavo.core.request import Request
from octavo.engine.advice import Advisor, RuleAdvisor
from octavo.engine.engine import Engine
from octavo.engine.explain import Explanation, explain, summarise
from octavo.engine.outputs import OutputEvent
from octavo.engine.replay_advice import ReplayAdvisor, Replayer, ReplayError
from octavo.engine.request_record import RequestRecord
from octavo.engine.step_window import MAX_WINDOW_S
from octavo.server.asgi import Message, Send
from octavo.server.errors import APIError, invalid

HELD_UP_S = 0.002  # a write takes microseconds; one that takes so long was held up by its client
MAX_LISTED = 100
MAX_ADVISED = 256  # requests of a window that the rules look at, about
MAX_STEPS_SHOWN = 512


class Delivery:
    """The writes of one answer: passes messages on and stamps them. ``made`` and ``sent`` for streams; ``done`` ends any answer."""

    def __init__(self, engine: Engine, requests: Sequence[Request], send: Send) -> None:
        self._timeline, self._clock, self._send = engine.timeline, engine.clock, send
        self._num_open = {request.request_id: request.params.n for request in requests}
        self._ended: list[str] = []  # requests whose last event is in what is written next

    async def send(self, message: Message) -> None:
        begin_s = self._clock.now()
        await self._send(message)
        end_s = self._clock.now()
        if end_s - begin_s > HELD_UP_S:
            self._timeline.blocked((*self._num_open, *self._ended), begin_s, end_s)

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
                self._timeline.delivered((request_id,), now_s)

    def done(self) -> None:
        """The whole answer has been written."""
        self._timeline.delivered((*self._num_open, *self._ended), self._clock.now())


class Explainer:
    """``replayer`` None: windows are not replayed. ``shows_misses``: as --explain-cache."""

    def __init__(self, engine: Engine, shows_misses: bool, replayer: Replayer | None = None) -> None:
        self._engine = engine
        self._shows_misses = shows_misses
        self.advisor: Advisor = RuleAdvisor(engine.config, shows_misses)
        self.replays = None if replayer is None else ReplayAdvisor(engine, replayer, self.advisor, shows_misses)
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
        while self._num_ended - len(next(iter(self._ended.values()))) >= self._engine.timeline.ended_records.capacity:
            self._num_ended -= len(self._ended.popitem(last=False)[1])

    def delivery(self, requests: Sequence[Request], send: Send) -> Delivery:
        return Delivery(self._engine, requests, send)

    # --- one request --------------------------------------------------------------------------------------------------------------------

    def of_id(self, given: str) -> dict[str, Any]:
        """By an answer's id. Raises APIError 404 for one that is unknown, or older than what is remembered."""
        found = self.of_call(given)
        if found is None:
            remembered = f"the last {self._engine.timeline.ended_records.capacity} that ended and those that run are remembered"
            raise APIError(404, f"request_id: {given!r:.200} is not the id of an answer; {remembered}", "request_id", "request_not_found")
        return {"id": given, "object": "request.explanation"} | found

    def of_call(self, response_id: str) -> dict[str, Any] | None:
        """The account of an answer: that of the prompt which ended last; None when nothing is known."""
        records = self._records(self._running.get(response_id) or self._ended.get(response_id, ()))
        return self._explained(_last(records)).shown() | _num_prompts(records) if records else None

    def _records(self, request_ids: Sequence[str]) -> list[RequestRecord]:
        """Those of them that the engine remembers."""
        return [record for record in map(self._engine.timeline.find, request_ids) if record is not None]

    def _explained(self, record: RequestRecord) -> Explanation:
        timeline, now_s = self._engine.timeline, self._engine.clock.now()
        found = explain(timeline, record, now_s, self._shows_misses)
        seconds = timeline.seconds_of(record, record.end_s or now_s)
        return found.advised(self.advisor.of_request(timeline, record, seconds, found.wall_s))

    def listed(self, query: bytes) -> dict[str, Any]:
        """Answers by ``sort``: the recent or the slowest, at most ``limit``, of a ``state``."""
        fields = _query(query, {"sort": "recent", "limit": "10", "state": "all"})
        limit = _whole_number("limit", fields["limit"], 1, MAX_LISTED)
        _one_of("sort", fields["sort"], ("recent", "slowest"))
        _one_of("state", fields["state"], ("all", "running", "finished"))
        now_s, answers = self._engine.clock.now(), [*self._ended.items(), *self._running.items()]
        told = [(given, records) for given, ids in answers if (records := self._records(ids))]
        if fields["state"] != "all":
            told = [one for one in told if (_last(one[1]).ended_s is None) == (fields["state"] == "running")]
        order = _wall_s if fields["sort"] == "slowest" else _recent
        told.sort(key=lambda one: order(_last(one[1]), now_s))
        return {"object": "list", "data": [self._entry(given, records, now_s) for given, records in told[: -limit - 1 : -1]]}

    def _entry(self, given: str, records: Sequence[RequestRecord], now_s: float) -> dict[str, Any]:
        found = explain(self._engine.timeline, _last(records), now_s, self._shows_misses).shown()
        counts = {"prompt_tokens": sum(one.num_prompt_tokens for one in records)}
        counts["completion_tokens"] = sum(one.num_output_tokens for one in records)
        names = ("state", "finish_reason", "wall_s", "ttft_s", "main_cause", "bottleneck")
        return {"id": given} | counts | {name: found[name] for name in names} | _num_prompts(records)

    # --- a window -----------------------------------------------------------------------------------------------------------------------

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
        timeline, now_s = self._engine.timeline, self._engine.clock.now()
        content = {"object": "explain.summary"} | summarise(timeline, window_s, now_s, self._shows_misses).shown()
        ended = [r for r in timeline.records() if r.ended_s is not None and r.ended_s >= now_s - window_s]
        some = ended[:: max(1, len(ended) // MAX_ADVISED)]  # enough for a mean, and no burden for a server that is watched
        content["advice"] = [advice.shown() for advice in self.advisor.of_window(timeline, some, window_s)]
        if self.replays is not None and self.replays.last is not None:
            content["replay"] = self.replays.shown(self.replays.last, objective)
        content["engine"] = self._engine_now()
        if num_steps:
            content["steps"] = self._steps(num_steps)
        return content

    async def _replay(self, window_s: float) -> None:
        """Have the window replayed, in another thread. Raises APIError when that cannot be done."""
        if self.replays is None:
            raise APIError(501, "advice: 'replay' is not allowed; this server was started without a simulator", "advice", "no_simulator")
        try:
            await _in_daemon_thread(self.replays.replayed, window_s)
        except ReplayError as error:
            raise APIError(409, f"advice: the window cannot be replayed: {error}", "advice", "not_replayable") from None

    def _engine_now(self) -> dict[str, Any]:
        engine, scheduler = self._engine, self._engine.scheduler
        return {
            "model": engine.config.model.served_model_name or engine.model.name,
            "running": scheduler.num_running,
            "waiting": scheduler.num_waiting,
            "max_num_seqs": engine.config.scheduler.max_num_seqs,
            "kv_blocks": scheduler.num_blocks,
            "kv_used": scheduler.num_used_blocks,
            "kv_cached": scheduler.num_cached_blocks,
            "preemptions": scheduler.stats.num_preemptions,
            "output_tokens": scheduler.stats.num_output_tokens,
        }

    def _steps(self, num_steps: int) -> list[dict[str, Any]]:
        with self._engine.timeline.lock:
            steps = list(self._engine.timeline.window.steps)[-num_steps:]
        return [
            {
                "step": step.step_index, "seconds": round(step.seconds, 7), "prefill_s": round(step.prefill_s, 7),
                "decode_s": round(step.decode_s, 7), "kv_s": round(step.kv_s, 7), "prompt_tokens": step.num_prompt_tokens,
                "tokens": step.num_tokens, "sequences": step.num_sequences,
            }
            for step in steps
        ]  # fmt: skip


async def _in_daemon_thread(function: Callable[..., object], *args: object) -> None:
    """Wait until ``function`` is done on a thread that a server which ends does not wait for. Raises what it raises."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def tell(error: BaseException | None) -> None:
        if not done.done():  # else whoever waited has gone
            done.set_result(None) if error is None else done.set_exception(error)

    def run() -> None:
        failed: BaseException | None = None
        try:
            function(*args)
        except BaseException as error:
            failed = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server has ended
            loop.call_soon_threadsafe(tell, failed)

    threading.Thread(target=run, name="octavo-replay", daemon=True).start()
    await done


def _last(records: Sequence[RequestRecord]) -> RequestRecord:
    """What a call waits for, or waited for: the other prompts were ready before."""
    return max(records, key=lambda record: (record.ended_s is None, record.ended_s or 0.0))


def _num_prompts(records: Sequence[RequestRecord]) -> dict[str, int]:
    return {"prompts": len(records)} if len(records) > 1 else {}


def _wall_s(record: RequestRecord, now_s: float) -> tuple[float, ...]:
    return ((now_s if record.end_s is None else record.end_s) - record.received_s,)


def _recent(record: RequestRecord, now_s: float) -> tuple[float, ...]:
    """Those that go on come after those that have ended."""
    return (record.ended_s is None, record.arrival_s if record.ended_s is None else record.ended_s)


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
