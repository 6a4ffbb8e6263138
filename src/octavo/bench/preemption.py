"""Recompute against swap: the same requests in a pool too small for them, by block size and by way of preempting.

R requests of P random tokens and N output tokens come at once; the pool holds a share of what they need together. Each round runs all
ways in turn, on the same prompts, whose outputs must be equal; one round warms up and is not counted; medians over the others. Then, for
each block size, what one sequence in the middle of its output takes to come back, predicted and measured (``restore_seconds``); the
*crossover* is the smallest block size from which on swapping is the cheaper way.
Owns the load and the figures; the engines are whole ones, of a configuration that differs in block size and preemption alone.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from octavo.bench.restore_seconds import restore_seconds
from octavo.bench.steps import steps_to_end
from octavo.bench.tables import table
from octavo.core.request import SamplingParams
from octavo.engine.engine import Engine

if TYPE_CHECKING:
    from octavo.config import EngineConfig

WAYS = ("recompute", "swap", "auto")


@dataclass(frozen=True, slots=True)
class PreemptionCase:
    """``share`` of the demand is what the pool holds. ``block_sizes`` in tokens."""

    num_requests: int
    num_prompt: int
    num_output: int
    share: float
    block_sizes: tuple[int, ...]
    repeat: int

    @property
    def num_demand_tokens(self) -> int:
        return self.num_requests * (self.num_prompt + self.num_output)

    def num_blocks(self, block_size: int) -> int:
        """Blocks of the pool. ValueError when it would not hold one request whole, or nothing beside its first block."""
        num_blocks = int(self.share * self.num_demand_tokens) // block_size
        needed = -(-(self.num_prompt + self.num_output) // block_size)
        if num_blocks < max(needed, 2):
            what = f"of {self.num_demand_tokens} tokens is {num_blocks} blocks of {block_size}, and {max(needed, 2)} are needed"
            raise ValueError(f"--share: {self.share:g} {what}")
        return num_blocks


@dataclass(frozen=True, slots=True)
class WayRun:
    """What one run took and did."""

    seconds: float
    num_preemptions: int
    num_swaps: int  # of these
    num_computed_tokens: int
    num_moves: int
    move_s: float
    outputs: list[list[int]]


def run_preemption(config: EngineConfig, case: PreemptionCase, echo: Callable[[str], None], as_json: bool) -> None:
    """Measure ``case``; the last line given to ``echo`` is the JSON record."""
    for block_size in case.block_sizes:
        case.num_blocks(block_size)
    results = [_measure(config, case, block_size) for block_size in case.block_sizes]
    record = {
        "bench": "preemption",
        "model": results[0]["model"],
        "num_requests": case.num_requests,
        "num_prompt": case.num_prompt,
        "num_output": case.num_output,
        "share": case.share,
        "repeat": case.repeat,
        "block_sizes": [{key: value for key, value in one.items() if key != "model"} for one in results],
        "crossover": {how: _crossover(results, how) for how in ("predicted", "measured")},
        "date": time.strftime("%Y-%m-%d"),
    }
    if not as_json:
        echo(_shown(record))
    echo(json.dumps(record))


def way_config(config: EngineConfig, case: PreemptionCase, block_size: int, way: str) -> EngineConfig:
    """``config`` with a pool for ``case``, and host memory that can take all of the demand where it is to be used."""
    num_blocks = case.num_blocks(block_size)
    cache = replace(config.cache, block_size=block_size, num_kv_blocks=num_blocks, kv_cache_memory=None, swap_space=0)
    if way != "recompute":
        bytes_per_token = 1 << 20  # above any model that runs here; memory is taken as it is written
        cache = replace(cache, swap_space=case.num_demand_tokens * bytes_per_token)
    return replace(config, cache=cache, scheduler=replace(config.scheduler, preemption=way)).validate()


def _measure(config: EngineConfig, case: PreemptionCase, block_size: int) -> dict[str, Any]:
    rng, runs = random.Random(1), {way: list[WayRun]() for way in WAYS}
    with ExitStack() as stack:
        engines = {way: stack.enter_context(closing(Engine.load(way_config(config, case, block_size, way)))) for way in WAYS}
        for round_number in range(1 + case.repeat):
            vocab_size = engines["swap"].backend.vocab_size
            prompts = [[rng.randrange(vocab_size) for _ in range(case.num_prompt)] for _ in range(case.num_requests)]
            ways = WAYS if round_number % 2 else WAYS[::-1]
            outcome = {way: run_way(engines[way], case, prompts) for way in ways}
            if any(one.outputs != outcome["recompute"].outputs for one in outcome.values()):
                raise RuntimeError(f"block size {block_size}: the outputs depend on how sequences are preempted")
            if round_number:
                for way in WAYS:
                    runs[way].append(outcome[way])
        num_held = (case.num_blocks(block_size) - 1) * block_size
        restore = restore_seconds(engines["auto"], min(case.num_prompt + case.num_output // 2, num_held))
        name = engines["auto"].model.name
    ways_record = {way: _way_record(case, runs[way]) for way in WAYS}
    gain = ways_record["swap"]["output_tok_s"] / ways_record["recompute"]["output_tok_s"]
    return {
        "model": name,
        "block_size": block_size,
        "num_kv_blocks": case.num_blocks(block_size),
        **ways_record,
        "restore": restore.record(),
        "swap_over_recompute": round(gain, 3),
    }


def run_way(engine: Engine, case: PreemptionCase, prompts: list[list[int]]) -> WayRun:
    """All requests at once, to their end."""
    params = SamplingParams(temperature=0.0, max_tokens=case.num_output, ignore_eos=True)
    stats = engine.scheduler.stats
    before = replace(stats)
    outputs: dict[str, list[int]] = {}
    for prompt in prompts:
        prepared = engine.prepare(prompt, params)
        outputs[prepared.request.request_id] = []
        engine.add(prepared)
    started = time.perf_counter()
    for events in steps_to_end(engine):
        for event in events:
            outputs[event.request_id] += event.token_ids
    seconds = time.perf_counter() - started
    num_moves = stats.num_blocks_saved + stats.num_blocks_loaded - before.num_blocks_saved - before.num_blocks_loaded
    num_preemptions = stats.num_preemptions - before.num_preemptions
    num_swaps = stats.num_swap_preemptions - before.num_swap_preemptions
    num_computed, move_s = stats.num_computed_tokens - before.num_computed_tokens, stats.move_s - before.move_s
    return WayRun(seconds, num_preemptions, num_swaps, num_computed, num_moves, move_s, list(outputs.values()))


def _crossover(results: list[dict[str, Any]], how: str) -> int | None:
    """The smallest block size from which on swapping a sequence takes less time than computing it again; None: not even the largest."""
    smallest = None
    for one in sorted(results, key=lambda one: -int(one["block_size"])):
        if one["restore"][f"swap_{how}_s"] >= one["restore"][f"recompute_{how}_s"]:
            break
        smallest = int(one["block_size"])
    return smallest


def _way_record(case: PreemptionCase, runs: list[WayRun]) -> dict[str, Any]:
    needed = case.num_requests * (case.num_prompt + case.num_output - 1)
    num_moves = sum(run.num_moves for run in runs)
    return {
        "output_tok_s": round(statistics.median(case.num_requests * case.num_output / run.seconds for run in runs), 2),
        "num_preemptions": statistics.median(run.num_preemptions for run in runs),
        "num_swaps": statistics.median(run.num_swaps for run in runs),
        "num_recomputed_tokens": statistics.median(run.num_computed_tokens - needed for run in runs),
        "num_moved_blocks": statistics.median(run.num_moves for run in runs),
        "move_us_per_block": round(1e6 * sum(run.move_s for run in runs) / num_moves, 2) if num_moves else None,
    }


def _shown(record: dict[str, Any]) -> str:
    shape = f"{record['num_requests']} x ({record['num_prompt']} + {record['num_output']}) tokens in a pool of {record['share']:g} of that"
    parts = [f"{record['model']}: {shape}, medians of {record['repeat']}", _throughput_table(record), "", _restore_table(record)]
    sizes = [size["block_size"] for size in record["block_sizes"]]
    for how, smallest in record["crossover"].items():
        if smallest is None:
            parts.append(f"Crossover {how}: none; computing again is cheaper with blocks of {max(sizes)} tokens")
        else:
            below = "the smallest tried" if smallest == min(sizes) else "below it computing again is"
            parts.append(f"Crossover {how}: swapping is cheaper from blocks of {smallest} tokens on, {below}")
    idle = [str(size["block_size"]) for size in record["block_sizes"] if not any(size[way]["num_preemptions"] for way in WAYS)]
    if idle:
        what = "so all ways did the same, and no move was seen to predict swapping from"
        parts.append(f"Nobody was preempted with blocks of {', '.join(idle)} tokens, {what}: give a larger --output.")
    return "\n".join(parts)


def _throughput_table(record: dict[str, Any]) -> str:
    rows = [["block size", "blocks", "way", "token/s", "of recompute", "preempted", "by swap", "tokens again", "blocks moved", "µs/block"]]
    for size in record["block_sizes"]:
        for way in WAYS:
            one = size[way]
            per_block = "-" if one["move_us_per_block"] is None else f"{one['move_us_per_block']:.1f}"
            counts = [f"{one[name]:g}" for name in ("num_preemptions", "num_swaps", "num_recomputed_tokens", "num_moved_blocks")]
            gain = f"{one['output_tok_s'] / size['recompute']['output_tok_s']:.2f}x"
            rows.append([str(size["block_size"]), str(size["num_kv_blocks"]), way, f"{one['output_tok_s']:.1f}", gain, *counts, per_block])
    return table(rows, ">> >>>>>>>")


def _restore_table(record: dict[str, Any]) -> str:
    """What one sequence takes to come back."""
    rows = [["block size", "tokens", "recompute, predicted ms", "measured", "swap, predicted ms", "measured", "cheaper"]]
    for size in record["block_sizes"]:
        found = size["restore"]
        ways = ("recompute_predicted_s", "recompute_measured_s", "swap_predicted_s", "swap_measured_s")
        swap_s, recompute_s = found["swap_measured_s"], found["recompute_measured_s"]
        cheaper = f"swap, {recompute_s / swap_s:.3g}x" if swap_s < recompute_s else f"recompute, {swap_s / recompute_s:.3g}x"
        rows.append([str(size["block_size"]), str(found["num_tokens"]), *(f"{1e3 * found[way]:.3f}" for way in ways), cheaper])
    return "To bring one sequence back (swap: out and in):\n" + table(rows, ">>>>>>")
