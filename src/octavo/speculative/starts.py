"""Whether a sequence is worth the start: a draft model has to read a text before its first draft, which can take longer than many steps.

That is no price of a draft but an outlay. It is paid when what is left of the sequence promises more, from a balance that savings fill and
that a start may overdraw once: a draft model that never pays costs one text, and then what a small share of the time allows.
"""

from __future__ import annotations

_RATE = 0.3
_MOST_TOKENS = 256  # of a sequence that are counted on, whatever its limit


class StartBudget:
    """Seconds told to it; reads no clock."""

    def __init__(self) -> None:
        self.balance_s = 0.0
        self.token_s = 0.0  # seconds that reading a token takes; 0 until a text was read

    def may_start(self, num_tokens: int, num_left: int, token_saving_s: float) -> bool:
        """``num_tokens`` to read for at most ``num_left`` to come, each of which is hoped to come ``token_saving_s`` earlier."""
        return self.balance_s >= 0.0 and token_saving_s * min(num_left, _MOST_TOKENS) >= self.token_s * num_tokens

    def started(self, num_tokens: int, seconds: float) -> None:
        """Reading ``num_tokens`` took ``seconds``."""
        self.balance_s -= seconds
        token_s = seconds / num_tokens
        self.token_s += (_RATE if self.token_s else 1.0) * (token_s - self.token_s)

    def earn(self, seconds: float, limit_s: float) -> None:
        """A step saved ``seconds`` (below 0: lost). No more than ``limit_s`` is kept."""
        self.balance_s = min(limit_s, self.balance_s + seconds)
