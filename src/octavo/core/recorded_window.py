"""A window of recent requests in numbers: what it takes to run them again elsewhere, and what was measured of them. Plain data.

No text and no tokens are in it: a request is its arrival, its lengths, and the keys of its full blocks. A key commits to a block's tokens
and to all before them; so two requests whose first k keys are equal have the first k blocks in common, and nothing else can be told.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import Any

_KEY_BYTES = 8
_INT_BYTES = 4
OBJECTIVES = ("wall", "ttft_p50", "ttft_p99", "itl_p50", "itl_p99", "throughput")
"""What advice is ranked by: mean seconds from arrival to the last token; a percentile of the time to the first token, or of the requests'
mean time between tokens; seconds per output token of the whole window."""


def salt_key(salt: str | None) -> int:
    """64 bits that name a cache salt, a user or a session; 0: none."""
    return int.from_bytes(blake2b(salt.encode(), digest_size=_KEY_BYTES, person=b"octavo-salt").digest(), "little") if salt else 0


def block_keys(token_ids: Seq[int], block_size: int) -> array[int]:
    """64-bit keys of the full blocks, from the first. About a microsecond a block."""
    data, step = array("i", token_ids).tobytes(), _INT_BYTES * block_size
    key, keys = b"", bytearray()
    for begin in range(0, len(data) - step + 1, step):
        key = blake2b(key + data[begin : begin + step], digest_size=_KEY_BYTES).digest()
        keys += key
    return array("Q", bytes(keys))


def packed(keys: Seq[int]) -> bytes:
    """Eight bytes a key, the lowest first."""
    return struct.pack(f"<{len(keys)}Q", *keys)


def unpacked(data: bytes) -> tuple[int, ...]:
    """What ``packed`` made. ValueError for what it cannot have made."""
    if len(data) % _KEY_BYTES:
        raise ValueError(f"keys: {len(data)} bytes are not allowed; {_KEY_BYTES} for each")
    return struct.unpack(f"<{len(data) // _KEY_BYTES}Q", data)


@dataclass(frozen=True, slots=True)
class WindowRequest:
    """``arrival_s``: from the window's beginning. ``num_output``: of each of ``num_choices``, so far; ``max_tokens``: what it might have.
    ``keys``: of the full blocks of its prompt and output; empty where they are not known, and then it shares nothing. ``salt``: its
    ``salt_key``. ``num_cached``: prompt tokens that the prefix cache had. ``user``, ``session``: 64 bits that name them (0: none).
    ``worker``: of a cluster, the place of the one that computed its prompt.

    ``wall_s``: to its last token, ``ttft_s``: to its first, ``itl_s``: its mean time between tokens; None: it has had none, or goes on.
    """

    arrival_s: float
    num_prompt: int
    num_output: int
    max_tokens: int
    num_choices: int = 1
    num_cached: int = 0
    keys: tuple[int, ...] = ()
    salt: int = 0
    wall_s: float | None = None
    ttft_s: float | None = None
    itl_s: float | None = None
    priority: int = 0
    user: int = 0
    session: int = 0
    worker: int = 0

    def to_dict(self) -> dict[str, Any]:
        """``keys`` in hexadecimal digits: there may be hundreds of thousands, and whoever serves writes them down."""
        plain = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return plain | {"keys": packed(self.keys).hex()}

    @classmethod
    def of_dict(cls, data: Mapping[str, Any]) -> WindowRequest:
        return cls(**{**data, "keys": unpacked(bytes.fromhex(data["keys"]))})


@dataclass(frozen=True, slots=True)
class WindowEngine:
    """The engine that a window was recorded on: its settings (fields of the configurations of the same names), and sizes.

    ``move_s``: seconds to move a block to host memory. ``acceptance``: the chance that a draft comes true after those before it did; None:
    nothing has been drafted. ``foreseen``: the share of the answers' tokens that could have been foretold; None: not known.
    ``has_tiers``: whether KV goes to tiers. ``layout``: of the pages of its blocks, as ``recording.layout_fields`` has it; None: blocks are
    never in parts. ``step_cost``: what was calibrated of its steps, as ``Coefficients.to_dict`` has it; None: nothing. ``num_kv_layers``:
    0: not known.
    """

    scheduler: Mapping[str, Any]
    cache: Mapping[str, Any]
    kv_dtype: str  # never "auto"
    num_blocks: int
    max_model_len: int
    kv_bytes_per_token: int
    num_host_blocks: int = 0
    move_s: float = 0.0
    spec: int | str = "off"
    acceptance: float | None = None
    foreseen: float | None = None
    has_tiers: bool = False
    layout: Mapping[str, Any] | None = None
    step_cost: Mapping[str, Any] | None = None
    num_kv_layers: int = 0


@dataclass(frozen=True, slots=True)
class RecordedWindow:
    """``requests`` by arrival. ``steps``: of every size some, as (rows, sequences, logit rows, positions read, pairs, seconds).
    ``starts_idle``: nothing that came before the first of the requests ran on beside them."""

    engine: WindowEngine
    requests: tuple[WindowRequest, ...]
    steps: tuple[tuple[float, ...], ...]
    starts_idle: bool

    def to_dict(self) -> dict[str, Any]:
        requests = [one.to_dict() for one in self.requests]
        return {"engine": asdict(self.engine), "requests": requests, "steps": self.steps, "starts_idle": self.starts_idle}

    @classmethod
    def of_dict(cls, data: Mapping[str, Any]) -> RecordedWindow:
        """What ``to_dict`` made, possibly by way of JSON."""
        requests = tuple(map(WindowRequest.of_dict, data["requests"]))
        return cls(WindowEngine(**data["engine"]), requests, tuple(tuple(step) for step in data["steps"]), data["starts_idle"])


@dataclass(frozen=True, slots=True)
class Figures:
    """Of a window's requests, as measured or as simulated, by the names of OBJECTIVES, in seconds; None: nothing to rest on."""

    wall: float | None
    ttft_p50: float | None
    ttft_p99: float | None
    itl_p50: float | None
    itl_p99: float | None
    throughput: float | None

    def of(self, objective: str) -> float | None:
        value: float | None = getattr(self, objective)
        return value


