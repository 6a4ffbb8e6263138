"""A workload: arrivals, lengths and prefixes put together into requests. Plain data, the same for a load generator and a simulator.

Everything follows from the seed. Arrivals, lengths, groups and tokens are drawn from generators of their own, so that a change of one
leaves the others as they were: the same prompts at twice the rate, the same arrivals with other lengths.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from octavo.workload.arrivals import Arrivals
from octavo.workload.lengths import Lengths


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """``arrival_s``: when it is due, from the start of the run (0 in a closed loop). ``session``: which requests belong together, those
    of one prefix group; None where there are no groups. ``priority``: lower first, and ``user``: whose it is, where requests are held back
    or an engine's policy asks. ``most_output``: what it allows, where that is more than it makes (None: as many)."""

    arrival_s: float
    prompt_token_ids: list[int]
    num_output: int  # tokens
    session: str | None = None
    priority: int = 0
    user: str | None = None
    most_output: int | None = None


class LengthPairs(Protocol):
    """Where lengths come from."""

    def lengths(self, rng: random.Random) -> Iterator[tuple[int, int]]:
        """(prompt tokens, output tokens) of each request; it may go on for ever."""
        ...


@dataclass(frozen=True, slots=True)
class Independent:
    """Prompt and output lengths that know nothing of each other."""

    prompt: Lengths
    output: Lengths

    def lengths(self, rng: random.Random) -> Iterator[tuple[int, int]]:
        while True:
            yield self.prompt.draw(rng), self.output.draw(rng)


def _integers(name: str, text: str, form: str, least: int, most: int) -> list[int]:
    parts = text.split(":")
    if not (least <= len(parts) <= most and all(part.isascii() and part.isdigit() for part in parts)):
        raise ValueError(f"{name}: {text!r} is not of the form {form}")
    return [int(part) for part in parts]


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Each request begins with the ``num_tokens`` of one of ``num_groups`` prefixes, drawn evenly; its own prompt follows."""

    num_tokens: int
    num_groups: int = 1

    def __post_init__(self) -> None:
        if self.num_tokens < 1 or self.num_groups < 1:
            raise ValueError(f"shared_prefix: {self.num_tokens}:{self.num_groups} is not allowed; at least 1 token and 1 group")

    @classmethod
    def parse(cls, text: str) -> SharedPrefix:
        """TOKENS or TOKENS:GROUPS. Raises ValueError."""
        return cls(*_integers("shared_prefix", text, "TOKENS[:GROUPS]", 1, 2))


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Prompts are of random token ids, ``low`` .. ``high`` - 1. Ids near 0 are special tokens in many vocabularies."""

    low: int = 100
    high: int = 32000

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high <= 1 << 31:
            raise ValueError(f"token_ids: {self.low}:{self.high} is not allowed; 0 <= LOW < HIGH <= {1 << 31}")

    @classmethod
    def parse(cls, text: str) -> TokenRange:
        """LOW:HIGH. Raises ValueError."""
        return cls(*_integers("token_ids", text, "LOW:HIGH", 2, 2))

    def draw(self, rng: random.Random, num_tokens: int) -> list[int]:
        """By remainder of 32 random bits: no id is likelier than another by more than (high - low) / 2**32."""
        low, span = self.low, self.high - self.low
        return [low + bits % span for bits in array("I", rng.randbytes(4 * num_tokens))]


@dataclass(frozen=True, slots=True)
class Workload:
    """``num_requests`` None: as many as arrivals and lengths have, which may be without end."""

    arrivals: Arrivals
    lengths: LengthPairs
    num_requests: int | None = None
    prefix: SharedPrefix | None = None
    tokens: TokenRange = TokenRange()
    seed: int | str = 0

    def requests(self) -> Iterator[WorkloadRequest]:
        """The requests by arrival, made one by one; each call gives the same ones."""
        return islice(self._endless(), self.num_requests)

    def _endless(self) -> Iterator[WorkloadRequest]:
        times, lengths = self.arrivals.times(self._rng("arrivals")), self.lengths.lengths(self._rng("lengths"))
        prefixes, groups, tokens = self._prefixes(), self._rng("groups"), self._rng("tokens")
        for arrival_s, (num_prompt, num_output) in zip(times, lengths, strict=False):
            own_ids = self.tokens.draw(tokens, num_prompt)
            if prefixes:
                group = groups.randrange(len(prefixes))
                yield WorkloadRequest(arrival_s, prefixes[group] + own_ids, num_output, f"prefix-{group}")
            else:
                yield WorkloadRequest(arrival_s, own_ids, num_output)

    def _prefixes(self) -> list[list[int]]:
        if self.prefix is None:
            return []
        rng = self._rng("prefixes")
        return [self.tokens.draw(rng, self.prefix.num_tokens) for _ in range(self.prefix.num_groups)]

    def _rng(self, purpose: str) -> random.Random:
        return random.Random(f"{self.seed}:{purpose}")  # a string is hashed by SHA-512: the same on every machine and version
