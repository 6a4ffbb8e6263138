"""The scheduler once more, slow and obvious: what the next plan must hold, by counting everything afresh.

No reference counts, keys, hashes, cursors or free lists: a block is a Python object, who holds it is found by looking into every table, and
the prefix cache is a dict from (salt, all tokens so far) to a block, full or (where single tokens are shared) part-filled. Tokens and
endings are told to it; it only decides who runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.core.request import Request
from octavo.core.step import TokenEvent

Prefix = tuple[str | None, tuple[int, ...]]


class TwinBlock:
    """Room for ``block_size`` tokens."""


@dataclass(eq=False)
class TwinSequence:
    request: Request
    choice: int
    num_choices: int
    tokens: list[int]
    computed: int = 0
    scheduled: int = 0
    table: list[TwinBlock] = field(default_factory=list)

    @property
    def gap(self) -> int:
        return len(self.tokens) - self.computed

    @property
    def scores_prompt(self) -> bool:
        return self.request.params.prompt_logprobs is not None and len(self.tokens) == len(self.request.prompt_token_ids)


@dataclass
class TwinPlan:
    slices: list[tuple[str, int, int, int, int]] = field(default_factory=list)  # request id, choice, start, tokens, samples
    num_copies: int = 0
    budget: int = 0
    waits: dict[TwinSequence, int] = field(default_factory=dict)


class Twin:
    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        budget: int,
        chunked: bool,
        caching: bool,
        policy: str,
        granularity: str = "block",
    ) -> None:
        self.by_token = caching and granularity == "token"
        self.uncopied: list[TwinBlock] = []  # to be copied into by the plan in flight
        self.num_blocks, self.block_size, self.max_num_seqs = num_blocks, block_size, max_num_seqs
        self.budget, self.chunked, self.caching, self.static = budget, chunked, caching, policy == "static"
        self.running: list[TwinSequence] = []
        self.waiting: list[TwinSequence] = []
        self.cache: dict[Prefix, TwinBlock] = {}
        self.unused: list[TwinBlock] = []  # cached blocks in no table, longest unused first
        self.being_computed: dict[Prefix, TwinSequence] = {}

    def add(self, request: Request) -> None:
        self.waiting.append(TwinSequence(request, 0, request.params.n, list(request.prompt_token_ids)))

    # --- plan

    def plan(self) -> TwinPlan | None:
        plan, preempted = TwinPlan(budget=self.budget), False
        if self.static and not self.running:
            while self.waiting and self._fits(plan, self.waiting[0]):
                self.running.append(self.waiting.pop(0))
                self._share(plan, self.running[-1])
        while True:
            before = list(self.running)
            if self.chunked or not self._run_alone(plan):
                self._serve_running(plan)
            now_preempted = any(seq not in self.running for seq in before)
            preempted = preempted or now_preempted
            if plan.slices or not now_preempted:
                break
        if not preempted and not self.static:
            self._admit(plan)
        return plan if plan.slices else None

    def _serve_running(self, plan: TwinPlan) -> None:
        for seq in list(self.running):
            if seq not in self.running or plan.budget == 0:
                continue
            if seq.gap > 1 and self._share(plan, seq):
                continue
            count = seq.gap
            if count > 1:
                behind = self.running[self.running.index(seq) + 1 :]
                room = plan.budget - sum(1 for other in behind if other.gap == 1)
                count = min(count, max(room, 0)) if self.chunked or count <= room else 0
            if count:
                self._schedule(plan, seq, count)

    def _run_alone(self, plan: TwinPlan) -> bool:
        room = self.budget - sum(1 for seq in self.running if seq.gap == 1)
        for seq in self.running:
            if seq.gap > 1 and not self._share(plan, seq) and seq.gap > max(room, 1):
                return self._schedule(plan, seq, seq.gap)
        if not self.waiting or self.static:
            return False
        head = self.waiting[0]
        found, pending = self._look_up(head)
        gap = head.gap - len(found) * self.block_size - self._best_part(head, found, pending)[1]
        if pending or gap <= max(room, 1) or not self._fits(plan, head):
            return False
        self._start(plan, gap)
        return True

    def _admit(self, plan: TwinPlan) -> None:
        while self.waiting and plan.budget > 0:
            head = self.waiting[0]
            found, pending = self._look_up(head)
            gap = head.gap - len(found) * self.block_size - self._best_part(head, found, pending)[1]
            if not pending and not self.chunked and gap > plan.budget:
                return
            if not self._fits(plan, head):
                return
            self._start(plan, min(gap, plan.budget))

    def _fits(self, plan: TwinPlan, seq: TwinSequence) -> bool:
        if sum(other.num_choices for other in self.running) + seq.num_choices > self.max_num_seqs:
            return False
        found, pending = self._look_up(seq)
        held = {id(block) for other in self.running for block in other.table} | {id(block) for block in found}
        still_needed = sum(self._blocks(len(other.tokens)) - len(other.table) - plan.waits.get(other, 0) for other in self.running)
        own = self._blocks(len(seq.tokens)) - len(found) - pending
        return own + still_needed + len(self.running) <= self.num_blocks - len(held)

    def _start(self, plan: TwinPlan, count: int) -> None:
        seq = self.waiting.pop(0)
        self.running.append(seq)
        if not self._share(plan, seq):
            self._schedule(plan, seq, count)

    def _schedule(self, plan: TwinPlan, seq: TwinSequence, count: int) -> bool:
        while not self._make_room(plan, seq, count):
            victim = self.running.pop()
            self._drop_blocks(victim)
            victim.computed = 0
            self.waiting.insert(0, victim)
            if victim is seq:
                return False
        if seq.gap > 1 and self.caching:
            for end in range(self.block_size, len(seq.tokens) + 1, self.block_size):
                prefix = self._prefix(seq, end)
                if end > seq.computed and prefix not in self.cache:
                    self.being_computed.setdefault(prefix, seq)
        ends = seq.computed + count == len(seq.tokens) and seq.request.params.max_tokens != 0
        plan.slices.append((seq.request.request_id, seq.choice, seq.computed, count, seq.num_choices if ends else 0))
        plan.budget -= count
        seq.scheduled = count
        return True

    # --- blocks

    def _blocks(self, num_tokens: int) -> int:
        return (num_tokens + self.block_size - 1) // self.block_size

    def _prefix(self, seq: TwinSequence, end: int) -> Prefix:
        return (seq.request.cache_salt or None, tuple(seq.tokens[:end]))

    def _holders(self, block: TwinBlock) -> int:
        return sum(block in seq.table for seq in self.running)

    def _make_room(self, plan: TwinPlan, seq: TwinSequence, count: int) -> bool:
        part = seq.computed // self.block_size
        copies = seq.computed % self.block_size > 0 and self._holders(seq.table[part]) > 1
        wanted = self._blocks(seq.computed + count) - len(seq.table) + copies
        held = {id(block) for other in self.running for block in other.table}
        if wanted > self.num_blocks - len(held):
            return False
        for _ in range(wanted):
            block = self._take_block() or TwinBlock()
            if copies:
                seq.table[part], copies = block, False
                plan.num_copies += 1
                self.uncopied.append(block)
            else:
                seq.table.append(block)
        return True

    def _take_block(self) -> TwinBlock | None:
        """Room for one block: None while some is left, else the block that had to be given up for it."""
        alive = {id(block) for other in self.running for block in other.table} | {id(block) for block in self.cache.values()}
        if len(alive) < self.num_blocks:
            return None
        oldest = self.unused.pop(0)
        self.cache = {prefix: block for prefix, block in self.cache.items() if block is not oldest}
        return oldest

    def _drop_blocks(self, seq: TwinSequence) -> None:
        """``seq`` has left the running ones; its end of the table becomes unused first."""
        if self.by_token and seq.computed % self.block_size:
            self._offer_part(seq, seq.table[seq.computed // self.block_size])
        for block in reversed(seq.table):
            if self._holders(block) == 0 and block in self.cache.values():
                self.unused.append(block)
        seq.table = []
        self.being_computed = {prefix: owner for prefix, owner in self.being_computed.items() if owner is not seq}

    def _look_up(self, seq: TwinSequence) -> tuple[list[TwinBlock], int]:
        """Cached blocks after the computed full ones, and how many after those another sequence computes."""
        found: list[TwinBlock] = []
        pending = 0
        if not self.caching or seq.scores_prompt:
            return found, pending
        end = seq.computed // self.block_size * self.block_size + self.block_size
        while end < len(seq.tokens):
            prefix = self._prefix(seq, end)
            if pending == 0 and prefix in self.cache:
                found.append(self.cache[prefix])
            elif self.being_computed.get(prefix, seq) is not seq:
                pending += 1
            else:
                break
            end += self.block_size
        return found, pending

    def _share(self, plan: TwinPlan, seq: TwinSequence) -> bool:
        found, plan.waits[seq] = self._look_up(seq)
        source, count = self._best_part(seq, found, plan.waits[seq])
        full = seq.computed // self.block_size + len(found)
        if found:
            seq.table = seq.table[: full - len(found)] + found
            seq.computed = full * self.block_size
            self.unused = [block for block in self.unused if block not in found]
        if source is not None and self._take_own_block(plan, seq, full, source):
            seq.computed = full * self.block_size + count
        return plan.waits[seq] > 0

    def _take_own_block(self, plan: TwinPlan, seq: TwinSequence, index: int, source: TwinBlock) -> bool:
        """Block ``index`` of ``seq`` becomes a copy of ``source``, or ``source`` itself when there is no other block."""
        if index == len(seq.table):
            if len({id(block) for other in self.running for block in other.table}) == self.num_blocks:
                return False
            self._use(source)
            seq.table.append(self._take_block() or TwinBlock())
        if seq.table[index] is not source:
            plan.num_copies += 1
            self.uncopied.append(seq.table[index])
        return True

    # --- parts of blocks

    def _use(self, block: TwinBlock) -> None:
        if block in self.unused:
            self.unused.remove(block)
            self.unused.append(block)

    def _parts(self, prefix: Prefix) -> list[Prefix]:
        """What the cache has in the place of the last block of ``prefix``, after the same blocks."""
        salt, tokens = prefix
        start = (len(tokens) - 1) // self.block_size * self.block_size
        same = [key for key in self.cache if key[0] == salt and key[1][:start] == tokens[:start]]
        return [key for key in same if start < len(key[1]) <= start + self.block_size]

    def _best_part(self, seq: TwinSequence, found: list[TwinBlock], pending: int) -> tuple[TwinBlock | None, int]:
        """The block that goes on longest with ``seq`` after ``found``, and its tokens of use; none if that is no gain."""
        full = seq.computed // self.block_size + len(found)
        start = full * self.block_size
        wanted = self._prefix(seq, min(start + self.block_size, len(seq.tokens) - 1))
        if not self.by_token or pending or seq.scores_prompt or len(wanted[1]) <= start:
            return None, 0
        if full < len(seq.table) and self._holders(seq.table[full]) > 1:
            return None, 0
        parts = self._parts(wanted)
        most = max((leading(key[1], wanted[1]) for key in parts), default=0)
        if most <= max(start, seq.computed):
            return None, 0
        best = sorted(key[1] for key in parts if leading(key[1], wanted[1]) == most)
        above = [tokens for tokens in best if tokens >= wanted[1]]
        return self.cache[wanted[0], (above or best[::-1])[0]], most - start

    def _offer_part(self, seq: TwinSequence, block: TwinBlock) -> None:
        prefix = self._prefix(seq, seq.computed)
        if self._holders(block) or block in self.uncopied:
            return
        longer = sorted(key[1] for key in self._parts(prefix) if key[1][: len(prefix[1])] == prefix[1])
        if longer:
            self._use(self.cache[prefix[0], longer[0]])
        else:
            self._drop_parts(prefix)
            self.cache[prefix] = block

    def _drop_parts(self, prefix: Prefix) -> None:
        """Part-filled blocks that hold less of the same are given up."""
        for key in self._parts(prefix):
            if len(key[1]) < len(prefix[1]) and prefix[1][: len(key[1])] == key[1]:
                self.unused.remove(self.cache.pop(key))

    # --- results

    def apply(self, events: list[TokenEvent]) -> None:
        self.uncopied = []
        told = {(event.request_id, event.choice): event for event in events}
        for seq in [seq for seq in self.running if seq.scheduled]:
            seq.computed, seq.scheduled = seq.computed + seq.scheduled, 0
            if self.caching:
                self._offer(seq)
            if (seq.request.request_id, seq.choice) not in told:
                continue
            choices = [seq]
            for i in range(1, seq.num_choices):
                choices.append(TwinSequence(seq.request, seq.choice + i, 1, list(seq.tokens), seq.computed, 0, list(seq.table)))
            seq.num_choices = 1
            place = self.running.index(seq)
            self.running[place : place + 1] = choices
            for choice in choices:
                event = told[choice.request.request_id, choice.choice]
                choice.tokens += event.token_ids
                if event.finish_reason is not None:
                    self.running.remove(choice)
                    self._drop_blocks(choice)

    def _offer(self, seq: TwinSequence) -> None:
        for i in range(seq.computed // self.block_size):
            prefix = self._prefix(seq, (i + 1) * self.block_size)
            if self.by_token:
                self._drop_parts(prefix)
            offered = self.cache.setdefault(prefix, seq.table[i])
            if offered is not seq.table[i]:
                seq.table[i] = offered
                self.unused = [block for block in self.unused if block is not offered]
            self.being_computed.pop(prefix, None)

    def abort(self, request_id: str) -> None:
        """Between steps."""
        self.waiting = [seq for seq in self.waiting if seq.request.request_id != request_id]
        for seq in [seq for seq in self.running if seq.request.request_id == request_id]:
            self.running.remove(seq)
            self._drop_blocks(seq)


def leading(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """How many tokens two texts have in common from their beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
