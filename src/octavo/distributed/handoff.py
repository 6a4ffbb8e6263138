"""The hand-off of a sequence's KV from a prefill to a decode engine: a state machine, and the link that the bytes go over. Pure.

    offered ──reserved──▶ reserved ──copied──▶ copied ──released──▶ released
       │                     │                    │
       │ no receiver in time │ the copy failed
       │ or it is withdrawn  │ or took too long
       ▼                     ▼
     failed               failed

It may be offered when its prompt begins: then KV is copied while the rest is computed, and it is copied when all KV has arrived and the
sender has drawn the first token (``drew``). Waiting for a receiver, or for the copy, is timed from the first token on: before it, nobody
waits. That the first token comes at all is timed from the offer.

The receiver allocates, the bytes are copied, then the sender frees (as in DistServe, Zhong et al., OSDI 2024, section 4). Until ``copied``
the request is the sender's, who can always go on with it; from then on it is the receiver's, and the sender has only to be told.
Each move returns what the two sides are to do. Times are told; nothing here waits, sends or knows an engine. The same objects serve a
simulation and real workers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum


class HandoffState(str, Enum):
    OFFERED = "offered"
    RESERVED = "reserved"
    COPIED = "copied"
    RELEASED = "released"
    FAILED = "failed"


class Action(str, Enum):
    """What a move asks of the two sides, in this order."""

    COPY = "copy"  # move the bytes into the receiver's blocks
    BEGIN = "begin"  # the receiver runs the request
    RELEASE = "release"  # the sender gives its blocks back
    CANCEL = "cancel"  # the receiver gives the reserved blocks back
    RESUME = "resume"  # the sender goes on with the request itself


class HandoffError(RuntimeError):
    """A move that the state of the hand-off does not allow; the message names both."""


@dataclass(frozen=True, slots=True)
class HandoffLimits:
    """Seconds that each edge may take; the clock of an edge starts with the one before, at the earliest with the first token.

    ``prompt_s``: from an offer to the first token. ``answer_s``: after which a worker that has not said whether it has room is not waited
    for alone.
    """

    reserve_s: float = 30.0
    copy_s: float = 30.0
    prompt_s: float = 600.0
    answer_s: float = 1.0

    def __post_init__(self) -> None:
        for name in ("reserve_s", "copy_s", "prompt_s", "answer_s"):
            if not getattr(self, name) > 0.0:
                raise ValueError(f"{name}: {getattr(self, name)!r} is not allowed; above 0 seconds")


@dataclass(slots=True)
class Handoff:
    """One request on its way. ``num_bytes``: of KV to move; ``drawn``: it has its first token; ``arrived``: all KV is in the receiver's
    blocks; ``failure``: why it failed."""

    request_id: str
    sender: int
    num_bytes: int
    offered_s: float
    limits: HandoffLimits = HandoffLimits()
    drawn: bool = True
    arrived: bool = False
    state: HandoffState = HandoffState.OFFERED
    receiver: int | None = None
    failure: str | None = None
    deadline_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.deadline_s = self.offered_s + (self.limits.reserve_s if self.drawn else self.limits.prompt_s)

    @property
    def is_over(self) -> bool:
        return self.state in (HandoffState.RELEASED, HandoffState.FAILED)

    def drew(self, now: float) -> list[Action]:
        """The sender has drawn the first token of a request that was offered before, and holds it."""
        if self.drawn or self.state not in (HandoffState.OFFERED, HandoffState.RESERVED):
            raise HandoffError(f"hand-off of {self.request_id!r}: it is {self.state.value}, and its first token was not waited for")
        self.drawn = True
        if self.arrived:
            return self._settle()
        is_offered = self.state is HandoffState.OFFERED
        self.deadline_s = now + (self.limits.reserve_s if is_offered else self.limits.copy_s)
        return []

    def reserved(self, receiver: int, now: float) -> list[Action]:
        """``receiver`` has blocks for it."""
        self._leave(HandoffState.OFFERED, "reserved")
        self.state, self.receiver = HandoffState.RESERVED, receiver
        if self.drawn:
            self.deadline_s = now + self.limits.copy_s
        return [Action.COPY]

    def copied(self, now: float) -> list[Action]:
        """All bytes are in the receiver's blocks. Nothing is to be done yet while the first token is not drawn."""
        self._leave(HandoffState.RESERVED, "copied")
        if self.arrived:
            raise HandoffError(f"hand-off of {self.request_id!r}: its KV has arrived before")
        self.arrived = True
        return self._settle() if self.drawn else []

    def _settle(self) -> list[Action]:
        self.state, self.deadline_s = HandoffState.COPIED, float("inf")
        return [Action.BEGIN, Action.RELEASE]

    def released(self) -> list[Action]:
        """The sender has given its blocks back."""
        self._leave(HandoffState.COPIED, "released")
        self.state = HandoffState.RELEASED
        return []

    def fail(self, reason: str) -> list[Action]:
        """It cannot go on: the copy failed, the receiver is gone, the offer is withdrawn. After ``copied`` it is too late to fail."""
        if self.state not in (HandoffState.OFFERED, HandoffState.RESERVED):
            raise HandoffError(f"hand-off of {self.request_id!r}: it is {self.state.value} and cannot fail any more")
        actions = [Action.RESUME] if self.state is HandoffState.OFFERED else [Action.CANCEL, Action.RESUME]
        self.state, self.failure, self.deadline_s = HandoffState.FAILED, reason, float("inf")
        return actions

    def expire(self, now: float) -> list[Action]:
        """Fail if the edge that is due has taken too long by ``now``."""
        if now < self.deadline_s or self.state not in (HandoffState.OFFERED, HandoffState.RESERVED):
            return []
        waited_for, limit_s = "the copy", self.limits.copy_s
        if not self.drawn:
            waited_for, limit_s = "the first token", self.limits.prompt_s
        elif self.state is HandoffState.OFFERED:
            waited_for, limit_s = "a receiver with room", self.limits.reserve_s
        return self.fail(f"{waited_for} took longer than {limit_s:g} s")

    def _leave(self, state: HandoffState, move: str) -> None:
        """HandoffError unless it is in ``state``."""
        if self.state is not state:
            raise HandoffError(f"hand-off of {self.request_id!r}: it is {self.state.value}, so it cannot become {move}")


