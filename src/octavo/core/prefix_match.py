"""What KVManager knows of a sequence's place in the prefix cache, and what a look-up there gives. Records only."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from octavo.core.kv_tiers import BlockRef, TierMatch
from octavo.core.prefix_index import Namespace, PrefixNode, block_key, pack_tokens
from octavo.core.tails import PartialMatch


@dataclass(slots=True)
class Chain:
    """Keys of a sequence's full blocks, made when first needed. Tokens only grow, so keys outlive preemption; ``depth`` does not."""

    namespace: Namespace
    keys: list[bytes]  # [1 + blocks hashed so far]: the root's key, then one per block
    tokens: list[bytes] = field(default_factory=list)  # [blocks hashed so far]
    depth: int = 0  # leading blocks of the table that are in the index
    publishable: bool = True  # False after a key collision: blocks below it cannot be offered
    num_found: int = 0  # leading blocks that somebody had, or was computing, at the last ``KVManager.num_found``

    def extend(self, token_ids: Seq[int], block_size: int, num_blocks: int) -> None:
        """Make keys for the first ``num_blocks`` blocks."""
        for i in range(len(self.tokens), num_blocks):
            tokens = pack_tokens(token_ids[i * block_size : (i + 1) * block_size])
            self.tokens.append(tokens)
            self.keys.append(block_key(self.keys[i], tokens))


@dataclass(slots=True)
class PrefixMatch:
    """What the cache has for a sequence beyond the blocks it already shares."""

    nodes: list[PrefixNode]
    num_pending: int = 0  # blocks after those that another sequence is computing; above 0: wait
    tail: PartialMatch | None = None  # beginning of the block after the nodes; None while blocks are pending
    tier: TierMatch | None = None  # blocks after those that can be restored
    num_unusable: int = 0  # blocks after the nodes that are offered and of no use: window parts before their end are gone

    @property
    def waits(self) -> bool:
        """Whether the sequence, once it shares what was found, sits out a step at least."""
        return self.num_pending > 0 or bool(self.tier)


def ref_of(node: PrefixNode) -> BlockRef:
    assert node.parent is not None, "a root holds no block"
    return BlockRef(node.key, node.parent.key, node.tokens)
