"""Figures from the records of a run: distributions of latencies, rates, errors, goodput. Pure arithmetic.

TTFT: from due to the first token. ITL: each gap between two events with tokens of one stream. TPOT: from first to last token, divided by
the tokens after the first. E2E: from due to the end of the answer. Only requests that were answered whole count, except for errors and
goodput.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.bench.stream_record import StreamRecord

PERCENTILES = (50, 90, 95, 99)
OBJECTIVES = ("ttft", "itl", "tpot", "e2e")


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of values in rising order, interpolated linearly between the two nearest (definition 7 of Hyndman and Fan, as NumPy's)."""
    position = (len(ordered) - 1) * percent / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def distribution_ms(seconds: Iterable[float]) -> dict[str, float] | None:
    """mean, p50 .. p99 and max in milliseconds; None when there are no values."""
    ordered = sorted(seconds)
    if not ordered:
        return None
    values = {"mean": math.fsum(ordered) / len(ordered), **{f"p{p}": percentile(ordered, p) for p in PERCENTILES}, "max": ordered[-1]}
    return {name: round(1000 * value, 3) for name, value in values.items()}


def ttft_s(record: StreamRecord) -> float:
    return record.event_times[0] - record.due_s


def e2e_s(record: StreamRecord) -> float:
    return record.end_s - record.due_s


def gaps_s(record: StreamRecord) -> list[float]:
    times = record.event_times
    return [later - earlier for earlier, later in zip(times, times[1:], strict=False)]


def tpot_s(record: StreamRecord) -> float | None:
    """None for an answer of one token."""
    if record.num_tokens < 2:
        return None
    return (record.event_times[-1] - record.event_times[0]) / (record.num_tokens - 1)


@dataclass(frozen=True, slots=True)
class Goodput:
    """Limits in milliseconds by objective. A request is good when it was answered whole and within all of them; ``itl`` bounds its worst
    gap, ``tpot`` its mean one."""

    limits_ms: dict[str, float]

    @classmethod
    def parse(cls, text: str) -> Goodput:
        """``ttft:500,itl:50``. ValueError for what is not of that form."""
        limits: dict[str, float] = {}
        for part in text.split(","):
            name, _, number = part.strip().partition(":")
            try:
                limit_ms = float(number)
            except ValueError:
                limit_ms = math.nan
            if name not in OBJECTIVES or name in limits or not 0 < limit_ms < math.inf:
                form = f"NAME:MILLISECONDS, with each of {', '.join(OBJECTIVES)} at most once"
                raise ValueError(f"goodput: {part.strip()!r} is not allowed; {form}")
            limits[name] = limit_ms
        return cls(limits)

    def met_by(self, record: StreamRecord) -> bool:
        if record.error_kind is not None:
            return False
        values = {"ttft": ttft_s(record), "itl": max(gaps_s(record), default=0.0), "tpot": tpot_s(record) or 0.0, "e2e": e2e_s(record)}
        return all(1000 * values[name] <= limit for name, limit in self.limits_ms.items())


def summary(records: Sequence[StreamRecord], goodput: Goodput | None = None) -> dict[str, Any]:
    """Figures of a run. Rates count from the first request that was due to the end of the last answer."""
    whole = [r for r in records if r.error_kind is None]
    wall_s = max(r.end_s for r in records) - min(r.due_s for r in records) if records else 0.0
    num_output, num_prompt = sum(r.num_tokens for r in whole), sum(r.num_prompt for r in whole)
    kinds = Counter(r.error_kind for r in records if r.error_kind is not None)

    def rate(amount: float) -> float:
        return round(amount / wall_s, 3) if wall_s > 0 else 0.0

    figures: dict[str, Any] = {
        "num_requests": len(records),
        "num_completed": len(whole),
        "num_errors": len(records) - len(whole),
        "errors": dict(kinds.most_common()),
        "first_error": next((r.error_message for r in records if r.error_kind is not None), None),
        "num_short": sum(r.num_tokens < r.num_output for r in whole),
        "num_prompt_tokens": num_prompt,
        "num_cached_tokens": sum(r.num_cached for r in whole),
        "num_output_tokens": num_output,
        "wall_s": round(wall_s, 3),
        "request_s": rate(len(whole)),
        "output_tok_s": rate(num_output),
        "total_tok_s": rate(num_prompt + num_output),
        "ttft_ms": distribution_ms(map(ttft_s, whole)),
        "itl_ms": distribution_ms(gap for r in whole for gap in gaps_s(r)),
        "tpot_ms": distribution_ms(value for r in whole if (value := tpot_s(r)) is not None),
        "e2e_ms": distribution_ms(map(e2e_s, whole)),
        "send_delay_ms": distribution_ms(r.sent_s - r.due_s for r in records),
    }
    if goodput is not None:
        num_good = sum(map(goodput.met_by, records))
        share = round(num_good / len(records), 4) if records else 0.0
        figures["goodput"] = {"limits_ms": goodput.limits_ms, "num_good": num_good, "share": share, "request_s": rate(num_good)}
    return figures
