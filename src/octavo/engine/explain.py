"""An account of one request's time, and of a window of many: from the timeline's records to what the API shows.

The causes of a request and the remainder add up to its wall time. The *main cause* is the largest of those that a request with an engine to
itself would not have; only where none of them is a tenth of the wall time, the largest of all. What is short is named for several causes
together (``Bottleneck``).

Reads records; charges nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from octavo.core.match_report import MatchEnd
from octavo.core.request import FinishReason
from octavo.core.words import counted
from octavo.engine.causes import BOTTLENECK_OF, MEANINGS, NAMES, NEEDED, Bottleneck, Cause
from octavo.engine.request_record import MAX_CHUNKS, RecordState, RequestRecord
from octavo.engine.step_window import GapClasses, Held, gap_quantiles, held_by

if TYPE_CHECKING:
    from octavo.engine.advice import Advice
    from octavo.engine.timeline import Timeline

_MAIN_SHARE = 0.1
SHOWN_S = 1e-9


@dataclass(frozen=True, slots=True)
class CauseTime:
    cause: Cause
    seconds: float
    detail: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """``causes``: the largest first. ``remainder_s``: wall time that no cause explains."""

    request_id: str
    wall_s: float
    ttft_s: float | None
    state: str
    causes: tuple[CauseTime, ...]
    remainder_s: float
    main: Cause
    record: RequestRecord
    advice: tuple[Advice, ...] = ()

    @property
    def bottleneck(self) -> Bottleneck:
        return BOTTLENECK_OF[self.main]

    def advised(self, advice: Seq[Advice]) -> Explanation:
        return replace(self, advice=tuple(advice))

    def shown(self) -> dict[str, Any]:
        """As the API has it."""
        causes = [{"cause": NAMES[c.cause], "seconds": _rounded(c.seconds), "detail": c.detail} for c in self.causes]
        causes.append({"cause": "remainder", "seconds": _rounded(self.remainder_s), "detail": "what the time stamps leave unexplained"})
        return {
            "wall_s": _rounded(self.wall_s),
            "ttft_s": None if self.ttft_s is None else _rounded(self.ttft_s),
            "state": self.state,
            "finish_reason": None if self.record.finish_reason is None else self.record.finish_reason.value,
            "main_cause": NAMES[self.main],
            "bottleneck": self.bottleneck.value,
            "causes": causes,
            "advice": [advice.shown() for advice in self.advice],
        }


def in_words(seconds: float) -> str:
    """For people, to three digits."""
    if seconds >= 0.9995:
        return f"{seconds:.3f} s"
    return f"{1000 * seconds:.3g} ms" if seconds >= 1e-6 or not seconds else "under 1 µs"


def _rounded(seconds: float) -> float:
    return round(seconds, 7) + 0.0


def explain(timeline: Timeline, record: RequestRecord, now_s: float, shows_misses: bool = True) -> Explanation:
    """``now_s``: up to where the time of a request that goes on is told. ``shows_misses``: whether it may be told that its prompt is, or
    was, in the cache for others; if not, such time is that of its own prompt."""
    end_s = now_s if record.end_s is None else record.end_s
    seconds = timeline.seconds_of(record, end_s)
    wall_s = end_s - record.received_s
    remainder_s = wall_s - sum(seconds)
    if record.end_s is None:  # the step in flight has not been charged yet: its end will tell
        wall_s, remainder_s = wall_s - remainder_s, 0.0
    if not shows_misses:
        hide_misses(seconds, record.own_missed_s)
    causes = [CauseTime(cause, seconds[cause], detail_of(cause, record)) for cause in Cause if seconds[cause] > SHOWN_S]
    causes.sort(key=lambda part: -part.seconds)
    ttft_s = None if record.first_token_s is None else record.first_token_s - record.received_s
    return Explanation(record.request_id, wall_s, ttft_s, state_of(record), tuple(causes), remainder_s, main_cause(seconds, wall_s), record)


def state_of(record: RequestRecord) -> str:
    """Where a request stands, in a word: one of ``STATES``."""
    if record.state is RecordState.ENDED:
        return {FinishReason.ABORT: "aborted", FinishReason.ERROR: "failed"}.get(record.finish_reason or FinishReason.STOP, "finished")
    return {RecordState.IN_STEP: "running", RecordState.OUT: "waiting"}.get(record.state, "queued")


STATES = ("queued", "running", "waiting", "finished", "aborted", "failed")


def hide_misses(seconds: list[float], own_s: float) -> None:
    """Have misses, ``own_s`` of them of the request's own prompt, count as prompts like any."""
    seconds[Cause.PREFILL] += own_s
    seconds[Cause.OTHERS_PREFILL] += seconds[Cause.CACHE_MISS] - own_s
    seconds[Cause.CACHE_MISS] = 0.0


def main_cause(seconds: Seq[float], wall_s: float) -> Cause:
    """What kept the request longest, of what it would not have had alone; its own work when that is nearly all."""
    avoidable = max((cause for cause in Cause if cause not in NEEDED), key=lambda cause: seconds[cause])
    if seconds[avoidable] >= _MAIN_SHARE * wall_s and seconds[avoidable] > 0.0:
        return avoidable
    return max(Cause, key=lambda cause: seconds[cause])


def detail_of(cause: Cause, record: RequestRecord) -> str:
    """What a cause is, with the counts that go with it."""
    text = MEANINGS[cause][1]
    counts = _COUNTS.get(cause)
    return text if counts is None else f"{text}: {counts(record)}"


def _behind(record: RequestRecord) -> str:
    return f"behind {counted(record.num_ahead, 'request')} with {counted(record.num_tokens_ahead, 'token')} to compute when it came"


