"""How many drafts pay: time per token by K, its parts, and how it spreads over requests, measured (Chen et al., 2023, figure 1 and section
6).

Published with a draft model of a constant c on sixteen TPUs: accepted / (K + 1) falls and a loop takes longer with K, so that there is a
best K, and more of it makes the time of a sequence spread. Drafts here are prompt lookups, on work that copies in part, and the model's
first layers, which like a draft model have one c and draft at every step.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from octavo.bench.in_process import Engines
from octavo.bench.spec import PLAIN, SpecRun, drafts_by
from octavo.bench.spec import measure as measure_spec
from octavo.engine.engine import Engine
from octavo.reproduce.drafted_work import DraftedWork
from octavo.reproduce.figure import MEASURED, Figure, Line, Plot, Row
from octavo.reproduce.measured import NOT_TRANSFERABLE, describe, times
from octavo.reproduce.setup import Setup

NUMBER = 19
NAME = "draft-lengths"
BEST = {0.0: "2.01x (XSum, greedy, K = 4)", 1.0: "1.92x (XSum, nucleus, K = 4; best at K = 3)"}


@dataclass(frozen=True, slots=True)
class Case:
    """``ks`` rising."""

    num_output: int
    repeat: int
    works: tuple[DraftedWork, ...] = (DraftedWork("json", "ngram", 0.0), DraftedWork("code", "self", 1.0))
    ks: tuple[int, ...] = (1, 2, 3, 4, 6)
    num_prompts: int = 4
    self_draft_layers: int = 24


FULL, QUICK = Case(64, 2), Case(32, 1, ks=(1, 3, 6), num_prompts=2)


@dataclass(frozen=True, slots=True)
class Point:
    """With K drafts wherever there are some: seconds per token of each request [requests], the median of its rounds; tokens that a step
    gives, of the K + 1 that it could; seconds of a loop: of a step and its drafts."""

    seconds: tuple[float, ...]
    kept_share: float
    loop_s: float

    @property
    def mean_s(self) -> float:
        return statistics.fmean(self.seconds)

    @property
    def spread(self) -> float:
        """Standard deviation over requests, of the mean."""
        return statistics.pstdev(self.seconds) / self.mean_s


Sweep = dict[int, Point]
"""By K; 0 is plain decoding."""


def run(setup: Setup) -> Figure:
    case = QUICK if setup.quick else FULL
    with Engines(setup.model, {"": {"num_kv_blocks": 1024, "self_draft_layers": case.self_draft_layers}}) as engines:
        engines.warm_up()
        return shown(measure(engines.first, case), f"{describe(engines)} {told(case)}")


def measure(engine: Engine, case: Case) -> dict[DraftedWork, Sweep]:
    return {work: _sweep(engine, case, work) for work in case.works}


def _sweep(engine: Engine, case: Case, work: DraftedWork) -> Sweep:
    """All K in turn on each prompt, round after round. ValueError when a text with drafts is not that without."""
    prompts = work.prompts(case.num_prompts)
    runs: dict[int, list[list[SpecRun]]] = {k: [[] for _ in prompts] for k in (0, *case.ks)}  # [prompts][rounds]
    for i in range(1 + case.repeat):  # the first reads the prompt into the cache
        for j, prompt in enumerate(prompts):
            for k in runs:
                spec = work.case(case.num_output, 1, k)
                found = measure_spec(engine, [prompt], 1, spec, drafts_by(k, work.method) if k else PLAIN)
                if i:
                    runs[k][j].append(found)
                    if found.tokens != runs[0][j][0].tokens:
                        raise ValueError(f"{work}, {k} drafts: the text with drafts is not that without")
    return {k: _point(k, by_prompt) for k, by_prompt in runs.items()}


def _point(k: int, by_prompt: list[list[SpecRun]]) -> Point:
    flat = [run for runs in by_prompt for run in runs]
    seconds = tuple(statistics.median(run.seconds / run.num_decoded for run in runs) for runs in by_prompt)
    kept = sum(run.num_decoded for run in flat) / sum(run.num_steps for run in flat)
    return Point(seconds, kept / (k + 1), statistics.median(run.seconds / run.num_steps for run in flat))


def told(case: Case) -> str:
    works = " and ".join(map(str, case.works))
    return (
        f"One stream, {case.num_prompts} prompts each of {works}, {case.num_output} tokens, {case.repeat} rounds after one to warm up, all "
        f"K in turn on a prompt, medians by request; {case.self_draft_layers} first layers, n-grams of 2 to 4 tokens, K drafts wherever "
        "there are some. Texts are equal for all K."
    )


def shown(sweeps: dict[DraftedWork, Sweep], setup: str) -> Figure:
    rows, lines = list[Row](), list[Line]()
    for work, sweep in sweeps.items():
        where = str(work)
        ks = [k for k in sorted(sweep) if k]
        gain = {k: sweep[0].mean_s / sweep[k].mean_s for k in ks}
        best = max(ks, key=lambda k: gain[k])
        rows.append(Row(f"{where}: best gain", BEST.get(work.temperature, "-"), f"{times(gain[best])} at K = {best}"))
        kept = [sweep[k].kept_share for k in ks]
        rows.append(Row(f"{where}: tokens of a step / (K + 1) fall", "with K", _list(kept), _falls(kept)))
        loops = [sweep[k].loop_s / sweep[0].loop_s for k in ks]
        rows.append(Row(f"{where}: time of a loop rises, in plain steps", "with K", _list(loops), loops[-1] > loops[0]))
        spread = [sweep[k].spread for k in (ks[0], ks[-1])]
        rows.append(Row(f"{where}: times of sequences spread more, K = {ks[0]} to {ks[-1]}", "yes", _list(spread), spread[1] > spread[0]))
        rows.append(Row(f"{where}: there is a best K below the most", "yes", f"{best} of up to {ks[-1]}", best < ks[-1]))
        lines.append(Line(where, tuple((float(k), gain[k]) for k in ks)))
    plot = Plot("Gain by number of drafts", "times plain decoding", lines=tuple(lines), x_label="K", marks=(("no gain", 1.0),))
    return Figure(NUMBER, "How many drafts pay", MEASURED, setup, rows, (plot,), (NOT_TRANSFERABLE,))


def _falls(values: list[float]) -> bool:
    return all(a >= b for a, b in zip(values, values[1:], strict=False)) and values[0] > values[-1]


def _list(values: list[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)
