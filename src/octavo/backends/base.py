"""The Backend protocol: what computes a StepPlan. One Backend runs one model.

A backend owns weights, KV storage and sampling-state slots; it owns no policy: which block holds what, and who runs, is the scheduler's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from octavo.core.kv_pages import GuestLayout, PageLayout
from octavo.core.step import StepPlan, StepResult

if TYPE_CHECKING:
    import numpy as np

    LogitsHook = Callable[[int, int, np.ndarray], None]


ROUNDED_TIERS = "+host-int8"  # in a fingerprint: KV that comes back from other tiers may be rounded, so that equal ones promise less


class BackendError(RuntimeError):
    """The backend cannot run this model or configuration; the message names what and why."""


class OutOfResources(BackendError):
    """There is too little memory, or no thread left: not for good, so another try may fare better."""


@dataclass(frozen=True, slots=True)
class KVCapacity:
    """What the KV pool can be: bytes of one block over all layers, and how many blocks fit the memory given."""

    bytes_per_block: int
    num_blocks: int
    dtype: str
    layout: PageLayout | None = None  # of a block's pages; None: it has one


class Backend(Protocol):
    """Life: ``load`` once (in the constructor of each implementation: ``(model: ModelBody, config: EngineConfig)``), then
    ``allocate_kv`` once, then ``execute`` per step from one thread, then ``close``.
    """

    name: str
    vocab_size: int
    max_num_slots: int

    def kv_capacity(self, memory_bytes: int) -> KVCapacity:
        """Blocks that fit ``memory_bytes``. Allocates nothing."""
        ...

    def allocate_kv(self, num_blocks: int) -> None:
        """Allocate the pool. Raises BackendError when the memory is not to be had."""
        ...

    def guest_layout(self, page_bytes: int) -> GuestLayout | None:
        """How its blocks would lie in pages of another backend's pool. None: they would waste too much of them."""
        ...

    def lodge_kv(self, owner: Backend, layout: GuestLayout) -> bool:
        """Instead of ``allocate_kv``: keep KV in the pages of ``owner``, which has its pool. False, and nothing done, where that is not of
        the same kind. One of the two runs at a time, and no block of this one is in a page that is the other's.
        """
        ...

    def allocate_host_kv(self, num_blocks: int, num_packed: int = 0) -> None:
        """Allocate a second pool in host memory, once and after ``allocate_kv``: ``num_blocks`` blocks as large as those of the first, and
        behind them ``num_packed`` blocks of ``packed_block_bytes``.

        ``plan.block_saves`` and ``plan.block_loads`` need it. A packed block keeps keys and values as integers of 8 bits with a scale for
        each token and kv head: what is loaded from it is near to what was saved, and saved again to the same bytes. Raises BackendError
        when the memory is not to be had.
        """
        ...

    def packed_block_bytes(self) -> int:
        """Bytes of a packed host block."""
        ...

    def read_host_block(self, host_block: int) -> bytes:
        """A copy of what a host block holds, in the backend's own layout, which ``fingerprint`` names.

        This and ``write_host_block`` may be called from any thread while a step runs, for blocks that its plan does not move.
        """
        ...

    def write_host_block(self, host_block: int, data: bytes) -> None:
        """Fill a host block with what ``read_host_block`` of a backend with the same fingerprint gave. ValueError for another size."""
        ...

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step. Effects in the order StepPlan documents; deterministic in (weights, tokens, params, seed) alone."""
        ...

    def first_layers(self, num_layers: int) -> Backend:
        """A backend of the first layers, the final norm and the output matrix, on the same weights and KV pages and with slots of its own.

        One of the two runs at a time. Raises ValueError unless 0 < num_layers < the number of layers, BackendError before ``allocate_kv``.
        """
        ...

    def fingerprint(self) -> str:
        """Names everything bit-exactness depends on: model, formats, compute mode, KV dtype, layout version, ISA level."""
        ...

    def close(self) -> None:
        """Release threads and memory. Idempotent."""
        ...


class ShowsLogits(Backend, Protocol):
    """A backend whose hook (sequence id, position of the row, logits float32 [vocab_size]) sees every row for which logits are computed."""

    logits_hook: LogitsHook | None
