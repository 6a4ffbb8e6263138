"""Processes whose workers said what cannot be, and how long each has to stay away. Pure: times are told.

    lied ─▶ barred for ``first_s`` ─▶ may come ──lied again──▶ barred for twice as long ... at most ``most_s``
                                         └─ well-behaved for ``most_s`` ─▶ forgotten

Such a worker loses its channel, and everything that it has loses its worker: one that came back at once to say the same again would cut the
streams of others without end. Owns the moments; refuses nobody itself.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

MAX_KEPT = 256  # processes; whoever lied longest ago is forgotten
ID_CHARS = 64  # of a process's id: they are the worker's own to choose


@dataclass(slots=True)
class Barred:
    """``first_s`` and ``most_s``: seconds for which a process is barred the first time, and at most."""

    first_s: float = 1.0
    most_s: float = 60.0
    _kept: OrderedDict[str, tuple[float, float]] = field(default_factory=OrderedDict)  # by boot id: (until when, for how long), seconds

    def lied(self, boot_id: str, now: float) -> None:
        """A worker of this process has said what cannot be."""
        until_s, last_s = self._kept.pop(boot_id[:ID_CHARS], (now, 0.0))
        is_again = last_s > 0.0 and now - until_s <= self.most_s
        wait_s = min(self.most_s, 2 * last_s) if is_again else self.first_s
        self._kept[boot_id[:ID_CHARS]] = now + wait_s, wait_s
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)

    def wait_s(self, boot_id: str, now: float) -> float:
        """Seconds until it may come; 0: now."""
        until_s, _ = self._kept.get(boot_id[:ID_CHARS], (now, 0.0))
        return max(0.0, until_s - now)
