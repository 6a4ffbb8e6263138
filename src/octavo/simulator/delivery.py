"""When tokens are read by who waits for them: some time after the step that drew them, since others want the cores that bring them.

    delays measured, in order ─▶ Delivery ─▶ TokenReader ─▶ the moment at which each token of a simulation is read

Owns nothing of steps: they go on meanwhile. There is one reader to a simulation: whoever reads a stream reads it in order, wherever its
tokens are made.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Generic, TypeVar

BesideT = TypeVar("BesideT")


@dataclass(frozen=True, slots=True)
class Delivery(Generic[BesideT]):
    """``delays_s``: seconds from the end of a step until its token was read, by what the neighbours were in, of tokens that followed one
    another. Where fewer than ``MIN_DELAYS`` are known, those of all count. Raises ValueError for one below 0."""

    delays_s: Mapping[BesideT, Seq[float]]
    all_s: list[float] = field(init=False)

    MIN_DELAYS = 20

    def __post_init__(self) -> None:
        object.__setattr__(self, "all_s", [delay for some in self.delays_s.values() for delay in some])
        for delay in self.all_s:
            if not 0.0 <= delay < math.inf:
                raise ValueError(f"delays_s: {delay!r} is not allowed; finite numbers from 0")

    def beside(self, what: BesideT) -> Seq[float]:
        """The delays that count beside ``what``, at least one where any are known."""
        some = self.delays_s.get(what, ())
        return some if len(some) >= self.MIN_DELAYS else self.all_s


@dataclass(slots=True)
class _Stream(Generic[BesideT]):
    """``place``: of its last delay, among those of ``delivery`` beside ``beside``; its next one is drawn where they are others."""

    delivery: Delivery[BesideT]
    beside: BesideT
    place: int
    last_s: float


class TokenReader(Generic[BesideT]):
    """Draws delays for the streams of a simulation. A stream begins anywhere among the measured ones, and goes on from there in their order
    (a block bootstrap, Künsch, 1989): what is late is late several times in a row, and that is no gap."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._streams: dict[str, _Stream[BesideT]] = {}

    def __len__(self) -> int:
        """Streams that have not ended, and that something has been late in."""
        return len(self._streams)

    def at_s(self, name: str, now: float) -> float:
        """When what stream ``name`` got at ``now`` is read if nothing holds it up: never before what it got earlier."""
        stream = self._streams.get(name)
        if stream is None:
            return now
        stream.last_s = max(stream.last_s, now)
        return stream.last_s

    def read_s(self, name: str, now: float, delivery: Delivery[BesideT], beside: BesideT) -> float:
        """When it is read where it is made by an engine with that ``delivery``. ``beside``: what neighbours are in."""
        delays = delivery.beside(beside)
        if not delays:
            return self.at_s(name, now)
        stream = self._streams.get(name)
        if stream is None:
            stream = self._streams[name] = _Stream(delivery, beside, self._rng.randrange(len(delays)), now)
        elif stream.delivery is not delivery or stream.beside != beside:
            stream.delivery, stream.beside, stream.place = delivery, beside, self._rng.randrange(len(delays))
        else:
            stream.place = (stream.place + 1) % len(delays)
        stream.last_s = max(stream.last_s, now + delays[stream.place])
        return stream.last_s

    def ended(self, name: str) -> None:
        """Nothing more comes of it."""
        self._streams.pop(name, None)
