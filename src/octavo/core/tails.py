"""Part-filled blocks: which of them the prefix index offers, and which cached block goes on longest with a prompt.

A sequence that gives its blocks back leaves a last block with fewer tokens than fit. Offered as a *tail* of the index it saves a later
prompt those tokens, and so does a full block of which a prompt shares only the beginning: the block is copied, and computing begins at
the first token that differs. The copied KV is what computing would have given, to the bit.

One token shared is worth the copy: copying a block moves its bytes once (23 kB a token and 16 tokens for SmolLM2: some 20 microseconds),
computing a token multiplies it with every weight (hundreds of microseconds on the same machine).

Nobody ever references a tail; it is cached until it is evicted, or given up for a longer block that begins with the same tokens. So no
tail begins another child of its parent. Owns no state: the trie is the index's, the order of eviction the pool's.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from octavo.core.block_pool import BlockPool
from octavo.core.prefix_index import Namespace, PrefixIndex, PrefixNode, block_key, pack_tokens


@dataclass(slots=True)
class PartialMatch:
    """The first ``num_tokens`` tokens of ``node``, fewer than a block, go on with a prompt."""

    node: PrefixNode
    num_tokens: int


class Tails:
    def __init__(self, pool: BlockPool, index: PrefixIndex) -> None:
        self._pool = pool
        self._index = index

    def find(self, parent: PrefixNode | None, token_ids: Seq[int], start: int) -> PartialMatch | None:
        """The child of ``parent`` that shares most tokens with ``token_ids`` from ``start`` on, but never the last, which has to run."""
        rest = pack_tokens(token_ids[start : min(start + self._index.block_size, len(token_ids) - 1)])
        node, num_tokens = self._index.nearest(parent, rest)
        return PartialMatch(node, num_tokens) if node is not None and num_tokens else None

    def offer(self, parent: PrefixNode | None, namespace: Namespace, parent_key: bytes, token_ids: Seq[int], block: int) -> None:
        """Offer ``block``, which holds the KV of ``token_ids``, fewer than a block, unless another one offers as much."""
        tokens = pack_tokens(token_ids)
        other = self._index.covering(parent, tokens)
        if other is not None:
            self._pool.touch(other.block)
            return
        node = self._index.publish(parent, namespace, block_key(parent_key, tokens), tokens, block)
        if node is not None:
            self.drop_covered(node)

    def drop_covered(self, node: PrefixNode) -> None:
        """Give up the tail that ``node`` has made needless."""
        tail = self._index.covered_tail(node)
        if tail is not None:
            self._index.forget(tail.block)
            self._pool.discard(tail.block)
