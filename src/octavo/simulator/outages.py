"""Engines of a simulation that are killed or drained, and perhaps come back: when, and what becomes of a request that was there.

Of one that is killed a request goes on elsewhere as one whose prompt is its own and what it has said: the same tokens are computed as after
a worker's death.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import NamedTuple

from octavo.core.request import Request


@dataclass(frozen=True, slots=True)
class Outage:
    """Engine ``engine`` is killed at ``at_s`` and is there again, empty, at ``back_s`` (infinity: never). ``drains``: it is not killed: it
    takes nothing new, and keeps what it has until that is done with. ``is_new``: it is another one that is there then; one that had
    drained and is the same has its cache."""

    engine: int
    at_s: float
    back_s: float = float("inf")
    drains: bool = False
    is_new: bool = True

    def __post_init__(self) -> None:
        if not 0.0 <= self.at_s < self.back_s:
            raise ValueError(f"outage: {self.at_s!r} to {self.back_s!r} is not allowed; from 0 seconds, and back after that")


class Moment(NamedTuple):
    """At which an engine goes, or ``is_back``. At one moment engines go before others come back."""

    at_s: float
    is_back: bool
    engine: int
    drains: bool = False
    is_new: bool = True


def moments(outages: Iterable[Outage], num_engines: int) -> list[Moment]:
    """Of all outages, by time. ValueError for an engine that is not there, or that is killed while it is gone."""
    found = list[Moment]()
    last_s = dict[int, float]()
    for outage in sorted(outages, key=lambda outage: outage.at_s):
        if not 0 <= outage.engine < num_engines:
            raise ValueError(f"outage: engine {outage.engine} is not allowed; they are numbered from 0 to {num_engines - 1}")
        if outage.at_s < last_s.get(outage.engine, 0.0):
            raise ValueError(f"outage: engine {outage.engine} is killed at {outage.at_s:g} s, when it is gone")
        last_s[outage.engine] = outage.back_s
        how = outage.engine, outage.drains, outage.is_new
        found.append(Moment(outage.at_s, False, *how))
        if outage.back_s < float("inf"):
            found.append(Moment(outage.back_s, True, *how))
    return sorted(found)


def continued(request: Request, output_token_ids: Seq[int]) -> Request:
    """What is left of a request that has drawn these tokens."""
    params = request.params
    left = None if params.max_tokens is None else params.max_tokens - len(output_token_ids)
    return replace(request, prompt_token_ids=[*request.prompt_token_ids, *output_token_ids], params=replace(params, max_tokens=left))


def parse_outage(text: str) -> Outage:
    """ENGINE@AT or ENGINE@AT-BACK, in seconds. Raises ValueError."""
    match = re.fullmatch(r"(\d+)@([\d.]+)(?:-([\d.]+))?", text.strip())
    try:
        if match is None:
            raise ValueError(text)
        return Outage(int(match[1]), float(match[2]), float("inf") if match[3] is None else float(match[3]))
    except ValueError:
        raise ValueError(f"outage: {text!r} is not allowed; ENGINE@AT or ENGINE@AT-BACK in seconds, back after that") from None
