"""The KV manager by itself: claims, and growth that happens whole or not at all."""

from __future__ import annotations

import pytest

from octavo.core.kv_manager import KVManager
from octavo.core.request import Sequence
from octavo.core.step import BlockCopy
from tests.core.harness import make_request

PROMPT = [0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0]  # three full blocks of 4 and one token


def sequence(seq_id: int) -> Sequence:
    return Sequence(seq_id, make_request(f"r{seq_id}", PROMPT), token_ids=list(PROMPT), num_prompt_tokens=len(PROMPT))


def test_the_first_claim_stands() -> None:
    kv, (first, second, third) = KVManager(16, 4), map(sequence, range(3))
    kv.claim(first)
    kv.claim(second)
    assert kv.find_prefix(first).num_pending == 0 and kv.find_prefix(third).num_pending == 3
    kv.release(second, forget=True)
    assert kv.find_prefix(third).num_pending == 3
    kv.release(first, forget=True)
    assert kv.find_prefix(third).num_pending == 0


def test_nobody_waits_for_blocks_that_cannot_be_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    kv, owner, other = KVManager(16, 4), sequence(0), sequence(1)
    kv.claim(owner)
    assert kv.grow(owner, 4, []) and kv.find_prefix(other).num_pending == 3
    owner.num_computed = 4
    assert kv.index is not None
    monkeypatch.setattr(kv.index, "publish", lambda *args: None)  # as when the key is taken by other tokens
    kv.publish(owner)
    assert kv.find_prefix(other).num_pending == 0
    kv.claim(owner)
    assert kv.find_prefix(other).num_pending == 0
    kv.check_invariants([owner])


def test_growth_without_room_changes_nothing() -> None:
    kv, parent, child, copies = KVManager(3, 4), sequence(0), sequence(1), list[BlockCopy]()
    assert kv.grow(parent, 6, copies)
    parent.num_computed = child.num_computed = 6
    kv.publish(parent)
    kv.fork(parent, child)
    before = list(parent.block_table)
    assert not kv.grow(parent, 4, copies)  # a copy and a new block, but only one is free
    assert list(parent.block_table) == before and copies == [] and kv.pool.num_free == 1
    assert kv.grow(parent, 1, copies)
    assert copies == [BlockCopy(before[1], parent.block_table[1])] and list(child.block_table) == before
    kv.check_invariants([parent, child])
