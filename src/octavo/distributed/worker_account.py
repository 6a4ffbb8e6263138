"""What a worker tells of one attempt: where its time went, by the worker's own clock. How it is made, and what is taken of one. Plain data.

It comes with the end of the attempt, with the first token of one that is to be handed over, or when it is asked for; ``accounts`` makes one
account of those of all workers that had a request.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from octavo.engine.advice import Advice
from octavo.engine.causes import MEANINGS, NAMES, Cause
from octavo.engine.explain import SHOWN_S, STATES, detail_of, explain, hide_misses
from octavo.engine.request_record import RequestRecord

if TYPE_CHECKING:
    from octavo.engine.engine import Engine
    from octavo.engine.timeline import Timeline

logger = logging.getLogger("octavo.worker")

MAX_ENTRIES = 64  # causes, or pieces of advice; a newer worker may know more of them than there are here
MAX_TEXT_CHARS = 8192  # of all names, details and advice of one
_MISS, _PREFILL = NAMES[Cause.CACHE_MISS], NAMES[Cause.PREFILL]


class ToldAdvice(msgspec.Struct):
    """See ``engine.advice.Advice``."""

    change: str
    gain_s: float
    why: str
    basis: str = "time stamps"

    @classmethod
    def of(cls, advice: Advice) -> ToldAdvice:
        return cls(advice.change, advice.gain_s, advice.why, advice.basis)

    def advice(self, share: float = 1.0) -> Advice:
        """``share`` of its gain."""
        return Advice(self.change, share * self.gain_s, self.why, self.basis)


class WorkerAccount(msgspec.Struct, omit_defaults=True):
    """Seconds from the attempt's arrival there, by the names of causes. ``ttft_seconds``: up to its first token; ``in_flight_s``: of one
    that runs, since then, not charged to anything yet; ``own_missed_s``: of ``cache_miss``, for its own prompt. ``details``: of causes that
    have more to say than what they mean."""

    name: str
    wall_s: float
    state: str
    ttft_s: float | None = None
    in_flight_s: float = 0.0
    seconds: dict[str, float] = {}
    ttft_seconds: dict[str, float] = {}
    details: dict[str, str] = {}
    advice: list[ToldAdvice] = []
    num_cached: int = 0
    num_output_tokens: int = 0
    own_missed_s: float = 0.0

    @classmethod
    def of(cls, timeline: Timeline, record: RequestRecord, now: float, shows_misses: bool = True) -> WorkerAccount:
        """By the worker's timeline, ``now`` on its clock. ``shows_misses``: as in ``without_misses``."""
        end_s = now if record.ended_s is None else record.ended_s
        found = explain(timeline, record, end_s)
        first = None if record.first_token_s is None else record.first_token_s - record.arrival_s
        ttft = {name: s for name, s in zip(NAMES, record.ttft_seconds or (), strict=False) if s > SHOWN_S}
        details = {NAMES[part.cause]: part.detail for part in found.causes if part.detail != MEANINGS[part.cause][1]}
        if _MISS in details:  # where they are not shown
            details[_PREFILL] = detail_of(Cause.PREFILL, record)
        in_flight_s = max(0.0, end_s - record.arrival_s - found.wall_s)
        seconds = {NAMES[part.cause]: part.seconds for part in found.causes}
        account = cls(
            record.request_id, max(0.0, found.wall_s), found.state, first, in_flight_s, seconds, ttft, details,
            num_cached=record.num_cached, num_output_tokens=record.num_output_tokens, own_missed_s=record.own_missed_s,
        )  # fmt: skip
        return account if shows_misses else account.without_misses()

    def without_misses(self) -> WorkerAccount:
        """For who may not be told that its prompt is, or was, in the cache for others: with misses as what they look like then. Before the
        first token nearly all are its own prompt's."""
        if _MISS not in self.seconds:
            return self
        details = {name: text for name, text in self.details.items() if name != _MISS}
        seconds, ttft = (_hidden(some, self.own_missed_s) for some in (self.seconds, self.ttft_seconds))
        return msgspec.structs.replace(self, seconds=seconds, ttft_seconds=ttft, details=details, own_missed_s=0.0)

    def without_details(self) -> WorkerAccount:
        """For sums over many."""
        self.details = {}
        return self

    @property
    def has_ended(self) -> bool:
        """Nothing more is to be told of it."""
        return self.state in ("finished", "aborted", "failed")

    def fault(self) -> str | None:
        """What of it cannot be, or is more than an engine has to say; None: nothing. It is kept, added up, and shown on terminals."""
        figures = {"wall_s": self.wall_s, "ttft_s": self.ttft_s or 0.0, "in_flight_s": self.in_flight_s, "own_missed_s": self.own_missed_s}
        figures |= {"num_cached": self.num_cached, "num_output_tokens": self.num_output_tokens}
        figures |= {f"advice[{place}]": one.gain_s for place, one in enumerate(self.advice)}
        for what, some in (("seconds", self.seconds), ("ttft_seconds", self.ttft_seconds)):
            figures |= {f"{what}[{name:.40}]": value for name, value in some.items()}
        if max(len(self.seconds), len(self.ttft_seconds), len(self.details), len(self.advice)) > MAX_ENTRIES:
            return f"more than {MAX_ENTRIES} causes, details or pieces of advice are not allowed"
        for name, value in figures.items():
            if not 0 <= value < math.inf:
                return f"{name!a}: {value!r} is not allowed; a finite number from 0"
        texts = list(self._texts())
        if sum(map(len, texts)) > MAX_TEXT_CHARS or not all(map(str.isprintable, texts)):
            return f"what it says in words is not allowed; at most {MAX_TEXT_CHARS} printable characters"
        return None if self.state in STATES else f"state: {self.state[:40]!a} is not allowed; one of {', '.join(STATES)}"

    def _texts(self) -> Iterator[str]:
        yield from (self.name, *self.seconds, *self.ttft_seconds, *self.details, *self.details.values())
        for one in self.advice:
            yield from (one.change, one.why, one.basis)


def _hidden(seconds: dict[str, float], own_s: float) -> dict[str, float]:
    """See ``hide_misses``."""
    known = [seconds.get(name, 0.0) for name in NAMES]
    hide_misses(known, min(own_s, known[Cause.CACHE_MISS]))
    return {name: s for name, s in (seconds | dict(zip(NAMES, known, strict=True))).items() if s}


def account_of(engine: Engine, name: str) -> WorkerAccount | None:
    """Of an attempt that runs, or is one of the last that ended, up to now; None: it is not known. Raises nothing: it goes with the events
    of a stream, which does not answer for it."""
    timeline = engine.timeline
    try:
        record = timeline.find(name)
        return None if record is None else WorkerAccount.of(timeline, record, engine.clock.now())
    except Exception as error:
        logger.error("where the time of %s went cannot be told", name, exc_info=error)
        return None
