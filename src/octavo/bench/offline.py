"""Offline throughput: B prompts of P random tokens at once, N output tokens each, through the same loop as everything else.

prefill_tok_s = B * P / seconds until every sequence has its first token; decode_tok_s = B * (N - 1) / seconds from then to the end.
Decoding so runs behind the prompt, at depth P. One run warms up and is not counted; medians over the others.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from octavo.bench.record import measured_with
from octavo.bench.steps import steps_to_end
from octavo.core.request import SamplingParams
from octavo.engine.engine import Engine

if TYPE_CHECKING:
    from octavo.config import EngineConfig


@dataclass(frozen=True, slots=True)
class OfflineCase:
    num_prompt: int
    num_output: int
    batch: int
    repeat: int


@dataclass(frozen=True, slots=True)
class OfflineRun:
    prefill_s: float
    decode_s: float


def run_offline(config: EngineConfig, case: OfflineCase, echo: Callable[[str], None], as_json: bool) -> None:
    """Measure ``case``; the last line given to ``echo`` is the JSON record."""
    engine = Engine.load(config)
    try:
        _check_fits(engine, case)
        rng = random.Random(1)
        measure(engine, case, rng)
        runs = [measure(engine, case, rng) for _ in range(case.repeat)]
        record = _record(engine, case, runs)
    finally:
        engine.close()
    if not as_json:
        shape = f"{case.batch} x ({case.num_prompt} + {case.num_output}) tokens"
        echo(f"{record['model']}: {shape}, {record['threads']} threads, {record['isa']}")
        echo(f"prefill {record['prefill_tok_s']:.1f} token/s, decode {record['decode_tok_s']:.1f} token/s (medians of {case.repeat})")
    echo(json.dumps(record))


def _check_fits(engine: Engine, case: OfflineCase) -> None:
    """ValueError when the sequences cannot run whole and side by side: the figures would mean something else."""
    num_tokens, size = case.num_prompt + case.num_output, engine.config.cache.block_size
    if num_tokens > engine.max_model_len:
        total = f"{case.num_prompt} + {case.num_output}"
        raise ValueError(f"--prompt and --output: {total} tokens are more than the context of {engine.max_model_len}")
    limit = engine.config.scheduler.max_num_seqs
    if case.batch > limit:
        raise ValueError(f"--batch: {case.batch} sequences cannot run side by side with --max-num-seqs {limit}")
    # An admission leaves every running sequence a spare block.
    needed = case.batch * max(-(-(num_tokens - 1) // size), -(-case.num_prompt // size) + 1)
    if needed > engine.num_kv_blocks:
        what = f"{case.batch} sequences of {num_tokens} tokens need {needed} KV blocks of {size} tokens"
        raise ValueError(f"--batch: {what}, but the pool has {engine.num_kv_blocks}; --kv-cache-memory or --num-kv-blocks makes it larger")


def measure(engine: Engine, case: OfflineCase, rng: random.Random) -> OfflineRun:
    """One run on fresh prompts, so that no prefix is found in the cache."""
    params = SamplingParams(temperature=0.0, max_tokens=case.num_output, ignore_eos=True)
    vocab_size = engine.backend.vocab_size
    for _ in range(case.batch):
        engine.add(engine.prepare([rng.randrange(vocab_size) for _ in range(case.num_prompt)], params))
    started = time.perf_counter()
    waiting = case.batch
    seen: set[str] = set()
    first_s = 0.0
    for events in steps_to_end(engine):
        for event in events:
            if event.token_ids and event.request_id not in seen:
                seen.add(event.request_id)
                waiting -= 1
                if waiting == 0:
                    first_s = time.perf_counter() - started
    return OfflineRun(first_s, time.perf_counter() - started - first_s)


def _record(engine: Engine, case: OfflineCase, runs: list[OfflineRun]) -> dict:
    prefill = [case.batch * case.num_prompt / run.prefill_s for run in runs]
    decode = [case.batch * (case.num_output - 1) / run.decode_s for run in runs]
    return {
        "bench": "offline",
        "model": engine.model.name,
        **asdict(case),
        "prefill_tok_s": round(statistics.median(prefill), 2),
        "decode_tok_s": round(statistics.median(decode), 2),
        "max_num_seqs": engine.config.scheduler.max_num_seqs,
        "max_num_batched_tokens": engine.config.scheduler.max_num_batched_tokens,
        **measured_with(engine),
    }
