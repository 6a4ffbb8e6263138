"""What goes into the matrices of a model: a forward pass over texts, all their tokens at once, in NumPy float32.

Owns that pass, which is for statistics: it keeps no KV and makes no logits, and its sums run in BLAS's order, so that its values are right
but their last bits are nobody's business. One matrix at a time is widened. Formulas are those of ``backends.reference.ops``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import numpy.typing as npt

from octavo.backends.reference.ops import ACTIVATIONS, RopeTable, softcap
from octavo.models.loaded import ModelBody
from octavo.models.program import Add, Attention, Embed, GatedAct, Linear, Norm, Op, Program, Rope, Softcap
from octavo.models.weights import widen_rows

Floats = npt.NDArray[np.float32]
Observer = Callable[[str, Floats], None]  # (name of a matrix, what it is multiplied with: float32 [tokens, in_features])


def observe(body: ModelBody, texts: Sequence[Sequence[int]], observer: Observer) -> None:
    """Tell ``observer`` the input of every matrix for all tokens of ``texts``, in the order of the ops.

    Texts do not see each other. Raises ValueError for texts without a token, or with one that is not in the vocabulary.
    """
    tokens = [token for text in texts for token in text]
    if not all(texts) or not tokens:
        raise ValueError("texts: each needs one token at least")
    if not all(0 <= token < body.program.vocab_size for token in tokens):
        raise ValueError(f"texts: token ids must be from 0 to {body.program.vocab_size - 1}")
    _Pass(body, [len(text) for text in texts], np.array(tokens, np.int64), observer).run()


class _Pass:
    """Values are [tokens, width], of all texts one behind the other."""

    def __init__(self, body: ModelBody, lengths: list[int], tokens: npt.NDArray[np.int64], observer: Observer) -> None:
        self.program, self._weights, self._observer, self._tokens = body.program, body.weights, observer, tokens
        ends = np.cumsum(lengths)
        self._spans = [slice(int(end) - length, int(end)) for end, length in zip(ends, lengths, strict=True)]
        self._positions = np.concatenate([np.arange(length) for length in lengths])
        self._values: dict[str, Floats] = {}

    def run(self) -> None:
        last_use, last_matrix = _last_uses(self.program), max(i for i, op in enumerate(self.program.ops) if isinstance(op, Linear))
        for index, op in enumerate(self.program.ops):
            if isinstance(op, Linear):
                self._observer(op.weight, self._values[op.x])
                if index == last_matrix:
                    return  # what follows are logits, which nobody looks at
            self._values[op.out] = self._do(op)
            for name in [name for name in self._values if last_use.get(name, index) <= index]:
                del self._values[name]

    def _do(self, op: Op) -> Floats:
        values = self._values
        if isinstance(op, Embed):
            return widen_rows(self._weights[op.weight], self._tokens) * np.float32(op.scale)
        if isinstance(op, Norm):
            return _norm(values[op.x], self._weights[op.weight].float32(), op)
        if isinstance(op, Linear):
            return _linear(values[op.x], self._weights[op.weight].float32(), None if op.bias is None else self._weights[op.bias].float32())
        if isinstance(op, Rope):
            return _rope(values[op.x], op, self._positions)
        if isinstance(op, Attention):
            return np.concatenate([_attention(values[op.q][s], values[op.k][s], values[op.v][s], op) for s in self._spans])
        if isinstance(op, GatedAct):
            return ACTIVATIONS[op.activation](values[op.gate]) * values[op.up]
        if isinstance(op, Add):
            return values[op.a] + values[op.b]
        assert isinstance(op, Softcap)
        return softcap(values[op.x], op.cap)


def _linear(x: Floats, weight: Floats, bias: Floats | None) -> Floats:
    out: Floats = x @ weight.T
    return out if bias is None else out + bias


def _norm(x: Floats, weight: Floats, op: Norm) -> Floats:
    grouped = x.reshape(len(x), op.groups, op.dim)
    mean_square: Floats = np.mean(np.square(grouped), axis=2, keepdims=True, dtype=np.float32)
    return cast(Floats, grouped / np.sqrt(mean_square + np.float32(op.eps)) * weight).reshape(x.shape)


def _rope(x: Floats, op: Rope, positions: npt.NDArray[np.int64]) -> Floats:
    table = RopeTable(op)
    turns = {int(position): table.at(int(position)) for position in np.unique(positions)}
    cos = np.stack([turns[int(position)][0] for position in positions])[:, None]
    sin = np.stack([turns[int(position)][1] for position in positions])[:, None]
    out = x.reshape(len(x), op.heads, op.head_dim).copy()
    half = op.rotary_dim // 2
    first = slice(0, op.rotary_dim, 2) if op.interleaved else slice(0, half)
    second = slice(1, op.rotary_dim, 2) if op.interleaved else slice(half, op.rotary_dim)
    a, b = out[..., first].copy(), out[..., second].copy()
    out[..., first] = a * cos - b * sin
    out[..., second] = b * cos + a * sin
    return out.reshape(x.shape)


def _attention(q: Floats, k: Floats, v: Floats, op: Attention) -> Floats:
    """Of one text: causal, within the window."""
    count, per_kv = len(q), op.heads // op.kv_heads
    queries = q.reshape(count, op.kv_heads, per_kv, op.head_dim).transpose(1, 2, 0, 3)
    keys = k.reshape(count, op.kv_heads, 1, op.head_dim).transpose(1, 2, 3, 0)
    values = v.reshape(count, op.kv_heads, 1, op.head_dim).transpose(1, 2, 0, 3)
    scores = queries @ keys * np.float32(op.scale)  # [kv_heads, per_kv, count, count]
    if op.softcap is not None:
        scores = softcap(scores, op.softcap)
    back = np.arange(count)[:, None] - np.arange(count)
    seen = (back >= 0) & (back < (op.window or count))
    scores = np.where(seen, scores, np.float32(-np.inf))
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    out: Floats = (weights @ values / weights.sum(-1, keepdims=True)).transpose(2, 0, 1, 3).reshape(count, -1)
    return out


def _last_uses(program: Program) -> dict[str, int]:
    uses: dict[str, int] = {}
    for index, op in enumerate(program.ops):
        for field in ("x", "q", "k", "v", "gate", "up", "a", "b"):
            if isinstance(name := getattr(op, field, None), str):
                uses[name] = index
    return uses
