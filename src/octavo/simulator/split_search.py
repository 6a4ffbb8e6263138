"""Which numbers of prompt machines are tried to find the best split of a cluster, and in what order. Runs nothing itself."""

from __future__ import annotations

from typing import Protocol


class SplitSearch(Protocol):
    """The splits of one design that were tried so far. ``num_best``: prompt machines of the best one."""

    @property
    def num_best(self) -> int: ...

    def most_prompt_machines(self) -> int:
        """That leave a token machine."""
        ...

    def try_split(self, num_prompt: int) -> None:
        """One that there cannot be, or that was tried, changes nothing."""
        ...


def walk_splits(search: SplitSearch, num_given: int, num_splits: int) -> None:
    """Try the given number of prompt machines, then ``num_splits`` evenly, then halve the distance to the best."""
    most = search.most_prompt_machines()
    distance = max(1, round(most / num_splits))
    search.try_split(min(max(num_given, 1), most))
    for num_prompt in range(distance, most + 1, distance):
        search.try_split(num_prompt)
    while distance > 1:
        distance = (distance + 1) // 2
        for num_prompt in (search.num_best - distance, search.num_best + distance):
            search.try_split(num_prompt)
