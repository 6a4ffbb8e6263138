"""Who has failed, and how long each is left alone. Pure: times are told.

    failed ─▶ barred for ``first_s`` ─▶ may come ──failed again──▶ barred for twice as long ... at most ``most_s``
                                           └─ all was well for ``most_s``, or it is forgiven ─▶ forgotten

So are processes whose workers said what cannot be: such a worker loses its channel, and everything that it has loses its worker; one that
came back at once to say the same again would cut the streams of others without end. And so are ways by which KV does not get over. Owns the
moments; refuses nobody itself.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

MAX_KEPT = 256  # whoever failed longest ago is forgotten

Who = TypeVar("Who", bound=Hashable)


@dataclass(slots=True)
class Barred(Generic[Who]):
    """``first_s`` and ``most_s``: seconds for which somebody is barred the first time, and at most. ``max_kept``: so many are known."""

    first_s: float = 1.0
    most_s: float = 60.0
    max_kept: int = MAX_KEPT
    _kept: OrderedDict[Who, tuple[float, float]] = field(default_factory=OrderedDict)  # (until when, for how long), seconds

    def __contains__(self, who: Who) -> bool:
        """It has failed, and is not known to be well again."""
        return who in self._kept

    def failed(self, who: Who, now: float) -> None:
        until_s, last_s = self._kept.pop(who, (now, 0.0))
        is_again = last_s > 0.0 and now - until_s <= self.most_s
        wait_s = min(self.most_s, 2 * last_s) if is_again else self.first_s
        self._kept[who] = now + wait_s, wait_s
        if len(self._kept) > self.max_kept:
            self._kept.popitem(last=False)

    def forgive(self, who: Who) -> None:
        """It is well again: another failure is its first."""
        self._kept.pop(who, None)

    def wait_s(self, who: Who, now: float) -> float:
        """Seconds until it may come; 0: now."""
        until_s, _ = self._kept.get(who, (now, 0.0))
        return max(0.0, until_s - now)
