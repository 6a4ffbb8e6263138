"""The cpu backend: weights packed once, then one native call per step.

Owns the native model, its KV pool and sampling slots; turns a StepPlan into flat arrays and their answers into a StepResult.
No policy, and no arithmetic of its own.
"""

from __future__ import annotations

import mmap
import time
from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from octavo.backends.base import ROUNDED_TIERS, Backend, BackendError, KVCapacity, OutOfResources
from octavo.backends.block_moves import pages_of, run_block_moves
from octavo.backends.cpu.kernel_path import kernel_path
from octavo.backends.cpu.lowering import Handles, lower
from octavo.backends.cpu.step_arrays import StepArrays, read_results
from octavo.backends.kv_wire import Buffer
from octavo.backends.machine import available_cpus
from octavo.core.kv_pages import GuestLayout, PageLayout, guest_layout, page_layout
from octavo.core.step import BlockMove, StepPlan, StepResult
from octavo.models.loaded import first_layers
from octavo.models.program import Linear, Rope, RopeScaling

if TYPE_CHECKING:
    import numpy as np

    from octavo.backends.cpu import _native
    from octavo.config import EngineConfig
    from octavo.models.loaded import ModelBody, WeightTensor

# Bump when the packed layout or any kernel's arithmetic changes: fingerprints must not match across it.
LAYOUT_VERSION = 2
PACKABLE = frozenset({"f32", "f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k"})
MAX_KV_BLOCKS = 2**31 - 1  # block ids are int32
ROPE_CHUNK = 1024  # positions a rotary table grows by


class KVReads(NamedTuple):
    """Bytes of keys and values that attention walked, over all layers: a tile counts once each time that a pass of queries takes it up."""

    together: int  # for several sequences that share them
    alone: int


