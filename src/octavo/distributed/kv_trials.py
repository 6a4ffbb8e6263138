"""Pairs of workers between whom KV did not get over, and who tries them again. Pure: times are told.

    failed ─▶ nobody, for 1 s ─▶ one hand-off ──failed──▶ nobody, for 2 s ... at most a minute
                                     └─ its KV has arrived ─▶ all

A firewall between two workers drops what it does not like: each hand-off would find out for itself, by waiting, and the answer of a short
prompt is held meanwhile. So one does, and the others go elsewhere or stay. Owns what is known of pairs; the hand-offs are the desk's.
"""

from __future__ import annotations

from collections.abc import Callable

from octavo.distributed.barred import Barred

Pair = tuple[str, str]
"""The boot ids of sender and receiver: a process that is another may be reached."""

MAX_KEPT = 4096  # pairs


class KVTrials:
    """``is_going(key)``: whether that hand-off is on its way, by whom it may be."""

    def __init__(self, is_going: Callable[[int], bool]) -> None:
        self._is_going = is_going
        self._barred: Barred[Pair] = Barred(max_kept=MAX_KEPT)
        self._trials: dict[Pair, int] = {}  # by pair in doubt: the hand-off that tries it

    def may_try(self, pair: Pair, key: int | None, now: float) -> bool:
        """Whether KV may go this way, that of the hand-off ``key`` (None: one that is not begun)."""
        if pair not in self._barred:
            return True
        if self._barred.wait_s(pair, now) > 0.0:
            return False
        trial = self._trials.get(pair)
        return trial is None or trial == key or not self._is_going(trial)

    def tries(self, pair: Pair, key: int) -> None:
        """The hand-off ``key`` goes this way, if there is room."""
        if pair in self._barred:
            self._trials = {other: trial for other, trial in self._trials.items() if self._is_going(trial)}
            self._trials[pair] = key

    def did_not(self, pair: Pair, key: int) -> None:
        """There was none, so that it tells nothing."""
        if self._trials.get(pair) == key:
            del self._trials[pair]

    def failed(self, pair: Pair, now: float) -> None:
        """Its KV did not get over. Of several that were on their way together it is one failure."""
        self._trials.pop(pair, None)
        if self._barred.wait_s(pair, now) == 0.0:
            self._barred.failed(pair, now)

    def arrived(self, pair: Pair) -> None:
        """KV got over."""
        self._trials.pop(pair, None)
        self._barred.forgive(pair)
