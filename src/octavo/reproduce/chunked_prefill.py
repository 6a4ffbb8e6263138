"""Prompts whole or in chunks, beside the running streams or alone, measured (Agrawal et al., Sarathi-Serve, OSDI 2024, table 4).

Three of the four cells can be had by the engine's switches: chunks beside streams (both), whole prompts beside streams (hybrid batching
only), and whole prompts in steps of their own (neither). Chunks in steps of their own (chunked prefill only) there are not: the scheduler
has no phases, and what fits a step goes into it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from octavo.bench.in_process import Engines, Options, in_turn, serve, token_range
from octavo.bench.latency import percentile
from octavo.reproduce.figure import MEASURED, Figure, Plot, Range, Row
from octavo.reproduce.measured import NOT_TRANSFERABLE, describe, milliseconds, times
from octavo.reproduce.setup import Setup
from octavo.workload.arrivals import ClosedLoop, OpenLoop
from octavo.workload.lengths import LogNormal
from octavo.workload.requests import Independent, TokenRange, Workload, WorkloadRequest

NUMBER = 31
NAME = "chunked-prefill"
BOTH, HYBRID, NEITHER = "both", "hybrid batching only", "neither"
PUBLISHED = {BOTH: ".76 / .14 s", HYBRID: ".53 / .68 s", NEITHER: "-"}  # P50 TTFT / P99 gap, openchat, Yi-34B, budget 1024
SIGMA_PROMPT, SIGMA_OUTPUT = 0.93, 0.545  # of the logarithm: P90 over median as published, 5696/1730 and 834/415


@dataclass(frozen=True, slots=True)
class Case:
    """Tokens, but for ``num_requests`` and ``share``, which is of the rate that chunks beside streams answer when all are there at once.
    Prompts and answers are log-normal with the published spreads; medians are ``prompt`` and ``output``."""

    num_requests: int
    repeat: int
    prompt: int = 512
    output: int = 96
    longest_prompt: int = 3072
    chunk: int = 256
    share: float = 0.85
    max_num_seqs: int = 16
    num_kv_blocks: int = 2048

    @property
    def lengths(self) -> Independent:
        """The mean of a log-normal is its median times exp(sigma^2 / 2)."""
        prompt = LogNormal(self.prompt * math.exp(SIGMA_PROMPT**2 / 2), SIGMA_PROMPT, 32, self.longest_prompt)
        return Independent(prompt, LogNormal(self.output * math.exp(SIGMA_OUTPUT**2 / 2), SIGMA_OUTPUT, 8, 8 * self.output))


FULL, QUICK = Case(14, 3), Case(8, 1, prompt=256, output=48, longest_prompt=1536, chunk=128)


@dataclass(slots=True)
class Cell:
    """[rounds] in seconds."""

    ttft_s: list[float] = field(default_factory=list)  # P50
    gap_s: list[float] = field(default_factory=list)  # P99
    worst_s: list[float] = field(default_factory=list)


def run(setup: Setup) -> Figure:
    case = QUICK if setup.quick else FULL
    with Engines(setup.model, arms(case)) as engines:
        engines.warm_up()
        return shown(measure(engines, case, setup.seed), f"{describe(engines)} {told(case, setup.seed)}")


def arms(case: Case) -> dict[str, Options]:
    common: Options = {"max_num_seqs": case.max_num_seqs, "enable_prefix_caching": False, "num_kv_blocks": case.num_kv_blocks}
    whole = common | {"enable_chunked_prefill": False}
    return {
        BOTH: common | {"max_num_batched_tokens": case.chunk},
        HYBRID: whole | {"max_num_batched_tokens": case.longest_prompt + case.max_num_seqs},  # the longest one fits beside all streams
        NEITHER: whole | {"max_num_batched_tokens": case.max_num_seqs},  # no prompt fits beside a stream, so it goes alone
    }


def requests(rate: float | None, case: Case, tokens: TokenRange, seed: int) -> Iterable[WorkloadRequest]:
    """Poisson at ``rate``; None: all at once."""
    arrivals = ClosedLoop(case.num_requests) if rate is None else OpenLoop(rate)
    return Workload(arrivals, case.lengths, case.num_requests, tokens=tokens, seed=seed).requests()


def measure(engines: Engines, case: Case, seed: int) -> dict[str, Cell]:
    tokens, cells = token_range(engines.first), {name: Cell() for name in engines.by_name}
    rate = case.share * serve(engines[BOTH], requests(None, case, tokens, seed)).request_s
    for i in range(case.repeat):
        answers = None
        for name in in_turn(list(cells), i):
            run = serve(engines[name], requests(rate, case, tokens, seed + i))
            if answers not in (None, run.outputs):
                raise RuntimeError(f"{name}: the answers depend on chunks")
            answers, gaps = run.outputs, sorted(run.gaps_s)
            cells[name].ttft_s.append(statistics.median(run.ttft_s))
            cells[name].gap_s.append(percentile(gaps, 99))
            cells[name].worst_s.append(gaps[-1])
    return cells


def told(case: Case, seed: int) -> str:
    return (
        f"{case.num_requests} requests, log-normal prompts and answers of medians {case.prompt} and {case.output} tokens with the "
        f"published spread (P90 over median 3.3 and 2.0), prompts up to {case.longest_prompt}, Poisson at {case.share:g} of what is "
        f"answered when all are there at once, {case.repeat} rounds, seeds from {seed}, the cells in turn on the same requests, medians of "
        f"the rounds; at most {case.max_num_seqs} at once, steps of {case.chunk} tokens with chunks. Answers are equal in all cells."
    )


def shown(cells: dict[str, Cell], setup: str) -> Figure:
    ttft = {name: statistics.median(cell.ttft_s) for name, cell in cells.items()}
    gap = {name: statistics.median(cell.gap_s) for name, cell in cells.items()}
    worst = {name: statistics.median(cell.worst_s) for name, cell in cells.items()}
    longer = times(worst[HYBRID] / worst[BOTH])
    rows = list(_cell_rows(cells, ttft, gap))
    rows += [
        Row("chunks shorten the P99 gap of hybrid batching", "4.9x", times(gap[HYBRID] / gap[BOTH]), gap[BOTH] < gap[HYBRID]),
        Row("whole prompts make the longest gap longer", "gaps up to 28.3x as long", longer, worst[HYBRID] > worst[BOTH]),
        Row("chunks lengthen its time to the first token", "1.43x", times(ttft[BOTH] / ttft[HYBRID]), ttft[BOTH] > ttft[HYBRID]),
        Row("chunked prefill only", "1.04 / .17 s", "no switch: what fits a step goes into it"),
    ]
    ranges = tuple(Range(name, 1e3 * min(cell.gap_s), 1e3 * max(cell.gap_s)) for name, cell in cells.items())
    plot = Plot("Gaps between tokens, P99", "ms", ranges)
    return Figure(NUMBER, "Chunked prefill and hybrid batching", MEASURED, setup, rows, (plot,), (NOT_TRANSFERABLE,))


def _cell_rows(cells: dict[str, Cell], ttft: dict[str, float], gap: dict[str, float]) -> Iterator[Row]:
    for name, cell in cells.items():
        ours = f"{milliseconds(ttft[name])} / {milliseconds(gap[name])}, worst gap {milliseconds(max(cell.worst_s))}"
        yield Row(f"{name}: P50 TTFT / P99 gap", PUBLISHED[name], ours)
