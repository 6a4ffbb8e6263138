"""When requests come, in seconds from the start of a run.

Closed loop: a fixed number of clients, each of which sends its next request when the last was answered, so the server sets the pace.
Open loop: requests come when they come, whether the server keeps up or not. Never reads a clock; who runs the requests waits.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol


class Arrivals(Protocol):
    """A process of arrivals."""

    def times(self, rng: random.Random) -> Iterator[float]:
        """Seconds, never falling; it may go on for ever."""
        ...


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """``concurrency`` requests at any time. Every request is due from the start: it waits for a client, not for a moment."""

    concurrency: int

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ValueError(f"concurrency: {self.concurrency!r} is not allowed; at least 1")

    def times(self, rng: random.Random) -> Iterator[float]:
        return itertools.repeat(0.0)


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """``rate`` requests per second on average, the gaps between them independent and Gamma-distributed.

    ``cv`` is their coefficient of variation (standard deviation / mean): 1 is a Poisson process, 0 a fixed rate, above 1 bursts. The
    first request comes after one gap.
    """

    rate: float
    cv: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.rate) and self.rate > 0):
            raise ValueError(f"rate: {self.rate!r} is not allowed; a finite number of requests per second above 0")
        if not 0 <= self.cv <= 100:
            raise ValueError(f"cv: {self.cv!r} is not allowed; from 0 to 100")

    @classmethod
    def of_burstiness(cls, rate: float, burstiness: float) -> OpenLoop:
        """vLLM's burstiness is the shape of the gaps' distribution, whose coefficient of variation is shape ** -0.5; infinite: a fixed
        rate."""
        return cls(rate, 0.0 if math.isinf(burstiness) else burstiness**-0.5)

    def times(self, rng: random.Random) -> Iterator[float]:
        if self.cv == 0:
            return (i / self.rate for i in itertools.count(1))
        shape = self.cv**-2
        gaps = (rng.gammavariate(shape, 1 / (shape * self.rate)) for _ in itertools.count())
        return itertools.accumulate(gaps)
