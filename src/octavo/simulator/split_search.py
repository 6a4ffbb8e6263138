"""The best split of a cluster into machines for prompts and machines for tokens: which splits are tried, and in what order. Runs nothing
itself."""

from __future__ import annotations

from collections.abc import Callable


class SplitSearch:
    """Splits of one design, by their number of prompt machines. ``num_token`` of these: token machines that there are beside them; below 1:
    there are too many of them. ``rates`` of a split and of the best rate so far, 0 before the first: (the highest rate at which it holds,
    the lowest at which it was seen to fail); whether it holds above the best rate is all that has to be found out.

    ``best``: of those that hold at the highest rate, ``holds_at``, the first that was found; 0: there is none to be tried. ``tried``: with
    the lowest rate at which each was seen to fail.
    """

    def __init__(self, num_token: Callable[[int], int], rates: Callable[[int, float], tuple[float, float]]) -> None:
        self.tried: dict[int, float] = {}
        self.best = 0
        self.holds_at = 0.0
        self._num_token, self._rates = num_token, rates

    def run(self, num_given: int, num_splits: int) -> None:
        """Try the given number of prompt machines, then ``num_splits`` evenly, then halve the distance to the best."""
        most = 1
        while self._num_token(most + 1) >= 1:
            most += 1
        distance = max(1, round(most / num_splits))
        self._try(min(max(num_given, 1), most))
        for num_prompt in range(distance, most + 1, distance):
            self._try(num_prompt)
        while distance > 1:
            distance = (distance + 1) // 2
            for num_prompt in (self.best - distance, self.best + distance):
                self._try(num_prompt)

    def _try(self, num_prompt: int) -> None:
        """One that there cannot be, or that was tried, changes nothing."""
        if num_prompt < 1 or num_prompt in self.tried or self._num_token(num_prompt) < 1:
            return
        holds_at, fails_at = self._rates(num_prompt, self.holds_at)
        if not self.tried or holds_at > self.holds_at:
            self.best, self.holds_at = num_prompt, holds_at
        self.tried[num_prompt] = fails_at
