"""Answers in a list: a row for each call, whatever its number of prompts, in the order and of the state that were asked for.

Picks and counts; what a row says of time is an account's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import Any, TypeVar

from octavo.engine.request_record import RequestRecord

R = TypeVar("R", bound=RequestRecord)
_SHOWN = ("state", "finish_reason", "wall_s", "ttft_s", "main_cause", "bottleneck", "workers")


def last_of(records: Seq[R]) -> R:
    """What a call waits for, or waited for: its other prompts were ready before."""
    return max(records, key=lambda record: (record.ended_s is None, record.ended_s or 0.0))


def known_of(find: Callable[[str], R | None], request_ids: Seq[str]) -> list[R]:
    """The records that are remembered."""
    return [record for record in map(find, request_ids) if record is not None]


def num_prompts(records: Seq[RequestRecord]) -> dict[str, int]:
    """How many there are, of a call with several."""
    return {"prompts": len(records)} if len(records) > 1 else {}


def picked(
    answers: Mapping[str, Seq[str]], find: Callable[[str], R | None], sort: str, limit: int, state: str, now_s: float
) -> list[tuple[str, list[R]]]:
    """At most ``limit`` of ``answers`` (requests by the answer's id), with what is remembered of their requests, by ``sort``: "recent",
    those that go on first, or "slowest". ``state``: "all", "running", which have not ended, or "finished", which have."""
    told = [(given, records) for given, ids in answers.items() if (records := known_of(find, ids))]
    if state != "all":
        told = [one for one in told if (last_of(one[1]).ended_s is None) == (state == "running")]
    order = _wall_s if sort == "slowest" else _recent
    told.sort(key=lambda one: order(last_of(one[1]), now_s))
    return told[: -limit - 1 : -1]


def row(given: str, records: Seq[RequestRecord], account: Mapping[str, Any]) -> dict[str, Any]:
    """A row as the API has it. ``account``: of the last of ``records``."""
    counts = {"prompt_tokens": sum(one.num_prompt_tokens for one in records)}
    counts["completion_tokens"] = sum(one.num_output_tokens for one in records)
    return {"id": given} | counts | {name: account[name] for name in _SHOWN if name in account} | num_prompts(records)


def _wall_s(record: RequestRecord, now_s: float) -> tuple[float, ...]:
    return ((now_s if record.end_s is None else record.end_s) - record.received_s,)


def _recent(record: RequestRecord, now_s: float) -> tuple[float, ...]:
    return (record.ended_s is None, record.arrival_s if record.ended_s is None else record.ended_s)
