"""Keys, lookups, and the reasons why a match ends."""

from __future__ import annotations

import random

import pytest

from octavo.core.match_report import MatchEnd, MatchReport
from octavo.core.prefix_index import Namespace, PrefixIndex, PrefixNode, block_key, pack_tokens, root_key

PLAIN = Namespace()


def publish(index: PrefixIndex, token_ids: list[int], blocks: list[int], namespace: Namespace = PLAIN) -> list[PrefixNode]:
    """Offer ``token_ids`` in ``blocks``, in order."""
    key, nodes = index.root_key(namespace), []
    for i, block in enumerate(blocks):
        parent, tokens = index.node(key), pack_tokens(token_ids[i * index.block_size : (i + 1) * index.block_size])
        key = block_key(key, tokens)
        node = index.publish(parent, namespace, key, tokens, block)
        assert node is not None
        nodes.append(node)
    index.check_invariants()
    return nodes


def test_each_source_of_key_material_is_tagged() -> None:
    names = ["", "x", "y", "salt:1:x", "1:x"]
    keys = {root_key(f, Namespace(s, a)) for f in names for s in names for a in names}
    assert len(keys) == len(names) ** 3
    assert root_key("f", Namespace(None, None)) == root_key("f", Namespace("", ""))  # empty is none


def test_keys_commit_to_all_tokens_before() -> None:
    root = root_key("", PLAIN)
    assert block_key(block_key(root, pack_tokens([1, 2])), pack_tokens([3, 4])) != block_key(
        block_key(root, pack_tokens([1, 3])), pack_tokens([3, 4])
    )
    assert block_key(root, pack_tokens([1, 2])) != block_key(root_key("", Namespace(salt="x")), pack_tokens([1, 2]))


def test_the_first_block_with_a_key_stays() -> None:
    index = PrefixIndex(2)
    first = publish(index, [1, 2, 3, 4], [5, 6])
    assert publish(index, [1, 2, 3, 4], [7, 8]) == first
    assert len(index) == 2 and index.offers(5) and not index.offers(7)


def test_a_key_taken_by_other_tokens_is_refused() -> None:
    index = PrefixIndex(2)
    (node,) = publish(index, [1, 2], [5])
    other = pack_tokens([8, 9])
    assert index.find(node.parent, node.key, other) is None
    assert index.publish(node.parent, PLAIN, node.key, other, 6) is None
    assert index.find(node, node.key, node.tokens) is None  # the same tokens, but under another parent
    index.check_invariants()


def test_parents_cannot_be_forgotten_before_children() -> None:
    index = PrefixIndex(2)
    publish(index, [1, 2, 3, 4], [5, 6])
    with pytest.raises(AssertionError, match="block 5 is evicted before its children"):
        index.forget(5)
    index.forget(6)
    index.forget(5)
    index.check_invariants()
    assert len(index) == 0 and index.node(index.root_key(PLAIN)) is None


def test_why_a_match_ends() -> None:
    index = PrefixIndex(2, num_remembered=1)
    assert index.explain(PLAIN, [1, 2, 3]) == MatchReport(MatchEnd.NOT_CACHED, 0)
    publish(index, [1, 2, 3, 4, 5, 6], [0, 1, 2])
    publish(index, [1, 2, 3, 9], [0, 3])
    assert index.explain(PLAIN, [1, 2, 3, 4, 5]) == MatchReport(MatchEnd.COMPLETE, 4)
    assert index.explain(PLAIN, [1, 2, 3, 4]) == MatchReport(MatchEnd.PART_BLOCK, 2)  # the last token has to run
    assert index.explain(PLAIN, [1, 2, 3, 7, 0]) == MatchReport(MatchEnd.DIFFERENT_TOKEN, 3, token_id=7, expected_id=9)
    assert index.explain(PLAIN, [8, 2, 3, 7, 0]) == MatchReport(MatchEnd.DIFFERENT_TOKEN, 0, token_id=8, expected_id=1)
    assert index.explain(PLAIN, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == MatchReport(MatchEnd.NOT_CACHED, 6)
    assert index.explain(Namespace(salt="x"), [1, 2, 3, 4, 5]) == MatchReport(MatchEnd.OTHER_SALT, 0)
    assert index.explain(Namespace(adapter="x"), [1, 2, 3, 4, 5]) == MatchReport(MatchEnd.OTHER_ADAPTER, 0)
    assert index.explain(Namespace(salt="x"), [1, 3, 3, 4, 5]) == MatchReport(MatchEnd.NOT_CACHED, 0)
    index.forget(2)
    assert index.explain(PLAIN, [1, 2, 3, 4, 5, 6, 7]) == MatchReport(MatchEnd.EVICTED, 4)
    index.forget(1)  # only one eviction is remembered
    assert index.explain(PLAIN, [1, 2, 3, 4, 5, 6, 7]) == MatchReport(MatchEnd.EVICTED, 3)  # the 3 is there, in another block
    publish(index, [1, 2, 3, 4], [0, 1])
    assert index.explain(PLAIN, [1, 2, 3, 4, 5, 6, 7]) == MatchReport(MatchEnd.NOT_CACHED, 4)
    assert index.explain(PLAIN, []) == MatchReport(MatchEnd.COMPLETE, 0)


def test_reports_by_the_token() -> None:
    index = PrefixIndex(4, token_granular=True)
    publish(index, [1, 2, 3, 4, 5, 6], [0, 1])  # the second one a tail
    assert index.explain(PLAIN, [1, 2, 3, 4, 5, 6, 7]) == MatchReport(MatchEnd.COMPLETE, 6)
    assert index.explain(PLAIN, [1, 2, 3, 4, 5, 6, 7, 8]) == MatchReport(MatchEnd.NOT_CACHED, 6)
    assert index.explain(PLAIN, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == MatchReport(MatchEnd.NOT_CACHED, 6)
    assert index.explain(PLAIN, [1, 2, 3, 4]) == MatchReport(MatchEnd.COMPLETE, 3)
    assert index.explain(PLAIN, [1, 2, 0, 4]) == MatchReport(MatchEnd.DIFFERENT_TOKEN, 2, token_id=0, expected_id=3)
    assert index.explain(PLAIN, [1, 2, 3, 4, 5, 9, 0]) == MatchReport(MatchEnd.DIFFERENT_TOKEN, 5, token_id=9, expected_id=6)


def test_the_nearest_child_is_the_best_of_all() -> None:
    """Against trying every child; blocks of 6 tokens, tails among them."""
    rng = random.Random(5)
    for _ in range(40):
        index, key = PrefixIndex(6, token_granular=True), root_key("", PLAIN)
        for block in range(rng.randint(0, 60)):
            tokens = pack_tokens(rng.choices([0, 1, 300, 70000], k=rng.choice([6, 6, rng.randint(1, 5)])))
            if index.covering(index.node(key), tokens) is None:
                node = index.publish(index.node(key), PLAIN, block_key(key, tokens), tokens, block)
                assert node is not None
                below = index.covered_tail(node)
                if below is not None:
                    index.forget(below.block)
        index.check_invariants()
        root = index.node(key)
        for _ in range(20):
            query = rng.choices([0, 1, 300, 70000], k=rng.randint(1, 6))
            node, common = index.nearest(root, pack_tokens(query))
            every = [leading(query, list(memoryview(child.tokens).cast("i"))) for child in (root.children if root else [])]
            assert common == max(every, default=0)
            assert node is None if root is None else leading(query, list(memoryview(node.tokens).cast("i"))) == common


def leading(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
