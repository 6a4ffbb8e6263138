"""A window of a cluster to be replayed: the front end's journeys and what its workers tell of them, put together. Pure.

Times are the front end's own. Of a worker's clock only how long an attempt took is used: what a leg took longer here was on the way.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from octavo.core.cluster_window import ClusterWindow, WindowAbsence, WindowFrontEnd, WindowHandover, WindowWorker
from octavo.core.recorded_window import WindowRequest, salt_key, unpacked
from octavo.core.words import counted
from octavo.distributed.answers import MAX_ASKED, MAX_TOLD_STEPS, AboutRecorded, Recorded, ToldAttempt
from octavo.distributed.attendance import Attendance
from octavo.distributed.cluster_options import ClusterOptions
from octavo.distributed.journeys import Journey, Leg, LegEnd
from octavo.engine.ended_records import MAX_KEYS
from octavo.engine.window_snapshot import measured_of, num_output_of

MAX_REQUESTS = 1000
_MOST_STEPS = 20_000  # of all workers together
_STEP_FIELDS = 6
_MOST_BLOCKS = 1 << 24  # of a worker: a simulated one takes 100 bytes for each
_FEWEST_STEPS = 64  # of each, however many there are


def front_end_of(options: ClusterOptions) -> WindowFrontEnd:
    limits, kv = options.backpressure, options.handover
    handover = WindowHandover(kv.min_layerwise, kv.wire_dtype, kv.limits.reserve_s, kv.limits.copy_s)
    return WindowFrontEnd(options.router, kv.may_borrow, limits.most_pending_s, limits.most_sequences, handover)


@dataclass(slots=True)
class RecordedCluster:
    """The part of the front end: ``journeys`` of the last ``window_s`` seconds, of which the last MAX_REQUESTS count. ``forgotten_s``:
    requests that ended by then are not remembered. ``attendance``: when workers were there; those that it does not know always were."""

    journeys: Seq[Journey]
    window_s: float
    now: float
    forgotten_s: float
    attendance: Attendance = field(default_factory=lambda: Attendance(0.0))
    recent: list[Journey] = field(init=False)
    is_cut: bool = field(init=False)

    def __post_init__(self) -> None:
        since_s = self.now - self.window_s
        came = sorted((one for one in self.journeys if one.arrival_s >= since_s), key=lambda one: one.arrival_s)
        self.is_cut = len(came) > MAX_REQUESTS
        self.recent = [one for one in came[-MAX_REQUESTS:] if one.ended_s is None or one.num_output_tokens]

    @property
    def has_answers(self) -> bool:
        return any(measured_of(one) is not None for one in self.recent)

    def questions(self, workers: Iterable[str]) -> dict[str, AboutRecorded]:
        """What each of these has to be asked, so that all answers together are bounded."""
        names: dict[str, list[str]] = {worker: [] for worker in workers}
        for leg in (leg for one in self.recent for leg in one.legs):
            if leg.worker in names and leg.end is not LegEnd.LOST:
                names[leg.worker].append(leg.name)
        num = max(1, len(names))
        limits = max(1, MAX_KEYS // num), max(_FEWEST_STEPS, min(_MOST_STEPS // num, MAX_TOLD_STEPS))
        return {worker: AboutRecorded(some[-MAX_ASKED:], *limits) for worker, some in names.items()}

    def window(self, roles: Mapping[str, str], told: Mapping[str, Recorded], front_end: WindowFrontEnd) -> ClusterWindow:
        """``told``: by worker, of all in ``roles``, which are there now. Raises ValueError for what no worker tells."""
        begin_s = self.recent[0].arrival_s if self.recent else self.now
        parts, workers = _Parts(told), self._workers(roles, told, begin_s)
        places = {worker.name: place for place, worker in enumerate(workers)}
        before = [one for one in self.journeys if one.arrival_s < begin_s]
        starts_idle = self.forgotten_s <= begin_s and all(one.ended_s is not None and one.ended_s <= begin_s for one in before)
        absences = {worker.name: worker.absences for worker in workers}
        odd = {one.request_id for one in self.recent if _lost_otherwise(one, begin_s, absences)}
        requests = tuple(_request(one, begin_s, parts, places, one.request_id in odd) for one in self.recent)
        from_start = not before and self.forgotten_s == -math.inf
        found = self._hand_offs(), parts.way_s(self.recent), starts_idle, from_start, self._notes(parts, workers, len(odd))
        return ClusterWindow(workers, front_end, requests, *found)

    def _workers(self, roles: Mapping[str, str], told: Mapping[str, Recorded], begin_s: float) -> tuple[WindowWorker, ...]:
        """Those that are there, then those that have been there since ``begin_s`` and tell nothing more: like another of their role."""
        found = []
        for name, role in roles.items():
            known = self.attendance.find(name)
            found.append(_worker(name, role, told[name], () if known is None else known.absences(begin_s)))
        for name, gone in self.attendance.since(begin_s).items():
            if name not in roles:
                like = next((one for one in found if one.role == gone.seen.role), found[0])
                engine = replace(like.engine, num_blocks=min(gone.seen.num_blocks, _MOST_BLOCKS), max_model_len=gone.seen.max_model_len)
                found.append(WindowWorker(name, gone.seen.role, engine, (), gone.absences(begin_s)))
        return tuple(found)

    def _hand_offs(self) -> tuple[tuple[float, float], ...]:
        """Without the wait for a worker with room, which a replay has of itself."""
        found = (
            (float(one.num_prompt_tokens), leg.end_s - max(leg.first_s, leg.found_s or 0.0))
            for one in self.recent
            for leg in one.legs
            if leg.end is LegEnd.HANDED_OVER and leg.first_s is not None and leg.end_s is not None
        )
        return tuple(found)

    def _notes(self, parts: _Parts, workers: Seq[WindowWorker], num_odd: int) -> tuple[str, ...]:
        notes, since_s = [], self.now - self.window_s
        if self.recent and (self.is_cut or self.forgotten_s > since_s):
            age_s = self.now - self.recent[0].arrival_s
            notes.append(f"of the window only the last {counted(len(self.recent), 'request')}, from {age_s:.0f} s ago on")
        if some := [worker.name for worker in workers if worker.absences]:
            notes.append(f"not there all the time, and in the replay neither: {', '.join(some)}")
        if num_odd:
            notes.append(f"{counted(num_odd, 'request')} lost a worker that went on: replayed as if that had not been, and not compared")
        gone = sorted({leg.worker for one in self.recent for leg in one.legs} - {worker.name for worker in workers})
        if gone:
            notes.append(f"no longer there, and not in the replay: {', '.join(gone)}")
        num_unknown = sum(one.ended_s is not None and parts.last(one) is None for one in self.recent)
        if num_unknown:
            notes.append(f"{counted(num_unknown, 'request')} no worker knows any more: taken to share nothing with others")
        return tuple(notes)


class _Parts:
    """What workers tell of attempts."""

    def __init__(self, told: Mapping[str, Recorded]) -> None:
        self._told = {(worker, one.name): one for worker, recorded in told.items() for one in recorded.attempts}

    def of(self, leg: Leg) -> ToldAttempt | None:
        return None if leg.end is LegEnd.LOST else self._told.get((leg.worker, leg.name))

    def first(self, journey: Journey) -> Leg | None:
        """The leg on which its prompt was computed, of those that were not lost."""
        return next((leg for leg in journey.legs if leg.end is not LegEnd.LOST), None)

    def last(self, journey: Journey) -> ToldAttempt | None:
        return None if journey.leg is None else self.of(journey.leg)

    def way_s(self, journeys: Iterable[Journey]) -> float:
        """Seconds on the way there and back, in the middle of those that one worker answered."""
        found = []
        for leg in (one.legs[0] for one in journeys if len(one.legs) == 1):
            told = self.of(leg)
            if leg.end is LegEnd.FINISHED and leg.end_s is not None and told is not None and told.wall_s is not None:
                found.append(max(0.0, leg.end_s - leg.sent_s - told.wall_s))
        return statistics.median(found) if found else 0.0


def _worker(name: str, role: str, told: Recorded, absences: tuple[WindowAbsence, ...]) -> WindowWorker:
    """ValueError for steps that are none, and for more blocks than can be simulated."""
    for field_name in ("num_blocks", "num_host_blocks"):
        if not 0 <= (number := getattr(told.engine, field_name)) <= _MOST_BLOCKS:
            raise ValueError(f"{field_name}: {name} tells of {number}; at most {_MOST_BLOCKS} can be simulated")
    if any(len(step) != _STEP_FIELDS for step in told.steps):
        raise ValueError(f"steps: {name} tells of some that are not {_STEP_FIELDS} numbers")
    return WindowWorker(name, role, told.engine, tuple(told.steps), absences)


def _lost_otherwise(journey: Journey, begin_s: float, absences: Mapping[str, Seq[WindowAbsence]]) -> bool:
    """It lost a worker, and not because that was gone: a step could not be computed, say."""
    lost = (leg for leg in journey.legs if leg.end is LegEnd.LOST)
    return any(not any(one.lost_at((leg.end_s or 0.0) - begin_s) for one in absences.get(leg.worker, ())) for leg in lost)


def _request(journey: Journey, begin_s: float, parts: _Parts, places: Mapping[str, int], is_odd: bool) -> WindowRequest:
    first, last = parts.first(journey), parts.last(journey)
    told = None if first is None else parts.of(first)
    wall_s, ttft_s, itl_s = (None if is_odd else measured_of(journey)) or (None, None, None)
    num_cached = 0 if told is None else min(max(0, told.num_cached), journey.num_prompt_tokens)
    return WindowRequest(
        journey.arrival_s - begin_s, journey.num_prompt_tokens, num_output_of(journey), journey.max_tokens, max(1, journey.num_choices),
        num_cached, () if last is None else unpacked(last.keys), salt_key(journey.cache_salt), wall_s, ttft_s, itl_s, journey.priority,
        journey.user, journey.session, 0 if first is None else places.get(first.worker, 0),
    )  # fmt: skip
