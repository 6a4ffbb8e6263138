"""DistServe (Zhong et al., OSDI 2024), figure 8: prefill and decode apart against both on every engine, by goodput for each GPU.

OPT on A100 of 80 GB, ShareGPT-like lengths, the paper's limits of the chatbot. Engines have one shape (as many GPUs as in ``CASES``); which
shares of them compute prompts is searched among ``SPLITS``. KV goes over links inside a node.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.reproduce.figure import SIMULATED, Figure, Line, Plot, Range, Row
from octavo.reproduce.serving_arms import GRID, seeds_of, sharegpt_like
from octavo.reproduce.setup import Setup
from octavo.simulator.dense_models import OPT_13B, OPT_66B, OPT_175B, DenseModel
from octavo.simulator.rate_curve import RateBracket, ratio_of
from octavo.simulator.records import Slo
from octavo.simulator.serving_study import Load, Served, ServingStudy, Way, datasheet

NUMBER = 33
NAME = "disaggregated"
PUBLISHED = (2.0, 4.6)
SPLITS = ((1, 1), (1, 2), (2, 1), (1, 3), (3, 1))  # prefill, decode engines
FIRST = Way.of("together, prompts first (vLLM-like)", policy="prefill_first", chunked=False).with_engines(2)
TOGETHER = Way.of("together, prompts whole beside answers", chunked=False).with_engines(2)
CHUNKED = Way.of("together, chunks of 512", budget=512).with_engines(2)
SHARE = 0.9  # of the requests that have to keep the limits


@dataclass(frozen=True, slots=True)
class Case:
    """``devices``: GPUs of an engine. ``slo``: the paper's limits of TTFT and mean time between tokens."""

    model: DenseModel
    devices: int
    slo: Slo


CASES = (
    Case(OPT_13B, 1, Slo(ttft_s=0.25, itl_s=0.1)),
    Case(OPT_66B, 4, Slo(ttft_s=2.5, itl_s=0.15)),
    Case(OPT_175B, 8, Slo(ttft_s=4.0, itl_s=0.2)),
)


def run(setup: Setup) -> Figure:
    duration_s = 20.0 if setup.quick else 60.0
    rows, ranges, plots = list[Row](), list[Range](), list[Plot]()
    for case in CASES[:1] if setup.quick else CASES:
        setup.say(f"  {case.model.name}")
        served = Served.fitting(case.model, datasheet("a100-80gb", case.devices))
        study = ServingStudy(served, Load(sharegpt_like(), duration_s), seeds_of(setup))
        apart = Way.of("apart", chunked=False)
        found = {way: per_engine(study, way, case.slo) for way in (FIRST, TOGETHER, CHUNKED, *(apart.apart(*split) for split in SPLITS))}
        best = max((way for way in found if sum(way.roles)), key=lambda way: found[way][0].holds_at)
        for way, brackets in found.items():
            mark = ", best split" if way == best else ""
            rows.append(Row(f"{case.model.name}, {way.name}{mark}: requests/s for each engine", "", ", ".join(map(str, brackets))))
        for below, published in ((FIRST, PUBLISHED), (TOGETHER, None), (CHUNKED, None)):
            least, middle, most = ratio_of(found[best], found[below])
            hit = None if published is None else least <= published[1] and most >= published[0]
            printed = "" if published is None else f"{published[0]:g}x to {published[1]:g}x"
            what = f"{case.model.name}, apart over {below.name}"
            rows.append(Row(what, printed, f"{middle:.2f}x ({least:.2f} to {most:.2f})", hit))
            ranges.append(Range(what, least, most))
        title = f"{case.model.name}: requests within {_limits(case.slo)}"
        lines = tuple(_attained(study, way, case.slo) for way in (FIRST, TOGETHER, CHUNKED, best))
        plots.append(Plot(title, "share of requests", lines=lines, x_label="requests/s for each engine", marks=(("goodput", SHARE),)))
    ratios = Plot("Goodput of prefill and decode apart over", "ratio", ranges=tuple(ranges))
    engines = ", ".join(f"{case.model.name} {case.devices}" for case in CASES)
    how = (
        f"OPT by rooflines of A100 of 80 GB, GPUs of an engine: {engines}; ShareGPT-like lengths, Poisson for {duration_s:g} s, seeds "
        f"{', '.join(map(str, seeds_of(setup)))}; the highest rate (holds / fails, on a grid of {GRID}) at which "
        f"{100 * SHARE:g} % of the "
        f"requests keep both limits, over the number of engines; splits tried: {', '.join(f'{p}P+{d}D' for p, d in SPLITS)}; KV over "
        "300 GB/s."
    )
    notes = (
        "Neither vLLM nor DistServe was rebuilt. The paper's vLLM, of 2023, stops decoding for prompts and has no chunks: that rule is "
        "here, on our scheduler and roofline. Prompts of 161 tokens on a roofline take few milliseconds, so that there is little "
        "interference to remove.",
        "DistServe also gives the two phases different parallelism, which is not searched here.",
    )
    return Figure(NUMBER, "Prefill and decode apart, goodput", SIMULATED, how, rows, (ratios, *plots), notes)


def per_engine(study: ServingStudy, way: Way, slo: Slo) -> list[RateBracket]:
    """Goodput over the number of engines."""
    found = study.goodput(way, slo, SHARE)
    return [RateBracket(bracket.holds_at / way.num_devices, bracket.fails_at / way.num_devices) for bracket in found]


def _attained(study: ServingStudy, way: Way, slo: Slo) -> Line:
    points = study.misses(way, study.seeds[0], slo).points
    return Line(way.name, tuple((rate / way.num_devices, 1 - missed) for rate, missed in points))


def _limits(slo: Slo) -> str:
    return f"TTFT {slo.ttft_s:g} s and {slo.itl_s:g} s between tokens"
