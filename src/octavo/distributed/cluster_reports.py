"""What a cluster tells of its requests and of itself: the front end's journeys, and what its workers answer, merged. A ``serving.Reports``.

Workers are asked all at once, and those that do not answer in time are left out: an account says so where it rests on them, a summary is
then not ``complete``. A window is replayed as a whole, with all workers in it, or not at all.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import msgspec
from msgspec import to_builtins

from octavo.core.clock import Clock
from octavo.core.cluster_window import ClusterWindow, WindowFrontEnd
from octavo.distributed.accounts import Merged, merge
from octavo.distributed.answers import (
    MAX_ASKED,
    AboutAttempts,
    AboutMetrics,
    AboutRecorded,
    AboutWindow,
    Accounts,
    Metrics,
    Recorded,
    Window,
)
from octavo.distributed.attendance import Attendance
from octavo.distributed.cluster_options import ClusterOptions
from octavo.distributed.flood_log import FloodLog
from octavo.distributed.journeys import Journey, Journeys, Leg, LegEnd
from octavo.distributed.merged_metrics import merged_families
from octavo.distributed.recorded_cluster import RecordedCluster, front_end_of
from octavo.distributed.worker_account import WorkerAccount
from octavo.engine.advice import Advice
from octavo.engine.answer_list import known_of, last_of, num_prompts, picked, row
from octavo.engine.causes import Bottleneck
from octavo.engine.explain import summary_of
from octavo.engine.replay_advice import Replayer, ReplayError, Replays
from octavo.engine.reports import NO_SIMULATOR, in_daemon_thread
from octavo.engine.serving import MetricFamily, ReplayUnavailable
from octavo.engine.step_window import GapClasses, add_gaps

logger = logging.getLogger("octavo.distributed")

ANSWER_S = 2.0  # how long a worker may take
_TAKE_S = 30.0  # how long the event loop may take to ask them
MAX_ADVICE = 8
_NUMBER = re.compile(r"\d+(\.\d+)?")
MAX_GAP_PLACE = 1000  # of a class of gaps: e^48 s

T = TypeVar("T")


class Workers(Protocol):
    """Who may be asked, and how."""

    def roles(self) -> Mapping[str, str]:
        """Names and roles of the workers that are there."""
        ...

    async def ask(self, worker: str, what: str, args: bytes) -> bytes:
        """A worker's answer; both are JSON. Raises RuntimeError when there is none."""
        ...


