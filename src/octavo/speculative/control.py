"""How many tokens to draft, for each sequence and step, so that more tokens come per second, and never noticeably fewer.

A step of B decoding sequences yields B tokens in T(B) seconds. Each draft adds a row, which costs little while reading the weights is what
takes the time, and its chance to be accepted, which falls along the draft. ``best_rate`` takes the drafts in the order of their chances,
over all sequences, as far as tokens per second rise. With drafts that cost time themselves this is the wall-time factor of Leviathan
et al. (2023, theorem 3.8), (1 - a^(k+1)) / ((1 - a)(k c + 1)), with a measured price of each row in place of "one pass".

Three things keep it from losing:

- **A price list that is measured** (``StepSeconds``). Row counts not seen yet are tried in stages, when good drafts are at hand.
- **A purse.** Every drafting step is compared with the estimate of plain decoding: gains and losses go into an account that starts with the
  time of a few steps, earns a small share of all time, and is capped. An empty purse buys no drafts. So whatever is wrong with the
  estimates, the loss is at most the start plus that share.
- **Plain steps now and then**, so that what plain decoding takes stays known.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from octavo.speculative.step_seconds import StepSeconds

_MARGIN = 1.02  # the predicted rate has to be so much better than plain
_FIRST_STEPS = 8.0  # plain steps whose time the purse starts with, and the most that it holds
_ALLOWANCE = 0.004  # share of all decoding time that may be lost in trying
_MAX_AGE = 512  # steps after which a price is to be seen again
_PROBE_CHANCE = 0.3  # drafts below it are not worth a trial of a new number of rows

Chances = list[float]
"""[drafts] of one sequence: the chance that the first j are all accepted. Never rises."""


def best_rate(gains: Seq[float], num_tokens: float, seconds: Callable[[int], float]) -> tuple[int, float]:
    """(number of drafts, tokens per second) where the rate is best; of equal rates the one with fewer drafts.

    ``gains``: chances of the drafts on offer, best first. ``num_tokens``: what comes without drafts. ``seconds(x)``: a step with x drafts.
    """
    best, best_value = 0, num_tokens / seconds(0)
    kept = num_tokens
    for x, gain in enumerate(gains, 1):
        kept += gain
        value = kept / seconds(x)
        if value > best_value:
            best, best_value = x, value
    return best, best_value


def best_worth(gains: Seq[float], token_s: float, seconds: Callable[[int], float]) -> int:
    """The number of drafts that gains most time when a token is worth ``token_s`` seconds. Arguments else as for ``best_rate``."""
    best, best_value = 0, 0.0
    base_s, kept = seconds(0), 0.0
    for x, gain in enumerate(gains, 1):
        kept += gain
        value = kept * token_s - (seconds(x) - base_s)
        if value > best_value:
            best, best_value = x, value
    return best


def share_out(chances: Seq[Chances], num_drafts: int) -> list[int]:
    """The best ``num_drafts`` drafts of all sequences, as a length for each. Of equal chances the earlier sequence's come first."""
    ranked = sorted((-chance, i) for i, row in enumerate(chances) for chance in row)
    lengths = [0] * len(chances)
    for _, i in ranked[:num_drafts]:
        lengths[i] += 1
    return lengths


class DraftControl:
    """One per engine. ``lengths`` before a step, ``observe`` after it."""

    def __init__(self) -> None:
        self.cost = StepSeconds()
        self._purse_s = 0.0
        self._is_new = True

    @property
    def purse_s(self) -> float:
        """Seconds that drafting may still lose."""
        return self._purse_s

    def lengths(
        self, chances: Seq[Chances], num_decoding: int, num_context: int, num_other_rows: int, max_drafts: int, draft_s: float
    ) -> list[int]:
        """Drafts for each entry of ``chances``, at most ``max_drafts`` in all.

        ``num_decoding`` sequences take a row each, ``num_context`` positions are read for them; ``num_other_rows`` of prompts, and of
        drafts that were asked for, are in the same step. ``draft_s``: host seconds that making one draft takes.
        """
        none = [0] * len(chances)
        gains = sorted((chance for row in chances for chance in row), reverse=True)[:max_drafts]
        if not gains or self._purse_s <= 0.0:
            return none
        if num_other_rows == 0 and not self.cost.knows(num_decoding, _MAX_AGE):
            return none
        seconds = self._price(num_decoding, num_context, draft_s)
        best, rate = best_rate(gains, num_decoding, seconds)
        plain_rate = num_decoding / seconds(0)
        if rate < _MARGIN * plain_rate:
            best, rate = 0, plain_rate
        if num_other_rows:
            best = best_worth(gains, 1.0 / (_MARGIN * rate), self._price(num_decoding + num_other_rows, num_context, draft_s))
        else:
            best = max(best, self._probe(gains, num_decoding, rate, seconds))
        return share_out(chances, best) if best else none

    def _price(self, first_rows: int, num_context: int, draft_s: float) -> Callable[[int], float]:
        """seconds(x) of a step with x drafts beside ``first_rows`` rows."""
        cost, known = self.cost, dict[int, float]()

        def seconds(x: int) -> float:
            found = known.get(x)
            if found is None:
                found = known[x] = cost.seconds(first_rows + x, num_context) + x * draft_s
            return found

        return seconds

    def _probe(self, gains: Seq[float], num_decoding: int, rate: float, seconds: Callable[[int], float]) -> int:
        """Drafts of a step that shows what the next stage of rows costs; 0 when that is known, too dear, or could not be a better rate."""
        num_good = sum(1 for gain in gains if gain >= _PROBE_CHANCE)
        last = num_decoding
        while True:
            stage = last + max(1, (last + 1) // 2)
            if stage > num_decoding + num_good:
                return 0
            if not self.cost.knows(stage, _MAX_AGE):
                break
            last = stage
        num_drafts = stage - num_decoding
        hoped = (num_decoding + sum(gains[:num_drafts])) / seconds(last - num_decoding)  # if the next rows were free
        if hoped < _MARGIN * rate or seconds(num_drafts) - seconds(0) > self._purse_s:
            return 0
        return num_drafts

    def observe(self, num_rows: int, num_decoding: int, num_kept: int, num_context: int, seconds: float, host_s: float) -> float:
        """Learn from a step of decoding sequences alone: ``num_rows`` with drafts, ``num_kept`` tokens. Returns the seconds it saved.

        ``host_s``: what proposing took beside the device's ``seconds``. Of what the system held up, at most the predicted time counts.
        """
        saved_s = -host_s
        if num_rows > num_decoding and self.cost.num_steps:
            predicted_s = self.cost.seconds(num_rows, num_context)
            saved_s += self.cost.seconds(num_decoding, num_context) * num_kept / num_decoding - min(seconds, 2.0 * predicted_s)
        self.cost.observe(num_rows, num_context, seconds)
        return saved_s

    def settle(self, num_decoding: int, num_context: int, seconds: float, saved_s: float) -> None:
        """Book a step in the purse: what it earned by taking ``seconds``, and what its drafts, made for ``lengths``, saved or lost."""
        limit_s = _FIRST_STEPS * self.cost.seconds(num_decoding, num_context)
        if self._is_new:
            self._is_new, self._purse_s = False, limit_s
        self._purse_s = min(limit_s, self._purse_s + _ALLOWANCE * seconds + saved_s)