def figures_of(requests: Seq[WindowRequest]) -> Figures:
    """Of those that have ended. Percentiles by nearest rank."""
    walls = [(one, one.wall_s) for one in requests if one.wall_s is not None]
    if not walls:
        return Figures(None, None, None, None, None, None)
    ttft = sorted(one.ttft_s for one, _ in walls if one.ttft_s is not None)
    itl = sorted(one.itl_s for one, _ in walls if one.itl_s is not None)
    num_tokens = sum(one.num_output for one, _ in walls)
    lasted_s = max(one.arrival_s + wall_s for one, wall_s in walls) - min(one.arrival_s for one, _ in walls)
    return Figures(
        sum(wall_s for _, wall_s in walls) / len(walls), _rank(ttft, 0.5), _rank(ttft, 0.99), _rank(itl, 0.5), _rank(itl, 0.99),
        lasted_s / num_tokens if num_tokens else None,
    )  # fmt: skip


def _rank(ordered: Seq[float], share: float) -> float | None:
    return ordered[math.ceil(share * len(ordered)) - 1] if ordered else None


@dataclass(frozen=True, slots=True)
class SwitchOutcome:
    """``change``: the switch, a flag where it is one; ``why``: what it acts on. ``figures``: with it, in the simulator."""

    kind: str
    change: str
    why: str
    figures: Figures

    @classmethod
    def of_dict(cls, data: Mapping[str, Any]) -> SwitchOutcome:
        return cls(**{**data, "figures": Figures(**data["figures"])})

    def gain(self, replayed: Figures, objective: str) -> float | None:
        """The share of the objective that the switch saves, against the unchanged window in the simulator; None: it cannot be told."""
        before, after = replayed.of(objective), self.figures.of(objective)
        return None if not before or after is None else 1.0 - after / before


@dataclass(frozen=True, slots=True)
class WindowReplay:
    """``measured``: of the ``num_compared`` requests that ended, but for the first ones; ``replayed``: the same requests in the simulator
    with nothing changed. ``skipped``: switches that there was no time for. ``notes``: what of the engine the replay leaves out."""

    num_requests: int
    num_compared: int
    measured: Figures
    replayed: Figures
    outcomes: tuple[SwitchOutcome, ...]
    skipped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def error(self, objective: str) -> float | None:
        """How far the replay of the unchanged window is off what was measured, as a share of it."""
        measured, replayed = self.measured.of(objective), self.replayed.of(objective)
        return None if not measured or replayed is None else abs(replayed / measured - 1.0)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_dict(cls, data: Mapping[str, Any]) -> WindowReplay:
        """What ``to_dict`` made, possibly by way of JSON."""
        outcomes = tuple(map(SwitchOutcome.of_dict, data["outcomes"]))
        figures = {name: Figures(**data[name]) for name in ("measured", "replayed")}
        return cls(**{**data, **figures, "outcomes": outcomes, "skipped": tuple(data["skipped"]), "notes": tuple(data["notes"])})
