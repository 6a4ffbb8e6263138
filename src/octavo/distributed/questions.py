"""The worker's side of what a front end asks beside the steps: accounts of attempts, sums over a window, metrics.

Answers are JSON, read from the timeline, the scheduler and the counters on whatever thread asks; nothing is changed. What a front end may
ask, and how it is answered, is here alone; ``cluster_reports`` asks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from octavo.distributed.accounts import WorkerAccount
from octavo.engine.advice import RuleAdvisor
from octavo.engine.metric_families import metric_families
from octavo.engine.reports import MAX_ADVISED, engine_now, last_steps
from octavo.engine.request_record import RequestRecord
from octavo.engine.serving import MetricFamily

if TYPE_CHECKING:
    from octavo.engine.engine import Engine

MAX_KEYS_ASKED = 4096  # attempts in one question
MAX_WINDOW_S = 600.0
MAX_STEPS = 512


class QuestionError(ValueError):
    """It is no question, or has no answer; the message says why."""


class AboutAttempts(msgspec.Struct):
    """``accounts``: where the time of these attempts went, with advice when there are few; those that are not known are left out."""

    keys: list[int]
    shows_misses: bool = False
    advises: bool = False


class AboutWindow(msgspec.Struct):
    """``window``: sums over the last ``window_s`` seconds, the accounts of attempts that ended, or began to answer, in it, and of those that
    run, and the last ``num_steps`` steps."""

    window_s: float
    num_steps: int = 0
    shows_misses: bool = False


class AboutMetrics(msgspec.Struct):
    """``metrics``."""

    shows_misses: bool = False


class Accounts(msgspec.Struct):
    accounts: list[WorkerAccount]


class Window(msgspec.Struct):
    """``gaps``: classes of gaps between tokens, each its place and its numbers (``StepWindow``). ``num_advised``: requests that ``advice`` is
    the mean of."""

    accounts: list[WorkerAccount]
    gaps: list[tuple[int, list[float]]]
    is_whole: bool
    advice: list[dict[str, Any]]
    num_advised: int
    engine: dict[str, Any]
    steps: list[dict[str, Any]] = []


class Metrics(msgspec.Struct):
    families: list[MetricFamily]


class Questions:
    """``name_of`` and ``key_of``: the request in the engine that an attempt is, and back (None: it is none of a front end's)."""

    def __init__(self, engine: Engine, name_of: Callable[[int], str], key_of: Callable[[str], int | None]) -> None:
        self._engine = engine
        self._name_of, self._key_of = name_of, key_of
        self._advisors = {shows: RuleAdvisor(engine.config, shows) for shows in (False, True)}
        self._lock = threading.Lock()  # one answer at a time: they are long, and the steps go on beside them

    def answer(self, what: str, args: bytes) -> bytes:
        """The answer, as JSON. Raises QuestionError. May be called from any thread."""
        try:
            with self._lock:
                if what == "accounts":
                    found: Any = self._accounts(msgspec.json.decode(args, type=AboutAttempts))
                elif what == "window":
                    found = self._window(msgspec.json.decode(args, type=AboutWindow))
                elif what == "metrics":
                    families = metric_families(self._engine, msgspec.json.decode(args, type=AboutMetrics).shows_misses)
                    found = Metrics(families)
                else:
                    raise QuestionError(f"what: {what[:80]!r} is not allowed; one of accounts, window, metrics")
        except msgspec.MsgspecError as error:
            raise QuestionError(f"{what}: {error}") from error
        return msgspec.json.encode(found)

    def _accounts(self, about: AboutAttempts) -> Accounts:
        if len(about.keys) > MAX_KEYS_ASKED:
            raise QuestionError(f"keys: {len(about.keys)} are not allowed; at most {MAX_KEYS_ASKED}")
        timeline, now = self._engine.timeline, self._engine.clock.now()
        out = []
        for key in about.keys:
            record = timeline.find(self._name_of(key))
            if record is not None:
                account = WorkerAccount.of(key, timeline, record, now, about.shows_misses)
                if about.advises:
                    seconds = timeline.seconds_of(record, record.ended_s or now)
                    advice = self._advisors[about.shows_misses].of_request(timeline, record, seconds, account.wall_s)
                    account.advice = [one.shown() for one in advice]
                out.append(account)
        return Accounts(out)

    def _window(self, about: AboutWindow) -> Window:
        if not 0.0 < about.window_s <= MAX_WINDOW_S or not 0 <= about.num_steps <= MAX_STEPS:
            raise QuestionError(f"window_s, num_steps: {about.window_s}, {about.num_steps} are not allowed")
        timeline, now = self._engine.timeline, self._engine.clock.now()
        since_s = now - about.window_s
        with timeline.lock:
            classes, records = timeline.window.gap_classes(since_s), timeline.records()
        ended = [record for record in records if record.ended_s is not None and record.ended_s >= since_s]
        some = ended[:: max(1, len(ended) // MAX_ADVISED)]
        advice = self._advisors[about.shows_misses].of_window(timeline, some, about.window_s)
        return Window(
            [account for record in records if _is_of(record, since_s) and (account := self._account(record, now, about)) is not None],
            [(place, list(found)) for place, found in classes.items()],
            timeline.ended_records.forgotten_s < since_s,
            [one.shown() for one in advice],
            len(some),
            engine_now(self._engine),
            last_steps(self._engine, about.num_steps) if about.num_steps else [],
        )

    def _account(self, record: RequestRecord, now: float, about: AboutWindow) -> WorkerAccount | None:
        key = self._key_of(record.request_id)
        return None if key is None else WorkerAccount.of(key, self._engine.timeline, record, now, about.shows_misses).without_details()


def _is_of(record: RequestRecord, since_s: float) -> bool:
    """Ended in the window, or before its end; runs; or had its first token in it."""
    return record.ended_s is None or record.ended_s >= since_s
