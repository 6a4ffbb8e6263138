"""What goes wrong, when and where: the events of a chaos run, drawn from a seed. Pure: the same seed is the same run, and a longer run
begins as a shorter one does.

    | calm | round | calm | round | calm | ...

A round is one event, or several that overlap, on different workers; one worker at least is left alone. The calm after a round is what
recovery is measured in; it is longer than recovery may take.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum


class Kind(str, Enum):
    KILL = "kill"  # SIGKILL; the worker is started again after ``lasts_s``
    STOP = "stop"  # SIGSTOP, and SIGCONT after ``lasts_s``
    LINK = "link"  # the cable of its host is pulled
    DELAY = "delay"  # what goes between it and the front end takes ``delay_s`` longer
    STALL = "stall"  # nothing passes between it and the front end, and no connection closes
    CUT = "cut"  # its connections to the front end are reset, new ones closed for ``lasts_s``


SHORT_S = (0.2, 0.8)  # too short to be taken for dead
LONG_S = (2.0, 6.0)
DELAY_S = (0.05, 0.4)
CALM_S = (13.0, 16.0)
LEAD_S = 20.0  # of calm before the first round, in which the full rate is measured


@dataclass(frozen=True, slots=True)
class ChaosEvent:
    """Times in seconds since the start of the run."""

    at_s: float
    kind: Kind
    worker: int
    lasts_s: float
    delay_s: float = 0.0

    @property
    def end_s(self) -> float:
        return self.at_s + self.lasts_s

    def __str__(self) -> str:
        late = f" of {1000 * self.delay_s:.0f} ms" if self.delay_s else ""
        return f"{self.kind.value}{late} at worker {self.worker} for {self.lasts_s:.1f} s"


@dataclass(frozen=True, slots=True)
class Round:
    """Events that overlap, by time."""

    events: tuple[ChaosEvent, ...]

    @property
    def at_s(self) -> float:
        return self.events[0].at_s

    @property
    def end_s(self) -> float:
        return max(event.end_s for event in self.events)


def rounds(seed: int, duration_s: float, kinds: Sequence[Sequence[Kind]]) -> list[Round]:
    """The rounds that are over, calm included, within ``duration_s``. ``kinds``: what may happen to each worker.

    Raises ValueError when there are fewer than two workers, or one to whom nothing may happen.
    """
    if len(kinds) < 2:
        raise ValueError(f"kinds: {len(kinds)} workers are not allowed; at least 2, since one is always left alone")
    if not all(kinds):
        raise ValueError("kinds: something has to happen to each worker")
    found = []
    for one in _endless(seed, kinds):
        if one.end_s + CALM_S[0] > duration_s:
            return found
        found.append(one)
    raise AssertionError("the rounds never end")


def _endless(seed: int, kinds: Sequence[Sequence[Kind]]) -> Iterator[Round]:
    draw = random.Random(seed)
    at_s = LEAD_S
    while True:
        one = _round(draw, at_s, kinds)
        yield one
        at_s = one.end_s + draw.uniform(*CALM_S)


def _round(draw: random.Random, at_s: float, kinds: Sequence[Sequence[Kind]]) -> Round:
    """One worker in two rounds of three, else as many as may be hit at once; each begins while the one before is on."""
    most = len(kinds) - 1
    num_hit = 1 if most == 1 or draw.random() < 2 / 3 else draw.randint(2, most)
    events: list[ChaosEvent] = []
    for worker in draw.sample(range(len(kinds)), num_hit):
        event = _event(draw, at_s, worker, draw.choice(list(kinds[worker])))
        events.append(event)
        at_s += draw.uniform(0.0, event.lasts_s)
    return Round(tuple(sorted(events, key=lambda event: event.at_s)))


def _event(draw: random.Random, at_s: float, worker: int, kind: Kind) -> ChaosEvent:
    brief = draw.random() < 0.25 and kind is not Kind.KILL
    lasts_s = draw.uniform(*(SHORT_S if brief else LONG_S))
    return ChaosEvent(at_s, kind, worker, lasts_s, draw.uniform(*DELAY_S) if kind is Kind.DELAY else 0.0)
