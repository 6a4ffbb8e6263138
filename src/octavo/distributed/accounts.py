"""One account of a request that ran on several workers: the journey's moments, and what each worker charges within its leg. Pure.

    front end  │ preparation │ queued_worker │        leg: sent ──────────────▶ last event         │ delivery │
    worker     │             │               │ network │ its own causes, by its own clock │ network │          │

A worker's clock is compared with nobody's: of a leg that took ``t`` here and ``w`` there, ``t - w`` was on the way. The rest is the
worker's to tell, its remainder too. A leg that was handed over counts up to its first token; what the journey has charged by itself
(``journeys``) is charged once. Of a leg whose worker cannot be asked any more, what tokens came of is charged as they were seen to come: up
to the first to ``prefill``, from there on to ``decode``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from octavo.core.request import FinishReason
from octavo.distributed.journeys import Journey, Leg, LegEnd
from octavo.distributed.worker_account import ToldAdvice, WorkerAccount
from octavo.engine.causes import MEANINGS, NAMES, Cause
from octavo.engine.explain import SHOWN_S, CauseTime, Explanation, detail_of, main_cause, state_of
from octavo.engine.request_record import RecordState, RequestRecord

_CAUSES = {name: cause for name, cause in zip(NAMES, Cause, strict=True)}
_UNTOLD = "as its events came: the worker that had it cannot be asked any more"


Told = Mapping[tuple[str, str], WorkerAccount]
"""By worker and the attempt's name there: one that was handed over may have the same on both."""


@dataclass(slots=True)
class Merged:
    """Of one request. ``seconds`` and ``ttft_seconds`` [NUM_CAUSES]; ``ttft_seconds`` None: no token has come."""

    journey: Journey
    seconds: list[float]
    ttft_seconds: list[float] | None
    details: dict[Cause, str] = field(default_factory=dict)
    advice: list[ToldAdvice] = field(default_factory=list)
    in_flight_s: float = 0.0

    @property
    def record(self) -> RequestRecord:
        """As a record of its own, for sums over many."""
        return replace(self.journey, seconds=self.seconds, ttft_seconds=self.ttft_seconds)

    def tell(self, part: _Part, span_s: float, is_running: bool = False) -> float:
        """What a worker charges of ``span_s`` seconds here; returns what is left of them, which was on the way."""
        _add(self.seconds, part)
        told = {name: text for name, text in part.details.items() if name in _CAUSES and part.seconds.get(name, 0.0) > SHOWN_S}
        self.details.update({_CAUSES[name]: text for name, text in told.items()})
        in_flight_s = part.in_flight_s if is_running else 0.0
        self.in_flight_s += in_flight_s
        return span_s - part.wall_s - in_flight_s

    def guess(self, cause: Cause, span_s: float) -> None:
        """Nobody tells what these seconds went to."""
        self.seconds[cause] += span_s
        self.details.setdefault(cause, _UNTOLD)  # what another leg's worker has told of its own is still so

    def explanation(self, now: float) -> Explanation:
        """See ``engine.explain.explain``."""
        journey, seconds = self.journey, self.seconds
        wall_s = (now if journey.end_s is None else journey.end_s) - journey.received_s
        if journey.end_s is None:
            wall_s -= self.in_flight_s  # as in ``explain``: the end of the step will tell
        remainder_s = wall_s - sum(seconds)
        causes = [CauseTime(cause, seconds[cause], self._detail(cause)) for cause in Cause if seconds[cause] > SHOWN_S]
        causes.sort(key=lambda part: -part.seconds)
        ttft_s = None if journey.first_token_s is None else journey.first_token_s - journey.received_s
        main = main_cause(seconds, wall_s)
        told = (tuple(causes), remainder_s, main, journey, tuple(one.advice() for one in self.advice))
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
        return state_of(journey)
    leg = journey.leg
    return "queued" if leg is None or leg.end is not LegEnd.RUNNING else "running"


def merge(journey: Journey, told: Told, now: float) -> Merged:
    """``told``: what workers say of the legs, of those that could be asked; ``now`` on the front end's clock, after they were asked."""
    merged = Merged(journey, journey.seconds[:], None if journey.ttft_seconds is None else journey.ttft_seconds[:])
    for leg in journey.legs:
        account = None if leg.end is LegEnd.LOST else told.get((leg.worker, leg.name))
        if account is not None:
            merged.advice = account.advice
        _add_leg(merged, leg, account, now)
    if journey.ended_s is None and not journey.is_placed:
        merged.seconds[journey.waits_for] += max(0.0, now - journey.since_s)
    return merged


