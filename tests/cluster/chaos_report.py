"""The result of a chaos run: what does not hold, and the dated page that says what was seen. Pure."""

from __future__ import annotations

import datetime
import statistics
from dataclasses import dataclass, field
from typing import Any

from tests.cluster.figures import FULL_SHARE, RoundResult, Seen
from tests.cluster.schedule import Kind, Round

RECOVERY_S = 10.0


@dataclass(frozen=True, slots=True)
class ChaosCase:
    """``roles``: of the workers, each in a namespace of its own."""

    model: str
    minutes: float
    seed: int = 1
    roles: tuple[str, ...] = ("both", "both", "both")
    num_clients: int = 6
    num_requests: int = 60


@dataclass(slots=True)
class ChaosResult:
    case: ChaosCase
    seen: list[Seen]
    rounds: list[RoundResult]
    blocks_left: dict[str, float]  # worker -> blocks in use when all is over
    workers: list[dict[str, Any]] = field(default_factory=list)
    drift: float = 1.0

    @property
    def faults(self) -> list[str]:
        """What does not hold, in words; empty: everything does."""
        found = [f"request {one.number}, sent at {one.sent_s:.1f} s, failed: {one.failure}" for one in self.seen if one.failure]
        found += [f"request {one.number}, sent at {one.sent_s:.1f} s, is wrong: {one.wrong}" for one in self.seen if one.wrong]
        found += [f"{worker} holds {blocks:.0f} blocks at the end" for worker, blocks in self.blocks_left.items() if blocks]
        for one in self.rounds:
            if _is_late(one):
                late = "never" if one.recovery_s is None else f"after {one.recovery_s:.1f} s"
                found.append(f"the round at {one.round.at_s:.0f} s ({_events(one.round)}): the full rate came back {late}")
        away = [worker["name"] for worker in self.workers if worker["state"] != "ready"]
        return found + [f"{name} has not come back" for name in away]


def _events(one: Round) -> str:
    return "; ".join(map(str, one.events))


def report(result: ChaosResult, day: datetime.date) -> str:
    """The page, in Markdown."""
    case, seen = result.case, result.seen
    num_events = sum(len(one.round.events) for one in result.rounds)
    pauses = sorted(one.longest_pause_s for one in seen)
    recoveries = [one.recovery_s for one in result.rounds if one.recovery_s is not None]
    rows = [
        ("Requests answered", f"{sum(one.failure is None for one in seen)} of {len(seen)}"),
        ("Requests that failed", str(sum(one.failure is not None for one in seen))),
        ("Answers that are not those of one engine, to the bit", str(sum(one.wrong is not None for one in seen))),
        ("Blocks in use at the end", ", ".join(f"{worker} {blocks:.0f}" for worker, blocks in result.blocks_left.items())),
        ("Workers at the end", ", ".join(f"{one['name']} {one['state']}" for one in result.workers)),
        (f"From a round's end to {FULL_SHARE:.0%} of the calm rate, longest", f"{max(recoveries, default=0.0):.1f} s"),
        ("Rounds after which it did not come back in time", str(sum(_is_late(one) for one in result.rounds))),
        ("Rate of the last calm, as a share of the first one's", f"{result.drift:.0%}"),
        ("Longest pause of a stream, longest and median", f"{pauses[-1]:.1f} s, {statistics.median(pauses):.2f} s" if pauses else "none"),
    ]
    lines = [
        f"# Chaos, {day.isoformat()}",
        "",
        f"`python -m tests.cluster.chaos --minutes {case.minutes:g} --seed {case.seed} --roles {','.join(case.roles)} "
        f"--model {case.model}`: {num_events} events in {len(result.rounds)} rounds, {case.num_clients} clients.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in rows),
        "",
        "Rounds with one event, by kind:",
        "",
        "| Kind | Rounds | Full rate again, median and longest | Lowest rate, median | Longest pause |",
        "|---|---|---|---|---|",
        *(_kind_row(kind, [one for one in result.rounds if [e.kind for e in one.round.events] == [kind]]) for kind in Kind),
        "",
    ]
    if result.faults:
        lines += ["What does not hold:", "", *(f"- {fault}" for fault in result.faults), ""]
    return "\n".join(lines)


def _is_late(one: RoundResult) -> bool:
    return one.recovery_s is None or one.recovery_s > RECOVERY_S


def _kind_row(kind: Kind, found: list[RoundResult]) -> str:
    if not found:
        return f"| {kind.value} | 0 | | | |"
    recoveries = sorted(float("inf") if one.recovery_s is None else one.recovery_s for one in found)
    lowest = statistics.median(one.lowest_share for one in found)
    pause = max(one.longest_pause_s for one in found)
    return f"| {kind.value} | {len(found)} | {statistics.median(recoveries):.1f}, {recoveries[-1]:.1f} s | {lowest:.0%} | {pause:.1f} s |"
