"""Time to the first token of a prompt whose KV comes from elsewhere, beside computing it: from host memory, from disk after a restart.

For each form that blocks are kept in (as the pool has them; packed to int8):

    engine 1   computes prompts of random tokens and closes, which leaves their blocks on disk
    engine 2   fresh: the same prompts, read from disk (page cache warm); its pool holds little more than one of them, so that another round
               finds them in host memory
    engine 3   fresh, after the page cache has let go of the files (page cache cold)

Tokens and log-probabilities of exact blocks have to be those that were computed, bit for bit; those of packed blocks are compared.
Medians over the prompts; one more of other tokens goes before each round.
"""

from __future__ import annotations

import json
import math
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

from octavo.backends.machine import physical_memory_bytes
from octavo.bench.record import measured_with
from octavo.bench.steps import steps_to_end
from octavo.bench.tables import table
from octavo.core.request import SamplingParams
from octavo.engine.engine import Engine

if TYPE_CHECKING:
    from octavo.config import EngineConfig

ASKED_RATIO = 0.25  # of computing: what restoring from disk after a restart is to stay below
_FORMS = {"auto": "exact", "int8": "int8"}


@dataclass(frozen=True, slots=True)
class KVCase:
    num_prompt: int
    num_output: int
    repeat: int


@dataclass(frozen=True, slots=True)
class _Answer:
    first_s: float
    num_cached: int
    tokens: list[tuple[int, float]]  # with their log-probabilities


@dataclass(frozen=True, slots=True)
class _Round:
    source: str  # computed, host memory, disk (warm), disk (cold)
    form: str  # exact, int8
    answers: list[_Answer]
    block_bytes: int = 0  # in the tier


def run_kv(config: EngineConfig, case: KVCase, echo: Callable[[str], None], as_json: bool) -> None:
    """Measure ``case``; the last line given to ``echo`` is the JSON record. RuntimeError when an exact answer differs."""
    parent = None if config.cache.kv_disk_path is None else Path(config.cache.kv_disk_path).expanduser()
    if parent is not None:
        parent.mkdir(parents=True, exist_ok=True)
    rounds: list[_Round] = []
    facts: dict[str, object] = {}
    for dtype in ("auto", "int8"):
        if dtype == "int8" and facts["kv_dtype"] == "int8":  # the option changes nothing
            continue
        with tempfile.TemporaryDirectory(prefix="octavo-kv-", dir=parent) as folder:
            found, facts = _measure(_config(config, case, folder, dtype), case, _FORMS[dtype], facts)
        rounds += found if not rounds else found[1:]
    computed = rounds[0].answers
    for one in rounds:
        if one.form == "exact" and [answer.tokens for answer in one.answers] != [answer.tokens for answer in computed]:
            raise RuntimeError(f"answers from {one.source} differ from the computed ones")
    rows = [_row(one, computed) for one in rounds]
    if not as_json:
        echo(
            f"{facts['model']}, KV in {facts['kv_dtype']}: seconds to the first token of {case.num_prompt}-token prompts, medians of "
            f"{case.repeat}. Asked of a disk after a restart: at most {ASKED_RATIO} of computing."
        )
        echo(_table(rows))
    echo(json.dumps({"bench": "kv", **asdict(case), "rows": rows, **facts}))


