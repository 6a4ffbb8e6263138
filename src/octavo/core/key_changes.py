"""Which block keys a prefix index has begun and ceased to offer since it was last asked: what an engine tells those who route to it.

Owns the net difference alone: a key that comes and goes between two questions is in neither list. It never holds more entries than there
were changes, and who asks often keeps it small.
"""

from __future__ import annotations


class KeyChanges:
    """Of one index, which calls ``published`` and ``forgotten``. Used on the thread that runs the index."""

    __slots__ = ("_changes",)

    def __init__(self) -> None:
        self._changes: dict[bytes, bool] = {}  # key -> whether it is offered now, which it was not when last asked, or the other way round

    def __len__(self) -> int:
        return len(self._changes)

    def published(self, key: bytes) -> None:
        """The index offers a block under ``key``, which it did not."""
        if self._changes.pop(key, None) is None:
            self._changes[key] = True

    def forgotten(self, key: bytes) -> None:
        """The index offers no block under ``key`` any more."""
        if self._changes.pop(key, None) is None:
            self._changes[key] = False

    def take(self) -> tuple[list[bytes], list[bytes]]:
        """(published, forgotten) since the last call, each in the order of the changes."""
        changes, self._changes = self._changes, {}
        return [key for key, is_offered in changes.items() if is_offered], [key for key, is_offered in changes.items() if not is_offered]
