"""Block tables over the pool and the prefix index: the KV cache as the scheduler sees it.

Owns every block table, which blocks are shared, which are offered for reuse, and who is computing what. Knows tokens and positions; never
budgets, order or time. Between steps:

    find_prefix ─▶ adopt_prefix ─▶ grow (new blocks, copy-on-write) ─▶ claim ─▶ [step] ─▶ publish ─▶ ... ─▶ release
                                                                                           └▶ fork

Three rules keep shared blocks right:
- A block is written only by a sequence that alone references it: a shared block about to be written is copied first.
- A block is offered only when all its positions are computed and applied. If the same block is already offered, the sequence swaps its own
  copy for the offered one (their KV is equal bit for bit) and frees its own. So a table that holds an offered block holds its parents too.
- Matched blocks are referenced before anything else is allocated, hence never evicted under their finder.

With ``token_granular`` a block that goes on with a prompt for some tokens only is copied (``adopt_tail``), as soon as it is found: the
copies of a plan take effect in their order, before anything is computed, so its source may be evicted and written by the same plan.
The copy is offered by nobody until the plan is applied.

A sequence that is about to compute full blocks *claims* their keys; another that needs such a block next waits for it. Nobody waits in
a circle. Say X waits for Y: X shares all offered blocks of its chain and lacks block i, which Y claims, so Y has the same chain up to i
and has not offered i. If Y in turn waits, it lacks a block j <= i of that chain; X shares all before i, so j = i, whose claim is Y's own.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace

from octavo.core.block_pool import BlockPool
from octavo.core.block_tables import BlockTables
from octavo.core.kv_restore import Restorer
from octavo.core.kv_tiers import BlockRef, HostEntry, KVTiers
from octavo.core.match_report import MatchEnd, MatchReport
from octavo.core.prefix_index import Namespace, PrefixIndex
from octavo.core.prefix_match import Chain, PrefixMatch, ref_of
from octavo.core.request import Sequence
from octavo.core.step import BlockCopy
from octavo.core.tails import PartialMatch, Tails


class KVManager(BlockTables):
    """``num_blocks`` blocks of ``block_size`` tokens. ``fingerprint`` names what else the KV depends on (model, formats, layout).

    ``token_granular``: a block that matches a prompt in part is used as well, by copying it.
    """

    restorer: Restorer | None = None  # there when the cache has tiers

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        fingerprint: str = "",
        token_granular: bool = False,
        pool: BlockPool | None = None,
    ) -> None:
        """``pool``: of ``num_blocks`` blocks, when it is not just any."""
        super().__init__(pool or BlockPool(num_blocks), block_size)
        num_remembered = max(num_blocks, 1024)
        self.index = PrefixIndex(block_size, fingerprint, num_remembered, token_granular) if enable_prefix_caching else None
        self._tails = Tails(self.pool, self.index) if token_granular and self.index is not None else None
        self._chains: dict[int, Chain] = {}  # by seq_id
        self._claims: dict[bytes, int] = {}  # key of a block being computed -> seq_id
        self.loading: set[int] = set()  # seq_ids whose blocks the plan in flight brings in: not offered before it is done

    # --- prefix cache -------------------------------------------------------------------------------------------------------------------

    def find_prefix(self, seq: Sequence) -> PrefixMatch:
        """Offered blocks that continue what ``seq`` shares, and how many after them are being computed. Changes nothing.

        The block of the last known token is never matched: a row has to run to draw the next token.
        """
        match = PrefixMatch([])
        if seq.seq_id in self.loading:
            return match
        chain = self._chain(seq)
        if chain is None or not chain.publishable or self.index is None:
            return match
        depth, limit = chain.depth, (len(seq.token_ids) - 1) // self.block_size
        parent = self.index.node(chain.keys[depth])
        while depth < limit:
            chain.extend(seq.token_ids, self.block_size, depth + 1)
            node = self.index.find(parent, chain.keys[depth + 1], chain.tokens[depth])
            if node is None:
                break
            match.nodes.append(node)
            parent, depth = node, depth + 1
        num_found = depth
        if self._trim(seq, match):
            num_found = depth = depth - match.num_unusable
            parent, limit = match.nodes[-1] if match.nodes else self.index.node(chain.keys[depth]), depth
        while depth < limit and self._claims.get(chain.keys[depth + 1], seq.seq_id) != seq.seq_id:
            match.num_pending += 1
            depth += 1
            if depth < limit:
                chain.extend(seq.token_ids, self.block_size, depth + 1)
        if self.restorer is not None and not match.num_pending and (match.nodes or seq.num_computed % self.block_size == 0):
            match.tier = self.restorer.match(seq, self._unclaimed_refs(seq, chain, depth, limit), depth)
            match.tier.entries = self.usable_entries(seq, match.tier.entries, match)
        if self._tails is not None and depth == num_found and not match.tier:
            match.tail = self._useful_tail(seq, self._tails.find(parent, seq.token_ids, depth * self.block_size), depth)
        return match

    def num_found(self, seq: Sequence) -> int:
        """Leading tokens of ``seq`` that it shares, or that are offered, or that another is computing, in whole blocks: what it will not
        have to compute, as things stand. Blocks in other tiers do not count. Cheap where it is asked again and again: it goes on from
        what it found last, since a block is evicted after its children."""
        chain, limit = self._chain(seq), (len(seq.token_ids) - 1) // self.block_size
        if chain is None or not chain.publishable:
            return 0
        depth = min(max(chain.num_found, chain.depth), limit)
        while depth > chain.depth and not self._will_be_there(chain.keys[depth], seq):
            depth -= 1
        while depth < limit:
            chain.extend(seq.token_ids, self.block_size, depth + 1)
            if not self._will_be_there(chain.keys[depth + 1], seq):
                break
            depth += 1
        chain.num_found = depth
        return depth * self.block_size

    def _will_be_there(self, key: bytes, seq: Sequence) -> bool:
        assert self.index is not None
        return self.index.node(key) is not None or self._claims.get(key, seq.seq_id) != seq.seq_id

    def key_after(self, seq: Sequence, match: PrefixMatch) -> bytes | None:
        """The key of the last block that ``seq`` shares once it has adopted ``match``; None without a prefix cache."""
        chain = self._chain(seq)
        return None if chain is None else chain.keys[chain.depth + len(match.nodes)]

    def last_offered(self, seq: Sequence) -> tuple[bytes, int] | None:
        """(key, number) of the last block of ``seq`` that is offered, of the root before the first; None when it offers no more."""
        chain = self._chain(seq)
        return (chain.keys[chain.depth], chain.depth) if chain is not None and chain.publishable else None

    def _trim(self, seq: Sequence, match: PrefixMatch) -> bool:
        """Take from ``match`` what is of no use because part of what is before it is gone. Here a block is offered whole, or not at all."""
        return False

    def usable_entries(self, seq: Sequence, entries: list[HostEntry], match: PrefixMatch | None = None) -> list[HostEntry]:
        """The first of ``entries``, found behind what ``seq`` has and ``match``, that are worth restoring. Here all of them are."""
        return entries

    def _useful_tail(self, seq: Sequence, tail: PartialMatch | None, depth: int) -> PartialMatch | None:
        """``tail``, of block ``depth``, when it has more than ``seq`` has computed and goes to a block that ``seq`` may write."""
        if tail is None or depth * self.block_size + tail.num_tokens <= seq.num_computed:
            return None
        return tail if depth >= len(seq.block_table) or self.pool.ref_counts[seq.block_table[depth]] == 1 else None

    def explain(self, seq: Sequence, match: PrefixMatch) -> MatchReport | None:
        """Why ``match``, just found and not yet adopted, went no further. None without a prefix cache.

        ``seq``, which has not been preempted, still has the report on its last match, if there was one.
        """
        if self.index is None:
            return None
        report, earlier = self._explain_end(self.index, seq, match), seq.match_report
        num_computed = seq.num_computed - seq.num_cached
        if self._tails is None:  # a part of a block that it has begun itself gives way, and does not count
            num_computed -= seq.num_computed % self.block_size
        if earlier is None or num_computed <= 0:
            return report
        return replace(report, num_computed=num_computed, computed_end=earlier.computed_end or earlier.end)

    def _explain_end(self, index: PrefixIndex, seq: Sequence, match: PrefixMatch) -> MatchReport:
        chain = self._chains[seq.seq_id]
        depth = chain.depth + len(match.nodes)
        if match.num_unusable:
            return MatchReport(MatchEnd.WINDOW_GONE, depth * self.block_size)
        node = match.nodes[-1] if match.nodes else index.node(chain.keys[depth])
        return index.explain_end(chain.namespace, node, chain.keys[depth], seq.token_ids, depth)

    def _unclaimed_refs(self, seq: Sequence, chain: Chain, depth: int, limit: int) -> Iterator[BlockRef]:
        """The blocks of ``seq`` from number ``depth`` on, up to the first that another sequence is computing."""
        while depth < limit:
            chain.extend(seq.token_ids, self.block_size, depth + 1)
            if self._claims.get(chain.keys[depth + 1], seq.seq_id) != seq.seq_id:
                return
            yield BlockRef(chain.keys[depth + 1], chain.keys[depth], chain.tokens[depth])
            depth += 1

    def can_admit(self, seq: Sequence, match: PrefixMatch, num_spare: int) -> bool:
        """Whether all known tokens of ``seq``, which holds nothing, fit with ``match`` while ``num_spare`` blocks stay available."""
        ref_counts = self.pool.ref_counts
        num_revived = sum(1 for node in match.nodes if ref_counts[node.block] == 0)
        num_new = self.num_missing(seq) - len(match.nodes) - match.num_pending
        return num_new + num_revived + num_spare <= self.pool.num_available

    def adopt_prefix(self, seq: Sequence, match: PrefixMatch) -> int:
        """Share the matched blocks; a block that ``seq`` had begun itself gives way. Returns the tokens found.

        Where only full blocks are shared these are the blocks' tokens, also of the one that ``seq`` had begun.
        """
        if not match.nodes:
            return 0
        chain, table = self._chains[seq.seq_id], seq.block_table
        for node in match.nodes:
            self.pool.acquire(node.block)
        for node in match.nodes:
            if chain.depth < len(table):
                own, table[chain.depth] = table[chain.depth], node.block
                self.pool.release(own, keep=False)
            else:
                table.append(node.block)
            chain.depth += 1
        num_gained = chain.depth * self.block_size - seq.num_computed
        seq.num_computed += num_gained
        return num_gained if self._tails is not None else len(match.nodes) * self.block_size

    def adopt_tail(self, seq: Sequence, match: PrefixMatch, copies: list[BlockCopy]) -> int:
        """Copy what was found of the next block into one of ``seq``'s own, after ``adopt_prefix``. Returns the tokens gained.

        The copy is added to ``copies``. Nothing happens when there is no block for it. When the only one is the source itself, that is
        evicted and taken over as it is: it holds what is wanted.
        """
        tail = match.tail
        if tail is None:
            return 0
        table, depth, src = seq.block_table, self._chains[seq.seq_id].depth, tail.node.block
        if depth == len(table):
            if not self._has_room_beside(src):
                return 0
            table.append(self._allocate_beside(src))
        if table[depth] != src:
            self._copy(src, table[depth], copies)
        num_gained = depth * self.block_size + tail.num_tokens - seq.num_computed
        seq.num_computed += num_gained
        return num_gained

    def claim(self, seq: Sequence) -> None:
        """``seq`` is about to compute its known tokens: others that need the same full blocks wait for them. The first claim stands."""
        chain = self._chain(seq)
        if chain is None or not chain.publishable or self.index is None:
            return
        num_full = len(seq.token_ids) // self.block_size
        chain.extend(seq.token_ids, self.block_size, num_full)
        for key in chain.keys[chain.depth + 1 : num_full + 1]:
            if self.index.node(key) is None:  # else it is the block of the last token, which has to be computed again
                self._claims.setdefault(key, seq.seq_id)

    def claims_next(self, seq: Sequence) -> bool:
        """Whether the claim on the next block that ``seq`` has to compute is its own."""
        chain = self._chains.get(seq.seq_id)
        return chain is not None and len(chain.tokens) > chain.depth and self._claims.get(chain.keys[chain.depth + 1]) == seq.seq_id

    def publish(self, seq: Sequence) -> None:
        """Offer the full blocks that ``seq`` has computed since the last call."""
        if self.index is None:
            return
        num_full = seq.num_computed // self.block_size
        chain = self._chains.get(seq.seq_id)
        if chain is not None and chain.depth >= num_full:
            return
        chain = self._chain(seq)
        while chain is not None and chain.publishable and chain.depth < num_full:
            self._publish_next(seq, chain)

    def _publish_next(self, seq: Sequence, chain: Chain) -> None:
        assert self.index is not None
        i, table = chain.depth, seq.block_table
        chain.extend(seq.token_ids, self.block_size, i + 1)
        key = chain.keys[i + 1]
        node = self.index.publish(self.index.node(chain.keys[i]), chain.namespace, key, chain.tokens[i], table[i])
        if node is None:
            self.withhold(seq)
            return
        self._claims.pop(key, None)
        if self._tails is not None:
            self._tails.drop_covered(node)
        if node.block != table[i]:
            own, table[i] = table[i], node.block
            self._exchange(own, node.block)
        chain.depth = i + 1

    def _exchange(self, own: int, offered: int) -> None:
        """A sequence shares ``offered`` from now on instead of ``own``, which nobody else has and which holds the same."""
        self.pool.acquire(offered)
        self.pool.release(own, keep=False)

    def withhold(self, seq: Sequence) -> None:
        """Offer nothing more of ``seq``, ever: what it computes cannot be offered, or is not to be trusted."""
        self._drop_claims(seq)
        chain = self._chain(seq)
        if chain is not None:
            chain.publishable = False

    def _offer_tail(self, seq: Sequence) -> None:
        """Offer the part-filled last block of ``seq``, which gives its blocks back, unless another sequence shares and may write it."""
        num_full, num_left = divmod(seq.num_computed, self.block_size)
        chain = self._chain(seq)
        if self._tails is None or self.index is None or chain is None or not num_left:
            return
        block, key = seq.block_table[num_full], chain.keys[chain.depth]
        if chain.publishable and chain.depth == num_full and self.pool.ref_counts[block] == 1 and block not in self._unfilled:
            tokens = seq.token_ids[seq.num_computed - num_left : seq.num_computed]
            self._tails.offer(self.index.node(key), chain.namespace, key, tokens, block)

    # --- blocks -------------------------------------------------------------------------------------------------------------------------

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """``child``, a new continuation with equal tokens, shares all blocks of ``parent``."""
        child.block_table = parent.block_table[:]
        self._acquire_all(parent, child)
        chain = self._chains.get(parent.seq_id)
        if chain is not None:
            self._chains[child.seq_id] = Chain(chain.namespace, chain.keys[:], chain.tokens[:], chain.depth, chain.publishable)

    def release(self, seq: Sequence, forget: bool) -> None:
        """Give back all blocks, the end of the table first, and all claims. ``forget`` when the sequence never runs again."""
        index, pool = self.index, self.pool
        self._drop_claims(seq)
        if self._tails is not None:
            self._offer_tail(seq)
        self.loading.discard(seq.seq_id)
        if self.restorer is not None:
            self.restorer.leave(seq)
        for block in reversed(seq.block_table):
            pool.release(block, keep=index is not None and index.offers(block))
        # A new array, not a cleared one: whoever still reads the table of a past plan sees what was planned.
        seq.block_table = array("i")
        chain = self._chains.get(seq.seq_id)
        if forget:
            self._chains.pop(seq.seq_id, None)
        elif chain is not None:
            chain.depth = 0

    def _allocate(self, windowed: bool = True) -> int:
        block, evicted = self.pool.allocate()
        if evicted:
            self._evicted(block, ())
        return block

    def _evicted(self, block: int, pages: Seq[int]) -> None:
        """``block``, which lay in ``pages``, is offered no more; what it holds goes to the tiers, if there are any."""
        assert self.index is not None
        node = self.index.forget(block)
        if self.restorer is not None and self.index.is_full(node):
            self.restorer.tiers.save(ref_of(node), block, pages)

    def attach_tiers(self, tiers: KVTiers) -> None:
        """What the pool evicts goes to ``tiers`` from now on, and is looked up there."""
        if self.index is None:
            raise ValueError("tiers keep blocks of the prefix cache, which is off")
        self.restorer = Restorer(self, tiers)

    def evictable_blocks(self) -> list[tuple[BlockRef, int]]:
        """The full blocks that are offered and not referenced, the next to be evicted first."""
        if self.index is None:
            return []
        nodes = self.index.blocks()
        return [(ref_of(nodes[block]), block) for block in self.pool.eviction_order() if self.index.is_full(nodes[block])]

    def offered_block(self, block: int) -> BlockRef | None:
        """What ``block`` holds, if it is full, with all its parts, and offered."""
        node = None if self.index is None else self.index.blocks().get(block)
        if node is None or self.index is None or not self.index.is_full(node) or not self.pool.is_whole(block):
            return None
        return ref_of(node)

    def _chain(self, seq: Sequence) -> Chain | None:
        if self.index is None:
            return None
        chain = self._chains.get(seq.seq_id)
        if chain is None:
            namespace = Namespace(salt=seq.request.cache_salt or None)
            chain = self._chains[seq.seq_id] = Chain(namespace, [self.index.root_key(namespace)])
        return chain

    def _drop_claims(self, seq: Sequence) -> None:
        chain = self._chains.get(seq.seq_id)
        if chain is None:
            return
        for key in chain.keys[chain.depth + 1 :]:
            if self._claims.get(key) == seq.seq_id:
                del self._claims[key]

    def check_invariants(self, holders: Iterable[Sequence]) -> None:
        """AssertionError unless the books balance. ``holders``: every sequence that may hold blocks."""
        from octavo.core import kv_checks

        kv_checks.check(self, list(holders))
