"""The way of each request through a cluster, as the front end sees it: which worker had it when, and what it waited for in between. Pure.

    received ─▶ arrived ─▶ leg ─▶ (lost ─▶) leg ─▶ (handed over ─▶) leg ─▶ ended ─▶ sent

A *leg* is one worker's part: from the moment the worker was told to the last of its events, or to the moment that another one was told or
it was given up. All moments are the front end's own, on its clock. What the front end can tell without a worker it charges here:

* before the first leg: ``queued_worker``; after a lost leg, until the next one is told: ``worker_lost``.
* from the first token of a leg that is handed over, until the next one is told: ``hand_off``.
* the silence of a lost leg after its last token, or all of it when it gave none: ``worker_lost``; so is the leg after it up to its first
  token, when tokens had come before: it makes good what was lost.

The rest of a leg the worker alone can tell (``accounts``), and tells it when the leg ends: what it has told is kept with the leg, as long
as the journey, so that a worker may go. Owns the journeys of running requests and of the last that ended, and the gaps between tokens that
no worker sees: those from one leg to the next, and those that a client held up. Memory does not grow with tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from octavo.core.recorded_window import salt_key
from octavo.core.request import FinishReason, Request
from octavo.distributed.worker_account import WorkerAccount
from octavo.engine.causes import NAMES, Bottleneck, Cause
from octavo.engine.ended_records import CAPACITY, EndedRecords
from octavo.engine.request_record import RecordState, RequestRecord
from octavo.engine.serving import MetricFamily
from octavo.engine.step_window import StepWindow, in_order


class LegEnd(Enum):
    """How a leg ended, or that it has not."""

    RUNNING = "running"
    FINISHED = "finished"
    HANDED_OVER = "handed over"  # after the first token, to another worker
    LOST = "lost"  # the worker died, hung, or was told to begin anew


@dataclass(slots=True)
class Leg:
    """``name``: of the attempt in the worker's engine. ``first_s`` and ``last_s``: when tokens of it came, the first and the last time.
    ``makes_good``: tokens had come before, from a worker that was lost. ``found_s``: of one that is to be handed over, when another worker
    had room. ``told``: what its worker has said of it."""

    worker: str
    name: str
    sent_s: float
    makes_good: bool = False
    first_s: float | None = None
    last_s: float | None = None
    end_s: float | None = None
    found_s: float | None = None
    end: LegEnd = LegEnd.RUNNING
    told: WorkerAccount | None = None

    @property
    def account(self) -> WorkerAccount | None:
        """All that there is to tell of it, once it has ended and its worker has told."""
        is_whole = self.told is not None and (self.told.has_ended if self.end is LegEnd.FINISHED else self.end is LegEnd.HANDED_OVER)
        return self.told if is_whole else None


@dataclass(slots=True, eq=False)
class Journey(RequestRecord):
    """A record whose ``seconds`` have what the front end charges by itself, up to ``since_s`` while nobody has it."""

    legs: list[Leg] = field(default_factory=list)
    user: int = 0  # a key that names whose it is, 0: nobody's
    session: int = 0  # likewise

    @property
    def leg(self) -> Leg | None:
        """The one that it is on, or was last."""
        return self.legs[-1] if self.legs else None

    @property
    def is_placed(self) -> bool:
        """A worker has it."""
        return bool(self.legs) and self.legs[-1].end is LegEnd.RUNNING

    @property
    def waits_for(self) -> Cause:
        """What its time goes to while no worker has it."""
        return Cause.WORKER_LOST if self.legs and self.legs[-1].end is LegEnd.LOST else Cause.QUEUED_WORKER

    @property
    def workers(self) -> list[str]:
        """In the order in which they had it."""
        return list(dict.fromkeys(leg.worker for leg in self.legs))

    def end_leg(self, end: LegEnd, now: float) -> None:
        """The worker that has it, if one does, has it no more; charges what the front end can tell of the leg."""
        leg = self.leg
        if leg is None or leg.end is not LegEnd.RUNNING:
            return
        leg.end, leg.end_s, self.since_s = end, now, now
        if end is LegEnd.HANDED_OVER:
            self.charge(Cause.HAND_OFF, now - (leg.first_s or leg.sent_s))
        elif end is LegEnd.LOST or (leg.makes_good and leg.first_s is None):
            self.charge(Cause.WORKER_LOST, now - (leg.last_s or leg.sent_s))


class Journeys:
    """Not thread-safe: all of it happens on the front end's event loop. What is told of a request that is unknown, or has ended, does
    nothing."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.window = StepWindow()  # of its gaps alone; the front end makes no steps
        self.num_lost_legs = 0
        self.num_handed_over = 0
        self._live: dict[str, Journey] = {}
        self._untold: dict[tuple[str, str], Leg] = {}  # by worker and name: those of which a worker may say something
        self._late: deque[tuple[str, str]] = deque()  # of them, those that have ended, oldest first
        self._ended = EndedRecords(capacity)

    @property
    def capacity(self) -> int:
        """Ended journeys that are remembered."""
        return self._ended.capacity

    @property
    def forgotten_s(self) -> float:
        """Requests that ended by then are not remembered."""
        return self._ended.forgotten_s

    # --- what happens -------------------------------------------------------------------------------------------------------------------

    def opened(self, request: Request) -> None:
        """A request was taken."""
        journey = self._live[request.request_id] = Journey.of(request)
        journey.since_s = journey.arrival_s
        journey.user, journey.session = salt_key(request.user), salt_key(request.session)

    def placed(self, request_id: str, worker: str, name: str, now: float) -> None:
        """``worker`` is told to answer it, or what is left of it, and knows it as ``name``."""
        journey = self._live.get(request_id)
        if journey is None:
            return
        journey.charge(journey.waits_for, max(0.0, now - journey.since_s))
        lost_before = journey.waits_for is Cause.WORKER_LOST and journey.first_token_s is not None
        self._begin_leg(journey, Leg(worker, name, now, lost_before))

    def found(self, request_id: str, now: float) -> None:
        """A worker that may be handed it has room."""
        journey = self._live.get(request_id)
        if journey is not None and journey.leg is not None:
            journey.leg.found_s = now

    def handed_over(self, request_id: str, worker: str, name: str, now: float) -> None:
        """``worker`` has its KV and is told to go on with it."""
        journey = self._live.get(request_id)
        if journey is not None:
            self._end_leg(journey, LegEnd.HANDED_OVER, now)
            self._begin_leg(journey, Leg(worker, name, now))
            self.num_handed_over += 1

    def lost(self, request_id: str, now: float) -> None:
        """The worker that has it is not counted on any more."""
        journey = self._live.get(request_id)
        if journey is not None and journey.is_placed:
            self._end_leg(journey, LegEnd.LOST, now)
            self.num_lost_legs += 1

    def told(self, worker: str, name: str, account: WorkerAccount) -> None:
        """What ``worker`` has to say of an attempt that has ended there, or that it holds to be handed over."""
        leg = self._untold.get((worker, name))
        if leg is not None:
            leg.told = account
            self._forget_if_told(leg)

    def _begin_leg(self, journey: Journey, leg: Leg) -> None:
        journey.legs.append(leg)
        self._untold[leg.worker, leg.name] = leg

    def _end_leg(self, journey: Journey, end: LegEnd, now: float) -> None:
        leg = journey.leg
        journey.end_leg(end, now)
        if leg is not None and not self._forget_if_told(leg):  # it was aborted, say, and its worker will say so
            self._late.append((leg.worker, leg.name))
            if len(self._late) > self.capacity:
                self._untold.pop(self._late.popleft(), None)

    def _forget_if_told(self, leg: Leg) -> bool:
        """Whether nothing more is to be told of it."""
        is_told = leg.end is LegEnd.LOST or leg.account is not None
        if is_told:
            self._untold.pop((leg.worker, leg.name), None)
        return is_told

    def tokens(self, request_id: str, num_tokens: int, now: float) -> None:
        """So many new tokens of it have come."""
        journey = self._live.get(request_id)
        if journey is None or not journey.legs:
            return
        leg = journey.legs[-1]
        if leg.first_s is None:
            leg.first_s = now
            self._first_of_leg(journey, leg, now)
        leg.last_s = journey.token_s = now
        journey.num_output_tokens += num_tokens

    def _first_of_leg(self, journey: Journey, leg: Leg, now: float) -> None:
        if leg.makes_good:
            journey.charge(Cause.WORKER_LOST, now - leg.sent_s)
        if journey.first_token_s is None:
            journey.first_token_s, journey.ttft_seconds = now, journey.seconds[:]
        else:  # a gap from one worker to the next, which none of them sees
            gap_s = now - journey.token_s
            self.window.add_gap(now, gap_s, in_order({Bottleneck.HOST if leg.makes_good else Bottleneck.NETWORK: gap_s}))

    def ended(self, request_id: str, reason: FinishReason, now: float) -> None:
        """Its last event has come, of all choices."""
        journey = self._live.pop(request_id, None)
        if journey is None:
            return
        if journey.is_placed:
            self._end_leg(journey, LegEnd.FINISHED, now)
        else:
            journey.charge(journey.waits_for, max(0.0, now - journey.since_s))
        journey.state, journey.ended_s, journey.finish_reason = RecordState.ENDED, now, reason
        self._ended.add(journey)

    def blocked(self, request_ids: Iterable[str], begin_s: float, end_s: float) -> None:
        """See ``Timeline.blocked``."""
        for journey in filter(None, map(self.find, request_ids)):
            journey.hold_up(begin_s, end_s)
        self.window.add_gap(end_s, end_s - begin_s, in_order({Bottleneck.CLIENT: end_s - begin_s}))

    def delivered(self, request_ids: Iterable[str], now: float) -> None:
        """See ``EndedRecords.delivered``."""
        self._ended.delivered(request_ids, now)

    # --- reading ------------------------------------------------------------------------------------------------------------------------

    def find(self, request_id: str) -> Journey | None:
        """Of a running request, or one of the last that ended."""
        found = self._live.get(request_id) or self._ended.find(request_id)
        assert found is None or isinstance(found, Journey)
        return found

    def all(self) -> list[Journey]:
        """Ended ones, oldest first, then those that go on, in the order in which they came."""
        return [*self._ended_journeys(), *self._live.values()]

    @property
    def num_unplaced(self) -> int:
        """Requests that no worker has."""
        return sum(not journey.is_placed for journey in self._live.values())

    def _ended_journeys(self) -> Iterator[Journey]:
        for record in self._ended.records():
            assert isinstance(record, Journey)
            yield record

    def check_invariants(self) -> None:
        """AssertionError unless workers may tell of each leg that runs, and of a bounded number of others. For tests."""
        legs = [leg for journey in self._live.values() for leg in journey.legs]
        running = {(leg.worker, leg.name) for leg in legs if leg.end is LegEnd.RUNNING}
        assert running <= self._untold.keys() <= running | {*self._late} and len(self._late) <= self.capacity
        assert all(leg.account is None for leg in self._untold.values())

    def families(self) -> list[MetricFamily]:
        """What the front end counts of them."""
        seconds = MetricFamily("octavo_request_cause_seconds", "counter", "Time of ended requests by what it went to.")
        seconds.samples += [({"cause": name}, total) for name, total in zip(NAMES, self._ended.totals, strict=True) if total > 0.0]
        lost = "Attempts whose worker was lost; their requests went on with another one, or failed."
        moved = "Requests whose KV was handed over from a worker to another one."
        waiting = "Sequences in the queue, preempted ones included."
        return [
            seconds,
            MetricFamily("octavo_num_requests_waiting", "gauge", waiting, [({}, self.num_unplaced)]),
            MetricFamily("octavo_cluster_lost_attempts", "counter", lost, [({}, self.num_lost_legs)]),
            MetricFamily("octavo_cluster_hand_offs", "counter", moved, [({}, self.num_handed_over)]),
        ]
