"""What a search is asked and what it finds: plain data, beside the sentence that says why a trial does not hold."""

from __future__ import annotations

import math
from dataclasses import dataclass

from octavo.planning.bracket import Bracket, RateGrid
from octavo.planning.estimate import Estimate
from octavo.planning.kinds import KindFit
from octavo.planning.trials import Fleet, Trial

MINIMIZE = ("usd", "watts", "machines")


@dataclass(frozen=True, slots=True)
class KindRates:
    """What one engine of a kind can do. ``brackets``: by seed, perhaps not of all seeds; ``dropped``: why there are none, or not all."""

    fit: KindFit
    estimate: Estimate | None = None
    brackets: tuple[tuple[int, Bracket], ...] = ()
    dropped: str | None = None

    @property
    def holds_at(self) -> float | None:
        """With every seed."""
        return min((bracket.holds_at for _, bracket in self.brackets), default=None)

    @property
    def fails_at(self) -> float | None:
        """With every seed. None: not found."""
        rates = [bracket.fails_at for _, bracket in self.brackets]
        return None if not rates or None in rates else max(rate for rate in rates if rate is not None)


@dataclass(frozen=True, slots=True)
class Plan:
    """A fleet that keeps the limits at ``rate`` with every seed. ``trials``: one for each. ``slower``: the first seed's trial with steps
    that take longer by ``error``."""

    fleet: Fleet
    rate: float
    trials: tuple[Trial, ...]
    usd_per_hour: float | None
    peak_w: float
    num_devices: int
    error: float
    slower: Trial | None = None

    @property
    def mean_w(self) -> float:
        return sum(trial.watts for trial in self.trials) / len(self.trials)


@dataclass(frozen=True, slots=True)
class Considered:
    """Something that was looked at, and what came of it: "chosen", or why it was dropped."""

    what: str
    outcome: str
    rate: float | None = None


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """``rate``: to be served; None: only what single engines can do is found. ``minimize``: None: usd where every kind has a price, else
    watts. ``splits``: (prefill, decode) of the fits that may be tried, by name; ``kinds``: those that run both phases; None: all."""

    rate: float | None = None
    grid: RateGrid = RateGrid()
    minimize: str | None = None
    budget_usd: float | None = None
    budget_w: float | None = None
    most_pairs: int = 3
    kinds: tuple[str, ...] | None = None
    splits: tuple[tuple[str, str], ...] | None = None
    fixed: tuple[Fleet, ...] = ()

    def __post_init__(self) -> None:
        if self.rate is not None and not 0.0 < self.rate < math.inf:
            raise ValueError(f"rate: {self.rate!r} is not allowed; a finite number of requests per second above 0")
        if self.minimize is not None and self.minimize not in MINIMIZE:
            raise ValueError(f"minimize: {self.minimize!r} is not allowed; one of {', '.join(MINIMIZE)}")
        for name in ("budget_usd", "budget_w"):
            value = getattr(self, name)
            if value is not None and not 0.0 < value < math.inf:
                raise ValueError(f"{name}: {value!r} is not allowed; a finite number above 0")


@dataclass(frozen=True, slots=True)
class SearchResult:
    """``best`` is one of ``colocated`` and ``split``, the better one within the budgets; None: there is none."""

    kinds: tuple[KindRates, ...]
    colocated: Plan | None
    split: Plan | None
    best: Plan | None
    considered: tuple[Considered, ...]
    minimize: str
    was_limited: bool  # by the number of requests that may be simulated


def why_not(trial: Trial) -> str:
    """What a trial that does not hold broke, most first."""
    if trial.first_refusal is not None and not trial.broken:
        return f"requests are refused: {trial.first_refusal}"
    if trial.piled_up and not trial.stopped:
        return "requests pile up"
    parts = [f"{name} late for {100 * share:.0f} %" for name, share in sorted(trial.broken.items(), key=lambda item: -item[1])]
    return ", ".join(parts) or "requests do not end"
