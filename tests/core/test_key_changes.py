"""What an index tells of its keys, against what it offers."""

from __future__ import annotations

from octavo.core.key_changes import KeyChanges
from octavo.core.prefix_index import Namespace, PrefixIndex, prompt_keys, root_key
from tests.core.test_prefix_index import publish


def test_keys_of_a_prompt_are_those_that_an_index_offers() -> None:
    index, token_ids = PrefixIndex(4, "f"), list(range(13))
    salted = Namespace("x")
    nodes = publish(index, token_ids, [3, 1, 2], salted)
    assert prompt_keys("f", salted, token_ids, 4) == [node.key for node in nodes]
    assert prompt_keys("f", salted, token_ids[:12], 4) == [node.key for node in nodes[:2]]  # the last token is computed in any case
    assert prompt_keys("f", salted, [], 4) == prompt_keys("f", salted, [1, 2, 3, 4], 4) == []
    assert root_key("f", salted) not in prompt_keys("f", salted, token_ids, 4)


def test_only_the_net_change_is_told() -> None:
    index = PrefixIndex(2)
    publish(index, [1, 2], [0])  # before anybody asked
    index.changes = KeyChanges()
    first, second = publish(index, [3, 4, 5, 6], [1, 2])
    assert index.changes.take() == ([first.key, second.key], []) and index.changes.take() == ([], [])
    index.forget(2)
    publish(index, [3, 4, 5, 6], [1, 5])  # evicted and back
    assert len(index.changes) == 0 and index.changes.take() == ([], [])
    index.forget(5)
    index.forget(1)
    assert index.changes.take() == ([], [second.key, first.key])