def _chunks(record: RequestRecord) -> str:
    shown = ", ".join(f"{chunk.num_tokens} in {in_words(chunk.seconds)}" for chunk in record.chunks)
    more = f", and {counted(record.num_chunks - MAX_CHUNKS, 'more piece')}" if record.num_chunks > MAX_CHUNKS else ""
    return f"{counted(record.num_prompt_tokens, 'token')}, {record.num_cached} of them cached; {shown}{more}"


def _miss(record: RequestRecord) -> str:
    if record.match is None:
        return "those of others"
    end = record.match.end
    reason = {MatchEnd.EVICTED: "evicted", MatchEnd.OTHER_SALT: "cached under another cache_salt"}.get(end, end.value)
    own = f"{counted(max(0, record.missed_end - record.num_cached), 'token')} of its own, {reason}, for {in_words(record.own_missed_s)}"
    return own if record.own_missed_s else "those of others"


def _drafts(record: RequestRecord) -> str:
    return f"{record.num_accepted} of {counted(record.num_drafts, 'draft')} came true, which saved about {in_words(record.draft_gain_s)}"


_COUNTS = {
    Cause.QUEUED_TOKENS: _behind,
    Cause.QUEUED_PROMPT: _behind,
    Cause.QUEUED_KV: _behind,
    Cause.QUEUED_BATCH: _behind,
    Cause.QUEUED_POLICY: _behind,
    Cause.PREFILL: _chunks,
    Cause.CACHE_MISS: _miss,
    Cause.DRAFTS: _drafts,
    Cause.DECODE: lambda record: counted(record.num_output_tokens, "token"),
    Cause.PREEMPTED: lambda record: counted(record.num_preemptions, "time"),
    Cause.RECOMPUTED: lambda record: f"{counted(record.num_recomputed, 'token')} of its own, for {in_words(record.own_recomputed_s)}",
}


# --- a window of many requests -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Summary:
    """``ttft`` and ``itl``: percentile -> what it is and what holds it; empty without any. ``seconds``: by cause, of requests that ended
    in the window. ``is_whole``: no request of the window has been forgotten."""

    window_s: float
    num_ended: int
    num_first_tokens: int
    num_gaps: int
    ttft: dict[str, Held]
    itl: dict[str, Held]
    seconds: dict[Cause, float]
    is_whole: bool

    def shown(self) -> dict[str, Any]:
        causes = sorted(self.seconds.items(), key=lambda pair: -pair[1])
        return {
            "window_s": _rounded(self.window_s),
            "num_requests": self.num_ended,
            "num_first_tokens": self.num_first_tokens,
            "num_gaps": self.num_gaps,
            "complete": self.is_whole,
            "ttft": {name: _shown_held(held) for name, held in self.ttft.items()},
            "itl": {name: _shown_held(held) for name, held in self.itl.items()},
            "causes": [{"cause": NAMES[c], "seconds": _rounded(s), "detail": MEANINGS[c][1]} for c, s in causes if s > SHOWN_S],
        }


def _shown_held(held: Held) -> dict[str, Any]:
    shares = {bottleneck.value: round(share, 4) for bottleneck, share in held.shares}
    return {"seconds": _rounded(held.seconds), "bottleneck": held.bottleneck.value, "shares": shares}


QUANTILES = {"p50": 0.5, "p99": 0.99}


def summarise(timeline: Timeline, window_s: float, now_s: float, shows_misses: bool = True) -> Summary:
    """The last ``window_s`` seconds: requests that ended, first tokens and gaps between tokens."""
    since_s = now_s - window_s
    with timeline.lock:
        classes = timeline.window.gap_classes(since_s)
    is_whole = timeline.ended_records.forgotten_s < since_s
    return summary_of(timeline.records(), classes, window_s, now_s, is_whole, shows_misses)


def summary_of(
    records: Seq[RequestRecord], gaps: GapClasses, window_s: float, now_s: float, is_whole: bool, shows_misses: bool = True
) -> Summary:
    """Of ``records``, those that ended, or had their first token, in the last ``window_s`` seconds; ``gaps``: those of the window."""
    since_s = now_s - window_s
    ended = [r for r in records if r.ended_s is not None and r.ended_s >= since_s]
    told = [r for r in records if r.first_token_s is not None and r.first_token_s >= since_s]
    seconds = [sum(r.seconds[cause] for r in ended) for cause in Cause]
    if not shows_misses:
        hide_misses(seconds, sum(r.own_missed_s for r in ended))
    num_gaps, held = gap_quantiles(gaps, tuple(QUANTILES.values()))
    itl, causes = dict(zip(QUANTILES, held, strict=False)), dict(zip(Cause, seconds, strict=True))
    return Summary(window_s, len(ended), len(told), num_gaps, _ttft(told), itl, causes, is_whole)


def _ttft(told: Seq[RequestRecord]) -> dict[str, Held]:
    """By nearest rank; what holds a percentile is told by the requests from there on (the median: those from the 45th to the 55th)."""
    if not told:
        return {}
    ranked = sorted(told, key=lambda r: (r.first_token_s or 0.0) - r.received_s)
    out = {}
    for name, q in QUANTILES.items():
        place = math.ceil(q * len(ranked)) - 1
        record = ranked[place]
        group = ranked[place:] if q > 0.5 else ranked[int(0.45 * len(ranked)) : math.ceil(0.55 * len(ranked))]
        sums = [0.0] * len(Bottleneck)
        places = {bottleneck: i for i, bottleneck in enumerate(Bottleneck)}
        for one in group or [record]:
            for cause, seconds in enumerate(one.ttft_seconds or ()):
                sums[places[BOTTLENECK_OF[cause]]] += max(0.0, seconds)
        out[name] = held_by((record.first_token_s or 0.0) - record.received_s, sums)
    return out
