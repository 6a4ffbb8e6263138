"""How the seconds of a step are split among the requests that take part in it.

The rule, which is that of the requests' users: *its own* part is what the step would have taken with the request alone, and for the rest
it waited for others. With a price for each kind of work (``StepShape``; ``costs.fitted`` learns it) a slice's *share* is the price of its
own work, and the *fixed* part, what a step costs whatever it holds (reading the weights above all), is everybody's own:

    own_i = seconds * (fixed + share_i) / (fixed + sum of all shares)

The others' part is divided between prompts and tokens as their shares are. So own parts of different requests overlap in the fixed part
and add up to more than the step: each explains one request, not who is to pay. While no price is known, shares are rows and nothing is
fixed.

Pure arithmetic; keeps nothing.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from octavo.core.step import SequenceSlice, StepPlan

MIN_OBSERVATIONS = 8  # steps from which a fitted price is used


class StepPrice(Protocol):
    """Linear prices of a step's work, as ``costs.fitted.FittedCost`` has them."""

    @property
    def num_observations(self) -> int:
        """Steps that they were learned from."""
        ...

    @property
    def weights(self) -> list[float]:
        """Seconds per row, pair, position, sequence, logit row, step."""
        ...


@dataclass(frozen=True, slots=True)
class KnownPrice:
    """Prices that are known beforehand: of a simulated device, say."""

    weights: list[float]
    num_observations: int = MIN_OBSERVATIONS


BY_ROWS = [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]


def weights_of(price: StepPrice) -> list[float]:
    """The prices to split by: those of ``price`` once they are more than a guess."""
    weights = price.weights
    return weights if price.num_observations >= MIN_OBSERVATIONS and any(weights) else BY_ROWS


def share_of(piece: SequenceSlice, weights: Seq[float]) -> float:
    """The price of one slice's own work, without what is fixed."""
    row, pair, position, sequence, logit_row, _ = weights
    n, start = len(piece.token_ids), piece.start
    num_logit_rows = 1 + piece.num_drafts if piece.num_samples else 0  # as in StepShape.of, which prices are fitted on
    if piece.prompt_logprobs is not None:
        num_logit_rows = max(num_logit_rows, len(piece.next_token_ids))
    seen = n * start + n * (n + 1) // 2
    return row * n + pair * seen + position * (start + n) + sequence + logit_row * num_logit_rows


class StepSplit(NamedTuple):
    """``shares`` [slices]: seconds of each slice's own work; ``fixed_s``: what the step would have taken whatever it held. ``prefill_s``
    (prompts) and ``decode_s`` (tokens, and what is fixed) add up to the step."""

    shares: list[float]
    fixed_s: float
    prefill_s: float
    decode_s: float
    num_prompt_tokens: int


def split_step(plan: StepPlan, weights: Seq[float], prompts: Seq[int], seconds: float) -> StepSplit:
    """``prompts``: places of the slices that compute prompts; ``seconds``: of the model's pass."""
    row, pair, position, sequence, logit_row, fixed = weights
    first, slope = row + pair + position + sequence + logit_row, pair + position  # of one row that draws a token
    shares = [first + slope * piece.start for piece in plan.slices]
    drafting = [place for place, piece in enumerate(plan.slices) if piece.num_drafts]
    for place in (*prompts, *drafting):
        shares[place] = share_of(plan.slices[place], weights)
    total = fixed + sum(shares)
    scale = seconds / total if total > 0.0 else 0.0
    prefill_s = scale * sum(shares[place] for place in prompts)
    num_prompt_tokens = sum(len(plan.slices[place].token_ids) for place in prompts)
    shares = [scale * share for share in shares]
    return StepSplit(shares, scale * fixed, prefill_s, seconds - prefill_s, num_prompt_tokens)
