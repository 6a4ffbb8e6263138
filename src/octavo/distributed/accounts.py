"""One account of a request that ran on several workers: the journey's moments, and what each worker charges within its leg. Pure.

    front end  │ preparation │ queued_worker │        leg: sent ──────────────▶ last event         │ delivery │
    worker     │             │               │ network │ its own causes, by its own clock │ network │          │

A worker's clock is compared with nobody's: of a leg that took ``t`` here and ``w`` there, ``t - w`` was on the way. The rest is the worker's
to tell, its remainder too. What is charged by the front end:

* between legs, and before the first: ``queued_worker``; after a lost leg: ``worker_lost``.
* a leg that was handed over: the worker's account up to its first token, then ``hand_off`` until the next one was told to go on.
* a leg that was lost: its account went with the worker. What tokens came of is charged as they were seen to come, up to the first to
  ``prefill``, from there to ``decode``; the silence after the last one to ``worker_lost``, and so is all of a leg that gave none.
* the leg after it, when tokens had been sent before: up to its first token it makes good what was lost, which is ``worker_lost`` too.

A worker that cannot be asked any more is treated like a lost one, but for what it gave.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from octavo.distributed.journeys import Journey, Leg, LegEnd
from octavo.engine.advice import Advice
from octavo.engine.causes import MEANINGS, NAMES, NUM_CAUSES, Cause
from octavo.engine.explain import CauseTime, Explanation, detail_of, explain, main_cause
from octavo.engine.request_record import RecordState, RequestRecord
from octavo.engine.timeline import Timeline

_CAUSES = {name: cause for name, cause in zip(NAMES, Cause, strict=True)}
_SHOWN_S = 1e-9
Told = Mapping[tuple[str, int], WorkerAccount]
"""By worker and key: an attempt that was handed over has one key on both."""

_UNTOLD = "as its events came: the worker that had it cannot be asked any more"


class WorkerAccount(msgspec.Struct, omit_defaults=True):
    """What a worker says of an attempt: seconds from its arrival there, by the names of causes. ``ttft_seconds``: up to its first token;
    ``in_flight_s``: of one that runs, since then, not charged to anything yet."""

    key: int
    wall_s: float
    state: str
    ttft_s: float | None = None
    in_flight_s: float = 0.0
    seconds: dict[str, float] = {}
    ttft_seconds: dict[str, float] = {}
    details: dict[str, str] = {}
    advice: list[dict[str, Any]] = []
    num_cached: int = 0
    num_output_tokens: int = 0

    @classmethod
    def of(cls, key: int, timeline: Timeline, record: RequestRecord, now: float, shows_misses: bool) -> WorkerAccount:
        """By the worker's timeline, ``now`` on its clock."""
        end_s = now if record.ended_s is None else record.ended_s
        found = explain(timeline, record, end_s, shows_misses)
        first = None if record.first_token_s is None else record.first_token_s - record.arrival_s
        ttft = dict(zip(NAMES, record.ttft_seconds or (), strict=False))
        if not shows_misses and record.ttft_seconds is not None:
            ttft = _without_misses(record)
        seconds = {NAMES[part.cause]: part.seconds for part in found.causes}
        details = {NAMES[part.cause]: part.detail for part in found.causes}
        in_flight_s = max(0.0, end_s - record.arrival_s - found.wall_s)
        return cls(
            key, found.wall_s, found.state, first, in_flight_s, seconds, {name: s for name, s in ttft.items() if s}, details,
            num_cached=record.num_cached, num_output_tokens=record.num_output_tokens,
        )  # fmt: skip

    def without_details(self) -> WorkerAccount:
        """For sums over many."""
        self.details = {}
        return self


def _without_misses(record: RequestRecord) -> dict[str, float]:
    """Up to the first token, with misses as what they look like without --explain-cache: before it, nearly all are its own prompt's."""
    seconds = list(record.ttft_seconds or ())
    own_s = min(record.own_missed_s, seconds[Cause.CACHE_MISS])
    seconds[Cause.PREFILL] += own_s
    seconds[Cause.OTHERS_PREFILL] += seconds[Cause.CACHE_MISS] - own_s
    seconds[Cause.CACHE_MISS] = 0.0
    return dict(zip(NAMES, seconds, strict=True))


@dataclass(slots=True)
class Merged:
    """Of one request. ``seconds`` and ``ttft_seconds`` [NUM_CAUSES]; ``ttft_seconds`` None: no token has come."""

    journey: Journey
    seconds: list[float]
    ttft_seconds: list[float] | None
    details: dict[Cause, str] = field(default_factory=dict)
    advice: list[dict[str, Any]] = field(default_factory=list)
    in_flight_s: float = 0.0

    @property
    def record(self) -> RequestRecord:
        """As a record of its own, for sums over many."""
        return replace(self.journey, seconds=self.seconds, ttft_seconds=self.ttft_seconds)

    def explanation(self, now: float) -> Explanation:
        """See ``engine.explain.explain``."""
        journey, seconds = self.journey, self.seconds
        wall_s = (now if journey.end_s is None else journey.end_s) - journey.received_s
        if journey.end_s is None:
            wall_s -= self.in_flight_s  # as in ``explain``: the end of the step will tell
        remainder_s = wall_s - sum(seconds)
        causes = [CauseTime(cause, seconds[cause], self._detail(cause)) for cause in Cause if seconds[cause] > _SHOWN_S]
        causes.sort(key=lambda part: -part.seconds)
        ttft_s = None if journey.first_token_s is None else journey.first_token_s - journey.received_s
        main = main_cause(seconds, wall_s)
        told = (tuple(causes), remainder_s, main, journey, tuple(_advice(one) for one in self.advice))
        return Explanation(journey.request_id, wall_s, ttft_s, _state(journey), *told)

    def _detail(self, cause: Cause) -> str:
        if cause is Cause.WORKER_LOST:
            lost = [leg.worker for leg in self.journey.legs if leg.end is LegEnd.LOST]
            return f"{MEANINGS[cause][1]}: {', '.join(lost)}" if lost else MEANINGS[cause][1]
        if cause is Cause.HAND_OFF:
            return f"{MEANINGS[cause][1]}: {' to '.join(self.journey.workers)}"
        return self.details.get(cause) or detail_of(cause, self.journey)

    def shown(self, now: float) -> dict[str, Any]:
        """As the API has it: with the workers that had the request, in order."""
        return self.explanation(now).shown() | {"workers": self.journey.workers}


