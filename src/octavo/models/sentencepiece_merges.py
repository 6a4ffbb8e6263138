"""The merges that a SentencePiece vocabulary implies when its file holds only scores.

Owns one computation, done on arrays because Gemma has 262,144 tokens and about two million ways to cut them in two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

_MULTIPLIER = 0x9E3779B97F4A7C15  # odd, so it has an inverse modulo 2^64
_CHUNK_TOKENS = 1 << 13  # at a time, so that what is computed on them stays in the cache and takes little memory
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
    import numpy as np

    powers, inverse_powers = _all_powers(max(map(len, tokens)))
    table = _HashTable(_whole_hashes(tokens, powers))
    texts = np.array(tokens, dtype=object)  # indexed by arrays in half the time of a list
    merges: list[tuple[str, str]] = []
    for begin in range(0, len(tokens), _CHUNK_TOKENS):
        prefixes, suffixes = _cut_hashes(tokens[begin : begin + _CHUNK_TOKENS], powers, inverse_powers)
        left = table.find(prefixes)
        cuts = (left >= 0).nonzero()[0]
        right = table.find(suffixes[cuts])
        both = (right >= 0).nonzero()[0]
        merges += zip(texts[left[cuts[both]]].tolist(), texts[right[both]].tolist(), strict=True)
    return merges


@dataclass(frozen=True, slots=True)
class _Characters:
    """Texts character by character. The hash of c0..cn-1 is the sum of mix(ci) * M^i modulo 2^64."""

    lengths: np.ndarray  # int64 [texts]
    ends: np.ndarray  # int64 [texts], of each text in what follows
    position: np.ndarray  # int64 [characters], of each in its text, from 1
    sums: np.ndarray  # uint64 [characters], of the terms up to and with each, from the first text on


def _characters(texts: Sequence[str], powers: np.ndarray) -> _Characters:
    import numpy as np

    lengths = np.fromiter(map(len, texts), dtype=np.int64, count=len(texts))
    ends = np.cumsum(lengths)
    terms = np.frombuffer("".join(texts).encode("utf-32-le"), dtype=np.uint32).astype(np.uint64)
    position = np.arange(1, len(terms) + 1) - np.repeat(ends - lengths, lengths)
    terms *= np.uint64(_MIXERS[0])
    terms ^= terms >> np.uint64(32)
    terms *= powers[position - 1]
    return _Characters(lengths, ends, position, np.cumsum(terms))


def _whole(chars: _Characters) -> tuple[np.ndarray, np.ndarray]:
    """uint64 [texts]: the hash of each text, and the sums before it."""
    import numpy as np

    before = np.zeros(len(chars.lengths), np.uint64)
    before[1:] = chars.sums[chars.ends[:-1] - 1]
    return chars.sums[chars.ends - 1] - before, before


def _whole_hashes(tokens: Sequence[str], powers: np.ndarray) -> np.ndarray:
    """Mixed hashes, uint64 [tokens]."""
    import numpy as np

    chunks = (tokens[begin : begin + _CHUNK_TOKENS] for begin in range(0, len(tokens), _CHUNK_TOKENS))
    return np.concatenate([_whole(_characters(chunk, powers))[0] for chunk in chunks]) * np.uint64(_MIXERS[1])


def _cut_hashes(tokens: Sequence[str], powers: np.ndarray, inverse_powers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mixed hashes, uint64 [cuts], of what is left and right of each cut, token by token.

    Prefixes are running sums, suffixes differences.
    """
    import numpy as np

    chars = _characters(tokens, powers)
    whole, before = _whole(chars)
    inside = np.ones(len(chars.sums), dtype=bool)
    inside[chars.ends - 1] = False  # after the last character there is no cut
    prefixes = (chars.sums - np.repeat(before, chars.lengths))[inside]
    suffixes = (np.repeat(whole, chars.lengths - 1) - prefixes) * inverse_powers[chars.position[inside]]
    mixer = np.uint64(_MIXERS[1])
    return prefixes * mixer, suffixes * mixer


def _all_powers(max_length: int) -> tuple[np.ndarray, np.ndarray]:
    """M^0 .. M^max_length, and those of its inverse."""
    return _powers(_MULTIPLIER, max_length + 1), _powers(pow(_MULTIPLIER, -1, 1 << 64), max_length + 1)


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
