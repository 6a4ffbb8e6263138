"""Who goes on with an answer when whoever was chosen for it has no room. Pure: the same for a cluster and for a simulation of one."""

from __future__ import annotations

from collections.abc import Iterable


def receiver_among(wanted: int, able: Iterable[tuple[int, str, int]]) -> int | None:
    """``able``: (index, role, available blocks) of those that may be asked. ``wanted`` if it is among them, whatever its role; else, of
    those that go on with answers, the one with most blocks, of role decode before both, the first of equals. None: nobody."""
    best: tuple[tuple[bool, int], int] | None = None
    for index, role, num_available in able:
        if index == wanted:
            return index
        rank = role == "decode", num_available
        if role != "prefill" and (best is None or rank > best[0]):
            best = rank, index
    return None if best is None else best[1]
