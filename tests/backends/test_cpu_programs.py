"""Programs that no family emits: whatever order of ops the cpu backend takes, it computes right; what it has no form for, it refuses."""

from __future__ import annotations

from array import array
from dataclasses import replace

import numpy as np
import pytest

from octavo.backends.base import BackendError
from octavo.core.request import SamplingParams
from octavo.core.step import SequenceSlice, SlotOpen, StepPlan
from octavo.models.loaded import LoadedModel, WeightTensor
from octavo.models.program import Add, Attention, Embed, GatedAct, KVLayer, Linear, Norm, Op, Program, Rope, Softcap
from tests.backends.cpu_runs import cpu_logits, make_cpu, plain_logits, rms, rounding_logits
from tests.backends.exactness import quantised

HIDDEN, HEADS, HEAD_DIM, VOCAB = 32, 2, 16, 50
IDS = np.random.default_rng(8).integers(0, VOCAB, 21).tolist()


def norm(out: str, x: str) -> Norm:
    return Norm(out, x, f"w_{out}", HIDDEN, 1e-5)


def linear(out: str, x: str) -> Linear:
    return Linear(out, x, f"w_{out}", HIDDEN, HIDDEN)


def rope(out: str, x: str) -> Rope:
    return Rope(out, x, HEADS, HEAD_DIM, HEAD_DIM, 1e4, False)


def attention(out: str, q: str, k: str, v: str, layer: int = 0, kv_heads: int = HEADS) -> Attention:
    return Attention(out, q, k, v, layer, HEADS, kv_heads, HEAD_DIM, HEAD_DIM**-0.5)


def add(out: str, a: str, b: str) -> Add:
    return Add(out, a, b, HIDDEN)


EMBED = Embed("h", "w_embed", HIDDEN)
QKV = [norm("n", "h"), linear("q", "n"), linear("k", "n"), linear("v", "n")]
HEAD = Linear("logits", "last", "w_output", HIDDEN, VOCAB)

PROGRAMS: dict[str, list[Op]] = {
    "a product added to its own input": [EMBED, *QKV, attention("a", "q", "k", "v"), linear("o", "a"), add("last", "o", "a"), HEAD],
    "a product added to its own input, before attention": [
        EMBED, linear("d", "h"), add("e", "h", "d"), linear("q", "e"), linear("k", "e"), linear("v", "e"), attention("a", "q", "k", "v"),
        add("last", "a", "e"), HEAD,
    ],
    "attention and MLP side by side, reading one norm": [
        EMBED, *QKV, attention("a", "q", "k", "v"), linear("o", "a"), linear("g", "n"), linear("u", "n"),
        GatedAct("m", "g", "u", HIDDEN, "silu"), linear("d", "m"), add("s", "o", "d"), add("last", "s", "h"), HEAD,
    ],
    "a product with two readers": [
        EMBED, *QKV, attention("a", "q", "k", "v"), linear("o", "a"), add("t", "h", "o"), add("last", "t", "o"), HEAD,
    ],
    "a value added to itself": [EMBED, *QKV, attention("a", "q", "k", "v"), linear("o", "a"), add("last", "o", "o"), HEAD],
    "rotary embedding without norms": [
        EMBED, linear("q0", "h"), linear("k0", "h"), linear("v", "h"), rope("q", "q0"), rope("k", "k0"), attention("a", "q", "k", "v"),
        add("last", "h", "a"), HEAD,
    ],
    "a norm with two readers, and a cap on the logits": [
        EMBED, *QKV, attention("a", "q", "k", "v"), norm("n2", "a"), linear("o", "n2"), add("last", "o", "n2"),
        replace(HEAD, out="raw"), Softcap("logits", "raw", VOCAB, 2.0),
    ],
}  # fmt: skip

