"""A model as a short list of ops: plain data, no computation.

Families (``families.py``) emit a Program once; backends know ops and never families. Values are named; every op writes one
new value. Rows are the tokens of a step (T). Shapes stand beside every op. Weight names are canonical (see ``Weight names``).

Weight names: ``embed``, ``norm_final``, ``output`` (absent when tied: Linear then names ``embed``), and per layer i ``layers.{i}.``
``norm_attn  q  k  v  o  norm_q  norm_k  norm_post_attn  norm_mlp  gate  up  down  norm_post_mlp`` and ``q_bias k_bias v_bias o_bias``.
Matrices are [out_features, in_features], row-major; norm weights are the factor that is multiplied (a file's "1 + w" is resolved at load).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Embed:
    """out[T, dim] = weight[token_id] * scale (scale applied in float32)."""

    out: str
    weight: str
    dim: int
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Norm:
    """RMSNorm over the last axis (Zhang & Sennrich, 2019): x[T, groups * dim] as [T, groups, dim]; weight [dim] is shared by the groups."""

    out: str
    x: str
    weight: str
    dim: int
    eps: float
    groups: int = 1


@dataclass(frozen=True, slots=True)
class Linear:
    """out[T, out_features] = x[T, in_features] @ weight[out_features, in_features].T (+ bias[out_features])."""

    out: str
    x: str
    weight: str
    in_features: int
    out_features: int
    bias: str | None = None


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How inverse frequencies are changed.

    ``kind``: "none", "linear" (factor), "llama3" (all four fields) or "factors" (per-frequency divisors).
    """

    kind: str = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    factors: tuple[float, ...] = ()  # [rotary_dim / 2], as GGUF's rope_freqs tensor


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding of x[T, heads * head_dim] by position (Su et al., 2021).

    ``interleaved``: pairs (2i, 2i+1), else (i, i + rotary_dim/2).
    """

    out: str
    x: str
    heads: int
    head_dim: int
    rotary_dim: int
    base: float
    interleaved: bool
    scaling: RopeScaling = RopeScaling()


@dataclass(frozen=True, slots=True)
class Attention:
    """Causal grouped-query attention of layer ``layer`` over the KV cache, which it also extends with k and v.

    q[T, heads * head_dim], k and v[T, kv_heads * head_dim] -> out[T, heads * head_dim]. Scores are q.k * scale, then
    softcap * tanh(score / softcap) when set. ``window`` w: position p sees p - w + 1 .. p.
    """

    out: str
    q: str
    k: str
    v: str
    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    softcap: float | None = None
    window: int | None = None


@dataclass(frozen=True, slots=True)
class GatedAct:
    """out[T, dim] = act(gate) * up; ``activation``: "silu" or "gelu_tanh"."""

    out: str
    gate: str
    up: str
    dim: int
    activation: str


@dataclass(frozen=True, slots=True)
class Add:
    """out[T, dim] = a + b."""

    out: str
    a: str
    b: str
    dim: int


@dataclass(frozen=True, slots=True)
class Softcap:
    """out = cap * tanh(x / cap)."""

    out: str
    x: str
    dim: int
    cap: float


Op = Embed | Norm | Linear | Rope | Attention | GatedAct | Add | Softcap


def _reading(op: Op, old: str, new: str) -> Op:
    """``op`` with ``new`` where it reads ``old``."""
    changed: dict[str, Any] = {field: new for field in _READS if getattr(op, field, None) == old}
    return replace(op, **changed)


_READS = ("x", "q", "k", "v", "gate", "up", "a", "b")


@dataclass(frozen=True, slots=True)
class KVLayer:
    kv_heads: int
    head_dim: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class Program:
    """A whole model. ``ops`` end with the one that writes ``logits`` [T, vocab_size]; rows without a sample skip what only logits need.

    ``weights``: canonical name -> shape, everything the ops read: a loader must supply exactly these.
    ``family`` is for messages; backends must not look at it.
    """

    family: str
    ops: tuple[Op, ...]
    weights: dict[str, tuple[int, ...]]
    kv_layers: tuple[KVLayer, ...]
    hidden: int
    vocab_size: int
    context: int  # positions the model was trained for
    logits: str = "logits"
    layer_ends: tuple[int, ...] = ()  # for each layer, the number of ops up to and with its last, which writes the residual stream

    def first_layers(self, num_layers: int) -> Program:
        """The program of the first layers alone, with the final norm and the output matrix behind them (an early exit).

        Raises ValueError unless 0 < num_layers < the number of layers.
        """
        if not 0 < num_layers < len(self.layer_ends):
            raise ValueError(f"num_layers: {num_layers} is not allowed; from 1 to {len(self.layer_ends) - 1}, less than the model has")
        end, last = self.layer_ends[num_layers - 1], self.layer_ends[-1]
        here, there = self.ops[end - 1].out, self.ops[last - 1].out
        ops = (*self.ops[:end], *(_reading(op, there, here) for op in self.ops[last:]))
        named = {getattr(op, field, None) for op in ops for field in ("weight", "bias")}
        weights = {name: shape for name, shape in self.weights.items() if name in named}
        kv_layers, layer_ends = self.kv_layers[:num_layers], self.layer_ends[:num_layers]
        return replace(self, ops=ops, weights=weights, kv_layers=kv_layers, layer_ends=layer_ends).check()

    def kv_bytes_per_token(self, bytes_per_value: int) -> int:
        """Bytes of KV cache one token takes over all layers."""
        return sum(2 * kv.kv_heads * kv.head_dim * bytes_per_value for kv in self.kv_layers)

    def check(self) -> Program:
        """Raise ValueError when an op reads a value or weight that is not there, or writes one twice; return self."""
        have: set[str] = set()
        for op in self.ops:
            for name in (getattr(op, f, None) for f in _READS):
                if name is not None and name not in have:
                    raise ValueError(f"op {op!r} reads {name!r} before it is written")
            for name in (getattr(op, f, None) for f in ("weight", "bias")):
                if name is not None and name not in self.weights:
                    raise ValueError(f"op {op!r} needs weight {name!r}, which the program does not declare")
            if op.out in have:
                raise ValueError(f"op {op!r} writes {op.out!r} a second time")
            have.add(op.out)
        if self.logits not in have:
            raise ValueError(f"no op writes {self.logits!r}")
        return self
