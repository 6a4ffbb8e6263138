"""Prices of work on engines, learned from the loads that they tell. Pure.

Good enough to weigh one engine against another, and no prediction to show to anybody. Prompts and steps are priced apart: a step takes
time beside that of its tokens, so a load of the few tokens that sequences are at says nothing of what a prompt takes. And whoever is taken
to be slow gets no prompt that would show that he is not.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.distributed.views import Costs, EngineView

_DECAY = 0.98  # of what has been learned of steps, with each load that is seen
_PROMPT_TOKENS = 2048  # a load of so many moves the price of a prompt's token half the way
_FIRST_TOKEN_S = 1e-3  # of a token, until something was learned: it only has to be above 0, so that work counts at all


@dataclass(slots=True)
class LearnedCosts(Costs):
    """A prompt's token: seconds over tokens of loads in which prompts wait, an engine's own and, until it has told of any, those of all.
    A step: a line over its sequences by least squares, from loads in which each waits for its next token alone."""

    _token_s: dict[int, float] = field(default_factory=dict)  # of a prompt, by engine
    _any_token_s: float | None = None  # of a prompt, on whichever engine
    _steps: dict[int, list[float]] = field(default_factory=dict)  # by engine: weight, sequences, seconds, sequences**2, sequences x seconds

    def saw(self, engine: EngineView) -> None:
        """Learn from an engine's own prediction for what waits there, unless a part of that is no more than a guess of others."""
        tokens, seconds = engine.pending_tokens, engine.pending_s
        if not tokens > 0 or not seconds > 0.0 or engine.num_unseen:
            return
        if tokens > engine.num_sequences:
            share, told_s = tokens / (tokens + _PROMPT_TOKENS), seconds / tokens
            any_s = told_s if self._any_token_s is None else self._any_token_s
            own_s = self._token_s.get(engine.index, any_s)
            self._token_s[engine.index] = own_s + share * (told_s - own_s)
            self._any_token_s = any_s + share * (told_s - any_s)
            return
        sums = self._steps.setdefault(engine.index, [0.0] * 5)
        for i, term in enumerate((1.0, tokens, seconds, tokens * tokens, tokens * seconds)):
            sums[i] = _DECAY * sums[i] + term

    def forget(self, index: int) -> None:
        """Engine ``index`` is gone; who comes in its place may be another."""
        self._token_s.pop(index, None)
        self._steps.pop(index, None)

    def step(self, index: int) -> tuple[float, float]:
        """(seconds of a step beside its sequences, seconds of a sequence), neither below 0; of an engine that told nothing those of
        another, and before any has a small guess."""
        sums = self._steps.get(index) or next(iter(self._steps.values()), None)  # engines are alike until they tell otherwise
        if sums is None:
            return 0.0, _FIRST_TOKEN_S if self._any_token_s is None else self._any_token_s
        weight, tokens, seconds, squares, products = sums
        spread = weight * squares - tokens * tokens
        slope = (weight * products - tokens * seconds) / spread if spread > 1e-9 * weight * squares else 0.0
        slope = min(max(slope, 0.0), seconds / tokens)  # else more would take less, or the line would cut the axis below 0
        return (seconds - slope * tokens) / weight, slope

    def prompt_token_s(self, index: int) -> float:
        """Seconds of a prompt's token; before any prompt was told of, those of the cheapest token of any step."""
        price = self._token_s.get(index, self._any_token_s)
        if price is None:
            price = min((seconds / tokens for _, tokens, seconds, *_ in self._steps.values()), default=_FIRST_TOKEN_S)
        return price

    def prompt_s(self, engine: EngineView, start: int, num_tokens: int) -> float:
        return self.prompt_token_s(engine.index) * num_tokens

    def token_s(self, engine: EngineView, num_sequences: int, num_context: int) -> float:
        base_s, sequence_s = self.step(engine.index)
        return base_s + sequence_s * num_sequences
