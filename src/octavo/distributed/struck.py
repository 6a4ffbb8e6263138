"""Processes that were lost and may come back, and what each of them had. Pure: times are told.

    lost ─▶ open ──returned: the same process──▶ forgiven
              └─ another has its name, or it has been away for too long ──▶ gone: its loss counts

Owns the records. What becomes of the requests is their flights' business.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

MAX_STRUCK = 64  # processes that are remembered


@dataclass(frozen=True, slots=True)
class _Process:
    name: str
    since_s: float
    request_ids: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Struck:
    _processes: OrderedDict[str, _Process] = field(default_factory=OrderedDict)  # by boot id; the one that was lost first comes first

    def lost(self, name: str, boot_id: str, request_ids: Sequence[str], now: float) -> list[str]:
        """The worker died, or hung, with these. Returns requests whose loss counts now: who had them is remembered no longer. One that had
        none is nothing to remember."""
        if not request_ids:
            return []
        self._processes.setdefault(boot_id, _Process(name, now)).request_ids.extend(request_ids)
        return self._processes.popitem(last=False)[1].request_ids if len(self._processes) > MAX_STRUCK else []

    def returned(self, name: str, boot_id: str) -> tuple[list[str], list[str]]:
        """A worker takes requests: (what this process had when it was lost, which did it no harm; what others of its name had, in whose
        place it has come)."""
        back = self._processes.pop(boot_id, None)
        return [] if back is None else back.request_ids, self._gone(lambda process: process.name == name)

    def expired(self, since_s: float) -> list[str]:
        """What processes had that were lost by ``since_s``, and are given up."""
        return self._gone(lambda process: process.since_s <= since_s)

    def _gone(self, is_gone: Callable[[_Process], bool]) -> list[str]:
        gone = [boot_id for boot_id, process in self._processes.items() if is_gone(process)]
        return [request_id for boot_id in gone for request_id in self._processes.pop(boot_id).request_ids]
