"""What a token takes of an engine whose steps are full: the prices by which a load is compared with what a worker can do at most.

A lone stream keeps an engine at work all the time and leaves nearly all of it free: its tokens are to count as what they take in a step
that many share. Reads an engine's cost and limits, and changes nothing.
"""

from __future__ import annotations

from octavo.core.cost import StepShape
from octavo.engine.engine import Engine

_CONTEXT = 512  # tokens of a sequence, while none runs


def full_step_prices(engine: Engine) -> tuple[float, float]:
    """(seconds of a prompt token, seconds of an output token) in the largest steps that the limits, the KV pool and what was seen of this
    engine's steps allow; 0 while nothing is known. Sequences are taken to be as long as those that run now."""
    cost, limits, pool = engine.step_cost, engine.config.scheduler, engine.scheduler.kv.pool
    trusted = max(1, cost.max_trusted_rows)
    num_rows = min(limits.max_num_batched_tokens, trusted)
    prompt = StepShape(num_rows, 1, 1, num_rows, num_rows * (num_rows + 1) // 2)
    running = engine.scheduler.running_sequences
    context = max(1, sum(seq.num_computed for seq in running) // len(running)) if running else _CONTEXT
    num_held = pool.num_blocks * engine.config.cache.block_size // context
    n = max(1, min(limits.max_num_seqs, trusted, num_held))
    output = StepShape(n, n, n, n * context, n * context)
    return max(0.0, cost.seconds_of(prompt)) / num_rows, max(0.0, cost.seconds_of(output)) / n
