"""Time to the first token of a prompt whose KV comes from elsewhere: computed, from disk after a restart, from host memory.

Engine one computes prompts of random tokens and closes, which leaves their blocks on disk. Engine two, fresh, answers the same prompts
from disk; its pool holds little more than one of them, so that a third round finds them in host memory. Tokens and log-probabilities are
compared, bit for bit. ``cold``: the page cache lets go of the files first, so that the disk itself is read. Medians over the prompts; one
more of other tokens goes before each round.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.bench.steps import steps_to_end
from octavo.core.request import SamplingParams
from octavo.engine.engine import Engine

if TYPE_CHECKING:
    from octavo.config import EngineConfig


@dataclass(frozen=True, slots=True)
class KVCase:
    num_prompt: int
    num_output: int
    repeat: int
    cold: bool


@dataclass(frozen=True, slots=True)
class _Answer:
    first_s: float
    num_cached: int
    tokens: list[tuple[int, float]]  # with their log-probabilities


def run_kv(config: EngineConfig, case: KVCase, echo: Callable[[str], None], as_json: bool) -> None:
    """Measure ``case``; the last line given to ``echo`` is the JSON record. RuntimeError when a restored answer differs."""
    with tempfile.TemporaryDirectory(prefix="octavo-kv-") as folder:
        config = _config(config, case, config.cache.kv_disk_path or folder)
        rng = random.Random(1)
        with closing(Engine.load(config)) as engine:
            vocab_size = engine.backend.vocab_size
            prompts = [[rng.randrange(vocab_size) for _ in range(case.num_prompt)] for _ in range(case.repeat)]
            others = [[rng.randrange(vocab_size) for _ in range(case.num_prompt)] for _ in range(3)]
            computed = _round(engine, prompts, others[0], case)
        if case.cold:
            _leave_page_cache(Path(config.cache.kv_disk_path or folder))
        with closing(Engine.load(config)) as engine:
            rounds = {"computed": computed, "disk": _round(engine, prompts, others[1], case)}
            rounds["host"] = _round(engine, prompts, others[2], case)
            record = _record(engine, case, rounds)
    for name, answers in rounds.items():
        if [answer.tokens for answer in answers] != [answer.tokens for answer in computed]:
            raise RuntimeError(f"answers from {name} differ from the computed ones")
    if not as_json:
        echo(f"{record['model']}: first token of {case.num_prompt}-token prompts, medians of {case.repeat}; answers equal to the bit")
        for name in rounds:
            times = f"{record[f'{name}_first_s']:.4f} s, {record[f'{name}_ratio']:.3f} of computing"
            echo(f"  {name:8s} {times}, {record[f'{name}_cached']:.0f} tokens cached")
    echo(json.dumps(record))


def _config(config: EngineConfig, case: KVCase, path: str) -> EngineConfig:
    """A pool for one prompt and a bit, and tiers for all; what the user has set stands."""
    size, cache = config.cache.block_size, config.cache
    if cache.num_kv_blocks is None and cache.kv_cache_memory is None:
        cache = replace(cache, num_kv_blocks=-(-(case.num_prompt + case.num_output) // size) + 4)
    if cache.kv_host_memory is None:
        cache = replace(cache, kv_host_memory=4 << 30)
    return replace(config, cache=replace(cache, kv_disk_path=path)).validate()


def _round(engine: Engine, prompts: list[list[int]], other: list[int], case: KVCase) -> list[_Answer]:
    _answer(engine, other, case)
    return [_answer(engine, prompt, case) for prompt in prompts]


def _answer(engine: Engine, prompt: list[int], case: KVCase) -> _Answer:
    params = SamplingParams(temperature=0.0, max_tokens=case.num_output, ignore_eos=True, logprobs=0)
    started = time.perf_counter()
    engine.add(engine.prepare(prompt, params))
    first_s, num_cached, tokens = 0.0, 0, list[tuple[int, float]]()
    for events in steps_to_end(engine):
        for event in events:
            if not tokens:
                first_s, num_cached = time.perf_counter() - started, event.num_cached_tokens
            tokens += [(entry.token_id, entry.logprob) for entry in event.logprobs or ()]
    return _Answer(first_s, num_cached, tokens)


def _leave_page_cache(path: Path) -> None:
    for file in path.rglob("*.kv"):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _record(engine: Engine, case: KVCase, rounds: dict[str, list[_Answer]]) -> dict:
    assert engine.tiering is not None
    medians = {name: statistics.median(answer.first_s for answer in answers) for name, answers in rounds.items()}
    figures = {}
    for name, answers in rounds.items():
        figures[f"{name}_first_s"] = round(medians[name], 5)
        figures[f"{name}_ratio"] = round(medians[name] / medians["computed"], 4)
        figures[f"{name}_cached"] = statistics.median(answer.num_cached for answer in answers)
    return {
        "bench": "kv",
        "model": engine.model.name,
        **asdict(case),
        **figures,
        "block_size": engine.config.cache.block_size,
        "block_bytes": engine.tiering.block_bytes,
        "threads": getattr(engine.backend, "threads", None),
        "isa": getattr(engine.backend, "isa", None),
        "fingerprint": engine.backend.fingerprint(),
        "date": time.strftime("%Y-%m-%d"),
    }
