"""The prefix index: a trie of computed blocks, found by key and verified by token.

A node is one full block whose KV is computed; its path from the root spells all tokens before it. Its key is blake2b over the parent's key
and its own tokens; a root's key is blake2b over fingerprint, salt and adapter, each tagged and length-prefixed, so that every key below
commits to all three and salt "x" never meets adapter "x". Keys are what other processes and disks can compare; within this process a hit
also needs the same tokens under the same parent, so even a key collision cannot hand out wrong KV.

Where single tokens are shared, a leaf may also be a *tail*: a part-filled block, with fewer tokens. It is found by ``nearest`` alone.

The children of a node are kept in the order of their tokens' bytes. Of all strings in such an order, those beside a string share the
longest beginning with it, so the best partial match among c children takes O(log c) comparisons of at most a block, however many there
are. (Any fixed order of the 4-byte tokens will do, so native byte order does.) Adding or removing a child moves c pointers.

The index owns the trie. It never counts references and never decides what is evicted.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from hashlib import blake2b
from operator import attrgetter
from typing import NamedTuple

from octavo.core.key_changes import KeyChanges
from octavo.core.match_report import MatchEnd, MatchReport

KEY_BYTES = 32
ROOT_BLOCK = -1
TOKEN_BYTES = 4
_TOKENS = attrgetter("tokens")


class Namespace(NamedTuple):
    """What separates prefix-cache entries besides tokens. An empty salt or adapter name is none."""

    salt: str | None = None
    adapter: str | None = None


@dataclass(slots=True, eq=False)
class PrefixNode:
    key: bytes
    parent: PrefixNode | None  # None: a root
    tokens: bytes  # int32 token ids of this block, fewer than a block of them in a tail (empty for a root)
    block: int  # ROOT_BLOCK for a root
    namespace: Namespace
    children: list[PrefixNode] = field(default_factory=list)  # in the order of their tokens' bytes


def pack_tokens(token_ids: Seq[int]) -> bytes:
    """Token ids as int32 in native byte order: the form in which blocks are hashed and compared."""
    return array("i", token_ids).tobytes()


def block_key(parent_key: bytes, tokens: bytes) -> bytes:
    return blake2b(parent_key + tokens, digest_size=KEY_BYTES, person=b"octavo-block").digest()


def root_key(fingerprint: str, namespace: Namespace) -> bytes:
    digest = blake2b(digest_size=KEY_BYTES, person=b"octavo-root")
    for tag, value in (("fingerprint", fingerprint), ("salt", namespace.salt), ("adapter", namespace.adapter)):
        if value:
            data = value.encode("utf-8", "surrogatepass")
            digest.update(f"{tag}:{len(data)}:".encode() + data)
    return digest.digest()


def prompt_keys(fingerprint: str, namespace: Namespace, token_ids: Seq[int], block_size: int) -> list[bytes]:
    """Keys of the full blocks of a prompt that a match may find, from the first; the last token is computed in any case."""
    key, keys = root_key(fingerprint, namespace), list[bytes]()
    for start in range(0, (len(token_ids) - 1) // block_size * block_size, block_size):
        key = block_key(key, pack_tokens(token_ids[start : start + block_size]))
        keys.append(key)
    return keys


class PrefixIndex:
    """``num_remembered`` keys of evicted blocks are kept, so that a report can tell an eviction from a first visit (not those of tails).

    ``token_granular``: tails may be offered, and reports end at a token rather than at a block.
    """

    def __init__(self, block_size: int, fingerprint: str = "", num_remembered: int = 4096, token_granular: bool = False) -> None:
        self.block_size = block_size
        self.fingerprint = fingerprint
        self.token_granular = token_granular
        self._nodes: dict[bytes, PrefixNode] = {}  # by key; roots too, while they have children
        self._by_block: dict[int, PrefixNode] = {}
        self._first_blocks: dict[bytes, dict[bytes, PrefixNode]] = {}  # full children of roots: by tokens, then by key
        self._evicted: OrderedDict[bytes, None] = OrderedDict()  # oldest first
        self._num_remembered = num_remembered
        self.changes: KeyChanges | None = None  # where somebody wants to hear of keys of full blocks

    def __len__(self) -> int:
        """Number of blocks that the index offers."""
        return len(self._by_block)

    def root_key(self, namespace: Namespace) -> bytes:
        return root_key(self.fingerprint, namespace)

    def offers(self, block: int) -> bool:
        return block in self._by_block

    def node(self, key: bytes) -> PrefixNode | None:
        return self._nodes.get(key)

    def is_full(self, node: PrefixNode) -> bool:
        return len(node.tokens) == TOKEN_BYTES * self.block_size

    def find(self, parent: PrefixNode | None, key: bytes, tokens: bytes) -> PrefixNode | None:
        """The child of ``parent`` with this key and exactly these tokens."""
        node = self._nodes.get(key)
        if node is None or node.parent is not parent or node.tokens != tokens:
            return None
        return node

    def nearest(self, parent: PrefixNode | None, tokens: bytes) -> tuple[PrefixNode | None, int]:
        """The child of ``parent`` that shares most leading tokens with ``tokens``, and how many (perhaps none).

        Of equally good ones: the first at or above ``tokens`` in the order of children, else the last below.
        """
        if parent is None or not parent.children:
            return None, 0
        children = parent.children
        place = bisect_left(children, tokens, key=_TOKENS)
        best, most = None, -1
        for child in (*children[place : place + 1], *children[max(0, place - 1) : place]):
            common = _common_tokens(tokens, child.tokens)
            if common > most:
                best, most = child, common
        return best, most

    def covering(self, parent: PrefixNode | None, tokens: bytes) -> PrefixNode | None:
        """A child of ``parent`` whose tokens begin with ``tokens``: it makes a tail of these tokens needless."""
        child = self._at_or_above(parent, tokens)
        return child if child is not None and child.tokens.startswith(tokens) else None

    def covered_tail(self, node: PrefixNode) -> PrefixNode | None:
        """The tail beside ``node`` that holds less of the same: at most one, since no tail begins another child's tokens."""
        assert node.parent is not None
        place = bisect_left(node.parent.children, node.tokens, key=_TOKENS)
        below = node.parent.children[place - 1] if place else None
        return below if below is not None and node.tokens.startswith(below.tokens) else None

    def publish(self, parent: PrefixNode | None, namespace: Namespace, key: bytes, tokens: bytes, block: int) -> PrefixNode | None:
        """Offer ``block`` as the child of ``parent``; returns its node, or the node that is there already with the same tokens (it stays).

        ``parent`` None: the first block of a namespace whose root does not exist; it is made now and disappears with its last child, so
        that salts do not pile up. Returns None when the key is taken by other tokens: the block cannot be offered.
        """
        if key in self._nodes:
            return self.find(parent, key, tokens)
        if parent is None:
            parent = PrefixNode(self.root_key(namespace), None, b"", ROOT_BLOCK, namespace)
            self._nodes[parent.key] = parent
        node = PrefixNode(key, parent, tokens, block, namespace)
        self._nodes[key] = self._by_block[block] = node
        parent.children.insert(bisect_left(parent.children, tokens, key=_TOKENS), node)
        if parent.parent is None and self.is_full(node):
            self._first_blocks.setdefault(tokens, {})[key] = node
        self._evicted.pop(key, None)
        if self.changes is not None and self.is_full(node):
            self.changes.published(key)
        return node

    def forget(self, block: int) -> PrefixNode:
        """Stop offering ``block``, which is being evicted and must be a leaf. Returns what its node was."""
        node = self._by_block[block]
        parent = node.parent
        if node.children or parent is None:
            raise AssertionError(f"block {block} is evicted before its children")
        del self._by_block[block], self._nodes[node.key]
        del parent.children[bisect_left(parent.children, node.tokens, key=_TOKENS)]
        if parent.parent is None and not parent.children:
            del self._nodes[parent.key]
        if self.is_full(node):
            self._remember(node, parent)
            if self.changes is not None:
                self.changes.forgotten(node.key)
        return node

    def _remember(self, node: PrefixNode, parent: PrefixNode) -> None:
        """``node``, a full block, has been evicted."""
        if parent.parent is None:
            namesakes = self._first_blocks[node.tokens]
            del namesakes[node.key]
            if not namesakes:
                del self._first_blocks[node.tokens]
        self._evicted[node.key] = None
        if len(self._evicted) > self._num_remembered:
            self._evicted.popitem(last=False)

    def _at_or_above(self, parent: PrefixNode | None, tokens: bytes) -> PrefixNode | None:
        if parent is None:
            return None
        place = bisect_left(parent.children, tokens, key=_TOKENS)
        return parent.children[place] if place < len(parent.children) else None

    # --- reports ------------------------------------------------------------------------------------------------------------------------

    def explain(self, namespace: Namespace, token_ids: Seq[int]) -> MatchReport:
        """How far a prompt would be found now, and why no further. Looks only; its time grows with the prompt."""
        size, limit = self.block_size, max(0, len(token_ids) - 1) // self.block_size
        key = self.root_key(namespace)
        node, depth = self._nodes.get(key), 0
        while depth < limit:
            tokens = pack_tokens(token_ids[depth * size : (depth + 1) * size])
            child_key = block_key(key, tokens)
            child = self.find(node, child_key, tokens)
            if child is None:
                break
            node, key, depth = child, child_key, depth + 1
        return self.explain_end(namespace, node, key, token_ids, depth)

    def explain_end(self, namespace: Namespace, node: PrefixNode | None, key: bytes, token_ids: Seq[int], depth: int) -> MatchReport:
        """Why ``token_ids``, whose first ``depth`` blocks lead to ``node``, are found no further. ``key`` is that of ``node``, which may
        be a root that does not exist (None)."""
        start = depth * self.block_size
        rest = pack_tokens(token_ids[start : min(start + self.block_size, len(token_ids) - 1)])
        near, common = self.nearest(node, rest)
        position = start + common
        fills_block = len(rest) == TOKEN_BYTES * self.block_size
        if not rest or (self.token_granular and not fills_block and common * TOKEN_BYTES == len(rest)):
            return MatchReport(MatchEnd.COMPLETE, position)
        if not fills_block and not self.token_granular:
            return MatchReport(MatchEnd.PART_BLOCK, start)
        if fills_block and block_key(key, rest) in self._evicted:
            return MatchReport(MatchEnd.EVICTED, position, missed_end=self._remembered_end(key, token_ids, depth))
        if depth == 0 and (elsewhere := self._elsewhere(namespace, rest)) is not None:
            return MatchReport(elsewhere[0], position, missed_end=self._found_end(elsewhere[1], token_ids))
        if near is None or common * TOKEN_BYTES == len(near.tokens):
            return MatchReport(MatchEnd.NOT_CACHED, position)
        return MatchReport(MatchEnd.DIFFERENT_TOKEN, position, token_ids[position], memoryview(near.tokens).cast("i")[common])

    def _elsewhere(self, namespace: Namespace, tokens: bytes) -> tuple[MatchEnd, PrefixNode] | None:
        """What separates ``namespace`` from another one that has these first tokens, and its node of them; None when there is none."""
        for node in self._first_blocks.get(tokens, {}).values():
            if node.namespace != namespace:
                return (MatchEnd.OTHER_ADAPTER if node.namespace.salt == namespace.salt else MatchEnd.OTHER_SALT), node
        return None

    def _found_end(self, node: PrefixNode, token_ids: Seq[int]) -> int:
        """Up to where a prompt, whose first block ``node`` holds, is found in that node's namespace."""
        size, end = self.block_size, self.block_size
        while end + size < len(token_ids):
            tokens = pack_tokens(token_ids[end : end + size])
            child = self._at_or_above(node, tokens)
            if child is None or child.tokens != tokens:
                break
            node, end = child, end + size
        return end

    def _remembered_end(self, key: bytes, token_ids: Seq[int], depth: int) -> int:
        """Up to where the blocks of a prompt after the first ``depth``, which lead to ``key``, are evicted ones or still offered."""
        size, end = self.block_size, depth * self.block_size
        while end + size < len(token_ids):
            key = block_key(key, pack_tokens(token_ids[end : end + size]))
            if key not in self._evicted and key not in self._nodes:
                break
            end += size
        return end

    # --- checks -------------------------------------------------------------------------------------------------------------------------

    def blocks(self) -> dict[int, PrefixNode]:
        """Offered blocks and their nodes (a view for checks; not to be changed)."""
        return self._by_block

    def check_invariants(self) -> None:
        """AssertionError unless keys, nodes, blocks and links map one to one, and children are in order."""
        num_roots = 0
        for key, node in self._nodes.items():
            assert node.key == key, "a node is filed under another key"
            self._check_children(node)
            if node.parent is None:
                num_roots += 1
                assert node.children, "a root without children is kept"
                assert key == self.root_key(node.namespace)
                continue
            assert self._by_block.get(node.block) is node, f"block {node.block} does not lead back to its node"
            assert self._nodes.get(node.parent.key) is node.parent, f"the parent of block {node.block} is gone"
            assert sum(child is node for child in node.parent.children) == 1
            assert key not in self._evicted, f"block {node.block} is both offered and remembered as evicted"
            named = self._first_blocks.get(node.tokens, {}).get(key) is node
            assert named == (node.parent.parent is None and self.is_full(node))
            if not self.is_full(node):
                assert self.token_granular and not node.children, f"block {node.block} is not full"
        assert len(self._by_block) == len(self._nodes) - num_roots, "two nodes share a block"
        assert all(self._nodes.get(key) is node for same in self._first_blocks.values() for key, node in same.items())

    def _check_children(self, node: PrefixNode) -> None:
        tokens = [child.tokens for child in node.children]
        assert all(0 < len(t) <= TOKEN_BYTES * self.block_size and len(t) % TOKEN_BYTES == 0 for t in tokens)
        for below, above in zip(tokens, tokens[1:], strict=False):
            assert below < above, "children are out of order"
            assert not above.startswith(below), "a tail is kept beside a block that begins with it"


def _common_tokens(a: bytes, b: bytes) -> int:
    common = 0
    for x, y in zip(memoryview(a).cast("i"), memoryview(b).cast("i"), strict=False):
        if x != y:
            break
        common += 1
    return common
