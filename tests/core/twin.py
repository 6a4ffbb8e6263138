"""The scheduler once more, slow and obvious: what the next plan must hold, by counting everything afresh (``twin_blocks.py``).

Tokens and endings are told to it; it only decides who runs.
"""

from __future__ import annotations

from octavo.core.request import Request
from octavo.core.step import TokenEvent
from tests.core.twin_blocks import TwinBlock, TwinBlocks, TwinPlan, TwinSequence


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
        self.max_num_seqs, self.budget, self.chunked, self.static = max_num_seqs, budget, chunked, policy == "static"
        self.lookahead, self.num_host_blocks, self.max_total = lookahead, num_host_blocks, max_total
        self.running: list[TwinSequence] = []
        self.waiting: list[TwinSequence] = []
        self.kv = TwinBlocks(self.running, num_blocks, block_size, caching, granularity == "token")
        self.in_flight = TwinPlan()
        self.reading: list[TwinBlock] = []  # host blocks that the plan in flight reads
        self.num_requests = 0

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
            if seq.gap > 1 and self.kv.share(plan, seq):
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
            if seq.gap > 1 and not self.kv.share(plan, seq) and seq.gap > max(room, 1):
                return self._schedule(plan, seq, seq.gap)
        if not self.waiting or self.static:
            return False
        head = self.waiting[0]
        gap, pending = self.kv.to_compute(plan, head)
        if pending or gap <= max(room, 1):
            return False
        group = self._next_group(plan)
        for i in range(len(group)):
            self._start(plan, 0 if i else gap)
        return bool(group)

    def _admit(self, plan: TwinPlan) -> None:
        while self.waiting and plan.budget > 0:
            head = self.waiting[0]
            gap, pending = self.kv.to_compute(plan, head)
            if not pending and not self.chunked and gap > plan.budget:
                return
            group = self._next_group(plan)
            if not group:
                return
            for seq in group:
                gap, _ = self.kv.to_compute(plan, seq)
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
        held = self.kv.held()
        own, common = 0, set[object]()
        for seq in group:
            found, pending = self.kv.look_up(plan, seq)
            held |= {id(block) for block in found}
            if len(group) == 1:
                own = self.kv.blocks_for(len(seq.tokens)) - len(found) - pending
            else:
                full: list[object] = list(seq.saved[: seq.saved_computed // self.kv.block_size])
                if not seq.saved and self.kv.caching:
                    full = list(range(len(seq.request.prompt_token_ids) // self.kv.block_size))
                common |= set(full[len(found) :])
                own += self.kv.blocks_for(len(seq.tokens)) - max(len(full), len(found))
        kept = 0
        if self.running:
            kept = sum(self.kv.blocks_for(len(seq.tokens)) - len(seq.table) - plan.waits.get(seq, 0) for seq in self.running)
            kept += sum(self._growth(seq) for seq in (*self.running, *group))
        return own + len(common) + kept <= self.kv.num_blocks - len(held)

    def _growth(self, seq: TwinSequence) -> int:
        prompt, asked = len(seq.request.prompt_token_ids), seq.request.params.max_tokens
        left = min(self.max_total, prompt + (self.max_total if asked is None else asked)) - len(seq.tokens)
        end = len(seq.tokens) + min(left, self.lookahead) - 1
        return seq.num_choices * max(1, self.kv.blocks_for(end) - self.kv.blocks_for(len(seq.tokens)))

    def _start(self, plan: TwinPlan, count: int) -> None:
        seq = self.waiting.pop(0)
        self.running.append(seq)
        self.running.sort(key=lambda other: other.place)
        if seq.preempted:
            seq.returned_with = len(seq.tokens)
        waits = self.kv.share(plan, seq)
        if seq.saved:
            self._load(plan, seq)
        if not waits and count:
            self._schedule(plan, seq, count)

    def _load(self, plan: TwinPlan, seq: TwinSequence) -> None:
        if seq.saved_computed > seq.computed:
            for host in seq.saved[len(seq.table) :]:
                if host not in plan.loaded:
                    plan.loaded[host] = self.kv.new()
                    self.kv.uncopied.append(plan.loaded[host])
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
            writes = [other.table[other.computed // self.kv.block_size] for other in group if other.computed % self.kv.block_size]
            copies = sum(min(writes.count(block), self.kv.holders(block) - 1) for block in set(writes))
            missing = sum(self.kv.blocks_for(len(other.tokens)) - len(other.table) for other in group)
            if len(group) < 2 or missing + copies <= self.kv.num_blocks - len(self.kv.held()) or not self._preempt(plan, first):
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
        if blocks and len(blocks) + len(hosts) <= self.num_host_blocks and not blocks & set(self.kv.uncopied):
            host_of = {block: TwinBlock() for block in blocks}
            plan.num_saves += len(blocks)
            for seq in group:
                seq.saved, seq.saved_computed = [host_of[block] for block in seq.table], seq.computed
        for seq in group:
            self.running.remove(seq)
            self.kv.drop(seq)
            seq.computed, seq.preempted = 0, True
        self.waiting = sorted([*self.waiting, *group], key=lambda other: other.place)
        return True

    def _schedule(self, plan: TwinPlan, seq: TwinSequence, count: int) -> bool:
        while not self.kv.make_room(plan, seq, count):
            if not self._preempt(plan, self.running.index(seq)) or seq not in self.running:
                return False
        if seq.gap > 1 and self.kv.caching:
            self.kv.announce(plan, seq)
        ends = seq.computed + count == len(seq.tokens) and seq.request.params.max_tokens != 0
        plan.slices.append((seq.request.request_id, seq.choice, seq.computed, count, seq.num_choices if ends else 0))
        plan.budget -= count
        seq.scheduled = count
        return True

    # --- results

    def apply(self, events: list[TokenEvent]) -> None:
        for seq in self.in_flight.loading:
            if seq in self.running and self.kv.caching:
                self.kv.offer(seq)
        self.reading = []
        self.kv.uncopied = []
        told = {(event.request_id, event.choice): event for event in events}
        for seq in [seq for seq in self.running if seq.scheduled]:
            seq.computed, seq.scheduled = seq.computed + seq.scheduled, 0
            if self.kv.caching:
                self.kv.offer(seq)
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
                    self.kv.drop(choice)

    def abort(self, request_id: str) -> None:
        """Between steps."""
        self.waiting = [seq for seq in self.waiting if seq.request.request_id != request_id]
        for seq in [seq for seq in self.running if seq.request.request_id == request_id]:
            self.running.remove(seq)
            self.kv.drop(seq)