class ClusterReports:
    """``replayer`` None: windows are not replayed. ``front_end``: how requests are spread, ``attendance``: when workers were
    there, for replays (None: they always were)."""

    def __init__(
        self,
        journeys: Journeys,
        workers: Workers,
        clock: Clock,
        model_name: str,
        shows_misses: bool,
        replayer: Replayer | None = None,
        front_end: WindowFrontEnd | None = None,
        attendance: Attendance | None = None,
    ) -> None:
        self._journeys, self._workers, self._clock, self._model_name = journeys, workers, clock, model_name
        self._shows_misses = shows_misses
        self._unanswered = FloodLog(logger, "worker")  # whoever asks brings it about, each time
        self._front_end = front_end or front_end_of(ClusterOptions())
        self._attendance = attendance or Attendance(0.0)
        self.replays = None if replayer is None else Replays(replayer, clock.now, shows_misses)

    # --- requests -----------------------------------------------------------------------------------------------------------------------

    async def account(self, request_ids: Sequence[str]) -> dict[str, Any] | None:
        """See Reports."""
        found = known_of(self._journeys.find, request_ids)
        if not found:
            return None
        (merged,) = await self._merged([last_of(found)], advises=True)
        return merged.shown(self._clock.now()) | num_prompts(found)

    async def answers(self, answers: Mapping[str, Sequence[str]], sort: str, limit: int, state: str) -> list[dict[str, Any]]:
        """See Reports. The order is by the front end's own clock."""
        told = picked(answers, self._journeys.find, sort, limit, state, self._clock.now())
        merged = await self._merged([last_of(journeys) for _, journeys in told])
        now = self._clock.now()
        return [row(given, journeys, one.shown(now)) for (given, journeys), one in zip(told, merged, strict=True)]

    async def _merged(self, journeys: Sequence[Journey], advises: bool = False) -> list[Merged]:
        told = await self._told_of((leg for journey in journeys for leg in journey.legs), advises)
        now = self._clock.now()
        return [merge(journey, told, now) for journey in journeys]

    async def _told_of(self, legs: Iterable[Leg], advises: bool = False) -> dict[tuple[str, str], WorkerAccount]:
        """What workers tell of these legs, as far as they were not lost, or have told. With ``advises`` all that are there are asked."""
        names: dict[str, list[str]] = {}
        told = dict[tuple[str, str], WorkerAccount]()
        for leg in legs:
            if (account := leg.account) is not None:
                told[leg.worker, leg.name] = account if self._shows_misses else account.without_misses()
            if leg.end is not LegEnd.LOST and (advises or account is None):
                names.setdefault(leg.worker, []).append(leg.name)
        asked = {worker: AboutAttempts(some[-MAX_ASKED:], self._shows_misses, advises) for worker, some in names.items()}
        answers = await self._ask("accounts", asked, Accounts)
        return told | _told((worker, answer.accounts) for worker, answer in answers.items())

    async def _ask(self, what: str, asked: Mapping[str, msgspec.Struct], kind: type[T]) -> dict[str, T]:
        """Answers by worker, of those that are there and answer in time."""
        there = self._workers.roles()
        workers = [worker for worker in asked if worker in there]
        got = await asyncio.gather(*(self._one_answer(worker, what, asked[worker], kind) for worker in workers))
        return {worker: answer for worker, answer in zip(workers, got, strict=True) if answer is not None}

    async def _one_answer(self, worker: str, what: str, about: msgspec.Struct, kind: type[T]) -> T | None:
        try:
            async with asyncio.timeout(ANSWER_S):
                return msgspec.json.decode(await self._workers.ask(worker, what, msgspec.json.encode(about)), type=kind)
        except (TimeoutError, OSError, RuntimeError, msgspec.MsgspecError) as error:
            self._unanswered.say(f"no answer to a question for {what}: {str(error) or type(error).__name__}", worker)
            return None

    # --- a window -----------------------------------------------------------------------------------------------------------------------

    async def summary(self, window_s: float, num_steps: int, objective: str) -> dict[str, Any]:
        """See Reports. ``steps`` are those of each worker, as many of each, with its name."""
        roles = self._workers.roles()
        each = -(-num_steps // len(roles)) if roles else 0
        answers = await self._ask("window", dict.fromkeys(roles, AboutWindow(window_s, each, self._shows_misses)), Window)
        since_s = self._clock.now() - window_s
        told = _told((worker, window.accounts) for worker, window in answers.items())
        recent = [journey for journey in self._journeys.all() if journey.ended_s is None or journey.ended_s >= since_s]
        ended = (leg for journey in recent for leg in journey.legs if leg.end_s is not None and (leg.worker, leg.name) not in told)
        others = [leg for leg in ended if leg.account is not None or (leg.end_s or 0.0) < since_s]
        if others:  # of requests that ended in the window, or run: legs that had ended before it, or whose worker has gone
            told |= await self._told_of(others)
        now = self._clock.now()
        gaps: GapClasses = self._journeys.window.gap_classes(since_s)
        for window in answers.values():
            for place, counts in window.gaps:
                if abs(place) <= MAX_GAP_PLACE and len(counts) == 1 + len(Bottleneck) and all(0.0 <= n < math.inf for n in counts):
                    add_gaps(gaps, place, counts)  # else of a worker of another version, or of one that is wrong
        is_whole = len(answers) == len(roles) and all(w.is_whole for w in answers.values()) and self._journeys.forgotten_s < since_s
        records = [merge(journey, told, now).record for journey in recent]
        content: dict[str, Any] = summary_of(records, gaps, window_s, now, is_whole).shown()
        content["advice"] = _mean_advice(answers.values())
        replayed = None if self.replays is None else self.replays.shown(objective)
        if replayed is not None:
            content["replay"] = replayed
        content["engine"] = self._engine_now(answers)
        there = [(worker, role, to_builtins(answers[worker].engine)) for worker, role in roles.items() if worker in answers]
        content["workers"] = [{"name": worker, "role": role, "engine": engine} for worker, role, engine in there]
        if num_steps:
            content["steps"] = [to_builtins(step) | {"worker": worker} for worker, window in answers.items() for step in window.steps]
        return content

    def _engine_now(self, answers: Mapping[str, Window]) -> dict[str, Any]:
        """Sums over the workers; what waits at the front end waits as well."""
        counts = ("running", "waiting", "max_num_seqs", "kv_blocks", "kv_used", "kv_cached", "preemptions", "output_tokens")
        summed = {name: sum(getattr(window.engine, name) for window in answers.values()) for name in counts}
        summed["waiting"] += self._journeys.num_unplaced
        return {"model": self._model_name} | summed

    async def replay(self, window_s: float) -> None:
        """See Reports."""
        if self.replays is None:
            raise ReplayUnavailable(NO_SIMULATOR)
        loop = asyncio.get_running_loop()

        def take() -> ClusterWindow:
            """On the replay's thread; the workers are asked on the loop's."""
            asking = asyncio.run_coroutine_threadsafe(self.recorded(window_s), loop)
            try:
                return asking.result(_TAKE_S)
            except TimeoutError:
                asking.cancel()
                raise ReplayError(f"workers: they could not be asked within {_TAKE_S:g} s") from None

        await in_daemon_thread(self.replays.of, window_s, take)

    async def recorded(self, window_s: float) -> ClusterWindow:
        """The last ``window_s`` seconds, for whoever replays them. Raises ReplayError."""
        part = RecordedCluster(self._journeys.all(), window_s, self._clock.now(), self._journeys.forgotten_s, self._attendance)
        if not part.has_answers:
            raise ReplayError("window: no request of it has ended; there is nothing to compare with")
        roles = self._workers.roles()
        if not roles:
            raise ReplayError("workers: none is there, and nobody else knows what their steps take")
        asked = part.questions(roles)
        told = await self._ask("recorded", asked, Recorded)
        told = {worker: one for worker, one in told.items() if _is_as_asked(one, asked[worker])}
        silent = [worker for worker in roles if worker not in told]
        if silent:
            names = ", ".join(silent)
            raise ReplayError(f"workers: {names} did not say what steps take there; a replay needs all of them, ask again later")
        try:
            return await asyncio.to_thread(part.window, roles, told, self._front_end)  # tens of milliseconds
        except ValueError as error:
            raise ReplayError(str(error)) from error

    # --- metrics ------------------------------------------------------------------------------------------------------------------------

    async def metrics(self) -> list[MetricFamily]:
        """See Reports. Samples of workers have their name and role as labels."""
        roles = self._workers.roles()
        answers = await self._ask("metrics", dict.fromkeys(roles, AboutMetrics(self._shows_misses)), Metrics)
        told = [(worker, roles[worker], metrics.families) for worker, metrics in answers.items()]
        return merged_families(self._journeys.families(), told)


def _is_as_asked(told: Recorded, about: AboutRecorded) -> bool:
    num_bytes = sum(len(one.keys) for one in told.attempts)
    return len(told.attempts) <= len(about.names) and num_bytes <= 8 * about.most_keys and len(told.steps) <= about.most_steps


def _told(answers: Iterable[tuple[str, Iterable[WorkerAccount]]]) -> dict[tuple[str, str], WorkerAccount]:
    """But for those that cannot be."""
    return {(worker, one.name): one for worker, accounts in answers for one in accounts if one.fault() is None}


def _mean_advice(windows: Iterable[Window]) -> list[dict[str, Any]]:
    """Means over all requests that the workers looked at, the best first. The same change to different numbers is one: it has the number,
    and the reason, of the worker that would gain most."""
    asked, parts = list(windows), dict[str, list[Advice]]()
    num_advised = max(1, sum(window.num_advised for window in asked))
    for window in asked:
        for told in window.advice:
            parts.setdefault(_NUMBER.sub("", told.change), []).append(told.advice(window.num_advised / num_advised))
    gains = [(max(alike, key=lambda part: part.gain_s), sum(part.gain_s for part in alike)) for alike in parts.values()]
    ranked = sorted((replace(most, gain_s=gain_s) for most, gain_s in gains), key=lambda advice: -advice.gain_s)
    return [advice.shown() for advice in ranked[:MAX_ADVICE]]