class CpuBackend:
    """``Backend`` over the native module. ``logits_hook(seq_id, position, logits)`` sees a float32 copy of every row of raw logits."""

    name = "cpu"

    def __init__(self, model: ModelBody, config: EngineConfig, base: CpuBackend | None = None) -> None:
        """``base``: a backend of more layers of the same model, whose weights, threads and KV pages this one uses; see ``first_layers``."""
        from octavo.backends.cpu import _native

        self.vocab_size = model.program.vocab_size
        self.max_num_slots = config.scheduler.max_num_seqs + 64
        self.block_size = config.cache.block_size
        self.logits_hook: Callable[[int, int, np.ndarray], None] | None = None
        self._program = model.program
        self.num_kv_layers = len(model.program.kv_layers)
        self._config, self._model = config, model
        self._exact = config.backend.compute == "f32"
        self._kv_dtype = kv_dtype_of(config)
        self.isa = kernel_path()
        self.threads = config.backend.threads or available_cpus()
        self._native: _native.Model | None
        self._base = base
        self._matrices: dict[str, tuple[int, bool]] = {}
        try:
            self._native = _native.Model(self.isa, self.threads) if base is None else _native.Model(base._open_native())
        except RuntimeError as e:  # std::system_error
            raise OutOfResources(f"threads: {self.threads} cannot be started: {e}") from e
        self._slots = _native.SamplerSlots(self.vocab_size, self.max_num_slots, self.isa)
        self._open_slots: set[int] = set()
        self._weights = model.weights
        self._rope_index: dict[Rope, int] = {}
        self._ropes: dict[Rope, int] = {}  # positions each rotary table covers
        self._num_pool_tokens = 0
        self._num_host_blocks = 0
        self._layout: PageLayout = self._page_layout() if base is None else base._layout
        kv = f"kv-{self._kv_dtype}{ROUNDED_TIERS if config.cache.packs_kv_tiers(self._kv_dtype) else ''}"
        self._fingerprint = f"{model.fingerprint}:{config.backend.compute}:{kv}:layout-{LAYOUT_VERSION}:{self.isa}"
        if self._layout.num_pages > 1:
            self._fingerprint += f":pages-{self._layout.num_full}+{self._layout.num_window}"
        self._load()

    # ---- loading ----

    def _load(self) -> None:
        from functools import cache

        # Each is made once, however many ops name it: a tied embedding is one matrix, layers share their rotary tables.
        matrix = cache(self._matrix)
        shared = {op.weight for op in self._program.ops if isinstance(op, Linear)}

        def embedding(name: str) -> int:
            return self._open_native().add_embedding_of(matrix(name)[0]) if name in shared else self._embedding(name)

        lower(self._program, self._open_native(), Handles(matrix, cache(self._vector), cache(embedding), cache(self._rope_table)))
        self._pack()
        self._extend_ropes(ROPE_CHUNK)  # now, with the imports it takes, and not in somebody's first request

    def _matrix(self, name: str) -> tuple[int, bool]:
        if self._base is not None:
            self._matrices[name] = self._open_native().add_matrix_of(self._base._open_native(), self._base._matrices[name][0])
        else:
            self._matrices[name] = self._add_matrix(name)
        return self._matrices[name]

    def _add_matrix(self, name: str) -> tuple[int, bool]:
        tensor = self._weights[name]
        dtype, data = _packable(tensor)
        rows, columns = tensor.shape
        in_file = data is tensor.data and isinstance(tensor.data.obj, mmap.mmap)
        try:
            planned = self._open_native().add_matrix(dtype, data, rows, columns, self._exact, in_file)
        except ValueError as e:
            raise BackendError(f"tensor {tensor.name!r}: {e}") from e
        if data is not tensor.data:
            self._pack()  # at once: widened copies are not to pile up
        return planned

    def _pack(self) -> None:
        """Pack what has been planned: one native call without the interpreter lock, so that whoever loads beside it has the interpreter."""
        try:
            self._open_native().pack()
        except MemoryError:
            raise OutOfResources(f"the packed weights take {self.weight_bytes()} bytes, more memory than there is") from None

    def _vector(self, name: str) -> int:
        tensor = self._weights[name]
        if tensor.dtype == "f32" and not tensor.add:
            return self._open_native().add_vector(tensor.data.cast("f"))
        import numpy as np

        return self._open_native().add_vector(np.ascontiguousarray(tensor.float32().reshape(-1)))

    def _embedding(self, name: str) -> int:
        tensor = self._weights[name]
        dtype, data = _packable(tensor)
        return self._open_native().add_embedding(dtype, data, *tensor.shape)

    def _rope_table(self, rotary_dim: int, base: float, scaling: RopeScaling) -> int:
        index = self._open_native().add_rope()
        rope = Rope("", "", 1, rotary_dim, rotary_dim, base, False, scaling)
        self._rope_index[rope] = index
        self._ropes[rope] = 0
        return index

    def _cover_positions(self, positions: int, plan: StepPlan) -> None:
        """Rotary tables for positions below ``positions``, appended to when needed, so that a long context costs nothing at start."""
        if all(positions <= covered for covered in self._ropes.values()):
            return
        longest = max(len(s.block_table) for s in plan.slices) * self.block_size  # a plan that goes beyond is refused in a moment
        self._extend_ropes(-(-min(positions, longest) // ROPE_CHUNK) * ROPE_CHUNK)

    def _extend_ropes(self, target: int) -> None:
        for rope, covered in self._ropes.items():
            if covered < target:
                from octavo.backends.cpu.rope_table import cos_sin

                self._open_native().extend_rope(self._rope_index[rope], cos_sin(rope, covered, target))
                self._ropes[rope] = target

    # ---- KV ----

    def kv_capacity(self, memory_bytes: int) -> KVCapacity:
        self._open_native()
        per_block = self._layout.block_bytes
        return KVCapacity(per_block, memory_bytes // per_block, self._kv_dtype, self._layout)

    def _layer_bytes(self) -> list[int]:
        bytes_of = self._open_native().bytes_per_block
        return [bytes_of(self.block_size, self._kv_dtype, [layer]) for layer in self._kv_layers()]

    def _page_layout(self) -> PageLayout:
        return page_layout(self._layer_bytes(), [kv.window for kv in self._program.kv_layers], self._config.cache.groups_kv)

    def _kv_layers(self) -> list[tuple[int, int]]:
        return [(kv.kv_heads, kv.head_dim) for kv in self._program.kv_layers]

    def allocate_kv(self, num_blocks: int) -> None:
        """Address space now, memory as blocks are first written; all that loading has left behind is given back for them.

        Raises BackendError when the pool is refused, or there already.
        """
        native = self._open_native()
        if self._num_pool_tokens:
            raise BackendError("the KV pool is already allocated")
        if not 1 <= num_blocks <= MAX_KV_BLOCKS:
            raise BackendError(f"num_kv_blocks: {num_blocks} is not allowed; from 1 to {MAX_KV_BLOCKS}")
        try:
            pages = self._layout
            native.allocate_kv(
                num_blocks, self.block_size, self._kv_dtype, self._kv_layers(), pages.num_pages, pages.page_bytes, pages.layers
            )
        except (MemoryError, ValueError) as e:
            kind = OutOfResources if isinstance(e, MemoryError) else BackendError
            raise kind(f"num_kv_blocks: {num_blocks} blocks of {self.block_size} tokens cannot be allocated ({e})") from e
        self._num_pool_tokens = num_blocks * self.block_size
        self._release_leavings()

    def guest_layout(self, page_bytes: int) -> GuestLayout | None:
        return guest_layout(self._layer_bytes(), page_bytes)

    def lodge_kv(self, owner: Backend, layout: GuestLayout) -> bool:
        if not isinstance(owner, CpuBackend):
            return False
        if not owner._num_pool_tokens or self._num_pool_tokens:
            raise BackendError("pages are lent by a pool that there is, once, to a backend that has none")
        pages = self._layout = layout.pages
        self._open_native().lodge_kv(
            owner._open_native(), self.block_size, self._kv_dtype, self._kv_layers(), pages.num_pages, pages.page_bytes, pages.layers
        )
        self._num_pool_tokens = owner._num_pool_tokens
        self._release_leavings()
        return True

    def packed_block_bytes(self) -> int:
        return self._open_native().bytes_per_block(self.block_size, "int8", self._kv_layers())

    def allocate_host_kv(self, num_blocks: int, num_packed: int = 0) -> None:
        """See ``Backend``. Address space now, memory as blocks are first saved."""
        native = self._open_native()
        if not self._num_pool_tokens or self._num_host_blocks:
            raise BackendError("the host pool is allocated once, after the KV pool")
        num_all = num_blocks + num_packed
        if not 1 <= num_all <= MAX_KV_BLOCKS:
            raise BackendError(f"host KV blocks: {num_all} is not allowed; from 1 to {MAX_KV_BLOCKS}")
        try:
            native.allocate_host_kv(num_blocks, num_packed)
        except MemoryError as e:
            raise OutOfResources(f"host KV blocks: {num_all} blocks of {self.block_size} tokens cannot be allocated ({e})") from e
        self._num_host_blocks = num_all

    def read_host_block(self, host_block: int) -> bytes:
        return self._open_native().read_host_block(host_block)

    def write_host_block(self, host_block: int, data: bytes) -> None:
        self._open_native().write_host_block(host_block, data)

    def wire_layer_bytes(self, layer: int, packed: bool = False) -> int:
        return self._open_native().wire_layer_bytes(layer, packed)

    def export_kv(self, layers: range, pages: array[int], to: Buffer, packed: bool = False) -> None:
        """See ``MovesKV``. Without the interpreter lock."""
        self._open_native().export_kv(layers.start, layers.stop, pages, to, packed)

    def import_kv(self, layers: range, pages: array[int], data: Buffer, packed: bool = False) -> None:
        """See ``MovesKV``. Without the interpreter lock."""
        self._open_native().import_kv(layers.start, layers.stop, pages, data, packed)

    def next_kv_step(self) -> int:
        return self._open_native().kv_step() + 1

    def wait_kv(self, step: int, layer: int, timeout_s: float) -> bool:
        """See ``MovesKV``. Without the interpreter lock."""
        return self._open_native().wait_kv(step, layer, timeout_s)

    def _move(self, saves: list[BlockMove], loads: list[BlockMove]) -> None:
        """Without the interpreter lock."""
        num_columns = self._layout.num_pages
        self._open_native().move_blocks(_flat(saves, num_columns), _flat(loads, num_columns))

    def _release_leavings(self) -> None:
        """The model is loaded, text and all: files need not be mapped in memory any more, and a vocabulary took much to build."""
        from octavo.backends.cpu import _native

        for file in {id(tensor.data.obj): tensor.data.obj for tensor in self._weights.values()}.values():
            _release_pages(file)
        _native.release_free_memory()

    def first_layers(self, num_layers: int) -> CpuBackend:
        """A backend of this one's first layers, with its final norm and output matrix: it computes what this one does up to there.

        It has slots of its own, and shares everything else: a step of it reads and writes the KV of those layers in the same pages, the
        same to the bit as a step of this one. One of the two runs at a time. Raises ValueError for a number of layers that is not below
        this one's, BackendError before ``allocate_kv``.
        """
        if not self._num_pool_tokens:
            raise BackendError("there are no KV pages to share: allocate_kv comes before first_layers")
        shallow = CpuBackend(first_layers(self._model, num_layers), self._config, self)
        shallow._open_native().share_kv(self._open_native(), num_layers)
        shallow._num_pool_tokens = self._num_pool_tokens
        return shallow

    # ---- steps ----

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step; see StepPlan for the order of effects.

        Raises ValueError for a plan that names tokens, blocks, slots or positions that cannot be, BackendError before
        ``allocate_kv`` and after ``close``. The slots it closes are closed even then.
        """
        started = time.perf_counter()
        native, slots = self._open_native(), self._slots
        if not self._num_pool_tokens:
            raise BackendError("there is no KV pool: allocate_kv comes before execute")
        for slot in plan.slot_closes:
            # A step that failed half way may have left slots unopened that the scheduler, rightly, gives back.
            if slot in self._open_slots:
                slots.close(slot)
                self._open_slots.discard(slot)
        for opened in plan.slot_opens:
            slots.open(opened)
            self._open_slots.add(opened.slot)
        for source, target, seed in plan.slot_forks:
            slots.fork(source, target, seed)
            self._open_slots.add(target)
        move_seconds = run_block_moves(plan, self._move, native.copy_page, self._layout.num_pages)
        if not plan.slices:
            return StepResult(plan.step_index, [], time.perf_counter() - started, move_seconds)
        arrays = StepArrays(plan, self.vocab_size)
        self._cover_positions(arrays.num_positions, plan)
        hook = self.logits_hook
        logits, sampling_seconds = self._run(arrays, plan.pages, hook is not None)
        if hook is not None and logits is not None:
            for (seq_id, position), row in zip(arrays.logit_positions(plan), logits, strict=True):
                hook(seq_id, position, row)
        return StepResult(plan.step_index, read_results(plan, arrays), time.perf_counter() - started, move_seconds, sampling_seconds)

    def _run(self, a: StepArrays, pages: array[int] | None, want_logits: bool) -> tuple[np.ndarray | None, float]:
        """(logits, if they are wanted, seconds of drawing)."""
        logits = None
        if want_logits:
            import numpy as np

            logits = np.empty((len(a.logit_rows), self.vocab_size), np.float32)
        sampling_seconds = self._open_native().step(
            self._slots, a.tokens, a.seq_start, a.seq_rows, a.table_offset, a.tables, a.logit_rows, a.requests, a.masks, a.mask_offset,
            a.out_token, a.out_status, a.out_rank, a.out_logprob, a.max_top, a.out_top_ids, a.out_top_logprobs, logits, pages,
        )  # fmt: skip
        return logits, sampling_seconds

    def _open_native(self) -> _native.Model:
        if self._native is None:
            raise BackendError("the cpu backend is closed")
        return self._native

    def fingerprint(self) -> str:
        return self._fingerprint

    def weight_bytes(self) -> int:
        """Bytes of packed weights."""
        return self._open_native().packed_bytes()

    def walk_together(self, on: bool) -> None:
        """Whether sequences that begin in the same blocks have those walked once a step for all of them, as they do from the start; off
        for benches alone. No bit of any result depends on it."""
        self._open_native().walk_together(on)

    def count_kv_reads(self, on: bool) -> None:
        """Count, from zero, the KV that attention walks; or count no more, as from the start."""
        self._open_native().count_kv_reads(on)

    def kv_reads(self) -> KVReads:
        """Since counting began."""
        return KVReads(*self._open_native().kv_reads())

    def close(self) -> None:
        self._native = None  # ends its threads


def kv_dtype_of(config: EngineConfig) -> str:
    """The type of keys and values in the cache."""
    if config.cache.kv_cache_dtype != "auto":
        return config.cache.kv_cache_dtype
    return "f32" if config.backend.compute == "f32" else "bf16"


def _flat(moves: list[BlockMove], num_columns: int) -> array[int]:
    """int32 (pages of the pool block, host block), flat."""
    return array("i", [place for move in moves for place in (*pages_of(move.pool_block, move.pages, num_columns), move.host_block)])


def _release_pages(file: object) -> None:
    """Let go of the pages of a mapped file: its header, and what packing has left at edges. The page cache keeps them."""
    if isinstance(file, mmap.mmap) and hasattr(file, "madvise"):  # absent outside Unix; file mappings are read-only, so nothing is lost
        file.madvise(mmap.MADV_DONTNEED)


def _packable(tensor: WeightTensor) -> tuple[str, object]:
    """(dtype, bytes) the packer takes; types without a packed form are widened to float32 first."""
    if tensor.dtype in PACKABLE and not tensor.add:
        return tensor.dtype, tensor.data
    import numpy as np

    wide = np.ascontiguousarray(tensor.float32())
    return "f32", wide.reshape(-1).view(np.uint8)
