"""The load that a plan is for: what requests of a trace are like, and how they come at any rate.

Either as a Poisson process whose requests are drawn from the trace in pairs of prompt and answer, with replacement; or as recorded, played
faster or slower, each seed beginning elsewhere in the trace. Where a trace says which beginnings are shared, requests keep their order.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean

from octavo.workload.arrivals import OpenLoop
from octavo.workload.jsonl_traces import JsonlTrace
from octavo.workload.requests import Independent, TokenRange, WorkloadRequest
from octavo.workload.traces import TraceError, TraceRow, read_trace

ARRIVALS = ("poisson", "trace")
MOST_SHARED = 20_000  # requests of a trace with prompts that are kept, which take memory


@dataclass(frozen=True, slots=True)
class PlanLoad:
    """``rows`` by arrival, ``prompts`` of each where beginnings are shared. ``num_left_out``: requests that no engine could take."""

    name: str
    rows: tuple[TraceRow, ...]
    prompts: tuple[list[int], ...] | None = None
    num_left_out: int = 0

    def fitting(self, max_tokens: int) -> PlanLoad:
        """Requests of at most ``max_tokens``, prompt and answer together. Raises ValueError when there is none."""
        kept = [i for i, row in enumerate(self.rows) if row.num_prompt + row.num_output <= max_tokens]
        if not kept:
            shortest = min(row.num_prompt + row.num_output for row in self.rows)
            raise ValueError(f"{self.name}: no request fits the model's context of {max_tokens} tokens; the shortest takes {shortest}")
        prompts = None if self.prompts is None else tuple(self.prompts[i] for i in kept)
        return PlanLoad(self.name, tuple(self.rows[i] for i in kept), prompts, self.num_left_out + len(self.rows) - len(kept))

    # --- what it is like ----------------------------------------------------------------------------------------------------------------

    @property
    def rate(self) -> float | None:
        """Its own, requests per second on average; None when all come at once."""
        span_s = self.rows[-1].arrival_s - self.rows[0].arrival_s
        return (len(self.rows) - 1) / span_s if span_s > 0.0 else None

    @property
    def mean_prompt(self) -> float:
        return fmean(row.num_prompt for row in self.rows)

    @property
    def mean_output(self) -> float:
        return fmean(row.num_output for row in self.rows)

    @property
    def mean_context(self) -> int:
        """Tokens of prompt and answer, as all the others of this kind."""
        return round(self.mean_prompt + self.mean_output)

    @property
    def p90_context(self) -> int:
        """The least that 90 % of the requests do not exceed."""
        contexts = sorted(row.num_prompt + row.num_output for row in self.rows)
        return contexts[-(-9 * len(contexts) // 10) - 1]

    @property
    def max_context(self) -> int:
        return max(row.num_prompt + row.num_output for row in self.rows)

    def to_dict(self) -> dict[str, object]:
        return {
            "trace": self.name,
            "num_requests": len(self.rows),
            "num_left_out": self.num_left_out,
            "rate": self.rate,
            "prompt_mean": self.mean_prompt,
            "output_mean": self.mean_output,
            "context_mean": self.mean_context,
            "context_p90": self.p90_context,
            "context_max": self.max_context,
            "shares_prefixes": self.prompts is not None,
        }

    # --- how it comes -------------------------------------------------------------------------------------------------------------------

    def requests(self, rate: float, seed: int, num_requests: int, arrivals: str = "poisson") -> Iterator[WorkloadRequest]:
        """``num_requests`` requests at ``rate`` on average. The same seed gives the same requests at every rate, nearer to each other."""
        if arrivals == "trace":
            picks = self._recorded(rate, seed)
        else:
            picks = self._drawn(rate, seed)
        tokens = TokenRange()
        rng = random.Random(f"{seed}:tokens")
        for arrival_s, i in islice(picks, num_requests):
            row = self.rows[i]
            prompt = tokens.draw(rng, row.num_prompt) if self.prompts is None else self.prompts[i]
            yield WorkloadRequest(arrival_s, prompt, row.num_output)

    def _drawn(self, rate: float, seed: int) -> Iterator[tuple[float, int]]:
        rng, num_rows = random.Random(f"{seed}:lengths"), len(self.rows)
        start = 0 if seed == 0 else random.Random(f"{seed}:start").randrange(num_rows)
        for n, arrival_s in enumerate(OpenLoop(1.0).times(random.Random(f"{seed}:arrivals"))):
            yield arrival_s / rate, (start + n) % num_rows if self.prompts is not None else rng.randrange(num_rows)

    def _recorded(self, rate: float, seed: int) -> Iterator[tuple[float, int]]:
        """Round and round through the trace; from its last request to its first a mean gap passes."""
        own = self.rate
        if own is None:
            raise ValueError(f"{self.name}: all requests come at once; arrivals of the trace cannot be played at another rate")
        num_rows, time_s = len(self.rows), 0.0
        i = 0 if seed == 0 else random.Random(f"{seed}:start").randrange(num_rows)
        while True:
            yield time_s * own / rate, i
            following = (i + 1) % num_rows
            time_s += self.rows[following].arrival_s - self.rows[i].arrival_s if following else 1.0 / own
            i = following


def read_load(path: str | Path) -> PlanLoad:
    """The load of a trace file, CSV or .jsonl. Raises TraceError that names line and field, OSError."""
    name = Path(path).name
    if not str(path).endswith(".jsonl"):
        trace = read_trace(path)
        return PlanLoad(name, trace.rows, None, trace.num_left_out)
    rows, prompts, num_left_out = list[TraceRow](), list[list[int]](), 0
    for work in islice(JsonlTrace(path).requests(), MOST_SHARED):
        if work.num_output:
            rows.append(TraceRow(work.arrival_s, len(work.prompt_token_ids), work.num_output))
            prompts.append(work.prompt_token_ids)
        else:
            num_left_out += 1  # it has neither tokens nor gaps to hold a limit to
    if not rows:
        raise TraceError(f"{path}: there is no request in it")
    return PlanLoad(name, tuple(rows), tuple(prompts) if _share_beginnings(prompts) else None, num_left_out)


def _share_beginnings(prompts: Seq[list[int]]) -> bool:
    """Whether two prompts begin with the same tokens: those of a trace that says nothing about it are random."""
    beginnings = [tuple(prompt[:16]) for prompt in prompts if len(prompt) >= 16]
    return len(set(beginnings)) < len(beginnings)


def made_load(lengths: Independent, num_rows: int = 2000) -> PlanLoad:
    """A load of no trace: pairs of lengths drawn once, which come one a second."""
    pairs = islice(lengths.lengths(random.Random("plan:lengths")), num_rows)
    return PlanLoad("made", tuple(TraceRow(float(i), *pair) for i, pair in enumerate(pairs)))