def _state(journey: Journey) -> str:
    if journey.state is RecordState.ENDED:
        return "finished"
    leg = journey.leg
    return "queued" if leg is None or leg.end is not LegEnd.RUNNING else "on_worker"


def _advice(shown: Mapping[str, Any]) -> Advice:
    return Advice(str(shown["change"]), float(shown["gain_s"]), str(shown["why"]), str(shown.get("basis", "time stamps")))


def merge(journey: Journey, told: Told, now: float) -> Merged:
    """``told``: what workers say of the legs, of those that could be asked; ``now`` on the front end's clock."""
    merging = _Merging(journey, told, now)
    for leg in journey.legs:
        merging.wait_until(leg.sent_s)
        merging.add(leg)
    merging.wait_until(now if journey.ended_s is None else journey.ended_s)
    last = next((account for leg in reversed(journey.legs) if (account := told.get((leg.worker, leg.key))) is not None), None)
    advice = [] if last is None else last.advice
    return Merged(journey, merging.seconds, merging.ttft_seconds, merging.details, advice, merging.in_flight_s)


class _Merging:
    """One pass over the legs. Everything up to ``_until_s`` has been charged."""

    def __init__(self, journey: Journey, told: Told, now: float) -> None:
        self.seconds = journey.seconds[:]
        self.ttft_seconds: list[float] | None = None
        self.details: dict[Cause, str] = {}
        self.in_flight_s = 0.0
        self._told, self._now = told, now
        self._until_s = journey.arrival_s
        self._has_lost = False  # the leg before was lost
        self._has_tokens = False  # tokens had come before

    def wait_until(self, moment_s: float) -> None:
        """Nobody had it."""
        self._charge(Cause.WORKER_LOST if self._has_lost else Cause.QUEUED_WORKER, moment_s)

    def add(self, leg: Leg) -> None:
        account = None if leg.end is LegEnd.LOST else self._told.get((leg.worker, leg.key))
        makes_good = self._has_lost and self._has_tokens
        if leg.first_s is None:
            self._without_tokens(leg, account, makes_good)
        else:
            self._up_to_first(leg, leg.first_s, account, makes_good)
            self._after_first(leg, leg.first_s, account, makes_good)
        self._has_lost = leg.end is LegEnd.LOST
        self._has_tokens = self._has_tokens or leg.first_s is not None

    def _without_tokens(self, leg: Leg, account: WorkerAccount | None, makes_good: bool) -> None:
        end_s = self._now if leg.end_s is None else leg.end_s
        if leg.end is LegEnd.LOST or makes_good:
            self._charge(Cause.WORKER_LOST, end_s)
        elif account is None:
            self._charge(Cause.PREFILL, end_s, _UNTOLD)
        else:
            self._told_part(account.seconds, account.wall_s, end_s, account)

    def _up_to_first(self, leg: Leg, first_s: float, account: WorkerAccount | None, makes_good: bool) -> None:
        if makes_good:
            self._charge(Cause.WORKER_LOST, first_s)
        elif account is None or account.ttft_s is None:
            self._charge(Cause.PREFILL, first_s, _UNTOLD)
        else:
            self._told_part(account.ttft_seconds, account.ttft_s, first_s, account)
        if self.ttft_seconds is None:
            self.ttft_seconds = self.seconds[:]

    def _after_first(self, leg: Leg, first_s: float, account: WorkerAccount | None, makes_good: bool) -> None:
        end_s = self._now if leg.end_s is None else leg.end_s
        if leg.end is LegEnd.HANDED_OVER:
            self._charge(Cause.HAND_OFF, end_s)
        elif account is None or account.ttft_s is None:
            self._charge(Cause.DECODE, leg.last_s or first_s, _UNTOLD)
            self._charge(Cause.WORKER_LOST if leg.end is LegEnd.LOST else Cause.DECODE, end_s, _UNTOLD)
        else:
            after = {name: s - account.ttft_seconds.get(name, 0.0) for name, s in account.seconds.items()}
            self._told_part(after, account.wall_s - account.ttft_s, end_s, account)

    def _told_part(self, seconds: Mapping[str, float], wall_s: float, until_s: float, account: WorkerAccount) -> None:
        """What the worker charges within this time, and the rest of it, which was on the way."""
        for name, part_s in seconds.items():
            cause = _CAUSES.get(name)  # one that only a newer worker knows stays in the remainder
            if cause is not None:
                self.seconds[cause] += part_s
                self.details[cause] = account.details.get(name, "")
        in_flight_s = 0.0 if until_s < self._now else account.in_flight_s
        self.in_flight_s += in_flight_s
        self.seconds[Cause.NETWORK] += max(0.0, until_s - self._until_s - wall_s - in_flight_s)
        self._until_s = max(self._until_s, until_s)

    def _charge(self, cause: Cause, until_s: float, detail: str = "") -> None:
        if until_s > self._until_s:
            self.seconds[cause] += until_s - self._until_s
            self._until_s = until_s
            if detail:
                self.details[cause] = detail
