"""How long prompts and answers are: distributions over token counts, drawn from a generator that the caller seeds.

Owns the distributions and the way they are written on a command line. Never reads a file; lengths of a trace come with ``traces``.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol

MAX_TOKENS = 1 << 24  # above any context; a larger length is a slip of the keyboard


class Lengths(Protocol):
    """A distribution over numbers of tokens."""

    def draw(self, rng: random.Random) -> int:
        """At least 1."""
        ...


def _check(name: str, value: float, low: float, high: float) -> None:
    """ValueError unless ``low <= value <= high``; nan is not."""
    if not low <= value <= high:
        raise ValueError(f"{name}: {value!r} is not allowed; from {low} to {high}")


@dataclass(frozen=True, slots=True)
class Fixed:
    num_tokens: int

    def __post_init__(self) -> None:
        _check("length", self.num_tokens, 1, MAX_TOKENS)

    def draw(self, rng: random.Random) -> int:
        return self.num_tokens

    def __str__(self) -> str:
        return str(self.num_tokens)


@dataclass(frozen=True, slots=True)
class Uniform:
    """Every length from ``low`` to ``high``, both included, equally likely."""

    low: int
    high: int

    def __post_init__(self) -> None:
        _check("low", self.low, 1, MAX_TOKENS)
        _check("high", self.high, self.low, MAX_TOKENS)

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)

    def __str__(self) -> str:
        return f"uniform:{self.low}:{self.high}"


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Conversations are roughly so: exp of a normal variable of standard deviation ``sigma``, rounded.

    ``mean`` is that of the whole distribution. What falls outside ``low`` .. ``high`` counts as that limit, so the mean of draws is lower
    when the upper limit is near.
    """

    mean: float
    sigma: float
    low: int
    high: int

    def __post_init__(self) -> None:
        _check("mean", self.mean, 1, MAX_TOKENS)
        _check("sigma", self.sigma, 0, 10)
        _check("low", self.low, 1, MAX_TOKENS)
        _check("high", self.high, self.low, MAX_TOKENS)

    def draw(self, rng: random.Random) -> int:
        return self._within(rng.lognormvariate(math.log(self.mean) - self.sigma**2 / 2, self.sigma))

    def quantile(self, share: float) -> int:
        """The length that a ``share`` (between 0 and 1) of all draws stays below."""
        return self._within(math.exp(math.log(self.mean) - self.sigma**2 / 2 + self.sigma * NormalDist().inv_cdf(share)))

    def _within(self, value: float) -> int:
        return round(min(max(value, self.low), self.high))

    def __str__(self) -> str:
        return f"lognormal:{self.mean:g}:{self.sigma:g}:{self.low}:{self.high}"


@dataclass(frozen=True, slots=True)
class Recorded:
    """Lengths that somebody recorded, each draw one of them, with replacement."""

    values: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError("values: () is not allowed; at least one length")
        _check("length", min(self.values), 1, MAX_TOKENS)
        _check("length", max(self.values), 1, MAX_TOKENS)

    def draw(self, rng: random.Random) -> int:
        return rng.choice(self.values)

    def __str__(self) -> str:
        return f"{len(self.values)} recorded lengths"


FORMS = "N, uniform:LOW:HIGH or lognormal:MEAN:SIGMA:LOW:HIGH"


def parse_lengths(text: str) -> Lengths:
    """The distribution that ``text`` names, in one of ``FORMS``. ValueError says what is wrong with it."""
    kind, *numbers = text.strip().split(":")
    try:
        if not numbers:
            return Fixed(int(kind))
        if kind == "uniform":
            low, high = map(int, numbers)
            return Uniform(low, high)
        if kind == "lognormal":
            mean, sigma, smallest, largest = numbers
            return LogNormal(float(mean), float(sigma), int(smallest), int(largest))
    except ValueError as error:
        if "is not allowed" in str(error):
            raise ValueError(f"{text!r}: {error}") from None
    raise ValueError(f"{text!r} is not allowed; {FORMS}, in tokens")
