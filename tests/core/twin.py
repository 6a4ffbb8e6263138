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
    """Room for ``block_size`` tokens, in the pool or in host memory."""


@dataclass(eq=False)
class TwinSequence:
    request: Request
    choice: int
    num_choices: int
    tokens: list[int]
    computed: int = 0
    scheduled: int = 0
    table: list[TwinBlock] = field(default_factory=list)
    arrival: int = 0
    saved: list[TwinBlock] = field(default_factory=list)  # in host memory, while it waits
    saved_computed: int = 0
    returned_with: int | None = None  # tokens it had when it last came back after a preemption
    preempted: bool = False

    @property
    def place(self) -> tuple[int, int]:
        return self.arrival, self.choice

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
    loading: list[TwinSequence] = field(default_factory=list)
    loaded: dict[TwinBlock, TwinBlock] = field(default_factory=dict)  # host block -> block
    num_saves: int = 0


class Twin:
    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        budget: int,
        chunked: bool,
        caching: bool,
        lookahead: int,
        num_host_blocks: int,
        max_total: int,
        policy: str,
        granularity: str = "block",
    ) -> None:
        self.by_token = caching and granularity == "token"
        self.uncopied: list[TwinBlock] = []  # to be copied into by the plan in flight
        self.num_blocks, self.block_size, self.max_num_seqs = num_blocks, block_size, max_num_seqs
        self.lookahead, self.num_host_blocks, self.max_total = lookahead, num_host_blocks, max_total
        self.in_flight = TwinPlan()
        self.reading: list[TwinBlock] = []  # host blocks that the plan in flight reads
        self.num_requests = 0
        self.budget, self.chunked, self.caching, self.static = budget, chunked, caching, policy == "static"
        self.running: list[TwinSequence] = []
        self.waiting: list[TwinSequence] = []
        self.cache: dict[Prefix, TwinBlock] = {}
        self.unused: list[TwinBlock] = []  # cached blocks in no table, longest unused first
        self.being_computed: dict[Prefix, TwinSequence] = {}

    def add(self, request: Request) -> None:
        self.waiting.append(TwinSequence(request, 0, request.params.n, list(request.prompt_token_ids), arrival=self.num_requests))
        self.num_requests += 1

    # --- plan

    def plan(self) -> TwinPlan | None:
        plan, preempted = TwinPlan(budget=self.budget), False
        self.in_flight = plan
        if self.static and not self.running:
            while self.waiting and (group := self._next_group(plan)):
                for _ in group:
                    self._start(plan, 0)
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
            if self._group(seq)[0] is seq and (not self._secure(plan, seq) or seq not in self.running):
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
        cached = len(found) * self.block_size + self._best_part(head, found, pending)[1]
        gap = len(head.tokens) - max(cached, head.saved_computed)
        if pending or gap <= max(room, 1):
            return False
        group = self._next_group(plan)
        for i in range(len(group)):
            self._start(plan, 0 if i else gap)
        return bool(group)

    def _admit(self, plan: TwinPlan) -> None:
        while self.waiting and plan.budget > 0:
            head = self.waiting[0]
            found, pending = self._look_up(head)
            cached = len(found) * self.block_size + self._best_part(head, found, pending)[1]
            gap = len(head.tokens) - max(cached, head.saved_computed)
            if not pending and not self.chunked and gap > plan.budget:
                return
            group = self._next_group(plan)
            if not group:
                return
            for seq in group:
                found, pending = self._look_up(seq)
                cached = len(found) * self.block_size + self._best_part(seq, found, pending)[1]
                gap = len(seq.tokens) - max(cached, seq.saved_computed)
                self._start(plan, min(gap, plan.budget) if self.chunked or gap <= plan.budget else 0)

    def _next_group(self, plan: TwinPlan) -> list[TwinSequence]:
        head = self.waiting[0]
        group = [seq for seq in self.waiting if seq.request is head.request]
        if self._fit(plan, group):
            return group
        if len(group) > 1 and all(seq.request is head.request for seq in self.running) and self._fit(plan, [head]):
            return [head]
        return []

    def _fit(self, plan: TwinPlan, group: list[TwinSequence]) -> bool:
        if sum(seq.num_choices for seq in (*self.running, *group)) > self.max_num_seqs:
            return False
        held = {id(block) for other in self.running for block in other.table}
        own, common = 0, set[object]()
        for seq in group:
            found, pending = self._look_up(seq)
            held |= {id(block) for block in found}
            if len(group) == 1:
                own = self._blocks(len(seq.tokens)) - len(found) - pending
            else:
                full: list[object] = list(seq.saved[: seq.saved_computed // self.block_size])
                if not seq.saved and self.caching:
                    full = list(range(len(seq.request.prompt_token_ids) // self.block_size))
                common |= set(full[len(found) :])
                own += self._blocks(len(seq.tokens)) - max(len(full), len(found))
        kept = 0
        if self.running:
            kept = sum(self._blocks(len(seq.tokens)) - len(seq.table) - plan.waits.get(seq, 0) for seq in self.running)
            kept += sum(self._growth(seq) for seq in (*self.running, *group))
        return own + len(common) + kept <= self.num_blocks - len(held)

    def _growth(self, seq: TwinSequence) -> int:
        prompt, asked = len(seq.request.prompt_token_ids), seq.request.params.max_tokens
        left = min(self.max_total, prompt + (self.max_total if asked is None else asked)) - len(seq.tokens)
        end = len(seq.tokens) + min(left, self.lookahead) - 1
        return seq.num_choices * max(1, self._blocks(end) - self._blocks(len(seq.tokens)))

    def _start(self, plan: TwinPlan, count: int) -> None:
        seq = self.waiting.pop(0)
        self.running = sorted([*self.running, seq], key=lambda other: other.place)
        if seq.preempted:
            seq.returned_with = len(seq.tokens)
        waits = self._share(plan, seq)
        if seq.saved:
            self._load(plan, seq)
        if not waits and count:
            self._schedule(plan, seq, count)

    def _load(self, plan: TwinPlan, seq: TwinSequence) -> None:
        if seq.saved_computed > seq.computed:
            for host in seq.saved[len(seq.table) :]:
                if host not in plan.loaded:
                    plan.loaded[host] = self._take_block() or TwinBlock()
                    self.uncopied.append(plan.loaded[host])
                seq.table.append(plan.loaded[host])
            seq.computed = seq.saved_computed
            plan.loading.append(seq)
        self.reading += seq.saved
        seq.saved, seq.saved_computed = [], 0

    def _group(self, seq: TwinSequence) -> list[TwinSequence]:
        return [other for other in self.running if other.request is seq.request]

    def _secure(self, plan: TwinPlan, seq: TwinSequence) -> bool:
        """Make room for all choices before the first one is scheduled."""
        first = self.running.index(seq)
        while True:
            group = self._group(seq)
            writes = [other.table[other.computed // self.block_size] for other in group if other.computed % self.block_size]
            copies = sum(min(writes.count(block), self._holders(block) - 1) for block in set(writes))
            missing = sum(self._blocks(len(other.tokens)) - len(other.table) for other in group)
            held = {id(block) for other in self.running for block in other.table}
            if len(group) < 2 or missing + copies <= self.num_blocks - len(held) or not self._preempt(plan, first):
                return bool(group)

    def _preempt(self, plan: TwinPlan, first: int) -> bool:
        free = [seq for seq in self.running[first:] if not seq.scheduled and seq not in plan.loading]
        if not free:
            return False
        victim = [seq for seq in free if seq.returned_with != len(seq.tokens)][-1:] or free[-1:]
        group = self._group(victim[0])
        group = [seq for seq in (group if len(group) < len(self.running) else victim) if seq in free]
        blocks = {block for seq in group for block in seq.table}
        hosts = {host for seq in self.waiting for host in seq.saved} | set(self.reading)
        if blocks and len(blocks) + len(hosts) <= self.num_host_blocks and not blocks & set(self.uncopied):
            host_of = {block: TwinBlock() for block in blocks}
            plan.num_saves += len(blocks)
            for seq in group:
                seq.saved, seq.saved_computed = [host_of[block] for block in seq.table], seq.computed
        for seq in group:
            self.running.remove(seq)
            self._drop_blocks(seq)
            seq.computed, seq.preempted = 0, True
        self.waiting = sorted([*self.waiting, *group], key=lambda other: other.place)
        return True

    def _schedule(self, plan: TwinPlan, seq: TwinSequence, count: int) -> bool:
        while not self._make_room(plan, seq, count):
            if not self._preempt(plan, self.running.index(seq)) or seq not in self.running:
                return False
        if seq.gap > 1 and self.caching:
            for end in range(self.block_size, len(seq.tokens) + 1, self.block_size):
                prefix = self._prefix(seq, end)
                if (end > seq.computed or seq in plan.loading) and prefix not in self.cache:
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
        if not self.caching or seq.scores_prompt or seq in self.in_flight.loading:
            return found, pending
        end = seq.computed // self.block_size * self.block_size + self.block_size
        while end < len(seq.tokens):
            prefix = self._prefix(seq, end)
            if pending == 0 and prefix in self.cache:
                found.append(self.cache[prefix])
            elif not seq.saved and self.being_computed.get(prefix, seq) is not seq:
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
        if not self.by_token or pending or seq.scores_prompt or len(wanted[1]) <= start or seq.saved or seq in self.in_flight.loading:
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
        for seq in self.in_flight.loading:
            if seq in self.running and self.caching:
                self._offer(seq)
        self.reading = []
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
                choices[-1].arrival, choices[-1].preempted, choices[-1].returned_with = seq.arrival, seq.preempted, seq.returned_with
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
