"""The decoder-only transformer that every supported family is a variation of, and the Program it stands for.

``Decoder`` is the list of choices (sizes, norms, caps, windows, rotary bases); ``build_program`` writes it out as ops.
Owns the order of ops and the shapes of weights. Never reads a file or knows a family by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.models.program import Add, Attention, Embed, GatedAct, KVLayer, Linear, Norm, Op, Program, Rope, RopeScaling, Softcap


@dataclass(frozen=True, slots=True)
class RopeSpec:
    base: float
    scaling: RopeScaling = RopeScaling()


@dataclass(frozen=True, slots=True)
class Decoder:
    """A family's choices. ``windows`` has one entry per layer (None: the layer sees everything before it).

    Layers with a window use ``rope_local`` when there is one, all others ``rope``. ``post_norms``: the outputs of attention and
    MLP are normalised before they join the residual. ``qk_norm``: RMSNorm over each head of q and k before the rotary embedding.
    """

    hidden: int
    ff: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    vocab_size: int
    context: int
    eps: float
    windows: tuple[int | None, ...]
    rope: RopeSpec
    activation: str
    attention_scale: float
    tied: bool
    rope_local: RopeSpec | None = None
    interleaved: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    embed_scale: float = 1.0
    attention_softcap: float | None = None
    final_softcap: float | None = None

    @property
    def layers(self) -> int:
        return len(self.windows)


class _Emitter:
    """Collects ops and the shapes of the weights they name."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.weights: dict[str, tuple[int, ...]] = {}

    def emit(self, op: Op) -> str:
        self.ops.append(op)
        return op.out

    def norm(self, out: str, x: str, weight: str, dim: int, eps: float, groups: int = 1) -> str:
        self.weights[weight] = (dim,)
        return self.emit(Norm(out, x, weight, dim, eps, groups))

    def linear(self, out: str, x: str, weight: str, shape: tuple[int, int], bias: str | None = None) -> str:
        """``shape`` is [out_features, in_features]."""
        self.weights[weight] = shape
        if bias is not None:
            self.weights[bias] = (shape[0],)
        return self.emit(Linear(out, x, weight, shape[1], shape[0], bias))


def build_program(d: Decoder, family: str) -> Program:
    """Write a decoder out as ops: embed, then per layer attention and gated MLP around a residual stream, then the output matrix."""
    e = _Emitter()
    e.weights["embed"] = (d.vocab_size, d.hidden)
    x = e.emit(Embed("h", "embed", d.hidden, d.embed_scale))
    layer_ends = []
    for i in range(d.layers):
        x = _attention_block(e, d, i, x)
        x = _mlp_block(e, d, i, x)
        layer_ends.append(len(e.ops))
    x = e.norm("h_final", x, "norm_final", d.hidden, d.eps)
    out = "logits" if d.final_softcap is None else "logits_raw"
    e.linear(out, x, "embed" if d.tied else "output", (d.vocab_size, d.hidden))
    if d.final_softcap is not None:
        e.emit(Softcap("logits", out, d.vocab_size, d.final_softcap))
    kv_layers = tuple(KVLayer(d.kv_heads, d.head_dim, window) for window in d.windows)
    return Program(family, tuple(e.ops), e.weights, kv_layers, d.hidden, d.vocab_size, d.context, layer_ends=tuple(layer_ends)).check()


def _attention_block(e: _Emitter, d: Decoder, i: int, x: str) -> str:
    w, v = f"layers.{i}.", f"l{i}."
    normed = e.norm(v + "x_attn", x, w + "norm_attn", d.hidden, d.eps)
    # Side by side, so that a backend can compute the three as one matrix.
    projected = [_projection(e, d, i, which, normed, heads) for which, heads in (("q", d.heads), ("k", d.kv_heads), ("v", d.kv_heads))]
    q = _positioned_heads(e, d, i, "q", projected[0], d.heads)
    k = _positioned_heads(e, d, i, "k", projected[1], d.kv_heads)
    mixed = e.emit(
        Attention(
            out=v + "mixed", q=q, k=k, v=projected[2], layer=i, heads=d.heads, kv_heads=d.kv_heads, head_dim=d.head_dim,
            scale=d.attention_scale, softcap=d.attention_softcap, window=d.windows[i],
        )
    )  # fmt: skip
    out = e.linear(v + "o", mixed, w + "o", (d.hidden, d.heads * d.head_dim), w + "o_bias" if d.o_bias else None)
    if d.post_norms:
        out = e.norm(v + "o_normed", out, w + "norm_post_attn", d.hidden, d.eps)
    return e.emit(Add(v + "h_attn", x, out, d.hidden))


def _projection(e: _Emitter, d: Decoder, i: int, which: str, x: str, heads: int) -> str:
    """q, k or v of layer i as the matrix makes it."""
    w = f"layers.{i}.{which}"
    return e.linear(f"l{i}.{which}", x, w, (heads * d.head_dim, d.hidden), w + "_bias" if d.qkv_bias else None)


def _positioned_heads(e: _Emitter, d: Decoder, i: int, which: str, out: str, heads: int) -> str:
    """q or k of layer i: per-head norm when the family has it, then rotary embedding."""
    v = f"l{i}.{which}"
    if d.qk_norm:
        out = e.norm(v + "_normed", out, f"layers.{i}.norm_{which}", d.head_dim, d.eps, groups=heads)
    local = d.windows[i] is not None and d.rope_local is not None
    rope = d.rope_local if local and d.rope_local is not None else d.rope
    return e.emit(Rope(v + "_rotated", out, heads, d.head_dim, d.rotary_dim, rope.base, d.interleaved, rope.scaling))


def _mlp_block(e: _Emitter, d: Decoder, i: int, x: str) -> str:
    w, v = f"layers.{i}.", f"l{i}."
    normed = e.norm(v + "x_mlp", x, w + "norm_mlp", d.hidden, d.eps)
    gate = e.linear(v + "gate", normed, w + "gate", (d.ff, d.hidden))
    up = e.linear(v + "up", normed, w + "up", (d.ff, d.hidden))
    act = e.emit(GatedAct(v + "act", gate, up, d.ff, d.activation))
    out = e.linear(v + "down", act, w + "down", (d.hidden, d.ff))
    if d.post_norms:
        out = e.norm(v + "down_normed", out, w + "norm_post_mlp", d.hidden, d.eps)
    return e.emit(Add(v + "h", x, out, d.hidden))


def windows_where(local: Sequence[bool], window: int | None) -> tuple[int | None, ...]:
    """Windows of the layers marked local."""
    return tuple(window if is_local else None for is_local in local)
