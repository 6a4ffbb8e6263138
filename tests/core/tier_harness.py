"""The harness with tiers: host memory, and a disk that answers late or not at all, both holding what was written where."""

from __future__ import annotations

import random
from typing import Any

from octavo.core.kv_tiers import BlockRef, KVTiers
from octavo.core.step import StepPlan, StepResult
from tests.core.harness import Harness
from tests.core.kv_memory import UNWRITTEN, KVMemoryBackend
from tests.core.page_memory import PageMemoryBackend

Contents = Any  # of a host block, as the backend reads it


class TokenCost:
    """A RestoreCost: a millisecond per token; restoring pays from ``min_tokens`` on."""

    def __init__(self, min_tokens: int = 1) -> None:
        self.min_tokens = min_tokens

    def recompute_s(self, start: int, num_tokens: int) -> float:
        return 1e-3 * num_tokens

    def load_s(self, num_blocks: int) -> float:
        return 1e-3 * num_blocks

    def restoring_pays(self, start: int, num_tokens: int, num_host_blocks: int, num_disk_blocks: int) -> bool:
        return num_tokens >= self.min_tokens


class ToyDisk:
    """Blocks by key. A read takes ``latency`` ticks per block, and fails with probability ``failing``; the block is then gone."""

    def __init__(self, latency: int, failing: float, seed: int) -> None:
        self.blocks: dict[bytes, tuple[BlockRef, Contents]] = {}
        self._latency, self._failing, self._random = latency, failing, random.Random(seed)
        self._batches: list[list[BlockRef]] = []
        self._ticks = 0

    def __contains__(self, key: bytes) -> bool:
        return key in self.blocks

    def read(self, refs: list[BlockRef]) -> None:
        self._batches.append(refs)

    def tick(self) -> list[tuple[BlockRef, Contents | None]]:
        """What arrives now."""
        self._ticks += 1
        if not self._batches or self._ticks < self._latency:
            return []
        self._ticks = 0
        ref = self._batches[0].pop(0)
        if self._random.random() < self._failing:
            self.blocks.pop(ref.key, None)
        found = self.blocks.get(ref.key)
        arrived = [(ref, found[1] if found is not None and found[0] == ref else None)]
        if arrived[0][1] is None:
            arrived += [(lost, None) for lost in self._batches[0]]
            self._batches[0].clear()
        if not self._batches[0]:
            self._batches.pop(0)
        return arrived


class TierBackend(KVMemoryBackend):
    def execute(self, plan: StepPlan) -> StepResult:
        for move in plan.block_saves:
            if move.host_block >= self.first_tier_block:
                assert UNWRITTEN not in self.memory[move.pool_block], "a block is saved that was not computed"
        return super().execute(plan)

    first_tier_block = 0


class PageTierBackend(PageMemoryBackend):
    first_tier_block = 0


class TierHarness(Harness):
    """``num_tier_blocks`` of host memory behind ``num_host_blocks`` for swapping. ``disk`` None: they are the last tier.

    Every plan and every look at the disk is a tick of a millisecond.
    """

    def __init__(
        self, num_tier_blocks: int = 8, disk: ToyDisk | None = None, min_tokens: int = 1, rounds: bool = False, **sizes: Any
    ) -> None:
        super().__init__(**sizes)
        size, num_blocks, num_swap = self.backend.block_size, len(self.backend.memory), len(self.backend.host)
        backend: TierBackend | PageTierBackend = TierBackend(num_blocks, size, num_swap + num_tier_blocks)
        if isinstance(self.backend, PageMemoryBackend):
            layout = self.backend.layout
            backend = PageTierBackend(len(self.backend.pages) // layout.num_pages, num_blocks, size, layout, num_swap + num_tier_blocks)
        self.backend = backend
        backend.first_tier_block = num_swap
        self.tiers = KVTiers(num_tier_blocks, size, TokenCost(min_tokens), disk, num_swap, rounds)
        self.scheduler._state.kv.attach_tiers(self.tiers)
        self.disk = disk
        self.now_s = 0.0

    def tick(self) -> None:
        self.now_s += 1e-3
        if self.disk is None:
            return
        for refs in self.tiers.take_reads():
            self.disk.read(refs)
        for ref, contents in self.disk.tick():
            if contents is None:
                self.tiers.read_failed(ref)
                continue
            host_block = self.tiers.arrived(ref)
            self.spill()
            if host_block is not None:
                self.backend.write_host(host_block, contents)
        self.check()

    def spill(self) -> None:
        for ref, host_block in self.tiers.take_spills():
            assert self.disk is not None
            self.disk.blocks[ref.key] = (ref, self.backend.read_host(host_block))

    def begin_once(self) -> StepPlan | None:
        """Plan and execute; None when there is nothing to do now, which may be because of the disk."""
        self.tick()
        drafts = {} if self.guess is None else {seq.seq_id: self.guess(seq) for seq in self.scheduler.decoding_sequences}
        plan = self.scheduler.plan(self.now_s, drafts)
        self.check()
        if plan is not None:
            self.spill()
            self.plans.append(plan)
            self.pending = self.backend.execute(plan)
        return plan

    def begin(self) -> StepPlan | None:
        plan = self.begin_once()
        while plan is None and self.scheduler.has_work:
            plan = self.begin_once()
        return plan

    def flush(self) -> None:
        """At the end: everything that is not on disk goes there, the pool's blocks through host memory."""
        assert self.disk is not None
        self.spill()
        for entry in self.tiers.entries():
            self.disk.blocks[entry.ref.key] = (entry.ref, self.backend.read_host(entry.host_block))
        self.tiers.vacate(self.tiers.num_host_blocks)
        for ref, block in self.scheduler.evictable_blocks():
            self.disk.blocks[ref.key] = (ref, list(self.backend.memory[block]))
