"""How many choices a request makes and which of them it shows: ``n``, ``best_of`` and vLLM's ``use_beam_search``.

``n`` alone: n are drawn, n are shown. With ``best_of``: so many are drawn, the ``n`` with the highest log-probability per token are shown.
With ``use_beam_search``: ``best_of``, or else ``n``, hypotheses are followed, the ``n`` best are shown. Knows no engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from octavo.core.request import MAX_N, BeamParams, shown
from octavo.engine.outputs import CompletionOutput
from octavo.server.errors import invalid

if TYPE_CHECKING:
    from octavo.server.openai_types import SamplingFields


def choice_params(request: SamplingFields, logprobs: int | None) -> dict[str, Any]:
    """``n``, ``beam`` and ``logprobs`` of the SamplingParams. Raises APIError 400 for fields that contradict each other."""
    n, best_of = num_shown(request), request.best_of
    if best_of is not None:
        if not 1 <= best_of <= MAX_N:
            raise invalid(f"best_of: {best_of} is not allowed; an integer from 1 to {MAX_N}", "best_of")
        if not 1 <= n <= best_of:
            raise invalid(f"n: {n} is not allowed; an integer from 1 to best_of ({best_of})", "n")
    if request.use_beam_search:
        penalty = 1.0 if request.length_penalty is None else request.length_penalty
        stopping = False if request.early_stopping is None else request.early_stopping
        return {"n": n, "logprobs": logprobs, "beam": BeamParams(best_of or n, penalty, stopping)}
    for name, neutral in (("length_penalty", 1.0), ("early_stopping", False)):
        value = getattr(request, name)
        if value is not None and value != neutral:
            raise invalid(f"{name}: {shown(value, 80)} is only allowed when use_beam_search is true", name)
    if best_of is None or best_of == n:
        return {"n": n, "logprobs": logprobs}
    if request.stream:
        raise invalid(f"best_of: {best_of} is not allowed; with stream it must be n ({n}), since the best are known at the end", "best_of")
    return {"n": best_of, "logprobs": 0 if logprobs is None else logprobs}  # to compare by


def num_shown(request: SamplingFields) -> int:
    return 1 if request.n is None else request.n


def best_choices(made: Sequence[CompletionOutput], num: int) -> Sequence[CompletionOutput]:
    """The ``num`` choices with the highest mean log-probability of their tokens, best first, equal ones as they were made."""
    if num == len(made):
        return made

    def mean_logprob(choice: CompletionOutput) -> float:
        return (choice.cumulative_logprob or 0.0) / max(len(choice.token_ids), 1)

    return sorted(made, key=mean_logprob, reverse=True)[:num]
