"""KV memory as engines before paging kept it: a sequence gets one contiguous chunk for its whole life when it is admitted.

The baselines of the PagedAttention paper (Kwon et al., SOSP 2023, section 6.1), after Orca (Yu et al., OSDI 2022), with a buddy allocator
over the same pool. What a sequence reserves, in tokens:

    max      the longest sequence there can be (max_model_len)
    pow2     its prompt, and its output length rounded up to a power of two (25 -> 32)
    oracle   its prompt and its exact output length

The output length is taken from ``max_tokens``: in a benchmark that ignores the end of text this is the true length, which pow2 and oracle
are assumed to know; of a live request it is an upper bound, so a reservation is never outgrown and nobody is ever preempted for blocks.
The last token of a sequence needs no KV, so oracle reserves one slot less than there are tokens.

``ReservedLimits`` says what fits, ``ReservedKV`` stands in for ``KVManager``: the same block tables for the same kernels, whose ids now
come from the sequence's own chunk. Nothing is shared: there is no prefix cache, and each choice of a request has a chunk of its own and
a copy of the prompt in it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from octavo.config import CacheConfig, ConfigError, check_reservation
from octavo.core.buddy import BuddyAllocator, Chunk, chunk_size
from octavo.core.kv_manager import KVManager
from octavo.core.kv_pages import PageNeeds
from octavo.core.limits import LengthLimits
from octavo.core.occupancy import KVOccupancy
from octavo.core.prefix_match import PrefixMatch
from octavo.core.request import ParameterError, Request, Sequence
from octavo.core.step import BlockCopy


@dataclass(frozen=True, slots=True)
class ReservedLimits(LengthLimits):
    """``num_blocks`` is the largest chunk of the pool, the most that one sequence can hold; ``num_pool_blocks`` the whole pool."""

    reservation: str
    num_pool_blocks: int

    @classmethod
    def of(cls, reservation: str, max_model_len: int, num_pool_blocks: int, block_size: int) -> ReservedLimits:
        """ConfigError when the policy is "max" and no chunk holds ``max_model_len`` tokens."""
        limits = cls(max_model_len, 1 << (num_pool_blocks.bit_length() - 1), block_size, reservation, num_pool_blocks)
        if reservation == "max" and max_model_len > limits.num_pool_tokens:
            chunk = f"{limits.num_pool_tokens} tokens ({limits.num_blocks} of {num_pool_blocks} blocks of {block_size})"
            raise ConfigError(
                f"kv_reservation: 'max' is not allowed; every sequence would reserve max_model_len ({max_model_len}) tokens, and the "
                f"largest chunk of the KV pool, a power of two, holds {chunk}"
            )
        return limits

    def check_prompt(self, request: Request) -> None:
        """Also: all choices, which reserve a chunk each, fit into the pool together. Beams, which come and go, are refused."""
        LengthLimits.check_prompt(self, request)
        if request.params.beam is not None:
            limit = f"beam search needs kv_reservation paged, not {self.reservation}: its beams share blocks"
            raise ParameterError("beam_width", request.params.beam.width, limit)
        num_chunk = chunk_size(self.reserved_blocks(request))
        most = self.num_pool_blocks // num_chunk  # chunks begin at multiples of their size
        if request.params.n > most:
            chunks = f"each choice reserves {num_chunk} of the {self.num_pool_blocks} KV blocks"
            raise ParameterError("n", request.params.n, f"at most {most} with kv_reservation {self.reservation}: {chunks}")

    def reserved_tokens(self, request: Request) -> int:
        """Slots that each choice of ``request`` reserves: at least ``final_tokens``, at most what the largest chunk holds."""
        if self.reservation == "max":
            return self.max_model_len
        if self.reservation == "oracle":
            return self.final_tokens(request)
        num_output = self.max_output_tokens(request)
        rounded = len(request.prompt_token_ids) + (chunk_size(num_output) if num_output else 0)
        return min(rounded, self.max_model_len, self.num_pool_tokens)

    def reserved_blocks(self, request: Request) -> int:
        return -(-self.reserved_tokens(request) // self.block_size)


class ReservedKV(KVManager):
    """Blocks of a chunk count as used from the reservation to the release, whether they are in the table yet or not."""

    def __init__(self, limits: ReservedLimits) -> None:
        super().__init__(limits.num_pool_blocks, limits.block_size, enable_prefix_caching=False)
        self.limits = limits
        self.buddy = BuddyAllocator(limits.num_pool_blocks)
        self._chunks: dict[int, list[Chunk]] = {}  # by seq_id: its own, then those of the choices to come
        self._copies: dict[int, list[BlockCopy]] = {}  # by seq_id: of the prompt of a choice that has just come to be

    def can_admit(self, seq: Sequence, match: PrefixMatch, num_spare: int) -> bool:
        """Whether there is a chunk for each choice. Nobody grows beyond what is reserved, so no blocks have to be kept spare."""
        return self.buddy.num_available(self.limits.reserved_blocks(seq.request)) >= seq.num_choices

    def reserve(self, seq: Sequence) -> None:
        """Take a chunk for each choice; ``can_admit`` has said that they are there."""
        chunks = [self.buddy.allocate(self.limits.reserved_blocks(seq.request)) for _ in range(seq.num_choices)]
        taken = self._chunks[seq.seq_id] = [chunk for chunk in chunks if chunk is not None]
        assert len(taken) == seq.num_choices, f"sequence {seq.seq_id} was admitted without room"
        for chunk in taken:
            for block in _blocks_of(chunk):
                self.pool.take(block)

    def grow(self, seq: Sequence, num_tokens: int, copies: list[BlockCopy]) -> bool:
        """Always True: the next ``num_tokens`` positions are in the sequence's chunk."""
        chunk, table = self._chunks[seq.seq_id][0], seq.block_table
        num_blocks = self.blocks_for(seq.num_computed + num_tokens)
        assert num_blocks <= chunk.num_units, f"sequence {seq.seq_id} needs {num_blocks} blocks and has reserved {chunk.num_units}"
        table.extend(range(chunk.first + len(table), chunk.first + num_blocks))
        return True

    def num_to_grow(self, group: Iterable[Sequence]) -> int:
        """None: what a sequence grows into is its own already."""
        return 0

    def truncate(self, seq: Sequence) -> None:
        """Blocks behind the computed tokens leave the table and stay reserved."""
        del seq.block_table[self.blocks_for(seq.num_computed) :]

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """``child`` gets the next of the parent's chunks, and with the next plan a copy of the parent's blocks in it."""
        chunk = self._chunks[parent.seq_id].pop(1)
        self._chunks[child.seq_id] = [chunk]
        child.block_table = array("i", range(chunk.first, chunk.first + len(parent.block_table)))
        self._copies[child.seq_id] = [BlockCopy(src, dst) for src, dst in zip(parent.block_table, child.block_table, strict=True)]

    def take_copies(self) -> list[BlockCopy]:
        """Copies that come first in the next plan, before anything is computed: the parent's blocks may be another's by then."""
        copies = [copy for made in self._copies.values() for copy in made]
        self._copies.clear()
        return copies

    def release(self, seq: Sequence, forget: bool) -> None:
        """Give back the whole reservation, of the choices to come too. A sequence that was preempted reserves again when it comes back."""
        self._copies.pop(seq.seq_id, None)
        for chunk in self._chunks.pop(seq.seq_id, ()):
            for block in _blocks_of(chunk):
                self.pool.release(block, keep=False)
            self.buddy.release(chunk)
        seq.block_table = array("i")

    def occupancy(self, holders: Iterable[tuple[Sequence, int]]) -> KVOccupancy:
        """As ``KVManager.occupancy``; the chunks of choices to come are empty."""
        found = KVOccupancy(self.pool.num_blocks * self.block_size, num_free=self.pool.num_free * self.block_size)
        for seq, num_final in holders:
            num_reserved = self.limits.reserved_tokens(seq.request)
            for i, chunk in enumerate(self._chunks.get(seq.seq_id, ())):
                num_written = seq.num_computed + seq.num_scheduled if i == 0 else 0
                found.num_token_states += num_written
                found.num_to_come += num_final - num_written
                found.num_never += num_reserved - num_final
                found.num_rounding += chunk.num_units * self.block_size - num_reserved
        return found

    def check_invariants(self, holders: Iterable[Sequence]) -> None:
        from octavo.core.kv_checks import check_table

        holders = list(holders)
        self.pool.check_invariants()
        self.buddy.check_invariants()
        assert self._chunks.keys() == {seq.seq_id for seq in holders}, "a chunk is nobody's, or a sequence has none"
        chunks = [chunk for held in self._chunks.values() for chunk in held]
        assert sorted(chunks) == self.buddy.taken_chunks(), f"sequences hold {sorted(chunks)}, the allocator {self.buddy.taken_chunks()}"
        counts = [0] * self.pool.num_blocks
        for chunk in chunks:
            for block in _blocks_of(chunk):
                counts[block] = 1
        assert counts == self.pool.ref_counts, "the pool counts other blocks than those in chunks"
        assert self._copies.keys() <= self._chunks.keys(), "a copy is left for a sequence that is gone"
        for seq in holders:
            held = self._chunks[seq.seq_id]
            assert len(held) == seq.num_choices, f"sequence {seq.seq_id} has {len(held)} chunks for {seq.num_choices} choices"
            first, table = held[0].first, seq.block_table
            assert list(table) == list(range(first, first + len(table))), f"the blocks of sequence {seq.seq_id} are not contiguous"
            assert len(table) <= held[0].num_units, f"sequence {seq.seq_id} holds blocks outside its chunk"
            check_table(self, seq)


def kv_of(
    cache: CacheConfig, num_blocks: int, max_model_len: int, fingerprint: str, needs: PageNeeds | None = None
) -> tuple[LengthLimits, KVManager]:
    """Limits and books of the KV memory that ``cache`` names; ``needs`` where blocks are made of pages, which reservations are not.

    ConfigError when the pool is too small for a reservation.
    """
    if cache.kv_reservation == "paged":
        by_token = cache.prefix_granularity == "token"
        if needs is not None:
            from octavo.core.kv_groups import GroupedKV, GroupedLimits

            grouped = GroupedKV(num_blocks, needs, cache.enable_prefix_caching, fingerprint, by_token)
            return GroupedLimits(max_model_len, num_blocks, cache.block_size, needs, grouped.pool.num_ids), grouped
        manager = KVManager(num_blocks, cache.block_size, cache.enable_prefix_caching, fingerprint, by_token)
        return LengthLimits(max_model_len, num_blocks, cache.block_size), manager
    check_reservation(cache)
    limits = ReservedLimits.of(cache.kv_reservation, max_model_len, num_blocks, cache.block_size)
    return limits, ReservedKV(limits)


def _blocks_of(chunk: Chunk) -> range:
    return range(chunk.first, chunk.first + chunk.num_units)
