"""What a worker answers to questions of its front end: accounts of attempts, sums over a window, what a replay needs, metrics.
Beside the steps, and as JSON.

Read from the timeline, the scheduler and the counters on a thread of its own; nothing is changed. Attempts are named as the worker's engine
knows them. What a front end may ask, and the shapes of the answers, are here alone; ``cluster_reports`` asks.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import msgspec

from octavo.core.recorded_window import WindowEngine, packed
from octavo.distributed.messages import Answer, Ask
from octavo.distributed.worker_account import ToldAdvice, WorkerAccount
from octavo.engine.advice import RuleAdvisor
from octavo.engine.ended_records import MAX_KEYS
from octavo.engine.metric_families import metric_families
from octavo.engine.reports import MAX_ADVISED, engine_now, last_steps
from octavo.engine.serving import MetricFamily
from octavo.engine.window_snapshot import engine_of

if TYPE_CHECKING:
    from octavo.engine.engine import Engine

logger = logging.getLogger("octavo.worker")

MAX_ASKED = 4096  # attempts in one question
MAX_WINDOW_S = 600.0
MAX_STEPS = 512
MAX_TOLD_STEPS = 4096


class QuestionError(ValueError):
    """It is no question, or has no answer; the message says why."""


class AboutAttempts(msgspec.Struct):
    """``accounts``: where the time of these attempts went, with advice when there are few; those that are not known are left out."""

    names: list[str]
    shows_misses: bool = False
    advises: bool = False


class AboutWindow(msgspec.Struct):
    """``window``: sums over the last ``window_s`` seconds, accounts of attempts that ended in it or run, the last ``num_steps`` steps."""

    window_s: float
    num_steps: int = 0
    shows_misses: bool = False


class AboutMetrics(msgspec.Struct):
    """``metrics``."""

    shows_misses: bool = False


class AboutRecorded(msgspec.Struct):
    """``recorded``: what a replay needs of this engine, and of these attempts; those that are not known are left out. At most
    ``most_keys`` block keys, the last named attempts first, and ``most_steps`` steps."""

    names: list[str]
    most_keys: int
    most_steps: int


class Accounts(msgspec.Struct):
    accounts: list[WorkerAccount]


class ToldStep(msgspec.Struct):
    """See ``engine.reports.last_steps``."""

    step: int
    seconds: float
    prefill_s: float
    decode_s: float
    kv_s: float
    prompt_tokens: int
    tokens: int
    sequences: int


class ToldEngine(msgspec.Struct):
    """See ``engine.reports.engine_now``."""

    model: str
    running: int
    waiting: int
    max_num_seqs: int
    kv_blocks: int
    kv_used: int
    kv_cached: int
    preemptions: int
    output_tokens: int


class Window(msgspec.Struct):
    """``gaps``: classes of gaps between tokens, each its place and numbers (``StepWindow``). ``advice``: of ``num_advised`` requests."""

    accounts: list[WorkerAccount]
    gaps: list[tuple[int, list[float]]]
    is_whole: bool
    advice: list[ToldAdvice]
    num_advised: int
    engine: ToldEngine
    steps: list[ToldStep] = []


class ToldAttempt(msgspec.Struct):
    """``keys``: of its full blocks (``recorded_window.block_keys``), eight bytes each, the lowest first; empty where there was no room for
    them, or it runs. ``wall_s``: from its arrival here to its last token; None: it runs."""

    name: str
    num_cached: int
    keys: bytes = b""
    wall_s: float | None = None


class Recorded(msgspec.Struct):
    """``steps``: as of a ``RecordedWindow``."""

    engine: WindowEngine
    steps: list[tuple[float, ...]]
    attempts: list[ToldAttempt]


class Metrics(msgspec.Struct):
    families: list[MetricFamily]


async def answer(engine: Engine, question: Ask) -> Answer:
    """Never raises: what cannot be answered is an answer with an error."""
    try:
        return Answer(question.number, await asyncio.to_thread(answer_now, engine, question.what, question.args))
    except QuestionError as error:
        return Answer(question.number, error=str(error))
    except Exception as error:
        logger.warning("a question for %.80s cannot be answered", question.what, exc_info=error)
        return Answer(question.number, error=f"{type(error).__name__}: {error}")


def answer_now(engine: Engine, what: str, args: bytes) -> bytes:
    """The answer, as JSON. Raises QuestionError. May be called from any thread."""
    try:
        if what == "accounts":
            return msgspec.json.encode(_accounts(engine, msgspec.json.decode(args, type=AboutAttempts)))
        if what == "window":
            return msgspec.json.encode(_window(engine, msgspec.json.decode(args, type=AboutWindow)))
        if what == "recorded":
            return msgspec.json.encode(_recorded(engine, msgspec.json.decode(args, type=AboutRecorded)))
        if what == "metrics":
            return msgspec.json.encode(Metrics(metric_families(engine, msgspec.json.decode(args, type=AboutMetrics).shows_misses)))
    except msgspec.MsgspecError as error:
        raise QuestionError(f"{what}: {error}") from error
    raise QuestionError(f"what: {what[:80]!r} is not allowed; one of accounts, window, recorded, metrics")


def _check_number(names: list[str]) -> None:
    if len(names) > MAX_ASKED:
        raise QuestionError(f"names: {len(names)} are not allowed; at most {MAX_ASKED}")


def _accounts(engine: Engine, about: AboutAttempts) -> Accounts:
    _check_number(about.names)
    timeline, now, advisor = engine.timeline, engine.clock.now(), RuleAdvisor(engine.config, about.shows_misses, is_worker=True)
    out = []
    for record in filter(None, map(timeline.find, about.names)):
        account = WorkerAccount.of(timeline, record, now, about.shows_misses)
        if about.advises:
            advice = advisor.of_request(timeline, record, timeline.seconds_of(record, record.ended_s or now), account.wall_s)
            account.advice = [ToldAdvice.of(one) for one in advice]
        out.append(account)
    return Accounts(out)


def _window(engine: Engine, about: AboutWindow) -> Window:
    if not 0.0 < about.window_s <= MAX_WINDOW_S:
        raise QuestionError(f"window_s: {about.window_s!r} is not allowed; above 0 and at most {MAX_WINDOW_S:g}")
    if not 0 <= about.num_steps <= MAX_STEPS:
        raise QuestionError(f"num_steps: {about.num_steps!r} is not allowed; from 0 to {MAX_STEPS}")
    timeline, now = engine.timeline, engine.clock.now()
    since_s = now - about.window_s
    with timeline.lock:
        classes, records = timeline.window.gap_classes(since_s), timeline.records()
    recent = [record for record in records if record.ended_s is None or record.ended_s >= since_s]
    ended = [record for record in recent if record.ended_s is not None]
    some = ended[:: max(1, len(ended) // MAX_ADVISED)]
    advice = RuleAdvisor(engine.config, about.shows_misses, is_worker=True).of_window(timeline, some, about.window_s)
    return Window(
        [WorkerAccount.of(timeline, record, now, about.shows_misses).without_details() for record in recent],
        [(place, list(found)) for place, found in classes.items()],
        timeline.ended_records.forgotten_s < since_s,
        [ToldAdvice.of(one) for one in advice],
        len(some),
        ToldEngine(**engine_now(engine)),
        [ToldStep(**step) for step in last_steps(engine, about.num_steps)] if about.num_steps else [],
    )


def _recorded(engine: Engine, about: AboutRecorded) -> Recorded:
    _check_number(about.names)
    for name, value, limit in (("most_keys", about.most_keys, MAX_KEYS), ("most_steps", about.most_steps, MAX_TOLD_STEPS)):
        if not 1 <= value <= limit:
            raise QuestionError(f"{name}: {value!r} is not allowed; from 1 to {limit}")
    timeline, left, attempts = engine.timeline, about.most_keys, list[ToldAttempt]()
    with timeline.lock:
        steps = timeline.samples.all()
    for record in filter(None, map(timeline.find, reversed(about.names))):
        keys = record.keys if len(record.keys) <= left else record.keys[:0]
        left -= len(keys)
        wall_s = None if record.ended_s is None else record.ended_s - record.arrival_s
        attempts.append(ToldAttempt(record.request_id, record.num_cached, packed(keys), wall_s))
    some: list[tuple[float, ...]] = [*steps[:: -(-len(steps) // about.most_steps) or 1]]
    return Recorded(engine_of(engine), some, attempts[::-1])
