"""The prefix index: a trie of computed blocks, found by key and verified by token.

A node is one full block whose KV is computed; its path from the root spells all tokens before it. Its key is blake2b over the parent's key
and its own tokens; a root's key is blake2b over fingerprint, salt and adapter, each tagged and length-prefixed, so that every key below
commits to all three and salt "x" never meets adapter "x". Keys are what other processes and disks can compare; within this process a hit
also needs the same tokens under the same parent, so even a key collision cannot hand out wrong KV.

The index owns the trie. It never counts references and never decides what is evicted.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import Enum
from hashlib import blake2b
from typing import NamedTuple

KEY_BYTES = 32
ROOT_BLOCK = -1


class Namespace(NamedTuple):
    """What separates prefix-cache entries besides tokens. An empty salt or adapter name is none."""

    salt: str | None = None
    adapter: str | None = None


class MatchEnd(str, Enum):
    """Why a match went no further."""

    COMPLETE = "complete"  # every block that may be shared was found
    DIFFERENT_TOKEN = "different_token"  # the cache goes on with another token
    EVICTED = "evicted"  # the next block was cached and has been evicted
    OTHER_NAMESPACE = "other_namespace"  # the same tokens are cached under another salt or adapter
    NOT_CACHED = "not_cached"  # nothing beyond here has been computed


@dataclass(frozen=True, slots=True)
class MatchReport:
    """How far ``token_ids`` are cached, in tokens, and why no further. ``differs_at`` is the position of the first differing token."""

    num_tokens: int
    end: MatchEnd
    differs_at: int | None = None


@dataclass(slots=True, eq=False)
class PrefixNode:
    key: bytes
    parent: PrefixNode | None  # None: a root
    tokens: bytes  # int32 token ids of this block (empty for a root)
    block: int  # ROOT_BLOCK for a root
    namespace: Namespace
    children: dict[bytes, PrefixNode] = field(default_factory=dict)


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


class PrefixIndex:
    """``num_remembered`` keys of evicted blocks are kept, so that ``explain`` can tell an eviction from a first visit."""

    def __init__(self, block_size: int, fingerprint: str = "", num_remembered: int = 4096) -> None:
        self.block_size = block_size
        self.fingerprint = fingerprint
        self._nodes: dict[bytes, PrefixNode] = {}  # by key; roots too, while they have children
        self._by_block: dict[int, PrefixNode] = {}
        self._evicted: OrderedDict[bytes, None] = OrderedDict()  # oldest first
        self._num_remembered = num_remembered

    def __len__(self) -> int:
        """Number of blocks that the index offers."""
        return len(self._by_block)

    def root_key(self, namespace: Namespace) -> bytes:
        return root_key(self.fingerprint, namespace)

    def offers(self, block: int) -> bool:
        return block in self._by_block

    def node(self, key: bytes) -> PrefixNode | None:
        return self._nodes.get(key)

    def find(self, parent: PrefixNode | None, key: bytes, tokens: bytes) -> PrefixNode | None:
        """The child of ``parent`` with this key and exactly these tokens."""
        node = self._nodes.get(key)
        if node is None or node.parent is not parent or node.tokens != tokens:
            return None
        return node

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
        self._nodes[key] = self._by_block[block] = parent.children[key] = node
        self._evicted.pop(key, None)
        return node

    def forget(self, block: int) -> PrefixNode:
        """Stop offering ``block``, which is being evicted and must be a leaf. Returns what its node was."""
        node = self._by_block[block]
        if node.children or node.parent is None:
            raise AssertionError(f"block {block} is evicted before its children")
        del self._by_block[block], self._nodes[node.key], node.parent.children[node.key]
        if node.parent.parent is None and not node.parent.children:
            del self._nodes[node.parent.key]
        self._evicted[node.key] = None
        if len(self._evicted) > self._num_remembered:
            self._evicted.popitem(last=False)
        return node

    def explain(self, namespace: Namespace, token_ids: Seq[int]) -> MatchReport:
        """How far a prompt would hit now, and why no further. Looks only; its time grows with the prompt and the siblings at the end."""
        size, limit = self.block_size, max(0, len(token_ids) - 1) // self.block_size
        key = self.root_key(namespace)
        node, depth = self._nodes.get(key), 0
        while depth < limit:
            tokens = pack_tokens(token_ids[depth * size : (depth + 1) * size])
            key = block_key(key, tokens)
            child = self.find(node, key, tokens)
            if child is None:
                return self._explain_miss(node, key, tokens, depth)
            node, depth = child, depth + 1
        return MatchReport(limit * size, MatchEnd.COMPLETE)

    def _explain_miss(self, node: PrefixNode | None, key: bytes, tokens: bytes, depth: int) -> MatchReport:
        num_tokens = depth * self.block_size
        if key in self._evicted:
            return MatchReport(num_tokens, MatchEnd.EVICTED)
        if depth == 0 and any(tokens == child.tokens for root in self._roots() if root is not node for child in root.children.values()):
            return MatchReport(num_tokens, MatchEnd.OTHER_NAMESPACE)
        if node is None or not node.children:
            return MatchReport(num_tokens, MatchEnd.NOT_CACHED)
        common = max(_common_tokens(tokens, child.tokens) for child in node.children.values())
        return MatchReport(num_tokens, MatchEnd.DIFFERENT_TOKEN, num_tokens + common)

    def _roots(self) -> list[PrefixNode]:
        return [node for node in self._nodes.values() if node.parent is None]

    def blocks(self) -> dict[int, PrefixNode]:
        """Offered blocks and their nodes (a view for checks; not to be changed)."""
        return self._by_block

    def check_invariants(self) -> None:
        """AssertionError unless keys, nodes, blocks and links map one to one."""
        for key, node in self._nodes.items():
            assert node.key == key, "a node is filed under another key"
            if node.parent is None:
                assert node.children, "a root without children is kept"
                assert key == self.root_key(node.namespace)
                continue
            assert self._by_block.get(node.block) is node, f"block {node.block} does not lead back to its node"
            assert self._nodes.get(node.parent.key) is node.parent, f"the parent of block {node.block} is gone"
            assert node.parent.children.get(key) is node
            assert len(node.tokens) == 4 * self.block_size, f"block {node.block} is not full"
            assert key not in self._evicted, f"block {node.block} is both offered and remembered as evicted"
        num_roots = len(self._roots())
        assert len(self._by_block) == len(self._nodes) - num_roots, "two nodes share a block"


def _common_tokens(a: bytes, b: bytes) -> int:
    common = 0
    for x, y in zip(memoryview(a).cast("i"), memoryview(b).cast("i"), strict=True):
        if x != y:
            break
        common += 1
    return common
