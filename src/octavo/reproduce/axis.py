"""Axes of plots: what range of values they show, where their ticks stand, how a value becomes a place. Numbers only; draws nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

_STEPS = (1.0, 2.0, 5.0)
_FEW_TICKS = 3
_UNSEEN = 1e-6
_TINY = 1e-200  # what is nearer to 0 is 0
_MOST_POWERS = 12  # of ten that are marked
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_NEAR_ZERO = 0.35  # an axis whose least value is nearer to 0 than this share of the largest begins at 0


@dataclass(frozen=True, slots=True)
class Axis:
    """Values ``low`` .. ``high``, ``ticks`` in between marked, over places ``start`` .. ``end`` (which may descend, as y does)."""

    low: float
    high: float
    ticks: tuple[float, ...]
    start: float
    end: float
    log: bool = False

    @classmethod
    def of(cls, values: Iterable[float], start: float, end: float, log: bool = False, num_ticks: int = 6) -> Axis:
        """An axis that shows all finite ``values``, from tick to tick; 0 .. 1 without any. A logarithmic one shows those above 0, and ends
        with them where there are ticks enough in between: a power of ten more would be mostly empty."""
        shown = [value if abs(value) > _TINY else 0.0 for value in values if math.isfinite(value) and (value > _TINY or not log)]
        if not shown:
            return cls(0.1 if log else 0.0, 1.0, (0.1, 1.0) if log else (0.0, 0.5, 1.0), start, end, log)
        low, high = min(shown), max(shown)
        if not log:
            ticks = _ticks(low, high, num_ticks)
            return cls(ticks[0], ticks[-1], ticks, start, end)
        ticks = _log_ticks(low, high)
        inner = tuple(tick for tick in ticks if low <= tick <= high)
        if len(inner) < _FEW_TICKS:
            return cls(ticks[0], ticks[-1], ticks, start, end, log)
        return cls(low, high, inner, start, end, log)

    def shows(self, value: float) -> bool:
        """Whether a value has a place here, but for a millionth of the axis, which no eye sees."""
        if self.log:
            return self.low * (1 - _UNSEEN) <= value <= self.high * (1 + _UNSEEN)
        margin = _UNSEEN * (self.high - self.low)
        return self.low - margin <= value <= self.high + margin

    def place(self, value: float) -> float:
        """Where a value stands; values beyond the axis, also infinite ones, at its end."""
        value = min(max(value, self.low), self.high)
        low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        share = ((math.log(value) if self.log else value) - low) / (high - low)
        return self.start + share * (self.end - self.start)


def _ticks(low: float, high: float, num_ticks: int) -> tuple[float, ...]:
    """1, 2 or 5 times a power of ten apart, about ``num_ticks`` of them, the first not above ``low``, the last not below ``high``."""
    if 0 <= low <= _NEAR_ZERO * high:
        low = 0.0
    if low == high:
        low, high = (low - abs(low) / 10, high + abs(high) / 10) if low else (0.0, 1.0)
    rough = (high - low) / max(1, num_ticks - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next((factor * power for factor in _STEPS if factor * power >= rough * 0.999), 10 * power)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return tuple(_rounded(i * step) for i in range(first, max(last, first + 1) + 1))


def _log_ticks(low: float, high: float) -> tuple[float, ...]:
    """Powers of ten, every n-th where there are many, and 1, 2 and 5 times these where there are few."""
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    last = max(last, first + 1)
    if last - first > 2:
        stride = -(-(last - first) // _MOST_POWERS)
        last += (first - last) % stride
        return tuple(10.0**power for power in range(first, last + 1, stride))
    ticks = [_rounded(factor * 10.0**power) for power in range(first, last) for factor in _STEPS] + [10.0**last]
    begin = max(i for i, tick in enumerate(ticks) if tick <= low * (1 + 1e-9))
    end = min(i for i, tick in enumerate(ticks) if tick >= high * (1 - 1e-9))
    return tuple(ticks[begin : max(end, begin + 1) + 1])


def _rounded(value: float) -> float:
    """Without the last digits of a sum of steps: 0.3, not 0.30000000000000004."""
    return float(f"{value:.10g}")


def number(value: float) -> str:
    """As it stands at a tick."""
    if not math.isfinite(value):
        return "no limit" if value > 0 else "none"
    if value == 0 or 1e-3 <= abs(value) < 1e6:
        return f"{value:,.10g}" if abs(value) < 1000 else f"{value:,.0f}"
    factor, power = f"{value:.3g}".split("e") if "e" in f"{value:.3g}" else (f"{value / 1e6:.3g}", "6")
    tens = f"10{str(int(power)).translate(_SUPERSCRIPTS)}"
    return tens if factor == "1" else f"{factor} × {tens}"
