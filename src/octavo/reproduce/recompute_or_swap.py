"""Recomputing against swapping by block size, measured (Kwon et al., PagedAttention, SOSP 2023, figure 19).

Two levels, both of ``bench.preemption``: what one sequence takes to come back, and whole loads in a pool too small for them. Swapping goes
to host memory beside the pool, which on a CPU is the same memory: a copy, where a GPU has a bus.
"""

from __future__ import annotations

import random
import statistics
from contextlib import ExitStack, closing
from dataclasses import dataclass

from octavo.bench.in_process import Options, in_turn
from octavo.bench.preemption import PreemptionCase, run_way, way_config
from octavo.bench.restore_seconds import restore_seconds
from octavo.engine.engine import Engine
from octavo.engine.llm import make_config
from octavo.reproduce.figure import MEASURED, Figure, Line, Plot, Row
from octavo.reproduce.measured import NOT_TRANSFERABLE, machine_limits, milliseconds
from octavo.reproduce.setup import Setup

NUMBER = 13
NAME = "recompute-or-swap"
WAYS = ("recompute", "swap")
FLAT = 1.25  # largest over smallest: what does not depend on the size of blocks stays within
COMPARABLE = 0.2  # of a ratio of throughputs
PUBLISHED = (16, 64)  # where both ways are comparable end to end


@dataclass(frozen=True, slots=True)
class Case:
    """``num_tokens`` of the sequence that comes back; ``sizes`` of blocks, and those of them at which whole loads run."""

    load: PreemptionCase
    num_tokens: int = 512
    sizes: tuple[int, ...] = (16, 32, 64, 128, 256)

    def restoring(self, size: int) -> PreemptionCase:
        """A pool of twice the sequence, which has nothing else in it."""
        return PreemptionCase(2, self.num_tokens, size, 1.0, (size,), 0)


# A sequence gives way while it grows, so that answers have to span blocks: of more than 64 tokens they would have to be longer.
FULL = Case(PreemptionCase(12, 64, 160, 0.3, (16, 32, 64), 2))
QUICK = Case(PreemptionCase(8, 32, 128, 0.3, (16, 64), 1), 256, (16, 64, 256))


@dataclass(frozen=True, slots=True)
class Restores:
    """By block size: ``seconds`` of one sequence's way back by (recomputing, swapping); ``ratios`` of throughputs, swapping over
    recomputing [rounds], and ``preemptions`` of all these runs."""

    model: str
    threads: int
    seconds: dict[int, tuple[float, float]]
    ratios: dict[int, list[float]]
    preemptions: dict[int, int]


def run(setup: Setup) -> Figure:
    case = QUICK if setup.quick else FULL
    found = measure(setup.model, case, setup.seed)
    return shown(found, f"{found.model}. {machine_limits(found.threads)} {told(case, setup.seed)}", case.num_tokens)


def measure(model: str, case: Case, seed: int, options: Options | None = None) -> Restores:
    config, seconds, name, threads = make_config(model, **(options or {})), dict[int, tuple[float, float]](), "", 1
    for size in case.sizes:
        with closing(Engine.load(way_config(config, case.restoring(size), size, "auto"))) as engine:
            found = restore_seconds(engine, case.num_tokens)
            seconds[size] = found.recompute_measured_s, found.swap_measured_s
            threads = getattr(engine.backend, "threads", 1)
            name = f"{engine.model.name} on {threads} threads, {getattr(engine.backend, 'isa', None)}"
    ratios, preemptions = dict[int, list[float]](), dict[int, int]()
    for size in case.load.block_sizes:
        ratios[size], preemptions[size] = _ratios(model, case.load, size, seed, options or {})
    return Restores(name, threads, seconds, ratios, preemptions)


