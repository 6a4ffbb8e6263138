"""A window of recent requests of a cluster in numbers: as ``recorded_window``, for a front end with workers behind it. Plain data.

Requests are as the front end saw them: when they came there, and when their tokens did. What a worker's steps take, and what its cache had
of a prompt, the workers tell. Two clocks are never compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, replace
from typing import Any

from octavo.core.recorded_window import WindowEngine, WindowRequest


@dataclass(frozen=True, slots=True)
class WindowAbsence:
    """Of a worker, in seconds from the window's beginning; ``to_s`` None: it has not come back. ``drained``: it took nothing new, and kept
    what it had; else that was lost. ``is_new``: another process came back, with nothing in its cache."""

    from_s: float
    to_s: float | None
    drained: bool = False
    is_new: bool = True

    def lost_at(self, moment_s: float) -> bool:
        """Whether what was lost by then was lost by this absence."""
        return not self.drained and self.from_s <= moment_s and (self.to_s is None or moment_s <= self.to_s)


@dataclass(frozen=True, slots=True)
class WindowWorker:
    """``role``: both, prefill or decode. ``steps``: as of a ``RecordedWindow``; none of one that is gone, and ``engine`` is then another's,
    of its size. ``absences``: by time, and none within another; but for these it took requests."""

    name: str
    role: str
    engine: WindowEngine
    steps: tuple[tuple[float, ...], ...]
    absences: tuple[WindowAbsence, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        plain = {name: getattr(self, name) for name in ("name", "role", "steps")}
        return plain | {"engine": asdict(self.engine), "absences": list(map(asdict, self.absences))}

    @classmethod
    def of_dict(cls, data: Mapping[str, Any]) -> WindowWorker:
        absences = tuple(WindowAbsence(**one) for one in data["absences"])
        return cls(data["name"], data["role"], WindowEngine(**data["engine"]), tuple(map(tuple, data["steps"])), absences)


@dataclass(frozen=True, slots=True)
class WindowHandover:
    """How KV goes from one worker to another, and how long that may take. ``min_layerwise``: prompt tokens from which on it goes while they
    are computed. ``wire_dtype``: auto, as it is stored; int8: rounded. A prefill worker goes on itself ``reserve_s`` after the first token
    where no other has room, ``copy_s`` after it (or after room was found) where the KV has not come; infinity: never."""

    min_layerwise: int = 512
    wire_dtype: str = "auto"
    reserve_s: float = 30.0
    copy_s: float = 30.0


@dataclass(frozen=True, slots=True)
class WindowFrontEnd:
    """How requests were spread. ``router``: its name. ``may_borrow``: workers took on the other role under pressure. ``most_pending_s`` and
    ``most_sequences``: what a worker might have waiting before requests were held back."""

    router: str
    may_borrow: bool = True
    most_pending_s: float = 0.5
    most_sequences: int | None = None
    handover: WindowHandover = WindowHandover()

    def to_dict(self) -> dict[str, Any]:
        return _without_infinity(asdict(self) | {"handover": _without_infinity(asdict(self.handover))})

    @classmethod
    def of_dict(cls, data: Mapping[str, Any]) -> WindowFrontEnd:
        handover = WindowHandover(**_with_infinity(data["handover"], "reserve_s", "copy_s"))
        return cls(**_with_infinity(data, "most_pending_s") | {"handover": handover})


def _without_infinity(data: dict[str, Any]) -> dict[str, Any]:
    """JSON has no number for it."""
    return {name: None if value == math.inf else value for name, value in data.items()}


def _with_infinity(data: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """None in fields of these names is what ``_without_infinity`` made."""
    return {name: math.inf if value is None and name in names else value for name, value in data.items()}


@dataclass(frozen=True, slots=True)
class ClusterWindow:
    """``requests`` by arrival; ``hand_offs``: (tokens of KV, seconds until the other worker was told to go on, from when there was a first
    token and room for it).
    ``way_s``: seconds from the front end to a worker and back. ``starts_idle``: nothing that came before the first of the requests ran on
    beside them; ``from_start``: nothing at all has come before. ``notes``: what is known to be other than in the run that was."""

    workers: tuple[WindowWorker, ...]
    front_end: WindowFrontEnd
    requests: tuple[WindowRequest, ...]
    hand_offs: tuple[tuple[float, float], ...]
    way_s: float
    starts_idle: bool
    from_start: bool = False
    notes: tuple[str, ...] = ()

    @property
    def engine(self) -> WindowEngine:
        """The settings, which are those of all, with the first one's sizes; of drafts the mean of what the workers have seen."""
        seen = {name: [getattr(worker.engine, name) for worker in self.workers] for name in ("acceptance", "foreseen")}
        known = {name: [share for share in shares if share is not None] for name, shares in seen.items()}
        means = {name: sum(shares) / len(shares) for name, shares in known.items() if shares}
        return replace(self.workers[0].engine, **means)

    @property
    def steps(self) -> Seq[tuple[float, ...]]:
        """Of all workers."""
        return [step for worker in self.workers for step in worker.steps]

    def to_dict(self) -> dict[str, Any]:
        plain = {name: getattr(self, name) for name in ("hand_offs", "way_s", "starts_idle", "from_start", "notes")}
        requests = [one.to_dict() for one in self.requests]
        workers = [one.to_dict() for one in self.workers]
        return {"workers": workers, "front_end": self.front_end.to_dict(), "requests": requests, **plain}

    @classmethod
    def of_dict(cls, data: Mapping[str, Any]) -> ClusterWindow:
        """What ``to_dict`` made, possibly by way of JSON."""
        workers = tuple(map(WindowWorker.of_dict, data["workers"]))
        requests, hand_offs = tuple(map(WindowRequest.of_dict, data["requests"])), tuple((tokens, s) for tokens, s in data["hand_offs"])
        front_end = WindowFrontEnd.of_dict(data["front_end"])
        starts = (data["starts_idle"], data["from_start"])
        return cls(workers, front_end, requests, hand_offs, data["way_s"], *starts, tuple(data["notes"]))
