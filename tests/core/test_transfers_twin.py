"""Random lives of two schedulers that hand over both ways, block by block and beside steps: every text equals its plain run.

What is copied goes into memories that remember what was written where, so that a block that was freed too early, copied too late or read
before it came gives another token. With window layers only what the receiver will ever read is copied, page by page.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest

from octavo.core.request import Request
from octavo.core.step import BlockMove, TokenEvent
from octavo.core.transfers import Transfers
from tests.core.harness import Harness, make_request
from tests.core.kv_memory import plain_run
from tests.core.page_memory import PageMemoryBackend
from tests.core.tier_harness import TierHarness, ToyDisk

PAGES = ((1, 2, 5), (1, 5, 9), (2, 1, 3), (1, 1, 1), (3, 2, 17), (0, 2, 6))


@dataclass
class Move:
    """A hand-off: ``sent`` leading blocks are copied. ``blocks``: the receiver's, while reserved. ``tokens``: once it is offered."""

    request: Request
    sender: int
    num_tokens: int
    blocks: list[int] | None = None
    tokens: list[int] | None = None
    sent: int = 0


class Lives:
    """Two engines of one kind and all that goes between them. ``counts``: of what happened."""

    def __init__(self, seed: int, pages: tuple[int, int, int] | None, tiers: str = "none") -> None:
        rng = self.rng = random.Random(seed)
        caching = rng.random() < 0.8 or tiers != "none"
        options = {
            "block_size": rng.choice((1, 3, 4)),
            "max_num_seqs": rng.randint(2, 5),
            "budget": rng.randint(4, 12),
            "caching": caching,
            "lookahead": rng.choice((1, 8)),
            "granularity": rng.choice(("block", "token")) if caching else "block",
            "preemption": rng.choice(("recompute", "swap")),
            "num_host_blocks": rng.choice((0, 12)),
            "pages": pages,
        }
        self.size: int = options["block_size"]  # type: ignore[assignment]
        self.sides = [self.side(rng.randint(8, 24) * 4 // self.size, tiers, options) for _ in range(2)]
        self.requests: dict[str, Request] = {}
        self.drawn: dict[str, list[int]] = {}
        self.ended = set[str]()
        self.moves: list[Move] = []
        self.counts = Counter[str]()

    def side(self, num_blocks: int, tiers: str, options: dict[str, Any]) -> Harness:
        if tiers == "none":
            return Harness(num_blocks, **options)
        disk = ToyDisk(2, 0.1, self.rng.randrange(100)) if tiers == "disk" else None
        return TierHarness(self.rng.choice((4, 16, 32)), disk, num_blocks=num_blocks, **options)

    def transfers(self, place: int) -> Transfers:
        return self.sides[place].scheduler.transfers

    def move(self) -> None:
        rng, what = self.rng, self.rng.random()
        if what < 0.06:
            self.add(rng.randrange(2))
        elif what < 0.55:
            self.half_step(rng.randrange(2))
        elif self.moves:
            one = rng.choice(self.moves)
            if what < 0.65:
                self.reserve(one)
            elif what < 0.85:
                self.copy(one, rng.randint(1, 6))
            elif what < 0.99:
                self.settle(one)
            else:
                self.give_up(one)
        for side in self.sides:
            side.check()

    def add(self, place: int) -> None:
        rng = self.rng
        prompt = [rng.randrange(3) for _ in range(rng.randint(1, 20))]
        if self.requests and rng.random() < 0.5:
            prompt = self.requests[rng.choice(sorted(self.requests))].prompt_token_ids + prompt[:2]
        max_tokens = rng.randint(1, 12)
        if len(prompt) + max_tokens > min(side.scheduler.limits.max_total_tokens for side in self.sides):
            return
        request = make_request(f"r{len(self.requests)}", prompt, rng.randrange(3), max_tokens=max_tokens, ignore_eos=rng.random() < 0.7)
        self.sides[place].scheduler.add(request)
        self.requests[request.request_id], self.drawn[request.request_id] = request, []
        if max_tokens > 1 and rng.random() < 0.7:
            self.moves.append(Move(request, place, len(prompt)))

    def half_step(self, place: int) -> None:
        side = self.sides[place]
        if isinstance(side, TierHarness) and side.pending is None:
            side.begin_once()
        elif side.pending is None:
            plan = side.scheduler.plan()
            side.pending = None if plan is None else side.backend.execute(plan)
        else:
            result, side.pending = side.pending, None
            self.take(place, side.scheduler.apply(result))

    def take(self, place: int, events: list[TokenEvent]) -> None:
        for event in events:
            self.drawn[event.request_id] += event.token_ids
            if event.finish_reason is not None:
                self.ended.add(event.request_id)
        for one in [m for m in self.moves if m.sender == place and m.tokens is None]:
            name = one.request.request_id
            if name in self.ended:
                self.give_up(one)
            elif self.drawn[name]:
                one.tokens = self.transfers(place).offer(name)
                assert one.tokens == self.drawn[name] and len(one.tokens) == 1, "it decoded further"

    def reserve(self, one: Move) -> None:
        if one.blocks is None:
            found = self.transfers(1 - one.sender).reserve(one.request, one.num_tokens)
            if found is not None:
                one.blocks = found.blocks
                self.save(self.sides[1 - one.sender], found.saves)
            self.counts["reserved" if one.blocks is not None else "no room"] += 1
            self.counts["early"] += one.blocks is not None and one.tokens is None

    def save(self, side: Harness, saves: list[BlockMove]) -> None:
        """What is evicted for a reservation: into host memory, or lost on the way."""
        if not saves:
            return
        assert isinstance(side, TierHarness)
        side.spill()
        if self.rng.random() < 0.2:
            side.tiers.lost(saves)
            return
        for move in saves:
            side.backend._save(move)
        self.counts["saved late"] += 1

    def copy(self, one: Move, most: int) -> None:
        """Full blocks as they come, the last when the prompt is done; a sequence that was preempted goes on from what was sent."""
        seq = self.transfers(one.sender).sender_sequence(one.request.request_id)
        if seq is None or one.blocks is None:
            return
        whole = seq.num_computed >= one.num_tokens
        ready = -(-one.num_tokens // self.size) if whole else seq.num_computed // self.size
        while one.sent < ready and most:
            self.counts["streamed"] += not whole
            self.copy_block(one, seq.block_table[one.sent], one.blocks[one.sent])
            one.sent, most = one.sent + 1, most - 1

    def copy_block(self, one: Move, src: int, dst: int) -> None:
        mine, other = (self.sides[place].backend for place in (one.sender, 1 - one.sender))
        other.memory[dst] = list(mine.memory[src])
        if not isinstance(mine, PageMemoryBackend) or not isinstance(other, PageMemoryBackend):
            return
        layout = mine.layout
        assert layout.window is not None
        passed = max(0, one.num_tokens - layout.window + 1) // self.size
        src_pages, dst_pages = (
            self.transfers(place).pages_of([block], layout.num_pages) for place, block in ((one.sender, src), (1 - one.sender, dst))
        )
        for column in range(layout.num_pages if one.sent >= passed else layout.num_full):
            other.pages[dst_pages[column]][:] = mine.pages[src_pages[column]]

    def settle(self, one: Move) -> None:
        if one.tokens is None or one.blocks is None or one.sent < -(-one.num_tokens // self.size):
            return
        exact = self.rng.random() < 0.6
        self.transfers(1 - one.sender).begin(one.request.request_id, one.tokens, exact)
        self.transfers(one.sender).release(one.request.request_id)
        self.moves.remove(one)
        kv, seq = self.sides[1 - one.sender].scheduler.kv, self.transfers(1 - one.sender).sender_sequence(one.request.request_id)
        assert seq is not None
        if kv.index is not None:
            assert sum(map(kv.index.offers, seq.block_table)) == (one.num_tokens // self.size if exact else 0)
        self.counts["begun" if exact else "begun, rounded"] += 1

    def give_up(self, one: Move) -> None:
        if one.blocks is not None:
            self.transfers(1 - one.sender).cancel(one.request.request_id)
        if one.tokens is not None:
            self.transfers(one.sender).resume(one.request.request_id)
            self.counts["resumed"] += 1
        self.moves.remove(one)

    def end(self) -> None:
        """Everything runs to its end, and is what it would have been without any of this."""
        for one in list(self.moves):
            self.give_up(one)
        for place, side in enumerate(self.sides):
            while side.pending is not None or side.scheduler.has_work:
                self.half_step(place)
                side.check()
            assert side.scheduler.num_used_blocks == 0
        assert self.ended == set(self.requests)
        for name, request in self.requests.items():
            want = plain_run(request, 0, min(side.scheduler.limits.max_total_tokens for side in self.sides))
            assert self.drawn[name] == want.token_ids, name


@pytest.mark.parametrize("pages", [None, *PAGES], ids=str)
def test_texts_are_the_plain_ones(pages: tuple[int, int, int] | None) -> None:
    counts = Counter[str]()
    for seed in range(4):
        lives = Lives(seed, pages)
        for _ in range(300):
            lives.move()
        lives.end()
        counts += lives.counts
    for what in ("begun", "begun, rounded", "resumed", "early", "streamed", "no room"):
        assert counts[what] > 0, f"{what}: {counts}"


@pytest.mark.parametrize("pages", [None, PAGES[1]], ids=str)
@pytest.mark.parametrize("tiers", ["host", "disk"])
def test_texts_are_the_plain_ones_with_what_was_evicted_for_others(tiers: str, pages: tuple[int, int, int] | None) -> None:
    """Blocks that are reserved were the prefix cache's: what comes back from the tiers is what was in them."""
    counts, num_hits = Counter[str](), 0
    for seed in range(4):
        lives = Lives(100 + seed, pages, tiers)
        for _ in range(300):
            lives.move()
        lives.end()
        counts += lives.counts
        num_hits += sum(side.tiers.stats.host_hit_tokens for side in lives.sides if isinstance(side, TierHarness))
    assert min(counts["saved late"], counts["begun"], num_hits) > 0, f"{num_hits}: {counts}"