@dataclass(slots=True)
class Link:
    """A connection that moves one sequence's KV at a time, first come, first served.

    ``num_layers`` above 0: each layer is sent as soon as it is computed (Splitwise, Patel et al., ISCA 2024, section 4.3), so that beside
    the last step of the prompt only what it could not hide is waited for, at least one layer's bytes. What is hidden takes its time of the
    link all the same: prompts of one step, and copies that are still on their way, share it.
    """

    bytes_per_s: float
    latency_s: float = 0.0
    num_layers: int = 0
    free_s: float = field(default=-math.inf, init=False)  # when all bytes so far could be through
    _layers_s: float = field(default=-math.inf, init=False)  # and when the last layers are, which are there at the end of their step alone

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0.0:
            raise ValueError(f"bytes_per_s: {self.bytes_per_s!r} is not allowed; above 0")
        if not self.latency_s >= 0.0:
            raise ValueError(f"latency_s: {self.latency_s!r} is not allowed; at least 0 seconds")

    def send(self, num_bytes: int, now: float) -> None:
        """Take on at ``now`` what is computed of a copy whose last part is yet to come: all layers of it are there."""
        self.free_s = max(now, self.free_s) + num_bytes / self.bytes_per_s

    def copy(self, num_bytes: int, now: float, overlap_s: float = 0.0) -> float:
        """Take on a copy at ``now``; when it will be through. ``overlap_s``: computing time up to now that layers were sent beside."""
        copy_s = num_bytes / self.bytes_per_s
        self.free_s = max(now - overlap_s if self.num_layers else now, self.free_s) + copy_s
        if self.num_layers:
            self._layers_s = max(now, self._layers_s) + copy_s / self.num_layers
        return max(self.free_s, self._layers_s) + self.latency_s
