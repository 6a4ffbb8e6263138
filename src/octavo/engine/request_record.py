"""What the timeline keeps of one request: seconds by cause, and the counts that say why. Plain data; memory does not grow with tokens."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Self

from octavo.core.match_report import MatchReport
from octavo.core.request import FinishReason, Request, Sequence
from octavo.engine.causes import NUM_CAUSES, Bottleneck, Cause

MAX_CHUNKS = 8


class RecordState(IntEnum):
    NEW = 0  # not seen by a plan yet
    QUEUED = 1  # never admitted; its seconds are in the timeline's queue sums
    IN_STEP = 2  # takes part in steps; its seconds are in the timeline's step sums
    OUT = 3  # admitted, but not in the steps: preempted, or waiting for blocks; charged to ``out_cause``
    ENDED = 4  # the last event is made


@dataclass(slots=True)
class Chunk:
    """A piece of the request's own prompt: its tokens, and what they took."""

    num_tokens: int
    seconds: float


@dataclass(slots=True, eq=False)
class RequestRecord:
    """``seconds`` [NUM_CAUSES]: what has been charged; while the request runs the timeline holds a part that is not in it yet.

    All moments are on the engine's clock. ``received_s``: when its HTTP request came, where there was one, else ``arrival_s``.
    """

    request_id: str
    arrival_s: float
    received_s: float
    num_prompt_tokens: int
    cache_salt: str | None = None
    priority: int = 0
    state: RecordState = RecordState.NEW
    seconds: list[float] = field(default_factory=lambda: [0.0] * NUM_CAUSES)
    since_s: float = 0.0  # OUT: charged up to here
    snapshot: list[float] = field(default_factory=list)  # of the sums that go on while it is QUEUED or IN_STEP
    out_cause: Cause = Cause.PREEMPTED
    step_index: int = -1  # the last step it took part in
    decode_s: float = 0.0  # own part of steps that made tokens, not in ``seconds`` yet
    num_ahead: int = 0  # requests in the queue when it came
    num_tokens_ahead: int = 0  # their prompt tokens, and those that running prompts lacked
    admitted_s: float | None = None
    first_token_s: float | None = None
    ttft_seconds: list[float] | None = None  # as ``seconds``, at the first token
    token_s: float = 0.0  # when a step last drew a token of it
    away: dict[Bottleneck, float] | None = None  # since the last token: time out of steps, or spent on lost tokens
    out_s: float = 0.0  # time out of steps since the token at ``out_token_s``
    out_token_s: float = -1.0
    ended_s: float | None = None
    finish_reason: FinishReason | None = None
    num_open: int = 1  # choices without a last event
    sent_s: float | None = None  # the last byte was handed to the connection
    num_output_tokens: int = 0  # drawn
    chunks: list[Chunk] = field(default_factory=list)  # the first MAX_CHUNKS
    num_chunks: int = 0
    num_prefilled: int = 0  # prompt tokens whose KV has been computed or found
    num_cached: int = 0
    match: MatchReport | None = None
    num_preemptions: int = 0
    num_recomputed: int = 0  # tokens
    own_missed_s: float = 0.0  # of CACHE_MISS, for its own prompt; the rest for those of others in its steps
    own_recomputed_s: float = 0.0  # of RECOMPUTED, likewise
    num_drafts: int = 0
    num_accepted: int = 0
    draft_gain_s: float = 0.0  # steps that accepted drafts made needless, at what those steps took without their drafts
    blocked_s: float = 0.0  # all the time that its writes were held up by the client, overlapping with everything else
    tail_blocked_s: float = 0.0  # of this, what came after its last token
    num_choices: int = 1
    max_tokens: int = 0
    sequence: Sequence | None = None  # of its first choice, while it runs
    keys: array[int] = field(default_factory=lambda: array("Q"))  # of its full blocks, once it has ended

    @classmethod
    def of(cls, request: Request, begun_s: float | None = None) -> Self:
        """``begun_s``: when it began to run here, of one that came from another engine; what was before is told there."""
        arrival_s = request.arrival_s if begun_s is None else begun_s
        received_s = arrival_s if request.received_s is None or begun_s is not None else min(request.received_s, arrival_s)
        record = cls(request.request_id, arrival_s, received_s, len(request.prompt_token_ids), request.cache_salt, request.priority)
        record.num_open = record.num_choices = request.params.n
        record.max_tokens = request.params.max_tokens or 0
        record.charge(Cause.PREPARATION, arrival_s - received_s)
        return record

    @property
    def end_s(self) -> float | None:
        """Up to where its time is told, once it has ended: the last byte sent, or the last token made."""
        return self.sent_s if self.sent_s is not None else self.ended_s

    def charge(self, cause: Cause, seconds: float) -> None:
        self.seconds[cause] += seconds

    def hold_up(self, begin_s: float, end_s: float) -> None:
        """A write for it was held up by its client."""
        self.blocked_s += end_s - begin_s
        if self.ended_s is not None:
            self.tail_blocked_s += max(0.0, end_s - max(begin_s, self.ended_s))

    def note_away(self, bottleneck: Bottleneck, seconds: float) -> None:
        """Of the gap to its next token, so much is this one's."""
        if self.away is None:
            self.away = {}
        self.away[bottleneck] = self.away.get(bottleneck, 0.0) + seconds

    def take_away(self) -> Mapping[Bottleneck, float]:
        """What was noted so of the gap that ends now."""
        away, self.away = self.away or {}, None
        return away

    def note_out(self, seconds: float) -> None:
        """So much time out of steps."""
        if self.out_token_s != self.token_s:
            self.out_s, self.out_token_s = 0.0, self.token_s
        self.out_s += seconds

    def out_since(self, since_s: float) -> float:
        """Seconds out of steps in the gap between two tokens that began at ``since_s`` and has ended last."""
        return self.out_s if self.out_token_s >= since_s else 0.0

    def add_chunk(self, num_tokens: int, seconds: float) -> None:
        self.num_chunks += 1
        if len(self.chunks) < MAX_CHUNKS:
            self.chunks.append(Chunk(num_tokens, seconds))

    @property
    def missed_end(self) -> int:
        """What it computes of its prompt before this place would have been found, had nothing been evicted or under another salt."""
        return 0 if self.match is None else self.match.missed_end
