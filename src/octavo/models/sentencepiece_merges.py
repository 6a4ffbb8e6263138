"""The merges that a SentencePiece vocabulary implies when its file holds only scores.

Owns one computation, done on arrays because Gemma has 262,144 tokens and about two million ways to cut them in two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

_MULTIPLIER = 0x9E3779B97F4A7C15  # odd, so it has an inverse modulo 2^64
_MIXERS = (0xD6E8FEB86659FD93, 0xFF51AFD7ED558CCD)


def derive(tokens: Sequence[str]) -> list[tuple[str, str]]:
    """Every (left, right) with left, right and left + right in ``tokens``, in the order of left + right.

    ``tokens`` are non-empty, best-scored first. BPE with these merges is SentencePiece's BPE, which always joins the adjacent
    pair whose union is the best-scored token (Kudo and Richardson, 2018).

    Tokens, prefixes and suffixes are compared by a 64-bit hash. Two strings of a file made to collide would yield a merge whose
    union is no token, which the merging library refuses.
    """
    if not tokens:
        return []
    whole, prefixes, suffixes = _hashes(tokens)
    table = _HashTable(whole)
    left = table.find(prefixes)
    cuts = (left >= 0).nonzero()[0]
    right = table.find(suffixes[cuts])
    both = (right >= 0).nonzero()[0]
    text_of = tokens.__getitem__
    return list(zip(map(text_of, left[cuts[both]].tolist()), map(text_of, right[both].tolist()), strict=True))


def _hashes(tokens: Sequence[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Hashes [tokens] of the tokens, and [cuts] of what is left and right of each cut, token by token.

    The hash of c0..cn-1 is the sum of mix(ci) * M^i modulo 2^64, so that prefixes are running sums and suffixes differences.
    """
    import numpy as np

    lengths = np.fromiter(map(len, tokens), dtype=np.int64, count=len(tokens))
    ends = np.cumsum(lengths)
    terms = np.frombuffer("".join(tokens).encode("utf-32-le"), dtype=np.uint32).astype(np.uint64)  # [characters of all tokens]
    position = np.arange(1, len(terms) + 1) - np.repeat(ends - lengths, lengths)  # characters up to and with this one
    powers = _powers(_MULTIPLIER, int(lengths.max()) + 1)
    inverse_powers = _powers(pow(_MULTIPLIER, -1, 1 << 64), int(lengths.max()) + 1)

    terms *= np.uint64(_MIXERS[0])
    terms ^= terms >> np.uint64(32)
    terms *= powers[position - 1]
    sums = np.cumsum(terms)
    before = np.zeros(len(lengths), np.uint64)
    before[1:] = sums[ends[:-1] - 1]
    whole = sums[ends - 1] - before
    prefixes = sums - np.repeat(before, lengths)
    suffixes = (np.repeat(whole, lengths) - prefixes) * inverse_powers[position]
    inside = np.ones(len(sums), dtype=bool)
    inside[ends - 1] = False  # after the last character there is no cut
    mixer = np.uint64(_MIXERS[1])
    return whole * mixer, prefixes[inside] * mixer, suffixes[inside] * mixer


def _powers(base: int, count: int) -> np.ndarray:
    """base^0 .. base^(count - 1) modulo 2^64."""
    import numpy as np

    factors = np.full(count, base, np.uint64)
    factors[0] = 1
    return np.cumprod(factors)


class _HashTable:
    """Open addressing with linear probing on whole arrays: each round settles every key whose slot is its own."""

    def __init__(self, keys: np.ndarray) -> None:
        import numpy as np

        bits = max(4, (4 * len(keys)).bit_length())  # at most a quarter full
        self._keys, self._shift, self._mask = keys, np.uint64(64 - bits), (1 << bits) - 1
        self._slots = np.full(1 << bits, -1, dtype=np.int32)
        pending = np.arange(len(keys), dtype=np.int32)
        slot = self._first_slot(keys)
        while len(pending):
            free = self._slots[slot] < 0
            self._slots[slot[free]] = pending[free]
            settled = self._keys[self._slots[slot]] == keys[pending]  # itself, or an equal token
            pending, slot = pending[~settled], (slot[~settled] + 1) & self._mask

    def _first_slot(self, keys: np.ndarray) -> np.ndarray:
        return (keys >> self._shift).view("int64")

    def find(self, keys: np.ndarray) -> np.ndarray:
        """For each key the index of an equal one in the table, or -1."""
        import numpy as np

        index = self._slots[self._first_slot(keys)]
        open_ = ((index >= 0) & (self._keys[index] != keys)).nonzero()[0]
        slot = self._first_slot(keys[open_])
        while len(open_):
            slot = (slot + 1) & self._mask
            found = self._slots[slot]
            index[open_] = found
            go_on = (found >= 0) & (self._keys[found] != keys[open_])
            open_, slot = open_[go_on], slot[go_on]
        return np.asarray(index)
