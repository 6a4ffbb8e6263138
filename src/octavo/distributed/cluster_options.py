"""What a cluster may be told beside its engines' configuration: how many workers, when they are given up, and how requests are spread."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from octavo.backends.kv_wire import WIRE_DTYPES
from octavo.config import ConfigError
from octavo.distributed.attempts import RetryLimits
from octavo.distributed.autoscale import ScaleLimits
from octavo.distributed.dispatcher import Backpressure
from octavo.distributed.fleet import LivenessLimits
from octavo.distributed.handoff import HandoffLimits
from octavo.distributed.roles import ROLES
from octavo.distributed.transport import CHECKSUMS, KV_TRANSPORTS

MAX_WORKERS = 1024


@dataclass(frozen=True, slots=True)
class HandoverOptions:
    """How KV goes from prefill to decode workers. ``transport`` auto: shared memory between workers of one host, else TCP. ``wire_dtype``
    auto: as it is stored, so that answers do not depend on where they are made; int8: rounded. Prompts of at least ``min_layerwise`` tokens
    are sent while they are computed, shorter ones in one piece. ``checksum``: over each piece. ``may_borrow``: a worker takes on the other
    role while its own workers are under pressure."""

    transport: str = "auto"
    wire_dtype: str = "auto"
    checksum: str = "none"
    min_layerwise: int = 512
    limits: HandoffLimits = field(default_factory=HandoffLimits)
    may_borrow: bool = True

    def __post_init__(self) -> None:
        for name, allowed in (("transport", KV_TRANSPORTS), ("wire_dtype", WIRE_DTYPES), ("checksum", CHECKSUMS)):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name}: {getattr(self, name)!r} is not allowed; one of {', '.join(allowed)}")
        if self.min_layerwise < 1:
            raise ConfigError(f"min_layerwise: {self.min_layerwise!r} is not allowed; at least 1 token")


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """``worker_wait_s``: how long a request may wait while there is no worker that takes requests. ``resubmit_per_s`` and
    ``resubmit_burst``: how fast requests of a lost worker are given to others. ``start_s``: how long the first workers may take to be
    ready (None: as long as they need). ``router``: a name of ``router.ROUTERS``. ``scale``: how many workers of each role the launcher
    is to run, by load; of a role without limits as many as it began with. ``backpressure``: when requests wait at the front end."""

    liveness: LivenessLimits = field(default_factory=LivenessLimits)
    retries: RetryLimits = field(default_factory=RetryLimits)
    worker_wait_s: float = 30.0
    resubmit_per_s: float = 100.0
    resubmit_burst: int = 16
    start_s: float | None = None
    router: str = "soonest"
    stream_limit_bytes: int = 8 << 20
    scale: Mapping[str, ScaleLimits] = field(default_factory=dict)
    handover: HandoverOptions = field(default_factory=HandoverOptions)
    backpressure: Backpressure = field(default_factory=Backpressure)

    def __post_init__(self) -> None:
        if not 0.0 <= self.worker_wait_s < math.inf:
            raise ConfigError(f"worker_wait_s: {self.worker_wait_s!r} is not allowed; a finite number of seconds from 0")
        if self.start_s is not None and not 0.0 < self.start_s < math.inf:
            raise ConfigError(f"start_s: {self.start_s!r} is not allowed; a finite number of seconds above 0")
        if unknown := [role for role in self.scale if role not in ROLES]:
            raise ConfigError(f"scale: {unknown[0]!r} is not allowed; roles are {', '.join(ROLES)}")

    def most_workers(self, workers: Mapping[str, int]) -> int:
        """How many there may be where ``workers``, by role, are there from the beginning: a host's cores and memory are shared for so
        many."""
        most = {role: limits.most for role, limits in self.scale.items()}
        return sum(max(workers.get(role, 0), most.get(role, 0)) for role in {*workers, *most})


def worker_name(role: str, number: int) -> str:
    """worker-0, prefill-0, decode-0."""
    return f"{'worker' if role == 'both' else role}-{number}"


class NewNames:
    """Names for workers that come later: none that is ``taken`` from the beginning, and none twice."""

    def __init__(self, taken: Iterable[str]) -> None:
        self._taken = frozenset(taken)
        self._numbers: dict[str, Iterator[int]] = {}

    def next(self, role: str) -> str:
        numbers = self._numbers.setdefault(role, itertools.count())
        return next(name for i in numbers if (name := worker_name(role, i)) not in self._taken)


def _counts(name: str, text: str) -> dict[str, int]:
    """Numbers by role; a number alone is of workers that do both. Raises ConfigError."""
    if _is_number(text):
        return {"both": int(text)}
    counts = dict[str, int]()
    for part in text.split(","):
        role, _, number = (piece.strip() for piece in part.partition("="))
        if role in counts:
            raise ConfigError(f"{name}: {text[:200]!r} is not allowed; each role once, and {role} is there twice")
        if role not in ROLES or not _is_number(number):
            raise ConfigError(f"{name}: {text[:200]!r} is not allowed; a number, or numbers by role such as prefill=1,decode=2")
        counts[role] = int(number)
    return counts


def _is_number(text: str) -> bool:
    """Of few enough digits to be one of workers."""
    return text.strip().isascii() and text.strip().isdigit() and len(text.strip()) <= 9


def parse_workers(text: str) -> Mapping[str, int]:
    """Workers by role: "3" are three that do both; "prefill=1,decode=2" are as said. Raises ConfigError."""
    counts = _counts("workers", text)
    if not 1 <= sum(counts.values()) <= MAX_WORKERS:
        raise ConfigError(f"workers: {text!r} is not allowed; from 1 to {MAX_WORKERS} workers")
    needs = [role for role in ("prefill", "decode") if not counts.get(role) and not counts.get("both")]
    if needs:
        raise ConfigError(f"workers: {text!r} is not allowed; nobody does {needs[0]}")
    return {role: number for role, number in counts.items() if number}


def parse_most(text: str, there: Mapping[str, int], name: str = "max_workers", of: str = "workers") -> Mapping[str, ScaleLimits]:
    """Limits by role of those that are ``there`` from the beginning: "4" is for those that do both, "decode=4" as said; a role that is not
    named has none. ``name`` and ``of``: the fields that say this, and who is there. Raises ConfigError."""

    def bad(value: object, limit: str) -> ConfigError:
        return ConfigError(f"{name}: {value} is not allowed; {limit}")

    counts = _counts(name, text)
    if _is_number(text) and there.keys() != {"both"}:
        has = ",".join(f"{role}={number}" for role, number in there.items()) or "none"
        raise bad(text, f"numbers by role such as decode={text}, since {of} is {has}")
    for role, most in counts.items():
        least, said = there.get(role, 0), str(most) if _is_number(text) else f"{role}={most}"
        if not least:
            raise bad(said, f"{of} has none of role {role}")
        if most < least:
            raise bad(said, f"at least as many as {of} has of them ({least})")
    if (total := sum((dict(there) | counts).values())) > MAX_WORKERS:
        raise bad(text, f"at most {MAX_WORKERS} {of} in all, and these would be {total}")
    return {role: ScaleLimits(least=there[role], most=most) for role, most in counts.items()}
