"""Lowers a Program once into fused native ops and buffers.

Owns the fusions: linears that read one value share a matrix phase and a buffer; a residual Add becomes the accumulation of
the linear before it; norms of heads and rotary embeddings work in place; activations are quantised once per value. It
knows ops, never families. It touches no weight bytes: it asks ``WeightSink`` for handles and whether a matrix takes
quantised activations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from octavo.backends.base import BackendError
from octavo.models.program import Add, Attention, Embed, GatedAct, Linear, Norm, Op, Program, Rope, RopeScaling, Softcap

_READS = ("x", "q", "k", "v", "gate", "up", "a", "b")


class NativeModel(Protocol):
    """The building calls of ``_native.Model`` that lowering uses (see ``_native.pyi``)."""

    def add_buffer(self, width: int) -> int: ...
    def begin_group(self) -> None: ...
    def matmul(self, x: int, weight: int, bias: int, out: int, out_col: int, accumulate: bool) -> None: ...
    def embed(self, weight: int, scale: float, out: int) -> None: ...
    def norm(self, x: int, x_col: int, weight: int, eps: float, dim: int, heads: int, out: int, out_col: int) -> None: ...
    def rope(self, x: int, x_col: int, table: int, heads: int, head_dim: int, rotary_dim: int, interleaved: bool) -> None: ...
    def store_kv(self, k: int, k_col: int, v: int, v_col: int, layer: int) -> None: ...
    def attention(
        self, layer: int, q: int, q_col: int, out: int, heads: int, kv_heads: int, head_dim: int, scale: float, softcap: float, window: int
    ) -> None: ...
    def gated_act(self, gate: int, gate_col: int, up: int, up_col: int, dim: int, activation: int, out: int) -> None: ...
    def add(self, a: int, a_col: int, b: int, b_col: int, dim: int, out: int, out_col: int) -> None: ...
    def quantize(self, x: int) -> None: ...
    def select(self, buffers: list[int]) -> None: ...
    def head(self, x: int, weight: int, softcap: float) -> None: ...


@dataclass(frozen=True, slots=True)
class Handles:
    """How lowering gets native ids of weights: by canonical name, made on first use."""

    matrix: Callable[[str], tuple[int, bool]]  # -> (id, takes quantised activations)
    vector: Callable[[str], int]
    embedding: Callable[[str], int]
    rope_table: Callable[[int, float, RopeScaling], int]  # rotary_dim, base, scaling


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a value lives: columns col .. col + width of a buffer."""

    buffer: int
    col: int
    width: int
    whole: bool  # the value is all of its buffer


def lower(program: Program, model: NativeModel, handles: Handles) -> None:
    """Emit ``program`` into ``model``. Raises BackendError for an op order the native runner has no form for."""
    _Lowering(program, model, handles).run()


