"""The formulas of speculative decoding (Leviathan, Kalman & Matias, ICML 2023), for chances of acceptance that do not depend on each other.

``alpha``: the chance that a draft is accepted; ``gamma``: drafts per pass of the target; ``c``: time of a draft over time of a pass.
"""

from __future__ import annotations


def tokens_per_pass(alpha: float, gamma: int) -> float:
    """Expected tokens of one pass of the target (equation 1): from 1 to gamma + 1."""
    return gamma + 1.0 if alpha == 1.0 else (1.0 - float(alpha ** (gamma + 1))) / (1.0 - alpha)


def speed_up(alpha: float, gamma: int, c: float) -> float:
    """Of wall time, when a pass over gamma + 1 tokens takes as long as over one (theorem 3.8)."""
    return tokens_per_pass(alpha, gamma) / (gamma * c + 1.0)


def operations(alpha: float, gamma: int, c_operations: float = 0.0) -> float:
    """How many times as many operations a token takes (theorem 3.11). ``c_operations``: of a draft over those of the target."""
    return (gamma * c_operations + gamma + 1.0) / tokens_per_pass(alpha, gamma)


def best_gamma(alpha: float, c: float, most: int = 64) -> int:
    """The number of drafts, up to ``most``, with the largest speed-up; 0: drafting does not pay."""
    return max(range(most + 1), key=lambda gamma: speed_up(alpha, gamma, c))
