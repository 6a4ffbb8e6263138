"""KV blocks saved by sharing between the samples and the beams of a request, on real text (Kwon et al., PagedAttention, SOSP 2023, figure
15).

What is run and how saving is counted is ``bench.sharing``. Steps count alike, so a figure is the same in every run on one kernel path.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from octavo.bench.in_process import Engines
from octavo.bench.sharing import BEAMS, DATASETS, SAMPLES, draw_jobs, own_text
from octavo.bench.sharing import measure as measure_sharing
from octavo.reproduce.figure import MEASURED, Figure, Line, Plot, Row
from octavo.reproduce.measured import describe
from octavo.reproduce.setup import Setup

TOLERANCE = 0.1  # of the published share, within which ours agrees


@dataclass(frozen=True, slots=True)
class Case:
    dataset: str
    num_requests: int
    widths: tuple[int, ...] = (2, 4, 6)
    num_kv_blocks: int = 2048


Saved = dict[tuple[str, int], float]
"""(method, width) -> percent of blocks saved."""


def make(setup: Setup, case: Case, number: int) -> Figure:
    with Engines(setup.model, {"": {"num_kv_blocks": case.num_kv_blocks}}) as engines:
        return shown(measure(engines, case, setup.seed), f"{describe(engines)} {told(case, setup.seed)}", case.dataset, number)


def measure(engines: Engines, case: Case, seed: int) -> Saved:
    engine = engines.first
    token_ids = engine.model.tokenizer.encode(own_text(), add_special_tokens=False)
    jobs = list(draw_jobs(token_ids, DATASETS[case.dataset], case.num_requests, seed, engine.max_model_len))
    cells = [(method, width) for method in (SAMPLES, BEAMS) for width in case.widths]
    return {(method, width): 100 * measure_sharing(engine, jobs, method, width).saved_by_step for method, width in cells}


def told(case: Case, seed: int) -> str:
    lengths = DATASETS[case.dataset]
    return (
        f"{case.num_requests} requests at once, each beginning elsewhere in a text, lengths by quantile of {lengths.prompt} and "
        f"{lengths.output} (the published means; the spread is an assumption), seed {seed}; blocks of 16 tokens; one run each. Agrees: "
        f"within {100 * TOLERANCE:g} % of the published share, or in the published range."
    )


def shown(saved: Saved, setup: str, dataset: str, number: int) -> Figure:
    rows = list[Row]()
    for (method, width), ours in saved.items():
        published = DATASETS[dataset].published(method, width)
        rows.append(Row(f"{method}, width {width}: blocks saved", f"{published} %", f"{ours:.2f} %", agrees(published, ours)))
    by_method = {method: [ours for (m, _), ours in saved.items() if m == method] for method in (SAMPLES, BEAMS)}
    for method, values in by_method.items():
        rows.append(Row(f"{method}: a wider request saves more", "yes", _list(values), _rises(values)))
    more = all(b > s for s, b in zip(by_method[SAMPLES], by_method[BEAMS], strict=True))
    both = f"{_list(by_method[BEAMS])} against {_list(by_method[SAMPLES])}"
    rows.append(Row("beams save more than samples", "at every width", both, more))
    lines = tuple(Line(method, tuple((w, ours) for (m, w), ours in saved.items() if m == method)) for method in (SAMPLES, BEAMS))
    plot = Plot("Blocks saved by sharing", "% of blocks without sharing", lines=lines, x_label="samples or beams of a request")
    notes = (
        "What samples save follows from the lengths alone, and means do not determine it; what beams save also from where their hypotheses "
        "part.",
    )
    return Figure(number, f"Blocks saved by sharing, lengths of {dataset}", MEASURED, setup, rows, (plot,), notes)


def agrees(published: str, ours: float) -> bool | None:
    """``published``: a number, or LOW-HIGH, in percent; "-": nothing is."""
    if published == "-":
        return None
    low, _, high = published.partition("-")
    if high:
        return float(low) <= ours <= float(high)
    return abs(ours - float(low)) <= TOLERANCE * float(low)


def _rises(values: Seq[float]) -> bool:
    return all(a < b for a, b in zip(values, values[1:], strict=False))


def _list(values: Seq[float]) -> str:
    return ", ".join(f"{value:.1f}" for value in values) + " %"
