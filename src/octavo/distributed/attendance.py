"""When each worker of a cluster was there: which took requests, which were draining, which were gone, and since when. Pure: times are told.

    look ─▶ OPEN ⇄ CLOSED (drains: keeps what it has) ─▶ AWAY ─▶ OPEN, as the same process or another

A look compares what there is with what there was. Whoever looks does so at once when a worker is lost, before anybody is told of it, and
every now and then. Owns the spells of the last ``keep_s`` seconds; forgets a worker that has been away for as long.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from octavo.core.cluster_window import WindowAbsence


class Presence(Enum):
    OPEN = "open"
    CLOSED = "closed"
    AWAY = "away"


class Seen(NamedTuple):
    """A worker at a look. ``boot_id``: of its process; ``num_blocks``, ``max_model_len``: what that holds."""

    name: str
    role: str
    boot_id: str
    presence: Presence
    num_blocks: int
    max_model_len: int


class Spell(NamedTuple):
    begin_s: float
    presence: Presence
    boot_id: str


@dataclass(slots=True)
class Attendant:
    """A worker by its name. ``seen``: as it was last there; ``spells``: from the first that is remembered to the present one."""

    seen: Seen
    spells: list[Spell] = field(default_factory=list)

    def absences(self, begin_s: float) -> tuple[WindowAbsence, ...]:
        """Since ``begin_s``, in seconds from there; it was away before it was first seen."""
        found, away = list[WindowAbsence](), Spell(-math.inf, Presence.AWAY, "")
        is_away, boot_id = True, ""  # boot_id: of the process that was there last
        for spell in self.spells:
            if spell.presence is Presence.OPEN:
                if is_away and spell.begin_s > begin_s and spell.begin_s > away.begin_s:
                    from_s, drained = max(0.0, away.begin_s - begin_s), away.presence is Presence.CLOSED
                    found.append(WindowAbsence(from_s, spell.begin_s - begin_s, drained, spell.boot_id != boot_id))
                is_away, boot_id = False, spell.boot_id
            elif not is_away:
                is_away, away = True, spell
        if is_away:
            found.append(WindowAbsence(max(0.0, away.begin_s - begin_s), None, away.presence is Presence.CLOSED))
        return tuple(found)

    def was_open(self, begin_s: float) -> bool:
        """At any time since ``begin_s``."""
        ends_s = [spell.begin_s for spell in self.spells[1:]] + [math.inf]
        return any(spell.presence is Presence.OPEN and end_s > begin_s for spell, end_s in zip(self.spells, ends_s, strict=True))


class Attendance:
    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._workers: dict[str, Attendant] = {}

    def look(self, there: Iterable[Seen], now: float) -> None:
        """``there``: all that are connected and can be told of; others are away."""
        present = {seen.name: seen for seen in there}
        for name, seen in present.items():
            if name in self._workers or seen.presence is Presence.OPEN:  # whoever has never been open has not come
                worker = self._workers.setdefault(name, Attendant(seen))
                worker.seen = seen
                self._enter(worker, Spell(now, seen.presence, seen.boot_id))
        for name, worker in list(self._workers.items()):
            if name not in present:
                self._enter(worker, Spell(now, Presence.AWAY, ""))
            while len(worker.spells) > 1 and worker.spells[1].begin_s < now - self._keep_s:
                del worker.spells[0]
            last = worker.spells[-1]
            if last.presence is Presence.AWAY and last.begin_s < now - self._keep_s:
                del self._workers[name]

    def _enter(self, worker: Attendant, spell: Spell) -> None:
        if not worker.spells or worker.spells[-1][1:] != spell[1:]:
            worker.spells.append(spell)

    def find(self, name: str) -> Attendant | None:
        return self._workers.get(name)

    def since(self, begin_s: float) -> dict[str, Attendant]:
        """Those that took requests at any time since then, in the order in which they came."""
        return {name: worker for name, worker in self._workers.items() if worker.was_open(begin_s)}
