"""Sarathi-Serve (Agrawal et al., OSDI 2024), figure 14 and table 4: what chunks of a prompt cost, and what they give the others.

Yi-34B on two A100. The paper's lengths by their medians and 90th percentiles as lognormals; 128 requests, Poisson, at a rate whose prompts
alone would keep the machine busy half of the time: fixed before the first run, since the rate is not published with the table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from octavo.reproduce.figure import SIMULATED, Figure, Line, Plot, Row, within
from octavo.reproduce.setup import Setup
from octavo.simulator.dense_models import YI_34B
from octavo.simulator.report import SimulationReport
from octavo.simulator.serving_study import Load, Served, ServingStudy, Way, datasheet
from octavo.workload.lengths import LogNormal
from octavo.workload.requests import Independent

NUMBER = 31
NAME = "chunk-overhead"
CHUNKS, PROMPTS = (256, 512, 1024, 2048), (2048, 4096, 8192, 16384)
PUBLISHED_OVERHEAD = 25.0  # percent at chunks of 512, at most
NUM_REQUESTS, BUDGET, BUSY = 128, 1024, 0.5
SHARE = 0.25  # of a published time that counts as agreement
_Z90 = 1.2815515655446004  # standard deviations to the 90th percentile


@dataclass(frozen=True, slots=True)
class DataSet:
    """Medians and 90th percentiles of prompts and outputs, the longest sequence; published P50 TTFT and P99 gap in s, whole and chunked."""

    name: str
    prompt: tuple[int, int]
    output: tuple[int, int]
    longest: int
    whole: tuple[float, float]
    chunked: tuple[float, float]

    @property
    def prompt_lengths(self) -> LogNormal:
        return _lognormal(*self.prompt, self.longest * 3 // 4)

    @property
    def output_lengths(self) -> LogNormal:
        return _lognormal(*self.output, self.longest // 4)


DATA_SETS = (
    DataSet("openchat", (1730, 5696), (415, 834), 8192, (0.53, 0.68), (0.76, 0.14)),
    DataSet("arxiv", (7059, 12985), (208, 371), 16384, (3.78, 1.38), (3.90, 0.17)),
)


def _lognormal(median: int, p90: int, longest: int) -> LogNormal:
    sigma = math.log(p90 / median) / _Z90
    return LogNormal(median * math.exp(sigma * sigma / 2), sigma, 4, longest)


def run(setup: Setup) -> Figure:
    served = Served.fitting(YI_34B, datasheet("a100-80gb", 2), 16384)
    rows, lines = list[Row](), list[Line]()
    for num_tokens in PROMPTS:
        whole_s = served.prefill_s(num_tokens)
        overhead = [100 * (served.prefill_s(num_tokens, chunk) / whole_s - 1) for chunk in CHUNKS if chunk <= num_tokens]
        lines.append(Line(f"{num_tokens:,} tokens", tuple((float(chunk), value) for chunk, value in zip(CHUNKS, overhead, strict=False))))
        at_512 = overhead[CHUNKS.index(512)]
        what = f"prompt of {num_tokens:,} tokens in chunks of 512, longer by"
        rows.append(Row(what, f"at most {PUBLISHED_OVERHEAD:g} %", f"{at_512:.1f} %", at_512 <= PUBLISHED_OVERHEAD))
    rates = []
    for data in DATA_SETS:
        setup.say(f"  {data.name}")
        rate = BUSY / served.prefill_s(round(data.prompt_lengths.mean))
        rates.append(f"{rate:.2g} requests/s ({data.name})")
        rows += _ablation(data, served, rate, setup)
    marks = (("published, 512", PUBLISHED_OVERHEAD),)
    plot = Plot("What chunks cost a prompt", "longer by, %", lines=tuple(lines), x_label="tokens in a chunk", log_x=True, marks=marks)
    how = (
        f"Yi-34B by the roofline of 2 A100 of 80 GB, {served.num_slots:,} KV slots, budget {BUDGET}; lengths lognormal by published "
        f"medians and 90th percentiles, {NUM_REQUESTS} requests, Poisson, {' and '.join(rates)}: prompts alone take half of the time; seed "
        f"{setup.seed}. Times agree within {100 * SHARE:g} %."
    )
    notes = (
        "A prompt of thousands of tokens stalls only the few who run beside it: where that is less than one gap in a hundred, the "
        "P99 gap does not show it and the longest does.",
        "Whole prompts ride along with decoding here as in the paper's \"hybrid batching only\". Its \"chunked prefill only\", whose "
        "chunks never share a step with decoding, is no mode of this scheduler.",
        "The roofline reads earlier chunks' KV again, as the paper does, but knows no lost efficiency of small matrices (chunks of "
        "257 instead of 256 cost 32 % there).",
    )
    return Figure(NUMBER, "Chunked prefill: its cost, and the gaps it closes", SIMULATED, how, rows, (plot,), notes)


def _ablation(data: DataSet, served: Served, rate: float, setup: Setup) -> list[Row]:
    study = ServingStudy(served, Load(Independent(data.prompt_lengths, data.output_lengths), math.inf), (setup.seed,))
    arms = {}
    for name, chunked in (("whole prompts", False), ("chunks", True)):
        way = Way.of(name, budget=BUDGET, chunked=chunked)
        arms[name] = _times(study.run(way, rate, setup.seed, num_requests=NUM_REQUESTS))
    rows = []
    for name, published in (("whole prompts", data.whole), ("chunks", data.chunked)):
        for what, value, ours in zip(("P50 TTFT", "P99 gap between tokens"), published, arms[name], strict=False):
            rows.append(Row(f"{data.name}, {name}: {what}", f"{value:g} s", f"{ours:.2f} s", within(value, ours, ours, SHARE)))
        rows.append(Row(f"{data.name}, {name}: longest gap between tokens", "", f"{arms[name][2]:.2f} s"))
    (whole_ttft_s, whole_gap_s, _), (ttft_s, gap_s, _) = arms["whole prompts"], arms["chunks"]
    gain, slower = whole_gap_s / gap_s, ttft_s / whole_ttft_s
    published_gain, published_slower = data.whole[1] / data.chunked[1], data.chunked[0] / data.whole[0]
    rows.append(Row(f"{data.name}: chunks make the P99 gap shorter", f"yes ({published_gain:.1f}x)", _yes(gain), gain > 1))
    rows.append(Row(f"{data.name}: and the median TTFT longer", f"yes ({published_slower:.2f}x)", _yes(slower), slower > 1))
    return rows


def _yes(factor: float) -> str:
    return f"{'yes' if factor > 1 else 'no'} ({factor:.2f}x)"


def _times(report: SimulationReport) -> tuple[float, float, float]:
    """Median time to the first token, 99th percentile and longest of all gaps between tokens, in seconds."""
    first, gap, longest = report.ttft_s["p50"], report.gap_s["p99"], report.gap_s["max"]
    return float(first or 0.0), float(gap or 0.0), float(longest or 0.0)
