"""The blocks of the scheduler's twin (``twin.py``), slow and obvious: who holds what, and what the prefix cache has.

No reference counts, keys, hashes or free lists: a block is a Python object, who holds it is found by looking into every table, and the
prefix cache is a dict from (salt, all tokens so far) to a block, full or (where single tokens are shared) part-filled.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.core.request import Request

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


class TwinBlocks:
    """The pool and its prefix cache. ``running``: the scheduler's own list, into whose tables is looked."""

    def __init__(self, running: list[TwinSequence], num_blocks: int, block_size: int, caching: bool, by_token: bool) -> None:
        self.running, self.num_blocks, self.block_size = running, num_blocks, block_size
        self.caching, self.by_token = caching, caching and by_token
        self.cache: dict[Prefix, TwinBlock] = {}
        self.unused: list[TwinBlock] = []  # cached blocks in no table, longest unused first
        self.being_computed: dict[Prefix, TwinSequence] = {}
        self.uncopied: list[TwinBlock] = []  # to be copied into by the plan in flight

    def blocks_for(self, num_tokens: int) -> int:
        return (num_tokens + self.block_size - 1) // self.block_size

    def held(self) -> set[int]:
        """Ids of the blocks that tables have."""
        return {id(block) for seq in self.running for block in seq.table}

    def holders(self, block: TwinBlock) -> int:
        return sum(block in seq.table for seq in self.running)

    def new(self) -> TwinBlock:
        """A block, for which the one that has been unused longest is given up if there is no room left."""
        if len(self.held() | {id(block) for block in self.cache.values()}) < self.num_blocks:
            return TwinBlock()
        oldest = self.unused.pop(0)
        self.cache = {prefix: block for prefix, block in self.cache.items() if block is not oldest}
        return oldest

    def make_room(self, plan: TwinPlan, seq: TwinSequence, count: int) -> bool:
        """Blocks for ``count`` more tokens, the one that is written first for ``seq`` alone. False: there are not so many."""
        part = seq.computed // self.block_size
        copies = seq.computed % self.block_size > 0 and self.holders(seq.table[part]) > 1
        wanted = self.blocks_for(seq.computed + count) - len(seq.table) + copies
        if wanted > self.num_blocks - len(self.held()):
            return False
        for _ in range(wanted):
            block = self.new()
            if copies:
                seq.table[part], copies = block, False
                plan.num_copies += 1
                self.uncopied.append(block)
            else:
                seq.table.append(block)
        return True

    def drop(self, seq: TwinSequence) -> None:
        """``seq`` has left the running ones; its end of the table becomes unused first."""
        if self.by_token and seq.computed % self.block_size:
            self._offer_part(seq, seq.table[seq.computed // self.block_size])
        for block in reversed(seq.table):
            if self.holders(block) == 0 and block in self.cache.values():
                self.unused.append(block)
        seq.table = []
        self.being_computed = {prefix: owner for prefix, owner in self.being_computed.items() if owner is not seq}

    # --- the prefix cache

    def look_up(self, plan: TwinPlan, seq: TwinSequence) -> tuple[list[TwinBlock], int]:
        """Cached blocks after the computed full ones, and how many after those another sequence computes."""
        found: list[TwinBlock] = []
        pending = 0
        if not self.caching or seq.scores_prompt or seq in plan.loading:
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

    def to_compute(self, plan: TwinPlan, seq: TwinSequence) -> tuple[int, int]:
        """Tokens of a waiting sequence that it would have to compute, and blocks that another computes for it."""
        found, pending = self.look_up(plan, seq)
        cached = len(found) * self.block_size + self._best_part(plan, seq, found, pending)[1]
        return len(seq.tokens) - max(cached, seq.saved_computed), pending

    def share(self, plan: TwinPlan, seq: TwinSequence) -> bool:
        """``seq`` takes what the cache has of its tokens. Whether it is to wait for more, which another sequence computes."""
        found, plan.waits[seq] = self.look_up(plan, seq)
        source, count = self._best_part(plan, seq, found, plan.waits[seq])
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
            if len(self.held()) == self.num_blocks:
                return False
            self._use(source)
            seq.table.append(self.new())
        if seq.table[index] is not source:
            plan.num_copies += 1
            self.uncopied.append(seq.table[index])
        return True

    def announce(self, plan: TwinPlan, seq: TwinSequence) -> None:
        """``seq`` begins to compute its tokens: others may wait for its full blocks."""
        for end in range(self.block_size, len(seq.tokens) + 1, self.block_size):
            prefix = self._prefix(seq, end)
            if (end > seq.computed or seq in plan.loading) and prefix not in self.cache:
                self.being_computed.setdefault(prefix, seq)

    def offer(self, seq: TwinSequence) -> None:
        """The cache gets the full blocks of ``seq``, and ``seq`` those that it had of the same tokens."""
        for i in range(seq.computed // self.block_size):
            prefix = self._prefix(seq, (i + 1) * self.block_size)
            if self.by_token:
                self._drop_parts(prefix)
            offered = self.cache.setdefault(prefix, seq.table[i])
            if offered is not seq.table[i]:
                seq.table[i] = offered
                self.unused = [block for block in self.unused if block is not offered]
            self.being_computed.pop(prefix, None)

    def _prefix(self, seq: TwinSequence, end: int) -> Prefix:
        return (seq.request.cache_salt or None, tuple(seq.tokens[:end]))

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

    def _best_part(self, plan: TwinPlan, seq: TwinSequence, found: list[TwinBlock], pending: int) -> tuple[TwinBlock | None, int]:
        """The block that goes on longest with ``seq`` after ``found``, and its tokens of use; none if that is no gain."""
        full = seq.computed // self.block_size + len(found)
        start = full * self.block_size
        wanted = self._prefix(seq, min(start + self.block_size, len(seq.tokens) - 1))
        if not self.by_token or pending or seq.scores_prompt or len(wanted[1]) <= start or seq.saved or seq in plan.loading:
            return None, 0
        if full < len(seq.table) and self.holders(seq.table[full]) > 1:
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
        if self.holders(block) or block in self.uncopied:
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


def leading(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """How many tokens two texts have in common from their beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
