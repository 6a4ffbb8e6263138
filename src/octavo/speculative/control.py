"""How many tokens to draft, for each sequence and step, so that more tokens come per second, and never noticeably fewer.

A step of B decoding sequences yields B tokens in T(B) seconds. Each draft adds a row, which costs little while reading the weights is what
takes the time, and its chance to be accepted, which falls along the draft. ``best_rate`` takes the drafts in the order of their chances,
over all sequences, as far as tokens per second rise. With drafts that cost time themselves this is the wall-time factor of Leviathan
et al. (2023, theorem 3.8), (1 - a^(k+1)) / ((1 - a)(k c + 1)), with a measured price of each row in place of "one pass".

Three things keep it from losing:

- **A price list that is measured** (``StepSeconds``). Row counts not seen yet are tried in stages, when good drafts are at hand.
- **A purse.** Every drafting step is compared with the estimate of plain decoding: gains and losses go into an account that starts with the
  time of a few steps and earns a small share of all time. A step drafts no more than the purse could pay for if every draft were wrong.
  So whatever is wrong with prices and chances, all drafting together loses at most the start plus that share.
- **Plain steps now and then**, so that what plain decoding takes stays known.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence as Seq

from octavo.speculative.step_seconds import StepSeconds

_MARGIN = 1.05  # the predicted rate has to be so much better than plain
_FIRST_STEPS = 4.0  # plain steps whose time the purse starts with
_MOST_STEPS = 64.0  # and the most that it holds: what was gained may be lost again, within limits
_ALLOWANCE = 0.005  # share of all decoding time that may be lost in trying
_MAX_AGE = 512  # steps after which a price is to be seen again
_HOPE = 0.5
_PROBE_CHANCE = 0.3  # drafts below it are not worth a trial of a new number of rows

Chances = list[float]
"""[drafts] of one sequence: the chance that the first j are all accepted. Never rises."""


def best_rate(gains: Seq[float], num_tokens: float, prices: Seq[float]) -> tuple[int, float]:
    """(number of drafts, tokens per second) where the rate is best; of equal rates the one with fewer drafts.

    ``gains``: chances of the drafts on offer, best first. ``num_tokens``: what comes without drafts. ``prices[x]``: seconds with x drafts.
    """
    best, best_value = 0, num_tokens / prices[0]
    kept = num_tokens
    for x, gain in enumerate(gains, 1):
        kept += gain
        value = kept / prices[x]
        if value > best_value:
            best, best_value = x, value
    return best, best_value


def best_worth(gains: Seq[float], token_s: float, prices: Seq[float]) -> int:
    """The number of drafts that gains most time when a token is worth ``token_s`` seconds. Arguments else as for ``best_rate``."""
    best, best_value = 0, 0.0
    base_s, kept = prices[0], 0.0
    for x, gain in enumerate(gains, 1):
        kept += gain
        value = kept * token_s - (prices[x] - base_s)
        if value > best_value:
            best, best_value = x, value
    return best


def share_out(chances: Seq[Chances], gains: Seq[float], num_drafts: int) -> list[int]:
    """The best ``num_drafts`` drafts, as a length for each sequence; ``gains`` are all chances, best first.

    Of equal chances those of earlier sequences come first.
    """
    least = gains[num_drafts - 1]
    lengths = []
    for row in chances:
        length = 0
        while length < len(row) and row[length] > least:
            length += 1
        lengths.append(length)
    num_left = num_drafts - sum(lengths)
    for i, row in enumerate(chances):
        while num_left and lengths[i] < len(row) and row[lengths[i]] == least:
            lengths[i] += 1
            num_left -= 1
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
        prices = self._prices(num_decoding, len(gains), num_context, draft_s)
        affordable = bisect_right(prices, prices[0] + self._purse_s) - 1  # if all of them were wrong
        best, rate = best_rate(gains[:affordable], num_decoding, prices)
        plain_rate = num_decoding / prices[0]
        if rate < _MARGIN * plain_rate:
            best, rate = 0, plain_rate
        if num_other_rows:
            prices = self._prices(num_decoding + num_other_rows, affordable, num_context, draft_s)
            best = best_worth(gains[:affordable], 1.0 / (_MARGIN * rate), prices)
        else:
            best = max(best, self._probe(gains, num_decoding, rate, prices))
        return share_out(chances, gains, best) if best else none

    def saving_per_token(self, chances: Chances, num_decoding: int, num_context: int, draft_s: float) -> float:
        """Seconds that drafts of one of ``num_decoding`` sequences are hoped to save for each of its tokens; inf until prices are known."""
        if not self.cost.knows(num_decoding + 1, _MAX_AGE):
            return math.inf
        prices = self._prices(num_decoding, len(chances), num_context, draft_s)
        best, rate = best_rate(chances, num_decoding, prices)
        kept = num_decoding + sum(chances[:best])
        return (kept * prices[0] / num_decoding - kept / rate) / (1.0 + kept - num_decoding)

    def _prices(self, first_rows: int, num_drafts: int, num_context: int, draft_s: float) -> list[float]:
        """[num_drafts + 1] seconds of a step with x drafts beside ``first_rows`` rows."""
        prices = self.cost.prices(first_rows, num_drafts, num_context)
        return [price + x * draft_s for x, price in enumerate(prices)] if draft_s else prices

    def _probe(self, gains: Seq[float], num_decoding: int, rate: float, prices: Seq[float]) -> int:
        """Drafts of a step that shows what the next stage of rows costs; 0 when that is known, too dear, or could not be a better rate."""
        num_good = next((x for x, gain in enumerate(gains) if gain < _PROBE_CHANCE), len(gains))
        last = self.cost.largest_known(num_decoding, num_decoding + num_good, _MAX_AGE)
        stage = last + max(1, last // 2)
        if stage > num_decoding + num_good:
            return 0
        known, wanted = last - num_decoding, stage - num_decoding
        # The hope: rows from here on cost half of what they did so far, nothing if it is the first stage.
        row_s = (prices[known] - prices[0]) / known if known else 0.0
        hoped = (num_decoding + sum(gains[:wanted])) / (prices[known] + _HOPE * row_s * (wanted - known))
        return wanted if hoped >= _MARGIN * rate and prices[wanted] - prices[0] <= self._purse_s else 0

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
        """Book a step in the purse: what it earned by taking ``seconds``, and what drafts chosen by ``lengths`` saved or lost."""
        plain_s = self.cost.seconds(num_decoding, num_context)
        if self._is_new:  # the first steps of a process are slow ones: not until their time is known
            if not self.cost.knows(num_decoding, _MAX_AGE):
                return
            self._is_new, self._purse_s = False, _FIRST_STEPS * plain_s
        self._purse_s = min(self.limit_s(num_decoding, num_context), self._purse_s + self.allowance_s(seconds) + saved_s)

    def allowance_s(self, seconds: float) -> float:
        """What may be lost in trying of a step of ``seconds``."""
        return _ALLOWANCE * seconds

    def limit_s(self, num_decoding: int, num_context: int) -> float:
        """The most that is kept of what was saved."""
        return _MOST_STEPS * self.cost.seconds(num_decoding, num_context)

    def saved_beside_prompts(self, num_rows: int, num_drafts: int, num_decoding: int, num_kept: int, num_context: int) -> float:
        """Estimated seconds that drafts saved in a step that also held prompt rows: of these the price is not known, only that of rows."""
        token_s = self.cost.seconds(num_decoding, num_context) / num_decoding
        price_s = self.cost.seconds(num_rows, num_context) - self.cost.seconds(num_rows - num_drafts, num_context)
        return (num_kept - num_decoding) * token_s - price_s