class _Lowering:
    def __init__(self, program: Program, model: NativeModel, handles: Handles) -> None:
        self.program, self.model, self.handles = program, model, handles
        self.ops = list(program.ops)
        self.places: dict[str, _Place] = {}
        self.last_use: dict[str, int] = {}
        self.uses: dict[str, list[int]] = {}
        for i, op in enumerate(self.ops):
            for name in _reads(op):
                self.last_use[name] = i
                self.uses.setdefault(name, []).append(i)
        self.quantized: set[str] = set()
        self.free: dict[int, list[int]] = {}  # buffer width -> buffers whose values are dead
        self.owners: dict[int, set[str]] = {}  # buffer -> live values in it
        self.widths: dict[int, int] = {}
        self.head_start = self._head_start()
        self.last_attention = max((i for i, op in enumerate(self.ops) if isinstance(op, Attention)), default=-1)

    def run(self) -> None:
        if self.last_attention < 0:
            raise BackendError("a program without attention has no form on the cpu backend")
        i = 0
        while i < self.head_start:
            i = self._emit(i)
            self._release(i)
        self._emit_head()

    # ---- buffers ----

    def _take(self, width: int) -> int:
        pool = self.free.get(width)
        if pool:
            return pool.pop()
        buffer = self.model.add_buffer(width)
        self.widths[buffer] = width
        return buffer

    def _place(self, names: list[str], widths: list[int]) -> list[_Place]:
        buffer = self._take(sum(widths))
        col, made = 0, []
        for name, width in zip(names, widths, strict=True):
            made.append(_Place(buffer, col, width, len(names) == 1))
            self._own(name, made[-1])
            col += width
        return made

    def _own(self, name: str, place: _Place) -> None:
        self.places[name] = place
        self.owners.setdefault(place.buffer, set()).add(name)

    def _rename(self, old: str, new: str) -> None:
        """``new`` takes the storage of ``old``, which is dead from here."""
        place = self.places[old]
        self.owners[place.buffer].discard(old)
        self._own(new, place)

    def _release(self, done: int) -> None:
        """Free buffers all of whose values were last read before op ``done``."""
        for buffer, names in self.owners.items():
            if names and all(self.last_use.get(n, -1) < done for n in names):
                names.clear()
                self.free.setdefault(self.widths[buffer], []).append(buffer)

    # ---- ops ----

    def _emit(self, i: int) -> int:
        """Emit the op at ``i`` (and those fused with it); return the index of the next one."""
        op, m = self.ops[i], self.model
        if isinstance(op, (Embed, Rope)) and i > self.last_attention >= 0:
            raise BackendError(f"{type(op).__name__} at op {i} stands behind the last attention, where rows are no longer positions")
        if isinstance(op, Embed):
            m.embed(self.handles.embedding(op.weight), op.scale, self._place([op.out], [op.dim])[0].buffer)
        elif isinstance(op, Linear):
            return self._emit_linears(i)
        elif isinstance(op, Norm):
            self._emit_norm(i, op)
        elif isinstance(op, Rope):
            self._require_last_use(op.x, i)
            p = self.places[op.x]
            table = self.handles.rope_table(op.rotary_dim, op.base, op.scaling)
            m.rope(p.buffer, p.col, table, op.heads, op.head_dim, op.rotary_dim, op.interleaved)
            self._rename(op.x, op.out)
        elif isinstance(op, Attention):
            self._emit_attention(i, op)
        elif isinstance(op, GatedAct):
            gate, up = self.places[op.gate], self.places[op.up]
            out = self._place([op.out], [op.dim])[0]
            m.gated_act(gate.buffer, gate.col, up.buffer, up.col, op.dim, {"silu": 0, "gelu_tanh": 1}[op.activation], out.buffer)
        elif isinstance(op, Add):
            self._emit_add(i, op)
        else:
            raise BackendError(f"the cpu backend has no native form for {type(op).__name__} at op {i}")
        return i + 1

    def _emit_norm(self, i: int, op: Norm) -> None:
        src = self.places[op.x]
        weight = self.handles.vector(op.weight)
        # Norms of heads happen where the heads are; a residual stream is still needed, so its norm goes elsewhere.
        if self.last_use[op.x] == i and (op.groups > 1 or not src.whole):
            self._rename(op.x, op.out)
            dst = src
        else:
            dst = self._place([op.out], [src.width])[0]
        self.model.norm(src.buffer, src.col, weight, op.eps, op.dim, op.groups, dst.buffer, dst.col)

    def _emit_attention(self, i: int, op: Attention) -> None:
        q, k, v = (self.places[n] for n in (op.q, op.k, op.v))
        self.model.store_kv(k.buffer, k.col, v.buffer, v.col, op.layer)
        out = self._place([op.out], [op.heads * op.head_dim])[0]
        cap, window = op.softcap or 0.0, op.window or 0
        try:
            self.model.attention(op.layer, q.buffer, q.col, out.buffer, op.heads, op.kv_heads, op.head_dim, op.scale, cap, window)
        except ValueError as e:
            raise BackendError(f"attention of layer {op.layer}: {e}") from e
        if i == self.last_attention:
            live = {self.places[n].buffer for n, last in self.last_use.items() if last > i and n in self.places}
            self.model.select(sorted(live))
            self.quantized.clear()  # rows have moved, their quantised copies have not

    def _emit_add(self, i: int, op: Add) -> None:
        a, b = self.places[op.a], self.places[op.b]
        if self.last_use[op.a] == i:
            self._rename(op.a, op.out)
            out = a
        else:
            out = self._place([op.out], [op.dim])[0]
        self.model.add(a.buffer, a.col, b.buffer, b.col, op.dim, out.buffer, out.col)

    def _emit_linears(self, first: int) -> int:
        """Emit the run of linears that read one value as one matrix phase."""
        x = self.ops[first].x  # type: ignore[union-attr]
        end = first
        while end < self.head_start and isinstance(self.ops[end], Linear) and self.ops[end].x == x:  # type: ignore[union-attr]
            end += 1
        group: list[Linear] = self.ops[first:end]  # type: ignore[assignment]
        weights = [self.handles.matrix(op.weight) for op in group]
        src = self.places[x]
        if not src.whole:
            raise BackendError(f"linear {group[0].weight!r} reads part of a buffer; the cpu backend needs it whole")
        if any(quantized for _, quantized in weights) and x not in self.quantized:
            self.model.quantize(src.buffer)
            self.quantized.add(x)
        residual = self._fusable_add(group, end)
        self.model.begin_group()
        if residual is not None:
            place = self.places[residual.a if residual.b == group[0].out else residual.b]
            self._matmul(group[0], weights[0][0], src, place, accumulate=True)
            self._rename(residual.a if residual.b == group[0].out else residual.b, residual.out)
            return end + 1
        places = self._place([op.out for op in group], [op.out_features for op in group])
        for op, (weight, _), place in zip(group, weights, places, strict=True):
            self._matmul(op, weight, src, place, accumulate=False)
        return end

    def _matmul(self, op: Linear, weight: int, src: _Place, out: _Place, accumulate: bool) -> None:
        bias = self.handles.vector(op.bias) if op.bias else -1
        self.model.matmul(src.buffer, weight, bias, out.buffer, out.col, accumulate)

    def _fusable_add(self, group: list[Linear], end: int) -> Add | None:
        """The Add right behind a lone linear, when it is the only reader of the linear and the last of the other operand."""
        if len(group) != 1 or end >= self.head_start or not isinstance(self.ops[end], Add):
            return None
        add: Add = self.ops[end]  # type: ignore[assignment]
        out = group[0].out
        if out not in (add.a, add.b) or add.a == add.b:
            return None
        other = add.b if add.a == out else add.a
        if other == group[0].x:
            return None  # the product would be added into the rows it is still read from
        alone = self.last_use[out] == end and len(self.uses[out]) == 1 and self.last_use[other] == end
        return add if alone else None

    def _require_last_use(self, name: str, i: int) -> None:
        if self.last_use[name] != i:
            raise BackendError(f"value {name!r} is read again after a rotary embedding in place; the cpu backend has no form for that")

    # ---- the head ----

    def _head_start(self) -> int:
        """Index of the linear that makes the logits: it and what follows run only for rows whose logits are wanted."""
        for i in range(len(self.ops) - 1, -1, -1):
            if isinstance(self.ops[i], Linear):
                return i
        raise BackendError("the program has no linear that makes logits")

    def _emit_head(self) -> None:
        op = self.ops[self.head_start]
        assert isinstance(op, Linear)
        if op.bias:
            raise BackendError(f"the cpu backend has no bias for the output matrix ({op.bias!r})")
        cap, out = 0.0, op.out
        for later in self.ops[self.head_start + 1 :]:
            if not isinstance(later, Softcap) or later.x != out or cap:
                raise BackendError(f"the cpu backend has no form for {type(later).__name__} behind the output matrix")
            cap, out = later.cap, later.out
        if out != self.program.logits:
            raise BackendError(f"the last op writes {out!r}, not {self.program.logits!r}")
        weight, quantized = self.handles.matrix(op.weight)
        src = self.places[op.x]
        if not src.whole:
            raise BackendError("the output matrix reads part of a buffer; the cpu backend needs it whole")
        if quantized and op.x not in self.quantized:
            self.model.quantize(src.buffer)
        self.model.head(src.buffer, weight, cap)


def _reads(op: Op) -> list[str]:
    return [name for name in (getattr(op, f, None) for f in _READS) if name is not None]