def _ratios(model: str, load: PreemptionCase, size: int, seed: int, options: Options) -> tuple[list[float], int]:
    """(ratios, preemptions) of the rounds; one more to warm up. RuntimeError when answers differ."""
    config, rng = make_config(model, **options, admission_lookahead=1), random.Random(seed)
    ratios, num_preemptions = list[float](), 0
    with ExitStack() as stack:
        engines = {way: stack.enter_context(closing(Engine.load(way_config(config, load, size, way)))) for way in WAYS}
        vocab_size = engines["swap"].backend.vocab_size
        for i in range(1 + load.repeat):
            prompts = [[rng.randrange(vocab_size) for _ in range(load.num_prompt)] for _ in range(load.num_requests)]
            runs = {way: run_way(engines[way], load, prompts) for way in in_turn(WAYS, i)}
            if runs["swap"].outputs != runs["recompute"].outputs:
                raise RuntimeError(f"blocks of {size} tokens: the answers depend on how sequences are preempted")
            if i:
                ratios.append(runs["recompute"].seconds / runs["swap"].seconds)
                num_preemptions += sum(run.num_preemptions for run in runs.values())
    return ratios, num_preemptions


def told(case: Case, seed: int) -> str:
    load = case.load
    return (
        f"One sequence of {case.num_tokens} tokens: what a step of another gets longer by when it computes them again, and what its blocks "
        f"take out and in, medians of 7. Loads: {load.num_requests} x ({load.num_prompt} + {load.num_output}) tokens at once in a pool of "
        f"{load.share:g} of that, {load.repeat} rounds after one to warm up, seed {seed}, both ways in turn, medians. Answers are equal. "
        f"Comparable: throughputs within {100 * COMPARABLE:g} %."
    )


def shown(found: Restores, setup: str, num_tokens: int) -> Figure:
    recompute = {size: pair[0] for size, pair in found.seconds.items()}
    swap = {size: pair[1] for size, pair in found.seconds.items()}
    small, large = min(swap), max(swap)
    flat = max(recompute.values()) / min(recompute.values())
    between = f"{milliseconds(min(recompute.values()))} to {milliseconds(max(recompute.values()))}"
    rows = [
        Row("recomputing costs the same with every block size", "yes", between, flat <= FLAT),
        Row(
            f"swapping costs more in blocks of {small} than of {large}", "yes, much",
            f"{milliseconds(swap[small])} against {milliseconds(swap[large])}", swap[small] > swap[large],
        ),
        Row(
            "cheaper way, one sequence", f"recompute below {PUBLISHED[0]} to {PUBLISHED[1]}, then swap", _cheaper(found), _crosses(found),
        ),
    ]  # fmt: skip
    for size, ratios in found.ratios.items():
        ratio, num_preemptions = statistics.median(ratios), found.preemptions[size]
        hit = abs(ratio - 1) <= COMPARABLE if num_preemptions else None
        ours = f"{ratio:.2f}, {num_preemptions} preemptions"
        rows.append(Row(f"whole load, blocks of {size}: throughput of swapping over recomputing", "comparable", ours, hit))
    by_way = {"recompute": recompute, "swap": swap}
    lines = tuple(Line(way, tuple((float(size), 1e3 * s) for size, s in by_size.items())) for way, by_size in by_way.items())
    plot = Plot(f"A sequence of {num_tokens} tokens comes back", "ms", lines=lines, x_label="tokens of a block")
    notes = ("Host memory is the pool's own memory here: swapping is a copy at its rate, without a bus between.", NOT_TRANSFERABLE)
    return Figure(NUMBER, "Recomputing and swapping by block size", MEASURED, setup, rows, (plot,), notes)


def _cheaper(found: Restores) -> str:
    ways = {size: "swap" if swap < recompute else "recompute" for size, (recompute, swap) in sorted(found.seconds.items())}
    if len(set(ways.values())) == 1:
        recompute, swap = found.seconds[min(ways)]
        way = ways[min(ways)]
        return f"{way} at every size, {max(recompute, swap) / min(recompute, swap):.3g}x at {min(ways)}"
    return ", ".join(f"{size}: {way}" for size, way in ways.items())


def _crosses(found: Restores) -> bool:
    """Whether recomputing is the cheaper way up to some block size from 16 to 64, and swapping from there on."""
    cheaper = [swap < recompute for _, (recompute, swap) in sorted(found.seconds.items())]
    first = cheaper.index(True) if True in cheaper else len(cheaper)
    crossing = sorted(found.seconds)[first] if first < len(cheaper) else None
    return first > 0 and all(cheaper[first:]) and crossing is not None and PUBLISHED[0] <= crossing <= PUBLISHED[1]
