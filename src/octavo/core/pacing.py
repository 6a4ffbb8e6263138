"""How many prompt tokens go into a step beside running streams: as many as keep the bound on the gap between a stream's tokens.

While no stream runs, only the token budget binds. A step takes one block of a prompt even when the bound cannot be kept, so that
no prompt waits for ever; who measures the gaps reports that. Small functions of plain numbers; queues and blocks are the planner's.

**Who gets the room.** Half of it goes to the prompt with the least left to compute, the rest to the oldest; what these two leave goes
on to the others by the same rule. So

- a prompt behind longer ones runs at half speed or better from its admission: n tokens take at most the time of 2n;
- the oldest prompt runs at half speed or better, however many short ones keep coming, and everyone becomes the oldest in time;
- equal prompts run one after the other: the first finishes as early as alone, the last no later than if they had shared every step.

Round robin (processor sharing) would give the last of these up: equal prompts would all finish when the last one does. Admission itself
is first come, first served: a prompt that finds no KV blocks or no place waits in the queue.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.core.cost import GapCost, StepShape


@dataclass(slots=True)
class Prompt:
    """What a planner tells of a sequence with more than one token to compute, and in ``num_tokens`` what it gets of the step."""

    start: int  # first position to compute
    gap: int  # known tokens from there on
    scores_rows: bool = False  # prompt log-probabilities are wanted: logits of every row
    num_tokens: int = 0


class StepRoom:
    """Room for prompts in one step.

    ``shape``: what the step holds already (its decoding sequences). ``limit_s``: the bound on the gap, None when no stream runs.
    ``num_tokens``: what is left of the token budget.
    """

    def __init__(self, cost: GapCost, shape: StepShape, limit_s: float | None, num_tokens: int, block_size: int) -> None:
        self._cost = cost
        self._shape = shape
        self._limit_s = limit_s
        self._num_tokens = num_tokens
        self._block_size = block_size
        self._must_progress = True  # until a prompt has got something

    def share(self, prompts: list[Prompt], odd_step: bool) -> None:
        """Fill in ``num_tokens`` of the prompts, which are in arrival order. ``odd_step``: whose turn it is when two do not fit."""
        left = prompts[:]
        while left and self._num_tokens > 0:
            oldest, shortest = left[0], min(left, key=_remaining)  # the oldest of equally short ones
            if oldest is not shortest:
                self._give_both(oldest, shortest, odd_step)
                left.remove(shortest)
            else:
                self._give(oldest, 1.0)
            left.remove(oldest)

    def _give_both(self, oldest: Prompt, shortest: Prompt, odd_step: bool) -> None:
        if self._fitting(shortest, 0.5) >= self._least(shortest):
            self._give(shortest, 0.5)
            self._give(oldest, 1.0)
        else:  # half the room is too little for a piece: they take turns
            first, second = (shortest, oldest) if odd_step else (oldest, shortest)
            self._give(first, 1.0)
            self._give(second, 1.0)

    def _give(self, prompt: Prompt, fraction: float) -> None:
        """Give ``prompt`` what fits into ``fraction`` of the room that is left: a block at least, or nothing unless it is the first."""
        num_tokens, least = self._fitting(prompt, fraction), self._least(prompt)
        if num_tokens < least:
            if not self._must_progress:
                return
            num_tokens = least
        self._must_progress = False
        prompt.num_tokens = num_tokens
        self._num_tokens -= num_tokens
        self._shape.add(prompt.start, num_tokens, _logit_rows(prompt, num_tokens))

    def _least(self, prompt: Prompt) -> int:
        """The smallest piece worth a slice of its own, which has to read all KV before it."""
        return min(self._block_size, prompt.gap, self._num_tokens)

    def _fitting(self, prompt: Prompt, fraction: float) -> int:
        """The most tokens of ``prompt`` that keep the step within the room: binary search, since a prediction grows with every row."""
        most = min(prompt.gap, int(self._num_tokens * fraction))
        if self._limit_s is None:
            return most
        most = min(most, self._cost.max_trusted_rows - self._shape.num_rows)
        base_s = self._cost.gap_seconds(self._shape)
        limit_s = base_s + (self._limit_s - base_s) * fraction
        if most <= 0 or self._fits(prompt, most, limit_s):
            return max(most, 0)
        fitting, failing = 0, most
        while failing - fitting > 1:
            middle = (fitting + failing) // 2
            if self._fits(prompt, middle, limit_s):
                fitting = middle
            else:
                failing = middle
        return fitting

    def _fits(self, prompt: Prompt, num_tokens: int, limit_s: float) -> bool:
        shape = self._shape.plus(prompt.start, num_tokens, _logit_rows(prompt, num_tokens))
        return self._cost.gap_seconds(shape) <= limit_s


def _remaining(prompt: Prompt) -> int:
    return prompt.gap


def _logit_rows(prompt: Prompt, num_tokens: int) -> int:
    return num_tokens if prompt.scores_rows else int(num_tokens == prompt.gap)
