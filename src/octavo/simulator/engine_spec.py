"""What one simulated engine is: its cost model, its memory, its settings, and what its machine draws and costs. Plain data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from octavo.backends.sim import TextSource
from octavo.config import CacheConfig, SchedulerConfig
from octavo.core.cost import CostModel
from octavo.core.kv_pages import PageLayout
from octavo.core.scheduler import Scheduler
from octavo.distributed.roles import ROLES

MOST_BLOCKS = 1 << 26  # whose books take gigabytes


@dataclass(frozen=True, slots=True)
class PowerModel:
    """Watts of a machine, and what an hour of it costs. ``idle_w`` while no step runs, ``busy_w`` while one does, 0: not known.
    ``usd_per_hour`` None: not known."""

    idle_w: float = 0.0
    busy_w: float = 0.0
    usd_per_hour: float | None = None

    def __post_init__(self) -> None:
        for name in ("idle_w", "busy_w", "usd_per_hour"):
            value = getattr(self, name)
            if value is not None and not 0.0 <= value < float("inf"):
                raise ValueError(f"{name}: {value!r} is not allowed; a finite number from 0")
        if self.idle_w > self.busy_w:
            raise ValueError(f"idle_w: {self.idle_w!r} is not allowed; at most busy_w, which is {self.busy_w!r}")


@dataclass(frozen=True, slots=True)
class Speculation:
    """Drafts in the simulation: ``spec`` as in SpeculativeConfig, ``acceptance`` the chance that a draft comes true after those before it
    did, ``draft_s`` what making one takes."""

    spec: int | str = "auto"
    acceptance: float = 0.7
    draft_s: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """``num_blocks``: the KV pool. ``role``: prefill engines compute prompts up to the first token and hand over, decode engines take over.

    ``make_scheduler`` makes another scheduler than ``Scheduler(scheduler, cache, num_blocks, max_model_len)``, with other policies, say.
    ``kv_bytes_per_token``: what a hand-off moves. ``move_s``: seconds to move a block to host memory or back. ``wake_s``: what a step
    takes more that follows on idleness. ``text``: what sequences say (None: each repeats one token, and steps that only repeat can be
    jumped); with ``speculation`` the simulated text is said instead. ``layout``: the pages of a block, of a model whose layers with a
    window give back what has left it (None: every layer keeps every block).
    """

    cost: CostModel
    num_blocks: int
    max_model_len: int = 1 << 20
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    role: str = "both"
    name: str = "engine"
    power: PowerModel = PowerModel()
    kv_bytes_per_token: int = 0
    num_host_blocks: int = 0
    move_s: float = 0.0
    wake_s: float = 0.0
    speculation: Speculation | None = None
    text: TextSource | None = None
    make_scheduler: Callable[[], Scheduler] | None = None
    layout: PageLayout | None = None

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ValueError(f"role: {self.role!r} is not allowed; one of {', '.join(ROLES)}")
        if not 1 <= self.num_blocks <= MOST_BLOCKS:
            raise ValueError(f"num_blocks: {self.num_blocks!r} is not allowed; from 1 to {MOST_BLOCKS}")
