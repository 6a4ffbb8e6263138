"""What an engine in this process tells of its requests and of itself: accounts, lists, summaries and metrics, as plain data.

Reads the timeline, the scheduler and the counters; changes nothing. The accounts are ``explain``'s, the advice is an ``Advisor``'s.
Replays run on a thread of their own, which a process that ends does not wait for.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from octavo.engine.advice import Advisor, RuleAdvisor
from octavo.engine.answer_list import known_of, last_of, num_prompts, picked, row
from octavo.engine.explain import Explanation, explain, summarise
from octavo.engine.metric_families import metric_families
from octavo.engine.replay_advice import ReplayAdvisor, Replayer
from octavo.engine.request_record import RequestRecord
from octavo.engine.serving import MetricFamily, ReplayUnavailable

if TYPE_CHECKING:
    from octavo.engine.engine import Engine

NO_SIMULATOR = "this server was started without a simulator"
MAX_ADVISED = 256  # requests of a window that the rules look at, about


class EngineReports:
    """See ``serving.Reports``. ``replayer`` None: windows are not replayed."""

    def __init__(self, engine: Engine, shows_misses: bool, replayer: Replayer | None = None) -> None:
        self._engine = engine
        self._shows_misses = shows_misses
        self.advisor: Advisor = RuleAdvisor(engine.config, shows_misses)
        self.replayer = None if replayer is None else ReplayAdvisor(engine, replayer, self.advisor, shows_misses)

    async def account(self, request_ids: Sequence[str]) -> dict[str, Any] | None:
        """See Reports. The other requests of a call were ready before the one that ended last."""
        records = known_of(self._engine.timeline.find, request_ids)
        return self._explained(last_of(records)).shown() | num_prompts(records) if records else None

    def _explained(self, record: RequestRecord) -> Explanation:
        timeline, now_s = self._engine.timeline, self._engine.clock.now()
        found = explain(timeline, record, now_s, self._shows_misses)
        seconds = timeline.seconds_of(record, record.end_s or now_s)
        return found.advised(self.advisor.of_request(timeline, record, seconds, found.wall_s))

    async def answers(self, answers: Mapping[str, Sequence[str]], sort: str, limit: int, state: str) -> list[dict[str, Any]]:
        """See Reports."""
        timeline, now_s = self._engine.timeline, self._engine.clock.now()
        told = picked(answers, timeline.find, sort, limit, state, now_s)
        accounts = [explain(timeline, last_of(records), now_s, self._shows_misses).shown() for _, records in told]
        return [row(given, records, account) for (given, records), account in zip(told, accounts, strict=True)]

    async def summary(self, window_s: float, num_steps: int, objective: str) -> dict[str, Any]:
        """See Reports."""
        timeline, now_s = self._engine.timeline, self._engine.clock.now()
        content: dict[str, Any] = summarise(timeline, window_s, now_s, self._shows_misses).shown()
        ended = [r for r in timeline.records() if r.ended_s is not None and r.ended_s >= now_s - window_s]
        some = ended[:: max(1, len(ended) // MAX_ADVISED)]  # enough for a mean, and no burden for a server that is watched
        content["advice"] = [advice.shown() for advice in self.advisor.of_window(timeline, some, window_s)]
        replayed = None if self.replayer is None else self.replayer.replays.shown(objective)
        if replayed is not None:
            content["replay"] = replayed
        content["engine"] = engine_now(self._engine)
        if num_steps:
            content["steps"] = last_steps(self._engine, num_steps)
        return content

    async def replay(self, window_s: float) -> None:
        """See Reports."""
        if self.replayer is None:
            raise ReplayUnavailable(NO_SIMULATOR)
        await in_daemon_thread(self.replayer.replayed, window_s)

    async def metrics(self) -> list[MetricFamily]:
        """See Reports."""
        return metric_families(self._engine, self._shows_misses)


def engine_now(engine: Engine) -> dict[str, Any]:
    """What a summary says of the engine as it is."""
    scheduler = engine.scheduler
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


def last_steps(engine: Engine, num_steps: int) -> list[dict[str, Any]]:
    """The last ``num_steps`` steps, the oldest first."""
    with engine.timeline.lock:
        steps = list(engine.timeline.window.steps)[-num_steps:]
    return [
        {
            "step": step.step_index, "seconds": round(step.seconds, 7), "prefill_s": round(step.prefill_s, 7),
            "decode_s": round(step.decode_s, 7), "kv_s": round(step.kv_s, 7), "prompt_tokens": step.num_prompt_tokens,
            "tokens": step.num_tokens, "sequences": step.num_sequences,
        }
        for step in steps
    ]  # fmt: skip


async def in_daemon_thread(function: Callable[..., object], *args: object) -> None:
    """Wait until ``function`` is done on a thread that a process which ends does not wait for. Raises what it raises."""
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
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends
            loop.call_soon_threadsafe(tell, failed)

    threading.Thread(target=run, name="octavo-replay", daemon=True).start()
    await done
