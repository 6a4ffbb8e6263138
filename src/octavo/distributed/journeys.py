"""The way of each request through a cluster, as the front end sees it: which worker had it when, and what it waited for in between. Pure.

    received ─▶ arrived ─▶ leg ─▶ (lost ─▶) leg ─▶ (handed over ─▶) leg ─▶ ended ─▶ sent

A *leg* is one worker's part: from the moment the worker was told to the last of its events, or to the moment that another one was told or
it was given up. All moments are the front end's own, on its clock; what happened within a leg the worker alone can tell (``accounts``).

Owns the journeys of running requests and of the last that ended, and the gaps between tokens that no worker sees: those from one leg to
the next, and those that a client held up. Memory does not grow with tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from octavo.core.request import FinishReason, Request
from octavo.engine.causes import Bottleneck
from octavo.engine.ended_records import CAPACITY, EndedRecords
from octavo.engine.request_record import RecordState, RequestRecord
from octavo.engine.step_window import StepWindow, in_order


class LegEnd(Enum):
    """How a leg ended, or that it has not."""

    RUNNING = "running"
    FINISHED = "finished"
    HANDED_OVER = "handed over"  # after the first token, to another worker
    LOST = "lost"  # the worker died, hung, or was told to begin anew


@dataclass(slots=True)
class Leg:
    """``key``: of the attempt, as the worker knows it. ``first_s`` and ``last_s``: when tokens of it came, the first and the last time."""

    worker: str
    key: int
    sent_s: float
    first_s: float | None = None
    last_s: float | None = None
    end_s: float | None = None
    end: LegEnd = LegEnd.RUNNING


@dataclass(slots=True, eq=False)
class Journey(RequestRecord):
    """A record whose ``seconds`` have what the front end charges by itself: preparation, and what came after the last token."""

    legs: list[Leg] = field(default_factory=list)

    @property
    def leg(self) -> Leg | None:
        """The one that it is on, or was last."""
        return self.legs[-1] if self.legs else None

    @property
    def workers(self) -> list[str]:
        """In the order in which they had it."""
        return list(dict.fromkeys(leg.worker for leg in self.legs))


class Journeys:
    """Not thread-safe: all of it happens on the front end's event loop. What is told of a request that is unknown, or has ended, does
    nothing."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.window = StepWindow()  # of its gaps alone; the front end makes no steps
        self._live: dict[str, Journey] = {}
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
        self._live[request.request_id] = Journey.of(request)

    def placed(self, request_id: str, worker: str, key: int, now: float) -> None:
        """``worker`` is told to answer it, or what is left of it, as attempt ``key``."""
        journey = self._live.get(request_id)
        if journey is not None:
            journey.state = RecordState.IN_STEP
            journey.legs.append(Leg(worker, key, now))

    def handed_over(self, request_id: str, worker: str, key: int, now: float) -> None:
        """``worker`` has its KV and is told to go on with it."""
        self._end_leg(request_id, LegEnd.HANDED_OVER, now)
        self.placed(request_id, worker, key, now)

    def lost(self, request_id: str, now: float) -> None:
        """The worker that has it is not counted on any more."""
        self._end_leg(request_id, LegEnd.LOST, now)

    def tokens(self, request_id: str, num_tokens: int, now: float) -> None:
        """So many new tokens of it have come."""
        journey = self._live.get(request_id)
        if journey is None or not journey.legs:
            return
        leg = journey.legs[-1]
        if leg.first_s is None:
            leg.first_s = now
            if journey.first_token_s is None:
                journey.first_token_s = now
            else:  # a gap from one worker to the next, which none of them sees
                gap_s = now - journey.token_s
                held = Bottleneck.NETWORK if journey.legs[-2].end is LegEnd.HANDED_OVER else Bottleneck.HOST
                self.window.add_gap(now, gap_s, in_order({held: gap_s}))
        leg.last_s = journey.token_s = now
        journey.num_output_tokens += num_tokens

    def ended(self, request_id: str, reason: FinishReason, now: float) -> None:
        """Its last event has come, of all choices."""
        self._end_leg(request_id, LegEnd.FINISHED, now)
        journey = self._live.pop(request_id, None)
        if journey is not None:
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

    def _end_leg(self, request_id: str, end: LegEnd, now: float) -> None:
        journey = self._live.get(request_id)
        leg = None if journey is None else journey.leg
        if leg is not None and leg.end is LegEnd.RUNNING:
            leg.end, leg.end_s = end, now

    # --- reading ------------------------------------------------------------------------------------------------------------------------

    def find(self, request_id: str) -> Journey | None:
        """Of a running request, or one of the last that ended."""
        found = self._live.get(request_id) or self._ended.find(request_id)
        assert found is None or isinstance(found, Journey)
        return found

    def all(self) -> list[Journey]:
        """Ended ones, oldest first, then those that go on, in the order in which they came."""
        return [*self._ended_journeys(), *self._live.values()]

    def _ended_journeys(self) -> Iterator[Journey]:
        for record in self._ended.records():
            assert isinstance(record, Journey)
            yield record

    def totals(self) -> list[float]:
        """Seconds by cause of all ended requests, as far as the front end charges them by itself, [NUM_CAUSES]."""
        return self._ended.totals[:]
