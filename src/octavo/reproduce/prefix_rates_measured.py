"""A prefix that all requests share, kept once, measured (Kwon et al., PagedAttention, SOSP 2023, figure 16).

The published prefixes of 80 and 341 tokens (one and five examples of a translation), here passages of a text, each request with some tokens
of its own behind it. The prefix cache against the same engine without it, and against reservations by exact length, which share nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from octavo.bench.in_process import Engines, Options, in_turn, serve
from octavo.bench.sharing import own_text
from octavo.reproduce.figure import MEASURED, Figure, Plot, Range, Row
from octavo.reproduce.measured import NOT_TRANSFERABLE, describe, times
from octavo.reproduce.setup import Setup
from octavo.workload.requests import WorkloadRequest

NUMBER = 11
NAME = "prefix-rates-measured"
SHARED, PAGED, ORACLE = "prefix cache", "no prefix cache", "Orca (Oracle)-like"
PUBLISHED = {80: "1.67x", 341: "3.58x"}  # over Orca (Oracle)


@dataclass(frozen=True, slots=True)
class Case:
    """Tokens, but for ``num_requests``. A sentence and its translation are about as long as ``num_own`` and ``num_output``."""

    num_requests: int
    repeat: int
    num_own: int = 32
    num_output: int = 40
    prefixes: tuple[int, ...] = tuple(PUBLISHED)
    num_kv_blocks: int = 1024


FULL, QUICK = Case(24, 3), Case(12, 1)


@dataclass(frozen=True, slots=True)
class Gains:
    """``ratios`` [rounds]: requests per second with the prefix cache over those of the other engine, by prefix and engine."""

    ratios: dict[tuple[int, str], list[float]]
    cached_share: dict[int, float]  # of the prompt tokens, with the prefix cache


def run(setup: Setup) -> Figure:
    case = QUICK if setup.quick else FULL
    pool: Options = {"num_kv_blocks": case.num_kv_blocks, "max_model_len": 1024}
    off = pool | {"enable_prefix_caching": False}
    arms = {SHARED: pool, PAGED: off, ORACLE: off | {"kv_reservation": "oracle"}}
    with Engines(setup.model, arms) as engines:
        engines.warm_up()
        return shown(measure(engines, case, setup.seed), f"{describe(engines)} {told(case, setup.seed)}")


def requests(token_ids: Seq[int], case: Case, num_prefix: int, seed: int) -> Iterator[WorkloadRequest]:
    """All at once: the text's first ``num_prefix`` tokens after a place that the seed says, then passages from places of their own."""
    size = len(token_ids)
    start = seed * num_prefix % size
    prefix = [token_ids[(start + k) % size] for k in range(num_prefix)]
    for i in range(case.num_requests):
        at = start + num_prefix + i * (size // case.num_requests)
        yield WorkloadRequest(0.0, prefix + [token_ids[(at + k) % size] for k in range(case.num_own)], case.num_output)


def measure(engines: Engines, case: Case, seed: int) -> Gains:
    token_ids = engines.first.model.tokenizer.encode(own_text(), add_special_tokens=False)
    ratios: dict[tuple[int, str], list[float]] = {(p, other): [] for p in case.prefixes for other in (PAGED, ORACLE)}
    cached: dict[int, float] = {}
    for num_prefix in case.prefixes:
        for i in range(case.repeat):
            load = list(requests(token_ids, case, num_prefix, seed + i))
            before = engines[SHARED].scheduler.stats.prefix_hit_tokens
            # Each round has a salt of its own: no round finds the blocks of another.
            runs = {name: serve(engines[name], load, salt=f"{num_prefix}:{i}") for name in in_turn((SHARED, PAGED, ORACLE), i)}
            if any(run.outputs != runs[SHARED].outputs for run in runs.values()):
                raise RuntimeError(f"prefix of {num_prefix} tokens, round {i}: the answers depend on how KV memory is kept")
            num_hit = engines[SHARED].scheduler.stats.prefix_hit_tokens - before
            cached[num_prefix] = num_hit / sum(len(one.prompt_token_ids) for one in load)
            for other in (PAGED, ORACLE):
                ratios[num_prefix, other].append(runs[SHARED].request_s / runs[other].request_s)
    return Gains(ratios, cached)


def told(case: Case, seed: int) -> str:
    return (
        f"{case.num_requests} requests at once, a common prefix and {case.num_own} tokens of their own from a text, {case.num_output} "
        f"tokens of answer, memory for all of them; {case.repeat} rounds, seeds from {seed}, the engines in turn on the same requests; "
        "medians of the ratio of requests per second. The cache is empty when a round begins. Answers of all engines are equal."
    )


def shown(found: Gains, setup: str) -> Figure:
    gain = {key: statistics.median(ratios) for key, ratios in found.ratios.items()}
    prefixes = sorted({num_prefix for num_prefix, _ in gain})
    rows = list[Row]()
    for num_prefix in prefixes:
        published, share = PUBLISHED.get(num_prefix, "-"), 100 * found.cached_share[num_prefix]
        rows.append(Row(f"prefix of {num_prefix} tokens, over {ORACLE}", published, times(gain[num_prefix, ORACLE])))
        ours = f"{times(gain[num_prefix, PAGED])}, {share:.0f} % of prompt tokens cached"
        rows.append(Row(f"prefix of {num_prefix} tokens, over {PAGED}", "-", ours))
    for other in (ORACLE, PAGED):
        gains = [gain[num_prefix, other] for num_prefix in prefixes]
        rows.append(Row(f"sharing is faster than {other}", "yes", _list(gains), min(gains) > 1))
        longer = all(a < b for a, b in zip(gains, gains[1:], strict=False))
        rows.append(Row(f"a longer prefix gains more over {other}", "yes", _list(gains), longer))
    ranges = tuple(Range(f"{p} tokens, over {other}", min(ratios), max(ratios)) for (p, other), ratios in found.ratios.items())
    marks = tuple((f"{p} tokens", float(PUBLISHED[p].rstrip("x"))) for p in prefixes if p in PUBLISHED)
    plot = Plot("Gain of a shared prefix", "requests per second, ratio", ranges, marks=marks)
    notes = ("The published gain is of rates at similar latency, on a GPU whose memory limits the batch; here all fit.", NOT_TRANSFERABLE)
    return Figure(NUMBER, "A prefix shared by all requests", MEASURED, setup, rows, (plot,), notes)


def _list(gains: Seq[float]) -> str:
    return ", ".join(map(times, gains))
