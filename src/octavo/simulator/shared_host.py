"""Engines whose machines share a host: a step takes longer while a neighbour is in one of its own, since both share memory and caches.

    steps begin and end ─▶ SharedHost.settle ─▶ the pace of each step in flight ─▶ when it will end, if nothing else happens

Beside neighbours a step makes progress at 1 / (1 + s) of its own pace, as jobs that share a processor do; s goes by what it is and by what
they are in, and changes when a neighbour's step begins or ends. What else the system does to steps (it lends their core to somebody else,
for a moment) cannot be told beforehand: where a ``Spread`` says how much steps that decode differ, each is longer or shorter by a factor
that is drawn when it begins.

Owns paces; what a step takes alone is its engine's to say.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from octavo.core.cost import StepShape
from octavo.simulator.delivery import Delivery
from octavo.simulator.sim_engine import InFlight, SimEngine


class StepKind(str, Enum):
    """What holds others up, and is held up, alike: steps that only decode read much and compute little, those with prompts compute."""

    DECODE = "decode"
    PROMPT = "prompt"

    @classmethod
    def of(cls, shape: StepShape) -> StepKind:
        return cls.DECODE if shape.only_decodes else cls.PROMPT


class Crowding(NamedTuple):
    """What one neighbour adds to a step while it is in one of its own, as a share: ``decode_prompt`` is what one with prompts adds to a
    step that decodes. Of several neighbours the sum."""

    decode_decode: float = 0.0
    decode_prompt: float = 0.0
    prompt_decode: float = 0.0
    prompt_prompt: float = 0.0

    def of(self, kind: StepKind, beside: StepKind) -> float:
        """To a step of ``kind``, by one of ``beside``."""
        if kind is StepKind.DECODE:
            return self.decode_decode if beside is StepKind.DECODE else self.decode_prompt
        return self.prompt_decode if beside is StepKind.DECODE else self.prompt_prompt


class Taken(NamedTuple):
    """A measured step: the seconds that it was predicted to take beside its neighbours, and how many times that it took."""

    seconds: float
    times: float


class Spread:
    """How much steps that only decode differ from what they are predicted to take: measured ones that began beside the same and should have
    taken about as long, drawn again (a bootstrap, Efron, 1979, among the nearest). By ``seconds``, since a moment without a core is less to
    a longer step. To one with prompts, tens of times as long, such moments come many times, and are in its mean.

    ``taken``: by what they were beside (None: nobody was in a step; prompts before others). Where fewer than ``MIN_TAKEN`` are known there
    is no spread.
    """

    MIN_TAKEN = 20
    NUM_NEAREST = 48

    def __init__(self, taken: Mapping[StepKind | None, Iterable[Taken]]) -> None:
        found = {beside: sorted(some) for beside, some in taken.items()}
        self._taken = {beside: some for beside, some in found.items() if len(some) >= self.MIN_TAKEN}

    def __bool__(self) -> bool:
        return bool(self._taken)

    def draw(self, beside: StepKind | None, seconds: float, rng: random.Random) -> float:
        """By what to multiply ``seconds``, which a step that only decodes is predicted to take."""
        some = self._taken.get(beside)
        if some is None:
            return 1.0
        num, place = min(self.NUM_NEAREST, len(some)), bisect_left(some, (seconds,))
        middle = (place + bisect_right(some, (seconds, math.inf))) // 2  # of those that should have taken just as long
        return some[min(max(0, middle - num // 2), len(some) - num) + rng.randrange(num)].times


@dataclass(frozen=True, slots=True)
class HostSharing:
    """``engines``: indexes of those that share a host. ``delivery``: when tokens are read (None: at the end of their step)."""

    engines: tuple[int, ...]
    crowding: Crowding
    spread: Spread | None = None
    delivery: Delivery[StepKind | None] | None = None


@dataclass(slots=True)
class _Pace:
    """A step in flight. ``left_s``: what would be left of it at ``since_s`` if it were alone from then on."""

    step: InFlight
    kind: StepKind
    begin_s: float
    left_s: float
    since_s: float
    slowing: float = 0.0


class SharedHost:
    """``engines``: all of a simulation. Those of the host take their steps one by one, whatever they repeat."""

    def __init__(self, engines: Seq[SimEngine], sharing: HostSharing, seed: int = 0) -> None:
        self._engines = [engines[index] for index in sharing.engines]
        self._crowding, self._spread = sharing.crowding, sharing.spread
        self._paces: list[_Pace | None] = [None] * len(self._engines)
        self._rngs = [random.Random(f"spread:{seed}:{engine.index}") for engine in self._engines]
        self.delivery = sharing.delivery

    def beside(self, engine: SimEngine) -> StepKind | None:
        """What the neighbours of ``engine`` are in."""
        others = Counter(pace.kind for one, pace in zip(self._engines, self._paces, strict=True) if pace is not None and one is not engine)
        return _strongest(others)

    def settle(self, now: float) -> None:
        """Steps have begun and ended at ``now``: say anew when each of those in flight will end."""
        fresh = self._look(now)
        present = Counter(pace.kind for pace in self._paces if pace is not None)
        for i, (engine, pace) in enumerate(zip(self._engines, self._paces, strict=True)):
            if pace is None:
                continue
            present[pace.kind] -= 1
            slowing = math.fsum(self._crowding.of(pace.kind, kind) * number for kind, number in present.items())
            is_fresh = i in fresh
            if is_fresh and self._spread is not None and pace.kind is StepKind.DECODE:
                pace.left_s *= self._spread.draw(_strongest(present), pace.left_s, self._rngs[i])
            if is_fresh or slowing != pace.slowing:
                pace.left_s -= (now - pace.since_s) / (1.0 + pace.slowing)
                pace.since_s, pace.slowing = now, slowing
                end_s = now + max(0.0, pace.left_s) * (1.0 + slowing)
                engine.ends_at(end_s, end_s - pace.begin_s)
            present[pace.kind] += 1

    def _look(self, now: float) -> set[int]:
        """Take account of what is in flight; who has begun."""
        fresh = set[int]()
        for i, engine in enumerate(self._engines):
            step, pace = engine.in_flight, self._paces[i]
            if step is None:
                self._paces[i] = None
            elif pace is None or pace.step is not step:
                self._paces[i] = _Pace(step, StepKind.of(StepShape.of(step.plan)), now, step.result.seconds, now)
                fresh.add(i)
        return fresh


def _strongest(present: Mapping[StepKind, int]) -> StepKind | None:
    """What a step is said to be beside."""
    return next((kind for kind in (StepKind.PROMPT, StepKind.DECODE) if present.get(kind)), None)


def check_hosts(hosts: Iterable[HostSharing], num_engines: int) -> None:
    """Raises ValueError for an engine that is not there, or that is on two hosts, and for steps that neighbours make shorter."""
    seen = set[int]()
    for host in hosts:
        for index in host.engines:
            if not 0 <= index < num_engines:
                raise ValueError(f"hosts: engine {index} is not allowed; they are numbered from 0 to {num_engines - 1}")
            if index in seen:
                raise ValueError(f"hosts: engine {index} is named twice")
            seen.add(index)
        for name, more in host.crowding._asdict().items():
            if not 0.0 <= more < math.inf:
                raise ValueError(f"hosts: {name} {more!r} is not allowed; a finite number from 0")
