"""What must always hold of the KV books: tables, reference counts, what is offered and what is claimed. For tests and debug runs: slow.

Reads everything that KVManager keeps, and changes nothing.
"""

from __future__ import annotations

from octavo.core.kv_manager import KVManager
from octavo.core.prefix_index import PrefixIndex, pack_tokens
from octavo.core.request import Sequence


def check(kv: KVManager, holders: list[Sequence]) -> None:
    """AssertionError unless the books balance. ``holders``: every sequence that may hold blocks."""
    kv.pool.check_invariants()
    counts = [0] * len(kv.pool.ref_counts)
    for seq in holders:
        assert len(set(seq.block_table)) == len(seq.block_table), f"sequence {seq.seq_id} holds a block twice"
        for block in seq.block_table:
            counts[block] += 1
    for block in kv.pool._lent_blocks():
        counts[block] += 1
    assert counts == kv.pool.ref_counts, f"tables reference {counts}, the pool counts {kv.pool.ref_counts}"
    for seq in holders:
        check_table(kv, seq)
    if kv.index is not None:
        _check_index(kv, kv.index)
    alive = {seq.seq_id for seq in holders}
    if kv.restorer is not None:
        kv.restorer.tiers.check_invariants(alive)
    for key, seq_id in kv._claims.items():
        assert seq_id in alive, f"sequence {seq_id} holds a claim but no blocks"
        assert kv.index is not None and kv.index.node(key) is None, "a block is both offered and claimed"


def check_table(kv: KVManager, seq: Sequence) -> None:
    """AssertionError unless the table of ``seq`` is as long as it should be, and its own where it is written."""
    size, table, end = kv.block_size, seq.block_table, seq.num_computed + seq.num_scheduled
    assert seq.num_computed <= len(seq.token_ids) and end <= len(seq.token_ids), f"sequence {seq.seq_id} computes unknown tokens"
    assert len(table) == kv.blocks_for(end + seq.num_drafts), f"sequence {seq.seq_id} holds {len(table)} blocks for {end} tokens"
    if seq.num_scheduled:
        for block in table[seq.num_computed // size :]:
            assert kv.pool.ref_counts[block] == 1, f"block {block} is shared and about to be written"
            assert kv.index is None or not kv.index.offers(block), f"block {block} is offered and about to be written"
    chain = kv._chains.get(seq.seq_id)
    if chain is None or kv.index is None:
        return
    assert chain.depth <= seq.num_computed // size, f"sequence {seq.seq_id} offers blocks that are not computed"
    offered = not chain.publishable or seq.seq_id in kv.loading or chain.depth == seq.num_computed // size
    assert offered, f"sequence {seq.seq_id} keeps computed blocks to itself"
    parent = kv.index.node(chain.keys[0])
    for i in range(chain.depth):
        node = kv.index.find(parent, chain.keys[i + 1], pack_tokens(seq.token_ids[i * size : (i + 1) * size]))
        assert node is not None and node.block == table[i], f"block {i} of sequence {seq.seq_id} is not the one offered for its tokens"
        parent = node


def _check_index(kv: KVManager, index: PrefixIndex) -> None:
    index.check_invariants()
    order = {block: i for i, block in enumerate(kv.pool.eviction_order())}
    for block, node in index.blocks().items():
        referenced = kv.pool.ref_counts[block] > 0
        assert not referenced or index.is_full(node), f"tail {block} is referenced"
        assert referenced != (block in order), f"offered block {block} is free"
        parent = node.parent
        if parent is None or parent.parent is None:
            continue
        if referenced:
            assert kv.pool.ref_counts[parent.block] > 0, f"block {block} is referenced, its parent {parent.block} is not"
        elif kv.pool.ref_counts[parent.block] == 0:
            assert order[block] < order[parent.block], f"block {parent.block} would be evicted before its child {block}"
    assert all(index.offers(block) for block in order), "a cached block is not offered"
