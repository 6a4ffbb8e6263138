"""What the slots of the KV pool are used for: token states, slots held for tokens to come, and waste.

The shares are those of Figure 2 of the PagedAttention paper (Kwon et al., SOSP 2023, section 3.1). A *slot* is room for the keys and values
of one token in all layers. Counts only; never moves a block.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from octavo.core.request import Sequence


@dataclass(slots=True)
class KVOccupancy:
    """Slots of the pool by use, at the end of the step in flight. The fields but ``num_slots`` add up to it.

    The first four are *allocated*: in blocks that a sequence holds. A sequence is expected to run to its ``max_tokens``.
    """

    num_slots: int
    num_token_states: int = 0  # hold the keys and values of a token of a running sequence; shared ones count once
    num_to_come: int = 0  # the paper's "reservation": held and empty, for tokens that are still to come
    num_never: int = 0  # "internal fragmentation": held, and never filled
    num_rounding: int = 0  # held because an allocator's chunks are powers of two
    num_cached: int = 0  # in no running sequence; the prefix cache offers them
    num_free: int = 0

    @property
    def num_allocated(self) -> int:
        return self.num_token_states + self.num_to_come + self.num_never + self.num_rounding

    @property
    def num_external(self) -> int:
        """The paper's "external fragmentation and others": of no use to a sequence, whether by an allocator's rounding or by being free."""
        return self.num_rounding + self.num_cached + self.num_free

    @property
    def fill_ratio(self) -> float:
        """Share of the allocated slots that hold a token; nan when none are allocated."""
        return self.num_token_states / self.num_allocated if self.num_allocated else float("nan")


def count_paged(block_size: int, num_used: int, num_cached: int, num_free: int, holders: Iterable[tuple[Sequence, int]]) -> KVOccupancy:
    """Of a pool whose sequences take blocks one by one and may share them. ``num_used``, ``num_cached``, ``num_free``: blocks.

    ``holders``: the sequences that hold blocks, each with the number of tokens whose KV it will have written when it has run to its end.
    """
    empty: dict[int, tuple[int, int]] = {}  # block that is not full -> (empty slots, those of them for tokens to come)
    for seq, num_final in holders:
        num_written, table = seq.num_computed + seq.num_scheduled, seq.block_table
        for i in range(num_written // block_size, len(table)):
            start = max(num_written, i * block_size)
            num_empty = (i + 1) * block_size - start
            num_to_come = min(num_final - start, num_empty)
            empty[table[i]] = num_empty, num_to_come  # equal for all who share it: only choices of a request share a part-filled block
    num_empty, num_to_come = (sum(pair[k] for pair in empty.values()) for k in (0, 1))
    found = KVOccupancy((num_used + num_cached + num_free) * block_size)
    found.num_token_states = num_used * block_size - num_empty
    found.num_to_come, found.num_never = num_to_come, num_empty - num_to_come
    found.num_cached, found.num_free = num_cached * block_size, num_free * block_size
    return found
