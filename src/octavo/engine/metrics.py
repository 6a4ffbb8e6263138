"""Counters and histograms of an engine, in plain numbers: what it has done since it started.

Written by the thread that runs steps, read by anyone. Knows no exposition format. Gauges and the counts that the scheduler itself
keeps (tokens, preemptions, prefix hits) are asked of the scheduler, not kept twice.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from octavo.core.request import FinishReason, Request
from octavo.core.step import StepPlan
from octavo.engine.outputs import OutputEvent

_LATENCY_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_STEP_TOKENS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0)


class Histogram:
    """Counts of observations at or below each of ``bounds``, with one more for the rest."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    @property
    def count(self) -> int:
        return sum(self.counts)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


@dataclass(slots=True)
class _Progress:
    """When a running request arrived and when each of its choices last got a token."""

    arrival_s: float
    num_open: int  # choices without a last event
    last_token_s: dict[int, float] = field(default_factory=dict)


class Gap(NamedTuple):
    """Between two tokens of a choice of a request."""

    seconds: float
    request_id: str


class EngineMetrics:
    """All times on the engine's clock, in seconds. ``max_itl_s``: the bound on the gap between two tokens of a choice."""

    def __init__(self, max_itl_s: float = math.inf) -> None:
        self.max_itl_s = max_itl_s
        self.num_finished = {reason: 0 for reason in FinishReason}
        self.num_prompt_tokens = 0
        self.num_failed_steps = 0
        self.time_to_first_token_s = Histogram(_LATENCY_S)
        self.inter_token_s = Histogram(_LATENCY_S)
        self.itl_excess_s = Histogram(_LATENCY_S)  # of gaps over max_itl_s: by how much
        self.request_s = Histogram(_LATENCY_S)
        self.step_s = Histogram(_LATENCY_S)
        self.step_tokens = Histogram(_STEP_TOKENS)
        self._progress: dict[str, _Progress] = {}

    def request_added(self, request: Request) -> None:
        self.num_prompt_tokens += len(request.prompt_token_ids)
        self._progress[request.request_id] = _Progress(request.arrival_s, request.params.n)

    def request_begun(self, request: Request, now_s: float) -> None:
        """A request that another engine began goes on here: its first token was drawn there."""
        self._progress[request.request_id] = _Progress(now_s, request.params.n, {0: now_s})

    def request_left(self, request_id: str) -> None:
        """Another engine goes on with it."""
        self._progress.pop(request_id, None)

    def step_done(self, plan: StepPlan, seconds: float) -> None:
        self.step_s.observe(seconds)
        self.step_tokens.observe(plan.num_tokens)

    def events_made(self, events: Iterable[OutputEvent], now_s: float) -> Gap:
        """Take in a step's events, which reach their readers at ``now_s``; return the longest gap that they end (of 0 s: none do)."""
        worst = Gap(0.0, "")
        for event in events:
            progress = self._progress.get(event.request_id)
            if progress is None:
                continue
            if event.token_ids:
                gap_s = self._tokens_made(progress, event, now_s)
                if gap_s > worst.seconds:
                    worst = Gap(gap_s, event.request_id)
            if event.finish_reason is not None:
                self._choice_finished(progress, event, now_s)
        return worst

    def _tokens_made(self, progress: _Progress, event: OutputEvent, now_s: float) -> float:
        """The gap that ends with these tokens; 0 for a choice's first ones."""
        last_s, gap_s = progress.last_token_s.get(event.choice), 0.0
        if last_s is not None:
            gap_s = now_s - last_s
            self.inter_token_s.observe(gap_s)
            if gap_s > self.max_itl_s:
                self.itl_excess_s.observe(gap_s - self.max_itl_s)
        elif not progress.last_token_s:
            self.time_to_first_token_s.observe(now_s - progress.arrival_s)
        progress.last_token_s[event.choice] = now_s
        return gap_s

    def _choice_finished(self, progress: _Progress, event: OutputEvent, now_s: float) -> None:
        """A request counts as finished once, by the reason of its last choice."""
        progress.num_open -= 1
        if progress.num_open == 0:
            assert event.finish_reason is not None
            self.num_finished[event.finish_reason] += 1
            self.request_s.observe(now_s - progress.arrival_s)
            del self._progress[event.request_id]
