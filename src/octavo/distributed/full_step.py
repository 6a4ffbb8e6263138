"""What a token takes of a worker whose steps are full, read off its engine (``costs.full_step``). Changes nothing."""

from __future__ import annotations

from octavo.costs import full_step
from octavo.engine.engine import Engine


def full_step_prices(engine: Engine) -> tuple[float, float]:
    """(seconds of a prompt token, seconds of an output token) in the largest steps that the limits, the KV pool and what was seen of this
    engine's steps allow; 0 while nothing is known. Sequences are taken to be as long as those that run now."""
    cost, limits, pool = engine.step_cost, engine.config.scheduler, engine.scheduler.kv.pool
    trusted = max(1, cost.max_trusted_rows)
    contexts = [seq.num_computed for seq in engine.scheduler.running_sequences]
    num_held = pool.num_blocks * engine.config.cache.block_size
    num_rows = min(limits.max_num_batched_tokens, trusted)
    return full_step.full_step_prices(cost.seconds_of, num_rows, min(limits.max_num_seqs, trusted), num_held, contexts)