def _add_leg(merged: Merged, leg: Leg, account: WorkerAccount | None, now: float) -> None:
    """What of a leg the journey has not charged itself."""
    seconds, is_running = merged.seconds, leg.end is LegEnd.RUNNING
    end_s = now if leg.end_s is None else leg.end_s
    if account is not None and leg.end is LegEnd.FINISHED and merged.journey.finish_reason is FinishReason.ABORT:
        account = _until(account, end_s - leg.sent_s)
        merged.advice = account.advice
    if leg.first_s is None:
        if leg.makes_good:
            seconds[Cause.WORKER_LOST] += end_s - leg.sent_s if is_running else 0.0
        elif account is not None:
            seconds[Cause.NETWORK] += max(0.0, merged.tell(_whole(account), end_s - leg.sent_s, is_running))
        elif leg.end is not LegEnd.LOST:
            merged.guess(Cause.PREFILL, end_s - leg.sent_s)
        return
    _add_to_ttft(merged, leg, leg.first_s, account)
    if account is None or account.ttft_s is None:
        _guess_leg(merged, leg, leg.first_s, end_s)
    elif leg.end is LegEnd.HANDED_OVER:
        if not leg.makes_good:
            seconds[Cause.NETWORK] += max(0.0, merged.tell(_up_to_first(account, account.ttft_s), leg.first_s - leg.sent_s))
    elif leg.makes_good:  # where its first token came later than those behind it, it had made good before that came
        left_s = merged.tell(_after_first(account, account.ttft_s), end_s - leg.first_s, is_running)
        seconds[Cause.NETWORK if left_s > 0.0 else Cause.WORKER_LOST] += left_s
    else:
        seconds[Cause.NETWORK] += max(0.0, merged.tell(_whole(account), end_s - leg.sent_s, is_running))


def _add_to_ttft(merged: Merged, leg: Leg, first_s: float, account: WorkerAccount | None) -> None:
    """The leg's part of the time to the request's first token, if it gave that."""
    ttft = merged.ttft_seconds
    if ttft is None or merged.journey.first_token_s != first_s:
        return
    if account is None or account.ttft_s is None:
        ttft[Cause.PREFILL] += first_s - leg.sent_s
    else:
        _add(ttft, _up_to_first(account, account.ttft_s))
        ttft[Cause.NETWORK] += max(0.0, first_s - leg.sent_s - account.ttft_s)


def _guess_leg(merged: Merged, leg: Leg, first_s: float, end_s: float) -> None:
    """By when its tokens came: it gave some, and nobody tells what it did."""
    if not leg.makes_good:
        merged.guess(Cause.PREFILL, first_s - leg.sent_s)
    if leg.end is LegEnd.LOST:
        merged.guess(Cause.DECODE, (leg.last_s or first_s) - first_s)
    elif leg.end is not LegEnd.HANDED_OVER:
        merged.guess(Cause.DECODE, end_s - first_s)


@dataclass(frozen=True, slots=True)
class _Part:
    """What a worker charges of a piece of a leg, and how long that piece took by its clock."""

    seconds: Mapping[str, float]
    wall_s: float
    in_flight_s: float
    details: Mapping[str, str]


def _add(seconds: list[float], part: _Part) -> None:
    for name, part_s in part.seconds.items():
        if name in _CAUSES:  # one that only a newer worker knows stays in the remainder
            seconds[_CAUSES[name]] += part_s


def _whole(account: WorkerAccount) -> _Part:
    return _Part(account.seconds, account.wall_s, account.in_flight_s, account.details)


def _until(account: WorkerAccount, span_s: float) -> WorkerAccount:
    """Of a request whose client left after ``span_s`` seconds: amid a step, it may be, which its worker has charged whole."""
    if account.wall_s <= span_s:
        return account
    ttft_s = account.ttft_s or 0.0
    ttft, begun_s = (account.ttft_seconds, ttft_s) if ttft_s <= span_s else ({}, 0.0)
    share = (span_s - begun_s) / (account.wall_s - begun_s)
    up_to = {name: ttft.get(name, 0.0) for name in account.seconds}
    seconds = {name: up_to[name] + share * (all_s - up_to[name]) for name, all_s in account.seconds.items()}
    advice = [msgspec.structs.replace(one, gain_s=one.gain_s * span_s / account.wall_s) for one in account.advice]
    return msgspec.structs.replace(account, wall_s=span_s, seconds=seconds, advice=advice)


def _up_to_first(account: WorkerAccount, ttft_s: float) -> _Part:
    return _Part(account.ttft_seconds, ttft_s, 0.0, account.details)


def _after_first(account: WorkerAccount, ttft_s: float) -> _Part:
    after = {name: seconds - account.ttft_seconds.get(name, 0.0) for name, seconds in account.seconds.items()}
    return _Part(after, account.wall_s - ttft_s, account.in_flight_s, account.details)
