"""KV blocks saved by sharing within requests: n samples, and beam search, on real prompts, beside the figures of the PagedAttention paper.

After every step: *held* is the number of blocks in the tables of all running sequences, a shared one counted once for each table, which is
what they would take without sharing; *used* is the number of blocks in use. saved = sum((held - used) * seconds) / sum(held * seconds) over
all steps (Kwon et al., SOSP 2023, section 6.3, figure 15: blocks saved by sharing / blocks without sharing). Only sharing within a request
is meant: every prompt begins at another place of the text, so no two have a block in common.

Lengths follow log-normal distributions with the means that the paper gives for its two data sets (section 6.1, figure 11); the spread is
an assumption. They are taken at evenly spaced quantiles, and paired by the golden section, as evenly as points on a plane can be: so a
few requests have means and products like many. The share that n samples save depends on lengths alone; the share of beams also on where
the model's hypotheses part.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from importlib import resources
from typing import TYPE_CHECKING, Any

from octavo.bench.record import measured_with
from octavo.bench.steps import steps_to_end
from octavo.bench.tables import table
from octavo.core.request import BeamParams, SamplingParams
from octavo.engine.engine import Engine
from octavo.workload.lengths import LogNormal

if TYPE_CHECKING:
    from octavo.config import EngineConfig

SAMPLES, BEAMS = "samples", "beams"
GOLDEN_SECTION = (5**0.5 - 1) / 2


@dataclass(frozen=True, slots=True)
class Dataset:
    """Lengths in tokens. ``paper``: "method width" -> percent saved, or "method" -> the range that is given for all widths."""

    prompt: LogNormal
    output: LogNormal
    paper: dict[str, str]

    def published(self, method: str, width: int) -> str:
        return self.paper.get(f"{method} {width}", self.paper.get(method, "-"))


DATASETS = {
    "alpaca": Dataset(
        LogNormal(19.31, 0.7, 2, 512),
        LogNormal(58.45, 0.9, 2, 512),
        {f"{SAMPLES} 2": "6.09", f"{SAMPLES} 4": "8.53", f"{SAMPLES} 6": "9.79"}
        | {f"{BEAMS} 2": "37.56", f"{BEAMS} 4": "53.13", f"{BEAMS} 6": "55.16"},
    ),
    "sharegpt": Dataset(
        LogNormal(161.31, 1.2, 4, 1024), LogNormal(337.99, 0.9, 4, 1024), {SAMPLES: "16.2-30.5", BEAMS: "44.3-66.3"}
    ),
}


@dataclass(frozen=True, slots=True)
class SharingCase:
    datasets: tuple[str, ...]
    widths: tuple[int, ...]
    num_requests: int
    text: str | None = None  # to take prompts from; None: the package's own
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Sharing:
    """``saved_by_step``: every step counts alike, so that the figure is the same in every run."""

    saved: float
    saved_by_step: float
    peak_used: int  # blocks
    peak_held: int
    num_preemptions: int


def run_sharing(config: EngineConfig, case: SharingCase, echo: Callable[[str], None], as_json: bool) -> None:
    """Measure ``case``; the last line given to ``echo`` is the JSON record."""
    engine = Engine.load(config)
    try:
        runs = list(_runs(engine, case))
        record = {
            "bench": "sharing",
            "model": engine.model.name,
            "block_size": config.cache.block_size,
            "num_requests": case.num_requests,
            "seed": case.seed,
            "runs": runs,
            **measured_with(engine),
        }
    finally:
        engine.close()
    if not as_json:
        echo(f"{record['model']}: KV blocks saved by sharing, {case.num_requests} requests, blocks of {config.cache.block_size} tokens")
        echo(_table(runs))
        echo("Saved: weighed by the seconds of steps; by steps: every step alike, the same in every run. Blocks: the most after any step.")
    echo(json.dumps(record))


def _runs(engine: Engine, case: SharingCase) -> Iterator[dict[str, Any]]:
    text = case.text if case.text is not None else own_text()
    token_ids = engine.model.tokenizer.encode(text, add_special_tokens=False)
    for name in case.datasets:
        dataset = DATASETS[name]
        jobs = list(draw_jobs(token_ids, dataset, case.num_requests, case.seed, engine.max_model_len))
        for method in (SAMPLES, BEAMS):
            for width in case.widths:
                result = measure(engine, jobs, method, width)
                shape = {"dataset": name, "method": method, "width": width, "paper_percent": dataset.published(method, width)}
                lengths = {"mean_prompt": _mean(len(p) for p, _ in jobs), "mean_output": _mean(n for _, n in jobs)}
                yield shape | lengths | asdict(result)


def own_text() -> str:
    return resources.files("octavo.bench").joinpath("prompts.txt").read_text(encoding="utf-8")


def draw_jobs(token_ids: list[int], dataset: Dataset, num: int, seed: int, max_model_len: int) -> Iterator[tuple[list[int], int]]:
    """(prompt, output tokens) of each request. A prompt is a passage of the text, which goes on at its beginning after its end.

    Raises ValueError for a text with fewer tokens than there are requests: prompts would begin alike.
    """
    if len(token_ids) < num:
        raise ValueError(f"--requests: {num} prompts cannot begin at different places of a text of {len(token_ids)} tokens")
    for i, place in enumerate(sorted(range(num), key=lambda k: (k + seed) * GOLDEN_SECTION % 1)):
        start, num_prompt = i * len(token_ids) // num, min(dataset.prompt.quantile((i + 0.5) / num), max_model_len - 1)
        prompt = [token_ids[(start + k) % len(token_ids)] for k in range(num_prompt)]
        yield prompt, min(dataset.output.quantile((place + 0.5) / num), max_model_len - num_prompt)


def measure(engine: Engine, jobs: list[tuple[list[int], int]], method: str, width: int) -> Sharing:
    """All requests at once, each with ``width`` samples or beams of the output length given. Raises ParameterError for a width that the
    engine cannot run, RuntimeError when a request fails."""
    params = SamplingParams(n=width, ignore_eos=True)
    if method == BEAMS:
        params = replace(params, beam=BeamParams(width))
    for i, (prompt, num_output) in enumerate(jobs):
        engine.add(engine.prepare(prompt, replace(params, max_tokens=num_output, seed=i)))
    scheduler, num_preemptions = engine.scheduler, engine.scheduler.stats.num_preemptions
    rows: list[tuple[int, int, float]] = []  # held, used, seconds
    started = time.perf_counter()
    for _ in steps_to_end(engine):
        rows.append((scheduler.num_table_blocks, scheduler.num_used_blocks, time.perf_counter() - started))
        started = time.perf_counter()
    held_s = sum(held * seconds for held, _, seconds in rows)
    used_s = sum(used * seconds for _, used, seconds in rows)
    held_sum, used_sum = sum(held for held, _, _ in rows), sum(used for _, used, _ in rows)
    return Sharing(
        saved=_share(held_s, used_s),
        saved_by_step=_share(held_sum, used_sum),
        peak_used=max(used for _, used, _ in rows),
        peak_held=max(held for held, _, _ in rows),
        num_preemptions=scheduler.stats.num_preemptions - num_preemptions,
    )


def _share(held: float, used: float) -> float:
    return round((held - used) / held, 4) if held else 0.0


def _mean(values: Iterator[int]) -> float:
    numbers = list(values)
    return round(sum(numbers) / len(numbers), 1)


def _table(runs: list[dict[str, Any]]) -> str:
    head = ["lengths", "mean tokens", "method", "width", "saved", "by steps", "paper", "peak blocks", "without sharing"]
    rows = [head]
    for run in runs:
        tokens = f"{run['mean_prompt']:.0f} + {run['mean_output']:.0f}"
        saved = [f"{100 * run['saved']:.2f} %", f"{100 * run['saved_by_step']:.2f} %", f"{run['paper_percent']} %"]
        peaks = [str(run["peak_used"]), str(run["peak_held"])]
        rows.append([run["dataset"], tokens, run["method"], str(run["width"]), *saved, *peaks])
    return table(rows, "   >>> >>")
