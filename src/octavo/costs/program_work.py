"""What a program computes and reads per step, counted from its ops: the numbers that a roofline multiplies. No machine, no seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from octavo.models.program import Attention, Linear, Program


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """Attention layers that see equally far. ``ops_per_pair``: operations for a (row, position it sees) pair, over all of these layers;
    ``kv_bytes``: of the KV of one token in them; ``window``: positions that a row sees (None: all)."""

    ops_per_pair: float
    kv_bytes: float
    window: int | None = None


@dataclass(frozen=True, slots=True)
class ProgramWork:
    """``linear_ops``: of all matrices but the output matrix, per row; ``linear_bytes``: of these matrices. ``output_ops`` and
    ``output_bytes``: of the output matrix, per row whose logits are wanted. ``activation_bytes``: that a row's values take on their way
    between matrices and attention, each written once and read once; what lies between these is taken to be fused with them."""

    linear_ops: float
    linear_bytes: float
    output_ops: float
    output_bytes: float
    activation_bytes: float
    logit_bytes: float  # of one row's logits, which sampling reads
    attention: tuple[AttentionWork, ...]

    @classmethod
    def of(
        cls,
        program: Program,
        weight_bytes: Mapping[str, int] | float = 2.0,
        kv_bytes_per_value: float = 2.0,
        activation_bytes_per_value: float = 2.0,
    ) -> ProgramWork:
        """``weight_bytes``: of each weight by its name, or bytes for each number in it (2: 16 bits)."""
        linear_ops = linear_bytes = output_ops = output_bytes = values = 0.0
        for op in program.ops:
            if isinstance(op, Attention):
                values += op.heads * op.head_dim
            if not isinstance(op, Linear):
                continue
            ops = 2.0 * op.in_features * op.out_features
            num_bytes = weight_bytes[op.weight] if isinstance(weight_bytes, Mapping) else weight_bytes * ops / 2.0
            if op.out == program.logits or op.out_features == program.vocab_size:
                output_ops, output_bytes = output_ops + ops, output_bytes + num_bytes
            else:
                linear_ops, linear_bytes, values = linear_ops + ops, linear_bytes + num_bytes, values + op.out_features
        activation_bytes = 2.0 * activation_bytes_per_value * values
        attention = _attention(program, kv_bytes_per_value)
        return cls(linear_ops, linear_bytes, output_ops, output_bytes, activation_bytes, 4.0 * program.vocab_size, attention)

    @property
    def kv_bytes_per_token(self) -> float:
        return sum(layers.kv_bytes for layers in self.attention)

    @property
    def weight_bytes(self) -> float:
        return self.linear_bytes + self.output_bytes


def _attention(program: Program, kv_bytes_per_value: float) -> tuple[AttentionWork, ...]:
    """By window: 2 operations per number for scores, as many for the sum of values."""
    ops, sizes = dict[int | None, float](), dict[int | None, float]()
    for op in program.ops:
        if isinstance(op, Attention):
            ops[op.window] = ops.get(op.window, 0.0) + 4.0 * op.heads * op.head_dim
            sizes[op.window] = sizes.get(op.window, 0.0) + 2.0 * op.kv_heads * op.head_dim * kv_bytes_per_value
    return tuple(AttentionWork(ops[window], sizes[window], window) for window in ops)
