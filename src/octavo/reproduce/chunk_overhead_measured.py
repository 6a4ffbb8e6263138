"""What it costs a prompt to come in chunks, by their size, measured (Agrawal et al., Sarathi-Serve, OSDI 2024, figure 14).

Each chunk reads the weights and the keys and values before it once more. One prompt alone, time to its first token.
"""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass

from octavo.bench.in_process import Engines, Options, in_turn, serve, token_range
from octavo.reproduce.figure import MEASURED, Figure, Line, Plot, Row
from octavo.reproduce.measured import NOT_TRANSFERABLE, describe
from octavo.reproduce.setup import Setup
from octavo.workload.requests import WorkloadRequest

NUMBER = 31
NAME = "chunk-overhead-measured"
AT, MOST = 512, 0.25  # published: at most 25 % at 512
NEGLIGIBLE_AT, NEGLIGIBLE = 2048, 0.05


@dataclass(frozen=True, slots=True)
class Case:
    """Tokens. ``chunks`` rising; the last one holds the whole prompt."""

    num_prompt: int
    chunks: tuple[int, ...]
    repeat: int


FULL, QUICK = Case(4096, (64, 256, 512, 1024, 2048, 4096), 3), Case(1024, (64, 256, 512, 1024), 1)


def run(setup: Setup) -> Figure:
    case = QUICK if setup.quick else FULL
    with Engines(setup.model, arms(case)) as engines:
        engines.warm_up()
        return shown(measure(engines, case, setup.seed), f"{describe(engines)} {told(case, setup.seed)}")


def arms(case: Case) -> dict[str, Options]:
    pool: Options = {"num_kv_blocks": -(-case.num_prompt // 16) + 8, "enable_prefix_caching": False, "max_num_seqs": 1}
    return {str(chunk): pool | {"max_num_batched_tokens": chunk} for chunk in case.chunks}


def measure(engines: Engines, case: Case, seed: int) -> dict[int, float]:
    """Chunk size -> seconds to the first token, median. RuntimeError when the answers differ."""
    prompt = token_range(engines.first).draw(random.Random(seed), case.num_prompt)
    seconds: dict[int, list[float]] = {chunk: [] for chunk in case.chunks}
    answers = None
    for i in range(1 + case.repeat):  # the first warms up
        for chunk in in_turn(case.chunks, i):
            run = serve(engines[str(chunk)], [WorkloadRequest(0.0, prompt, 4)])
            if answers not in (None, run.outputs):
                raise RuntimeError(f"chunks of {chunk} tokens: the answer depends on them")
            answers = run.outputs
            if i:
                seconds[chunk] += run.ttft_s
    return {chunk: statistics.median(found) for chunk, found in seconds.items()}


def told(case: Case, seed: int) -> str:
    return (
        f"One prompt of {case.num_prompt} random tokens, seed {seed}, {case.repeat} rounds after one to warm up, the sizes in turn, "
        "medians; against the whole prompt in one step. Answers are equal."
    )


def shown(seconds: dict[int, float], setup: str) -> Figure:
    whole = max(seconds)
    over = {chunk: s / seconds[whole] - 1 for chunk, s in seconds.items()}
    rows = [Row("whole prompt", "-", f"{1e3 * seconds[whole]:.0f} ms")]
    for chunk, overhead in over.items():
        if chunk == whole:
            continue
        published, hit = "-", None
        if chunk == AT:
            published, hit = f"at most {100 * MOST:.0f} %", overhead <= MOST
        elif chunk == NEGLIGIBLE_AT:
            published, hit = "negligible", overhead <= NEGLIGIBLE
        rows.append(Row(f"chunks of {chunk}: longer by", published, f"{100 * overhead:.1f} %", hit))
    small = min(over)
    both = f"{100 * over[small]:.1f} % against {100 * over[AT]:.1f} %"
    rows.append(Row(f"chunks of {small} cost more than chunks of {AT}", "yes", both, over[small] > over[AT]))
    line = Line("longer than whole", tuple((float(chunk), 100 * overhead) for chunk, overhead in over.items()))
    marks = ((f"published for {AT}: at most", 100 * MOST),)
    plot = Plot("What chunks cost a prompt", "% of its time", lines=(line,), x_label="tokens of a chunk", marks=marks)
    notes = (f"Negligible: at most {100 * NEGLIGIBLE:g} %. The published figure is of Yi-34B on two GPUs.", NOT_TRANSFERABLE)
    return Figure(NUMBER, "The cost of chunks by their size", MEASURED, setup, rows, (plot,), notes)
