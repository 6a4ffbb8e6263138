"""What a token takes of an engine whose steps are full: the prices by which a load is compared with what an engine can do at most.

A lone stream keeps an engine at work all the time and leaves nearly all of it free: its tokens are to count as what they take in a step
that many share.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from octavo.core.cost import StepShape

_USUAL_CONTEXT = 512  # tokens of a sequence, while none runs


def full_step_prices(
    seconds_of: Callable[[StepShape], float], num_rows: int, most_sequences: int, num_held_tokens: int, contexts: Seq[int]
) -> tuple[float, float]:
    """(seconds of a prompt token, seconds of an output token). ``num_rows``: of the largest step; ``most_sequences`` that it may have,
    each as long as those that run now, of ``contexts`` tokens, if the KV pool, of ``num_held_tokens``, has room for them."""
    prompt = StepShape(num_rows, 1, 1, num_rows, num_rows * (num_rows + 1) // 2)
    context = max(1, sum(contexts) // len(contexts) if contexts else _USUAL_CONTEXT)
    n = max(1, min(most_sequences, num_held_tokens // context))
    output = StepShape(n, n, n, n * context, n * context)
    return max(0.0, seconds_of(prompt)) / num_rows, max(0.0, seconds_of(output)) / n