def _config(config: EngineConfig, case: KVCase, path: str, dtype: str) -> EngineConfig:
    """A pool for one prompt and a bit, and tiers for all; what the user has set stands."""
    size, cache = config.cache.block_size, config.cache
    if cache.num_kv_blocks is None and cache.kv_cache_memory is None:
        cache = replace(cache, num_kv_blocks=-(-(case.num_prompt + case.num_output) // size) + 4)
    if cache.kv_host_memory is None:
        cache = replace(cache, kv_host_memory=min(4 << 30, physical_memory_bytes() // 2))
    return replace(config, cache=replace(cache, kv_disk_path=path, kv_host_dtype=dtype)).validate()


def _measure(config: EngineConfig, case: KVCase, form: str, facts: dict[str, object]) -> tuple[list[_Round], dict[str, object]]:
    """Computed, disk (warm), host memory, disk (cold); and what all rounds have in common (of the exact form where that was measured)."""
    rng = random.Random(1)
    with closing(Engine.load(config)) as engine:
        kv_dtype = engine.backend.kv_capacity(0).dtype
        if kv_dtype == "int8":
            config = replace(config, cache=replace(config.cache, kv_host_dtype="auto"))
        vocab_size = engine.backend.vocab_size
        prompts = [[rng.randrange(vocab_size) for _ in range(case.num_prompt)] for _ in range(case.repeat)]
        others = [[rng.randrange(vocab_size) for _ in range(case.num_prompt)] for _ in range(4)]
        rounds = [_Round("computed", form, _answers(engine, prompts, others[0], case))]
    with closing(Engine.load(config)) as engine:
        assert engine.tiering is not None
        block_bytes = engine.tiering.block_bytes
        rounds.append(_Round("disk (warm)", form, _answers(engine, prompts, others[1], case), block_bytes))
        rounds.append(_Round("host memory", form, _answers(engine, prompts, others[2], case), block_bytes))
    assert config.cache.kv_disk_path is not None
    if _leave_page_cache(Path(config.cache.kv_disk_path)):
        with closing(Engine.load(config)) as engine:
            rounds.append(_Round("disk (cold)", form, _answers(engine, prompts, others[3], case), block_bytes))
    return rounds, facts or {
        "model": engine.model.name,
        "kv_dtype": kv_dtype,
        "block_size": config.cache.block_size,
        **measured_with(engine),
    }


def _answers(engine: Engine, prompts: list[list[int]], other: list[int], case: KVCase) -> list[_Answer]:
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


def _leave_page_cache(path: Path) -> bool:
    """False where the system offers no way to."""
    if not hasattr(os, "posix_fadvise"):
        return False
    for file in path.rglob("*.kv"):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    return True


def _row(one: _Round, computed: list[_Answer]) -> dict[str, object]:
    first_s = statistics.median(answer.first_s for answer in one.answers)
    alike, errors = 0, list[float]()
    for answer, wanted in zip(one.answers, computed, strict=True):
        alike += [token for token, _ in answer.tokens] == [token for token, _ in wanted.tokens]
        for (token, logprob), (wanted_token, wanted_logprob) in zip(answer.tokens, wanted.tokens, strict=True):
            if token != wanted_token:
                break
            errors.append(logprob - wanted_logprob)
    return {
        "source": one.source,
        "form": one.form,
        "first_s": round(first_s, 5),
        "ratio": round(first_s / statistics.median(answer.first_s for answer in computed), 4),
        "cached": statistics.median(answer.num_cached for answer in one.answers),
        "block_bytes": one.block_bytes,
        "equal_answers": alike,
        "rms_logprob": math.sqrt(statistics.fmean(error * error for error in errors)) if errors else None,
    }


def _table(rows: list[dict[str, object]]) -> str:
    """``rms of log-probability``: of tokens as long as they are those that were computed."""
    head = ("KV from", "form", "first token", "of computing", "cached tokens", "block bytes", "equal texts", "rms of log-probability")
    lines = [head]
    for row in rows:
        rms, size = row["rms_logprob"], row["block_bytes"]
        error = "0, to the bit" if rms == 0.0 else "-" if rms is None else f"{rms:.3f}"
        times = (f"{row['first_s']:.4f} s", f"{row['ratio']:.3f}", f"{row['cached']:.0f}")
        lines.append((str(row["source"]), str(row["form"]), *times, str(size or "-"), str(row["equal_answers"]), error))
    return table(lines, right="<<>>>>>>", indent="  ")
