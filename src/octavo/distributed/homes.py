"""Which engine a session, or the beginning of a prompt, went to last. Pure. Engines that go are told of, and whoever has the index of one
next has nothing that it had; no look at all that is remembered is needed for that."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Generic, TypeVar

K = TypeVar("K")


class Homes(Generic[K]):
    """``most`` names are remembered, the last used ones."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._homes: OrderedDict[K, tuple[int, int]] = OrderedDict()  # name -> (engine index, how many had that and are gone)
        self._num_gone = Counter[int]()  # by engine index

    def __len__(self) -> int:
        return len(self._homes)

    def of(self, name: K) -> int:
        """The index of the engine that ``name`` went to last, if that is not gone; else -1."""
        index, num_gone = self._homes.get(name, (-1, 0))
        return index if num_gone == self._num_gone[index] else -1

    def remember(self, name: K, index: int) -> None:
        self._homes[name] = index, self._num_gone[index]
        self._homes.move_to_end(name)
        if len(self._homes) > self._most:
            self._homes.popitem(last=False)

    def gone(self, index: int) -> None:
        self._num_gone[index] += 1
