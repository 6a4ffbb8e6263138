"""How likely the next draft of a sequence is right, by the evidence for it: learned from what was verified and what was never drafted.

A proposer's *evidence* (the tokens of context that matched) is the best predictor there is: on texts of a small model, a match of 2
tokens goes on rightly in 0.3 to 0.6 of all cases, of 5 in 0.6 to 0.9, of 20 or more in 0.95 and up. An accepted draft makes the match one
longer. So the chance that j drafts are accepted is a product along growing evidence, and (1 - a^(k+1)) / (1 - a), the expected tokens of
a step with k drafts (Leviathan et al., 2023, equation 1), is the case where evidence says nothing.

Each rate is a Beta mean: the sequence's own trials over those of all sequences over what is built in. Old trials fade. Text is the same
with speculation and without, so every token that came tells whether the draft that was not made would have been right: learning is free.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

_BOUNDS = (1, 2, 3, 4, 5, 6, 8, 12, 20, 32)  # most evidence of each class but the last
NUM_CLASSES = len(_BOUNDS) + 1
LOOKUP_PRIOR = (0.15, 0.4, 0.55, 0.6, 0.7, 0.75, 0.8, 0.88, 0.92, 0.95, 0.97)  # [classes]
MODEL_PRIOR = (0.6,) * NUM_CLASSES  # for drafts of which nothing is known beforehand; draft models reach 0.5 to 0.9
_COUNTED = _BOUNDS[-1] + 1
CLASS_OF = tuple(next((c for c, bound in enumerate(_BOUNDS) if evidence <= bound), NUM_CLASSES - 1) for evidence in range(_COUNTED + 1))
"""[evidence] -> class; more evidence than the last index counts as that."""

_SHARED_MEMORY = 0.99  # weight that a trial keeps when another of its class comes: about the last 100 count
_OWN_MEMORY = 0.95  # the last 20 of a sequence
_SHARED_PRIOR_TRIALS = 6.0  # that the built-in rate is worth
_OWN_PRIOR_TRIALS = 3.0  # that the rate of all sequences is worth
_NEGLIGIBLE = 0.05


class SharedRates:
    """Acceptance by class over all sequences of one method."""

    __slots__ = ("_hits", "_trials", "rates")

    def __init__(self, prior: Seq[float] = LOOKUP_PRIOR) -> None:
        """``prior``: [classes]."""
        self._hits = [_SHARED_PRIOR_TRIALS * rate for rate in prior]
        self._trials = [_SHARED_PRIOR_TRIALS] * NUM_CLASSES
        self.rates = list(prior)

    def add(self, index: int, hit: bool) -> None:
        # The built-in trials fade as well: what was seen of many sequences needs no help.
        hits = self._hits[index] = _SHARED_MEMORY * self._hits[index] + hit
        trials = self._trials[index] = _SHARED_MEMORY * self._trials[index] + 1.0
        self.rates[index] = hits / trials


class SequenceRates:
    """Acceptance by class of one sequence, resting on the shared rates while it has few trials of its own."""

    __slots__ = ("_hits", "_shared", "_trials")

    def __init__(self, shared: SharedRates) -> None:
        self._shared = shared
        self._hits = [0.0] * NUM_CLASSES
        self._trials = [0.0] * NUM_CLASSES

    def add(self, evidence: int, hit: bool) -> None:
        """A draft on this evidence was right, or not; or would have been."""
        index = CLASS_OF[evidence if evidence < _COUNTED else _COUNTED]
        self._hits[index] = _OWN_MEMORY * self._hits[index] + hit
        self._trials[index] = _OWN_MEMORY * self._trials[index] + 1.0
        self._shared.add(index, hit)

    def chances(self, evidence: int, max_drafts: int) -> list[float]:
        """[drafts] the chance that the first j drafts are all accepted; ends where that is negligible. Never rises."""
        out: list[float] = []
        chance, rate, last = 1.0, 0.0, -1
        for j in range(evidence, evidence + max_drafts):
            index = CLASS_OF[j if j < _COUNTED else _COUNTED]
            if index != last:
                last, own = index, self._trials[index]
                rate = (self._hits[index] + _OWN_PRIOR_TRIALS * self._shared.rates[index]) / (own + _OWN_PRIOR_TRIALS)
            chance *= rate
            if chance < _NEGLIGIBLE:
                break
            out.append(chance)
        return out
