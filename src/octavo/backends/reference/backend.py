"""The reference backend: interprets a Program op by op in NumPy float32, one row after another, slow and obvious.

It is the oracle of the tests. A row is computed alone, always by calls of the same shapes, and its key and value are written
before the next row reads them, so its logits depend on the tokens before it and on nothing else: not on chunking, batch mates,
block size or the blocks' order. Owns float32 weights, KV blocks and sampling slots; never decides what to run.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator

import numpy as np

import octavo.backends.reference.kv_wire as kv_wire
import octavo.backends.reference.ops as ops
from octavo.backends.base import ROUNDED_TIERS, Backend, BackendError, KVCapacity, OutOfResources
from octavo.backends.block_moves import run_block_moves
from octavo.backends.kv_wire import Buffer
from octavo.backends.reference.host_pool import HostPool, packed_block_bytes
from octavo.config import EngineConfig
from octavo.core.kv_pages import GuestLayout, PageLayout, guest_layout, page_layout
from octavo.core.request import MAX_N
from octavo.core.step import BlockMove, SequenceSlice, SliceResult, StepPlan, StepResult
from octavo.models.loaded import ModelBody, first_layers
from octavo.models.program import Add, Attention, Embed, GatedAct, KVLayer, Linear, Norm, Op, Program, Rope, Softcap
from octavo.sampling.reference import LogitsError, ReferenceSampler, raw_logprobs

Floats = ops.Floats
LogitsHook = Callable[[int, int, Floats], None]


class KVPool:
    """Keys and values of all layers, float32, per layer [num_pages, block_size, kv_heads, head_dim]: views of ``memory``, in which layers
    of different columns share the pages, as in any backend. Tables are [columns, blocks]."""

    def __init__(self, program: Program, num_blocks: int, block_size: int, layout: PageLayout, memory: Floats | None = None) -> None:
        """``memory``: that of another pool, [pages, floats]."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.layout = layout
        self.memory = np.zeros((num_blocks * layout.num_pages, layout.page_bytes // 4), np.float32) if memory is None else memory
        self.layers = [self._layer(kv, place[1] // 4) for kv, place in zip(program.kv_layers, layout.layers, strict=True)]

    def _layer(self, kv: KVLayer, begin: int) -> tuple[Floats, Floats]:
        shape = (len(self.memory), self.block_size, kv.kv_heads, kv.head_dim)
        size = self.block_size * kv.kv_heads * kv.head_dim
        return self.memory[:, begin : begin + size].reshape(shape), self.memory[:, begin + size : begin + 2 * size].reshape(shape)

    def copy_page(self, src: int, dst: int) -> None:
        for page in (src, dst):
            if not 0 <= page < len(self.memory):
                raise BackendError(f"copy of page {src} to page {dst}: pages are 0 to {len(self.memory) - 1}")
        self.memory[dst] = self.memory[src]

    def write(self, op: Attention, tables: np.ndarray, position: int, k: Floats, v: Floats) -> None:
        """Store k and v [kv_heads * head_dim] of one position."""
        keys, values = self.layers[op.layer]
        table = tables[self.layout.layers[op.layer][0]]
        at = table[position // self.block_size], position % self.block_size
        keys[at], values[at] = k.reshape(op.kv_heads, op.head_dim), v.reshape(op.kv_heads, op.head_dim)

    def read(self, op: Attention, tables: np.ndarray, position: int) -> tuple[Floats, Floats]:
        """Keys and values [n, kv_heads, head_dim] of the n positions that ``position`` sees, oldest first, its own included."""
        first = 0 if op.window is None else max(0, position - op.window + 1)
        seen = np.arange(first, position + 1)
        table = tables[self.layout.layers[op.layer][0]]
        at = table[seen // self.block_size], seen % self.block_size
        keys, values = self.layers[op.layer]
        return keys[at], values[at]


class ReferenceBackend:
    """Runs one model; see ``backends.base.Backend``.

    Computes in float32 with a float32 KV cache whatever ``compute`` is; refuses a 16-bit ``kv_cache_dtype`` and ``threads``, which it
    cannot honour. ``logits_hook`` (sequence id, position, logits float32 [vocab_size]) sees the raw logits of every row for which they
    are computed; ``all_logits`` makes that every row.
    """

    name = "reference"

    def __init__(self, model: ModelBody, config: EngineConfig) -> None:
        if config.cache.kv_cache_dtype not in ("auto", "f32"):
            raise BackendError(f"kv_cache_dtype: {config.cache.kv_cache_dtype!r}; the reference backend keeps KV in f32 (auto or f32)")
        if config.backend.threads is not None:
            raise BackendError(f"threads: {config.backend.threads}; the reference backend has none of its own, leave it out")
        self.program = model.program
        self._config, self._model = config, model
        self.vocab_size = model.program.vocab_size
        self.max_num_slots = config.scheduler.max_num_seqs + MAX_N
        self.logits_hook: LogitsHook | None = None
        self.all_logits = False
        self._block_size = config.cache.block_size
        self._fingerprint = model.fingerprint
        self._weights = {name: model.weights[name].float32() for name in model.program.weights}
        self._ropes = {op.out: ops.RopeTable(op) for op in self.program.ops if isinstance(op, Rope)}
        self._last_attention = max(i for i, op in enumerate(self.program.ops) if isinstance(op, Attention))
        self._sampler = ReferenceSampler(self.vocab_size, self.max_num_slots)
        self._sampling_s = 0.0  # of the step being run
        self._layout = page_layout(self._layer_bytes(), [kv.window for kv in self.program.kv_layers], config.cache.groups_kv)
        self._kv: KVPool | None = None
        self._host: HostPool | None = None
        self._steps = kv_wire.StepCount()
        self.num_kv_layers = len(model.program.kv_layers)

    def kv_capacity(self, memory_bytes: int) -> KVCapacity:
        bytes_per_block = self._layout.block_bytes
        return KVCapacity(bytes_per_block, memory_bytes // bytes_per_block, "f32", self._layout)

    def allocate_kv(self, num_blocks: int) -> None:
        if self._kv is not None:
            raise BackendError("the KV pool is already allocated")
        try:
            self._kv = KVPool(self.program, num_blocks, self._block_size, self._layout)
        except (MemoryError, ValueError) as exc:
            kind = OutOfResources if isinstance(exc, MemoryError) else BackendError
            raise kind(f"num_blocks: no memory for {num_blocks} KV blocks: {exc}") from exc

    def guest_layout(self, page_bytes: int) -> GuestLayout | None:
        return guest_layout(self._layer_bytes(), page_bytes)

    def lodge_kv(self, owner: Backend, layout: GuestLayout) -> bool:
        if not isinstance(owner, ReferenceBackend):
            return False
        self._layout = layout.pages
        memory = owner._pool().memory.reshape(-1, layout.pages.page_bytes // 4)
        self._kv = KVPool(self.program, len(memory) // layout.pages.num_pages, self._block_size, layout.pages, memory)
        return True

    def _layer_bytes(self) -> list[int]:
        return [2 * 4 * self._block_size * kv.kv_heads * kv.head_dim for kv in self.program.kv_layers]

    def packed_block_bytes(self) -> int:
        return packed_block_bytes(self._pool().layers)

    def allocate_host_kv(self, num_blocks: int, num_packed: int = 0) -> None:
        if self._host is not None:
            raise BackendError("the host pool is already allocated")
        try:
            self._host = HostPool(self._pool().layers, self._layout, num_blocks, num_packed)
        except (MemoryError, ValueError) as exc:
            kind = OutOfResources if isinstance(exc, MemoryError) else BackendError
            raise kind(f"host KV blocks: no memory for {num_blocks + num_packed}: {exc}") from exc

    def read_host_block(self, host_block: int) -> bytes:
        return self._host_pool().read(host_block)

    def write_host_block(self, host_block: int, data: bytes) -> None:
        self._host_pool().write(host_block, data)

    def _host_pool(self) -> HostPool:
        if self._host is None:
            raise BackendError("there is no host pool: allocate_host_kv comes first")
        return self._host

    def _move(self, saves: list[BlockMove], loads: list[BlockMove]) -> None:
        self._host_pool().move(saves, loads)

    def wire_layer_bytes(self, layer: int, packed: bool = False) -> int:
        return kv_wire.layer_bytes(self._pool().layers, layer, packed)

    def export_kv(self, layers: range, pages: array[int], to: Buffer, packed: bool = False) -> None:
        kv_wire.export_kv(self._pool().layers, self._layout, layers, pages, to, packed)

    def import_kv(self, layers: range, pages: array[int], data: Buffer, packed: bool = False) -> None:
        kv_wire.import_kv(self._pool().layers, self._layout, layers, pages, data, packed)

    def next_kv_step(self) -> int:
        return self._steps.next_step

    def wait_kv(self, step: int, layer: int, timeout_s: float) -> bool:
        self.wire_layer_bytes(layer)  # ValueError for one that there is not
        return self._steps.wait(step, timeout_s)

    def first_layers(self, num_layers: int) -> ReferenceBackend:
        """As CpuBackend's."""
        shallow = ReferenceBackend(first_layers(self._model, num_layers), self._config)
        shallow._kv, shallow._layout = self._pool(), self._layout
        return shallow

    def execute(self, plan: StepPlan) -> StepResult:
        started = time.perf_counter()
        kv = self._pool()
        for slot in plan.slot_closes:
            if self._sampler.is_open(slot):  # a step that failed half way may have left it unopened
                self._sampler.close(slot)
        for entry in plan.slot_opens:
            self._sampler.open(entry)
        for src, dst, seed in plan.slot_forks:
            self._sampler.fork(src, dst, seed)
        move_seconds = run_block_moves(plan, self._move, kv.copy_page, kv.layout.num_pages)
        self._sampling_s = 0.0
        results = [self._run_slice(s, kv, plan.pages) for s in plan.slices]
        if plan.slices:
            self._steps.done()
        return StepResult(plan.step_index, results, time.perf_counter() - started, move_seconds, self._sampling_s)

    def fingerprint(self) -> str:
        pages = f"/pages-{self._layout.num_full}+{self._layout.num_window}" if self._layout.num_pages > 1 else ""
        kv = f"kv-f32{ROUNDED_TIERS if self._config.cache.packs_kv_tiers('f32') else ''}"
        return f"{self._fingerprint}/reference/f32/{kv}/layout-1/numpy-{np.__version__}{pages}"

    def close(self) -> None:
        self._kv = self._host = None
        self._weights = {}

    def _pool(self) -> KVPool:
        if self._kv is None:
            raise BackendError("there is no KV pool: allocate_kv comes before execute, and nothing after close")
        return self._kv

    def _run_slice(self, s: SequenceSlice, kv: KVPool, pages: array[int] | None) -> SliceResult:
        """Forward all rows and draw from the last one; with drafts from each row behind them, until a draft does not come true."""
        table = self._check_slice(s, kv, pages)
        result = SliceResult()
        first_drawn = s.num_tokens - 1 - s.num_drafts
        if s.prompt_logprobs is not None:
            result.prompt_logprobs = []
        last: Floats | None = None
        for row, logits in self._rows(s, table, kv):
            if self.logits_hook is not None:
                self.logits_hook(s.seq_id, s.start + row, logits.copy())
            if s.prompt_logprobs is not None and row < len(s.next_token_ids):
                try:
                    entry = raw_logprobs(logits, s.next_token_ids[row], s.prompt_logprobs)
                except LogitsError as error:
                    result.error = f"position {s.start + row}: {error}"
                    return result
                result.prompt_logprobs.append(entry)  # type: ignore[union-attr]
            last = logits
            if s.num_drafts and row >= first_drawn:
                self._sample(s, row, logits, result)
                if row == s.num_tokens - 1 or result.token_ids[row - first_drawn :] != [s.token_ids[row + 1]]:
                    return result
        if s.num_samples and last is not None:
            self._sample(s, s.num_tokens - 1, last, result)
        return result

    def _rows(self, s: SequenceSlice, table: np.ndarray, kv: KVPool) -> Iterator[tuple[int, Floats]]:
        """Compute the rows in order; yield (row, logits) of those whose logits somebody wants."""
        for row, token in enumerate(s.token_ids):
            wanted = self.all_logits or (s.num_samples > 0 and row >= s.num_tokens - 1 - s.num_drafts)
            wanted = wanted or (s.prompt_logprobs is not None and row < len(s.next_token_ids))
            logits = self._forward(token, s.start + row, table, kv, wanted)
            if logits is not None:
                yield row, logits

    def _sample(self, s: SequenceSlice, row: int, logits: Floats, result: SliceResult) -> None:
        """Draw a token with each slot from a row; the first failure is the slice's error, unless tokens were drawn behind drafts before."""
        if s.logprobs is not None and result.logprobs is None:
            result.logprobs = []
        for slot in s.sample_slots:
            begun = time.perf_counter()
            outcome = self._sampler.sample(slot, logits, s.start + row + 1, s.mask, s.logprobs)
            self._sampling_s += time.perf_counter() - begun
            if outcome.error is not None:
                if s.num_drafts and result.token_ids:
                    return  # the next step begins with this row
                result.token_ids, result.error, result.error_code = [], outcome.error, outcome.error_code
                return
            result.token_ids.append(outcome.token_id)
            if result.logprobs is not None and outcome.logprobs is not None:
                result.logprobs.append(outcome.logprobs)

    def _check_slice(self, s: SequenceSlice, kv: KVPool, pages: array[int] | None) -> np.ndarray:
        """The pages of its blocks [columns, blocks]; BackendError when the slice names tokens, blocks or slots that cannot be."""
        where = f"sequence {s.seq_id}"
        if not s.token_ids or s.start < 0:
            raise BackendError(f"{where}: {len(s.token_ids)} tokens from position {s.start}; at least one, from 0 on")
        if fault := s.drafts_fault():
            raise BackendError(f"{where}: {fault}")
        if len(s.sample_slots) != s.num_samples - s.num_drafts or len(s.next_token_ids) > s.num_tokens:
            raise BackendError(f"{where}: {s.num_samples} samples need as many slots, and {s.num_tokens} rows at most as many next tokens")
        bad = [t for t in (*s.token_ids, *s.next_token_ids) if not 0 <= t < self.vocab_size]
        if bad:
            raise BackendError(f"{where}: token id {bad[0]} is not in 0 .. {self.vocab_size - 1}")
        table = np.array(s.block_table, np.int64)
        needed = -(-(s.start + s.num_tokens) // kv.block_size)
        num_columns = kv.layout.num_pages
        num_ids = kv.num_blocks if pages is None else len(pages) // num_columns
        if len(table) < needed or not all(0 <= block < num_ids for block in table[:needed]):
            ids = table[:needed].tolist()
            raise BackendError(f"{where}: its block table must name {needed} blocks from 0 to {num_ids - 1}, not {ids}")
        places = table[:needed] * num_columns + np.arange(num_columns)[:, None]
        return places if pages is None else np.array(pages)[places]

    def _forward(self, token: int, position: int, table: np.ndarray, kv: KVPool, wanted: bool) -> Floats | None:
        """One row through the program. When its logits are not wanted it ends where its last key and value are written."""
        values: dict[str, Floats] = {}
        for index, op in enumerate(self.program.ops):
            if isinstance(op, Attention):
                kv.write(op, table, position, values[op.k], values[op.v])
                if index == self._last_attention and not wanted:
                    return None
                keys, cached = kv.read(op, table, position)
                values[op.out] = ops.attention(values[op.q], keys, cached, op)
            elif isinstance(op, Embed):
                values[op.out] = self._weights[op.weight][token] * np.float32(op.scale)
            elif isinstance(op, Rope):
                cos, sin = self._ropes[op.out].at(position)
                values[op.out] = ops.rope(values[op.x], op, cos, sin)
            else:
                values[op.out] = self._elementwise(op, values)
        return values[self.program.logits]

    def _elementwise(self, op: Op, values: dict[str, Floats]) -> Floats:
        """Ops that need neither position nor cache."""
        w = self._weights
        if isinstance(op, Norm):
            return ops.rms_norm(values[op.x], w[op.weight], op.eps, op.groups)
        if isinstance(op, Linear):
            return ops.linear(values[op.x], w[op.weight], None if op.bias is None else w[op.bias])
        if isinstance(op, GatedAct):
            return ops.ACTIVATIONS[op.activation](values[op.gate]) * values[op.up]
        if isinstance(op, Add):
            return values[op.a] + values[op.b]
        if isinstance(op, Softcap):
            return ops.softcap(values[op.x], op.cap)
        raise BackendError(f"the reference backend does not know the op {op!r}")
