"""How far a prompt was found in the prefix cache, and why no further. Records only; ``prefix_index`` fills them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class MatchEnd(str, Enum):
    """Why a match went no further."""

    COMPLETE = "whole_prompt"  # every token but the last, which always runs
    PART_BLOCK = "part_block"  # what is left fills no block, and only full blocks are shared
    DIFFERENT_TOKEN = "different_token"  # the cache goes on with another token
    EVICTED = "evicted"  # the next full block was cached and has been evicted
    WINDOW_GONE = "window"  # the next block is cached, but layers with a window have given up what they would read before its end
    OTHER_SALT = "salt"  # the first block is cached under another salt
    OTHER_ADAPTER = "adapter"  # the first block is cached under another adapter
    NOT_CACHED = "never_seen"  # nothing beyond here is cached, nor remembered as evicted


@dataclass(frozen=True, slots=True)
class MatchReport:
    """``position``: the first token that the cache does not go on with, which is how many tokens it knows.

    With DIFFERENT_TOKEN ``token_id`` is the prompt's token there and ``expected_id`` a token that the cache has instead. Where only full
    blocks are shared, fewer tokens than ``position`` may have been used.

    ``num_computed`` of the tokens before ``position``, in whole blocks where these alone are shared, the request had computed itself when
    they were found, or what comes after them: an earlier match had ended before them, for the reason ``computed_end``.

    ``missed_end``, with EVICTED and OTHER_SALT: the prompt would have been found up to here, had nothing been evicted or under that salt.
    """

    end: MatchEnd
    position: int
    token_id: int | None = None
    expected_id: int | None = None
    missed_end: int = field(default=0, compare=False)
    num_computed: int = 0
    computed_end: MatchEnd | None = None  # there when num_computed is