REFUSED: dict[str, tuple[list[Op], str]] = {
    "rotary embedding of a value read again": (
        [EMBED, *QKV, rope("r", "q"), attention("a", "r", "k", "v"), add("last", "a", "q"), HEAD], "'q' is read again",
    ),
    "rotary embedding behind the last attention": (
        [EMBED, *QKV, attention("a", "q", "k", "v"), rope("last", "a"), HEAD], "Rope at op 6 stands behind the last attention",
    ),
    "an op behind the output matrix": (
        [EMBED, *QKV, attention("last", "q", "k", "v"), replace(HEAD, out="raw"), add("logits", "raw", "raw")], "no form for Add",
    ),
    "an output matrix on part of a buffer": (
        [EMBED, *QKV, attention("a", "q", "k", "v"), add("t", "k", "v"), add("last", "t", "a"), HEAD], "reads part of a buffer",
    ),
    "no attention": ([EMBED, norm("n", "h"), linear("o", "n"), add("last", "h", "o"), HEAD], "without attention"),
    "layers with different numbers of KV heads": (
        [
            EMBED, *QKV, attention("a", "q", "k", "v"), norm("n2", "a"), Linear("k2", "n2", "w_k2", HIDDEN, HEAD_DIM),
            Linear("v2", "n2", "w_v2", HIDDEN, HEAD_DIM), linear("q2", "n2"), attention("last", "q2", "k2", "v2", 1, 1), HEAD,
        ],
        "layer 1: layers with different numbers of KV heads: 2 and 1",
    ),
}  # fmt: skip


def model_of(ops: list[Op]) -> LoadedModel:
    shapes: dict[str, tuple[int, ...]] = {}
    for op in ops:
        if isinstance(op, Linear):
            shapes[op.weight] = (op.out_features, op.in_features)
        elif isinstance(op, Norm):
            shapes[op.weight] = (op.dim,)
        elif isinstance(op, Embed):
            shapes[op.weight] = (VOCAB, op.dim)
    layers = tuple(KVLayer(op.kv_heads, op.head_dim) for op in ops if isinstance(op, Attention))
    program = Program("made by hand", tuple(ops), shapes, layers, HIDDEN, VOCAB, 64).check()
    rng = np.random.default_rng(1)
    weights = {}
    for name, shape in shapes.items():
        values = rng.standard_normal(shape, dtype=np.float32) / np.float32(HIDDEN**0.5 if len(shape) == 2 else 1)
        weights[name] = WeightTensor(name, "f32", shape, memoryview(values.tobytes()))
    return LoadedModel("hand", "", "test", program, weights, None, None, frozenset(), None, 0, 0)  # type: ignore[arg-type]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_any_order_that_is_taken_is_right(name: str, packed: bool) -> None:
    model = model_of(PROGRAMS[name])
    if packed:
        model = quantised(model, ("q8_0",))
    backend = make_cpu(model, "fast", "f32", threads=2)
    got = cpu_logits(backend, IDS, [1, 0])
    # All rows wanted, and only the last: rows move up where the others end.
    assert cpu_logits(backend, IDS, [1, 0], chunk=5).tobytes() == got.tobytes()
    assert np.array_equal(last_logits(model), got[-1])
    want = rounding_logits(model, IDS, "f32") if packed else plain_logits(model, IDS)
    assert rms(got - want) < 1e-3 * rms(want)


def last_logits(model: LoadedModel) -> np.ndarray:
    """Of the last row of IDS, whose logits are the only ones wanted, behind two sequences of which none are."""
    backend, rows = make_cpu(model, "fast", "f32", threads=2), list[tuple[int, int, np.ndarray]]()
    backend.logits_hook = lambda seq_id, position, row: rows.append((seq_id, position, row.copy()))
    others = [SequenceSlice(i, 0, IDS[: 3 + i], array("i", [2 + i])) for i in (1, 2)]
    wanted = SequenceSlice(0, 0, IDS, array("i", [0, 1]), 1, [0])
    backend.execute(StepPlan(0, [*others, wanted], slot_opens=[SlotOpen(0, SamplingParams(temperature=0.0), 1, IDS, [])]))
    assert [row[:2] for row in rows] == [(0, len(IDS) - 1)]
    return rows[0][2]


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_form_is_refused_by_name(name: str) -> None:
    ops, message = REFUSED[name]
    with pytest.raises(BackendError, match=message):
        make_cpu(model_of(ops))
