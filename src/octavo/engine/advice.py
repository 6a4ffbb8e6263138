"""What would help, and by how much: rules that take the answer from the time stamps alone.

``Advisor`` is what the engine's users ask; another one may replay the window instead (a simulator does, and states its error). The rules
here never promise what was not measured: a gain is a sum of recorded seconds, or what is left of them under a stated bound. Gains are of
the wall time of the request, or, for a window, of the mean wall time of its requests.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from octavo.config import EngineConfig
from octavo.core.match_report import MatchEnd
from octavo.engine.causes import Cause
from octavo.engine.request_record import RequestRecord

if TYPE_CHECKING:
    from octavo.engine.step_window import LastSteps, StepParts
    from octavo.engine.timeline import Timeline

LEAST_SHARE = 0.02  # of the wall time: less is no advice
_WAITS_FOR_KV = (Cause.QUEUED_KV, Cause.PREEMPTED)


@dataclass(frozen=True, slots=True)
class Advice:
    """``change``: what to do, a flag where it is one. ``gain_s``: seconds of wall time less, or of what else the advisor ranks by.
    ``basis``: what that rests on. ``error``: of a replay, how far the unchanged window is off what was measured, as a share of it.
    ``is_told``: False: a replay has shown some gain or harm that is within its error."""

    change: str
    gain_s: float
    why: str
    basis: str = "time stamps"
    error: float | None = None
    is_told: bool = True

    def shown(self) -> dict[str, Any]:
        shown = {"change": self.change, "gain_s": round(self.gain_s, 7), "why": self.why, "basis": self.basis}
        return shown if self.error is None else shown | {"error": round(self.error, 4), "told": self.is_told}


class Advisor(Protocol):
    def of_request(self, timeline: Timeline, record: RequestRecord, seconds: Seq[float], wall_s: float) -> list[Advice]:
        """What would have helped this request, the best first. ``seconds``: by cause, as it may be told."""
        ...

    def of_window(self, timeline: Timeline, records: Seq[RequestRecord], window_s: float) -> list[Advice]:
        """What would have helped the requests that ended in a window, on average, the best first."""
        ...


class RuleAdvisor:
    """Rules, each from the causes that a switch acts on. ``shows_misses``: whether advice may tell that a prompt is cached for others.
    ``is_worker``: there are workers, of which the engine is one."""

    def __init__(self, config: EngineConfig, shows_misses: bool = True, is_worker: bool = False) -> None:
        self._config = config
        self._shows_misses = shows_misses
        self._more_workers = "one worker more (--workers)" if is_worker else "a second worker (--workers 2)"

    def of_request(self, timeline: Timeline, record: RequestRecord, seconds: Seq[float], wall_s: float) -> list[Advice]:
        """See Advisor."""
        return self._advise(timeline.last_steps(), record, seconds, wall_s)

    def _advise(self, steps: LastSteps, record: RequestRecord, seconds: Seq[float], wall_s: float) -> list[Advice]:
        shared = shared_part(steps, record)
        found = [*self._kv(seconds, shared), *self._queue(seconds, shared), *self._cache(record, seconds), *self._client(seconds)]
        found += self._drafts(record, seconds)
        pacing = self._pacing(steps, record, seconds)
        return _ranked([*found, *([] if pacing is None else [pacing])], wall_s)

    def of_window(self, timeline: Timeline, records: Seq[RequestRecord], window_s: float) -> list[Advice]:
        """See Advisor: the mean of what is said to each request, by change."""
        ended = [record for record in records if record.end_s is not None]
        if not ended:
            return []
        gains, first, steps = dict[str, float](), dict[str, Advice](), timeline.last_steps()
        wall_s = sum((record.end_s or 0.0) - record.received_s for record in ended)
        for record in ended:
            for advice in self._advise(steps, record, record.seconds, (record.end_s or 0.0) - record.received_s):
                gains[advice.change] = gains.get(advice.change, 0.0) + advice.gain_s
                first.setdefault(advice.change, advice)
        means = [Advice(change, gain_s / len(ended), first[change].why) for change, gain_s in gains.items()]
        return _ranked(means, wall_s / len(ended))

    def _kv(self, seconds: Seq[float], shared: float) -> list[Advice]:
        gain_s = shared * sum(seconds[cause] for cause in _WAITS_FOR_KV) + seconds[Cause.RECOMPUTED] + seconds[Cause.SWAPPED]
        cache = self._config.cache
        smaller = "" if cache.kv_cache_dtype == "int8" else ", or --kv-cache-dtype int8, which halves the bytes of a 16-bit KV"
        return [Advice("more KV blocks (--kv-cache-memory or --num-kv-blocks" + smaller + ")", gain_s, "it waited for room in the KV pool")]

    def _queue(self, seconds: Seq[float], shared: float) -> list[Advice]:
        config = self._config.scheduler
        return [
            Advice(f"--max-num-seqs above {config.max_num_seqs}", shared * seconds[Cause.QUEUED_BATCH], "all places were taken"),
            Advice("--scheduling-policy fcfs", seconds[Cause.QUEUED_POLICY], "it waited for a whole batch to finish"),
            Advice(self._more_workers, seconds[Cause.QUEUED_TOKENS] / 2, "prompts before it kept the engine busy"),
        ]

    def _cache(self, record: RequestRecord, seconds: Seq[float]) -> list[Advice]:
        gain_s = seconds[Cause.CACHE_MISS] if self._shows_misses else 0.0
        if record.match is not None and record.match.end is MatchEnd.EVICTED:
            return [Advice("--kv-host-memory, or more KV blocks", gain_s, "its prompt's beginning had been evicted from the prefix cache")]
        return [Advice("one cache_salt for requests that may share", gain_s, "its prompt's beginning is cached under another salt")]

    def _client(self, seconds: Seq[float]) -> list[Advice]:
        return [Advice("a client that reads faster", seconds[Cause.SLOW_READER], "the answer was ready before it was taken")]

    def _drafts(self, record: RequestRecord, seconds: Seq[float]) -> list[Advice]:
        lost_s = seconds[Cause.DRAFTS] - record.draft_gain_s
        return [Advice("--spec off, or auto", lost_s, "drafting cost more than the drafts that came true saved")]

    def _pacing(self, last: LastSteps, record: RequestRecord, seconds: Seq[float]) -> Advice | None:
        """A bound on gaps, of twice the usual step: what its steps took beyond that for others' prompts it would not have waited for."""
        if self._config.scheduler.max_itl_ms is not None or record.first_token_s is None or last.usual_s is None:
            return None
        steps, bound_s = last.between(record.first_token_s, record.ended_s), 2.0 * last.usual_s
        gain_s = min(sum(_excess(step, bound_s) for step in steps), max(0.0, seconds[Cause.OTHERS_PREFILL]))
        queued_s = seconds[Cause.QUEUED_PROMPT] - seconds[Cause.PREFILL]  # a short prompt runs at half speed or better beside a long one
        why = "it waited for long pieces of another's prompt, whose own first token comes later with it; the bound is twice a usual step"
        return Advice(f"--max-itl-ms {float(f'{1000 * bound_s:.2g}'):g}", gain_s + max(0.0, queued_s), why)


def shared_part(last: LastSteps, record: RequestRecord) -> float:
    """What is fixed in the steps that ran while the request waited, as a share of their time.

    Had it run beside those before it, their work and its own would still have had to be done; what they would have shared is the fixed
    part of the steps, so that is what a place of its own gains of each second of waiting. Little where arithmetic is short, nearly all
    where each step only reads the weights.
    """
    until_s = record.ended_s if record.num_preemptions or record.admitted_s is None else record.admitted_s
    steps = last.between(record.arrival_s, until_s)
    total_s = sum(step.end_s - step.since_s for step in steps)
    return sum(step.fixed_s for step in steps) / total_s if total_s > 0.0 else 0.0


def _excess(step: StepParts, bound_s: float) -> float:
    return min(step.prefill_s, max(0.0, step.seconds - bound_s))


def _ranked(found: Seq[Advice], wall_s: float) -> list[Advice]:
    worth = [advice for advice in found if advice.gain_s >= LEAST_SHARE * wall_s and advice.gain_s > 0.0]
    return sorted(worth, key=lambda advice: -advice.gain_s)
