"""Token masks: which ids may come next, as packed bits. Standard library only.

A mask has ceil(vocab_size / 32) uint32 words; bit t % 32 of word t // 32 set means token t is allowed. It is the one hook by
which a set of ids restricts a draw: ``allowed_token_ids`` goes through it, and so does any grammar. Masks combine by AND.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

BITS_PER_WORD = 32


def num_mask_words(vocab_size: int) -> int:
    return (vocab_size + BITS_PER_WORD - 1) // BITS_PER_WORD


def mask_from_ids(ids: Iterable[int], vocab_size: int) -> array:
    """The mask that allows exactly ``ids``; repeats are fine. Raises ValueError for an id outside 0 .. vocab_size - 1."""
    mask = array("I", bytes(4 * num_mask_words(vocab_size)))
    for token in ids:
        if not 0 <= token < vocab_size:
            raise ValueError(f"mask: token id {token} is not in 0 .. {vocab_size - 1}")
        mask[token // BITS_PER_WORD] |= 1 << token % BITS_PER_WORD
    return mask
