"""How much memory a model and its conversations take: exact, in the engine's own blocks and pages, with nothing allocated.

Sequences are counted at their largest: a layer with a window holds what a step writes and what its first row sees, whatever the length
(``core.kv_pages``); layers without one hold every token, in whole blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from octavo.core.kv_pages import PageLayout, PageNeeds
from octavo.core.page_pool import IDS_PER_BLOCK
from octavo.costs.kv_bytes import kv_layout
from octavo.models.outline import ModelOutline
from octavo.models.program import Attention, Embed, GatedAct, KVLayer, Linear, Norm, Op, Program, Rope

ACTIVATION_BYTES = 2  # of a value between two ops, in 16 bits
LOGIT_BYTES = 4


@dataclass(frozen=True, slots=True)
class KVSizing:
    """A pool's blocks. ``needs``: of layers with a window that give back what has left it; None where there are none."""

    dtype: str
    block_size: int
    layout: PageLayout
    needs: PageNeeds | None

    @classmethod
    def of(cls, kv_layers: Seq[KVLayer], dtype: str, block_size: int = 16, max_chunk: int = 512, grouped: bool = True) -> KVSizing:
        """``max_chunk``: most tokens of a sequence that one step computes. Raises ValueError."""
        layout = kv_layout(kv_layers, dtype, block_size, grouped)
        return cls(dtype, block_size, layout, layout.needs(block_size, max_chunk))

    @property
    def bytes_per_token(self) -> int | float:
        """Of a token in all layers: a block's bytes by its tokens, scales and padding among them."""
        whole, rest = divmod(self.layout.block_bytes, self.block_size)
        return self.layout.block_bytes / self.block_size if rest else whole

    @property
    def bytes_per_late_token(self) -> int | float:
        """Of a token beyond all windows: it takes room in the layers alone that see everything."""
        if self.needs is None:
            return self.bytes_per_token
        num_bytes = self.layout.page_bytes * self.needs.num_full
        whole, rest = divmod(num_bytes, self.block_size)
        return num_bytes / self.block_size if rest else whole

    def num_blocks(self, context: int, num_sequences: int = 1) -> int:
        """Least blocks of a pool in which ``num_sequences`` sequences of ``context`` tokens each have room at once."""
        per_sequence = -(-context // self.block_size)
        if self.needs is None:
            return num_sequences * per_sequence
        num_pages, num_ids = num_sequences * self.needs.peak(context), num_sequences * per_sequence
        ids_per_block = IDS_PER_BLOCK if not self.needs.num_full else self.needs.num_pages // self.needs.num_full
        return max(-(-num_pages // self.needs.num_pages), -(-num_ids // ids_per_block))

    def num_bytes(self, context: int, num_sequences: int = 1) -> int:
        """Bytes of that pool."""
        return self.num_blocks(context, num_sequences) * self.layout.block_bytes

    def blocks_in(self, num_bytes: float) -> int:
        """Blocks that so many bytes hold."""
        return max(0, int(num_bytes // self.layout.block_bytes))

    def sequences_in(self, num_blocks: int, context: int) -> int:
        """Most sequences of ``context`` tokens that a pool of ``num_blocks`` has room for at once."""
        low, high = 0, max(1, num_blocks)
        while self.num_blocks(context, high) <= num_blocks:
            high *= 2
        while low < high - 1:
            middle = (low + high) // 2
            if self.num_blocks(context, middle) <= num_blocks:
                low = middle
            else:
                high = middle
        return low


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """What ``num_sequences`` sequences of ``context`` tokens take beside the weights. ``activation_bytes`` None: not known."""

    model: ModelOutline
    kv: KVSizing
    context: int
    num_sequences: int
    activation_bytes: int | None

    @property
    def kv_bytes(self) -> int:
        return self.kv.num_bytes(self.context, self.num_sequences)

    @property
    def total_bytes(self) -> int:
        return self.model.weight_bytes + self.kv_bytes + (self.activation_bytes or 0)

    def sequences_in(self, memory_bytes: int) -> int:
        """Most sequences of this context for which ``memory_bytes`` has room beside weights and activations."""
        room = memory_bytes - self.model.weight_bytes - (self.activation_bytes or 0)
        return self.kv.sequences_in(self.kv.blocks_in(room), self.context)

    def to_dict(self) -> dict[str, object]:
        kv = self.kv
        return {
            "model": self.model.name,
            "architecture": self.model.architecture,
            "weight_bytes": self.model.weight_bytes,
            "weights_from": self.model.weights_from,
            "kv_dtype": kv.dtype,
            "kv_bytes_per_token": kv.bytes_per_token,
            "kv_bytes_per_token_beyond_windows": kv.bytes_per_late_token,
            "kv_bytes": self.kv_bytes,
            "num_kv_blocks": kv.num_blocks(self.context, self.num_sequences),
            "kv_bytes_per_block": kv.layout.block_bytes,
            "block_size": kv.block_size,
            "context": self.context,
            "sequences": self.num_sequences,
            "trained_context": self.model.context,
            "activation_bytes": self.activation_bytes,
            "total_bytes": self.total_bytes,
        }


def activation_bytes(program: Program, num_rows: int, num_logit_rows: int) -> int:
    """Bytes of a step's values at the op where most are alive, each in 16 bits from where it is written to where it is read last; logits in
    32 bits. What a backend adds for its own purposes is not in it."""
    return _widest_row(program) * ACTIVATION_BYTES * num_rows + program.vocab_size * LOGIT_BYTES * num_logit_rows


def _widest_row(program: Program) -> int:
    """Most values of a row that are alive at a time, logits aside."""
    last_read = dict[str, int]()
    for i, op in enumerate(program.ops):
        for name in _reads(op):
            last_read[name] = i
    alive, widest = dict[str, int](), 0
    for i, op in enumerate(program.ops):
        width = _width(op)
        if width != program.vocab_size:
            alive[op.out] = width
        widest = max(widest, sum(alive.values()))
        for name in {*_reads(op), op.out}:
            if last_read.get(name, i) <= i:
                alive.pop(name, None)
    return widest


def _reads(op: Op) -> Iterable[str]:
    names = (getattr(op, field, None) for field in ("x", "q", "k", "v", "gate", "up", "a", "b"))
    return [name for name in names if name is not None]


def _width(op: Op) -> int:
    """Values of a row that ``op`` writes."""
    if isinstance(op, Linear):
        return op.out_features
    if isinstance(op, Norm):
        return op.dim * op.groups
    if isinstance(op, Attention | Rope):
        return op.heads * op.head_dim
    assert isinstance(op, Embed | GatedAct) or hasattr(op, "dim")
    return op.dim
