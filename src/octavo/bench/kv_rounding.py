"""How far answers behind a prefix that was kept in int8 are from exact ones (``--kv-host-dtype int8``).

Passages of a real text are answered greedily, each computed in full: the exact path. Then their KV is evicted to host memory, packed, and
the same passage is asked for again, first alone, then with each beginning of its answer: the token that comes next is forced, so that its
log-probability is had along the exact path, and the best one is compared. All KV before the last few tokens was rounded.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from octavo.bench.record import measured_with
from octavo.bench.sharing import own_text
from octavo.bench.steps import steps_to_end
from octavo.core.request import SamplingParams
from octavo.engine.engine import Engine

if TYPE_CHECKING:
    from octavo.config import EngineConfig
    from octavo.core.step import TokenLogprobs


@dataclass(frozen=True, slots=True)
class RoundingCase:
    num_prompt: int
    num_output: int
    num_passages: int


def run_rounding(config: EngineConfig, case: RoundingCase, echo: Callable[[str], None], as_json: bool) -> None:
    """Measure ``case``; the last line given to ``echo`` is the JSON record.

    Raises ValueError for a text with fewer tokens than passages, ConfigError for a cache that is int8 already.
    """
    from octavo.config import ConfigError

    size = config.cache.block_size
    num_blocks = -(-(case.num_prompt + case.num_output) // size) + 2  # one passage: the next takes its place
    cache = replace(config.cache, num_kv_blocks=num_blocks, kv_cache_memory=None, kv_disk_path=None, kv_disk_size=None)
    cache = replace(cache, kv_host_memory=1 << 30, kv_host_dtype="int8", kv_disk_flush_seconds=None)
    with closing(Engine.load(replace(config, cache=cache).validate())) as engine:
        if not cache.packs_kv_tiers(engine.backend.kv_capacity(0).dtype):
            raise ConfigError("kv_cache_dtype: 'int8' is not allowed; blocks are then kept as they are, and nothing is rounded")
        assert engine.tiering is not None
        engine.tiering.cost.restoring_pays = lambda *_: True  # type: ignore[method-assign]  # the error is asked for, not the time
        passages = _passages(engine, case)
        exact = [_ask(engine, passage, case.num_output) for passage in passages]
        num_equal, errors = 0, list[float]()
        for passage, path in zip(passages, exact, strict=True):
            for i, wanted in enumerate(path):
                (got,) = _ask(engine, passage + [entry.token_id for entry in path[:i]], 1, wanted.token_id)
                num_equal += got.rank == 1
                errors.append(got.logprob - wanted.logprob)
        tokens = engine.tiering.tiers.stats.host_hit_tokens
        record = {
            "bench": "kv-rounding", "model": engine.model.name, **asdict(case), "restored_tokens": tokens, "positions": len(errors),
            "rms_logprob": round(math.sqrt(statistics.fmean(error * error for error in errors)), 5),
            "max_logprob": round(max(map(abs, errors)), 5), "mean_logprob": round(statistics.fmean(errors), 5),
            "same_best_token": round(num_equal / len(errors), 5), "kv_dtype": engine.backend.kv_capacity(0).dtype,
            **measured_with(engine),
        }  # fmt: skip
    if not as_json:
        echo(
            f"{record['model']}: {case.num_passages} passages of {case.num_prompt} tokens, {record['positions']} positions behind KV that "
            f"was int8: rms of log-probability {record['rms_logprob']:.4f} (greatest {record['max_logprob']:.4f}, mean "
            f"{record['mean_logprob']:+.4f}), same best token {record['same_best_token']:.4f}"
        )
    echo(json.dumps(record))


def _passages(engine: Engine, case: RoundingCase) -> list[list[int]]:
    """Each begins at another place of the text, which goes on at its beginning after its end."""
    token_ids = engine.model.tokenizer.encode(own_text(), add_special_tokens=False)
    if len(token_ids) < case.num_passages:
        raise ValueError(f"num_passages: {case.num_passages} cannot begin at different places of a text of {len(token_ids)} tokens")
    starts = [i * len(token_ids) // case.num_passages for i in range(case.num_passages)]
    longer = token_ids * (1 + -(-case.num_prompt // len(token_ids)))
    return [longer[start : start + case.num_prompt] for start in starts]


def _ask(engine: Engine, tokens: list[int], num_output: int, forced: int | None = None) -> list[TokenLogprobs]:
    allowed = None if forced is None else (forced,)
    params = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True, logprobs=0, allowed_token_ids=allowed)
    engine.add(engine.prepare(tokens, params))
    return [entry for events in steps_to_end(engine) for event in events for entry in event.logprobs or ()]
