"""Kinds of machines that a plan chooses from, and what a model leaves room for on each: arithmetic, no simulation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from octavo.config import CacheConfig, SchedulerConfig
from octavo.core.cost import CostModel
from octavo.costs.coefficients import Coefficients
from octavo.costs.machines import Machine
from octavo.costs.program_work import ProgramWork
from octavo.costs.roofline import roofline
from octavo.costs.scaled import scaled
from octavo.models.outline import ModelOutline
from octavo.planning.load import PlanLoad
from octavo.planning.memory import KVSizing, activation_bytes
from octavo.simulator.engine_spec import EngineSpec, PowerModel
from octavo.simulator.scenario import MEMORY_SHARE

ASSUMED_ERROR = 0.2  # of a step's seconds, where nobody has stated one: what a plan is tried against


@dataclass(frozen=True, slots=True)
class Engine:
    """What is planned for: a model, and the settings of every engine that runs it. Raises ValueError when it cannot be priced."""

    model: ModelOutline
    kv_dtype: str = "bf16"
    scheduler: SchedulerConfig = SchedulerConfig(max_num_seqs=256)
    cache: CacheConfig = CacheConfig()

    def __post_init__(self) -> None:
        if self.model.program is None:
            raise ValueError(f"model: {self.model.architecture!r} is not allowed; it can be sized (--fit), but has no program to price")

    @property
    def kv(self) -> KVSizing:
        chunk, cache = self.scheduler.max_num_batched_tokens, self.cache
        return KVSizing.of(self.model.kv_layers, self.kv_dtype, cache.block_size, chunk, cache.groups_kv)

    @property
    def work(self) -> ProgramWork:
        program, values = self.model.program, sum(2 * kv.kv_heads * kv.head_dim for kv in self.model.kv_layers)
        assert program is not None
        return ProgramWork.of(program, self.model.sizes or 2.0, self.kv.bytes_per_token / values)

    @property
    def activation_bytes(self) -> int:
        program, config = self.model.program, self.scheduler
        assert program is not None
        return activation_bytes(program, config.max_num_batched_tokens, config.max_num_seqs)


@dataclass(frozen=True, slots=True)
class MachineKind:
    """``make_cost``: of so many devices that share each step. Figures are of one device. ``error``: of the seconds of a step, as stated by
    who measured it; None: nobody has."""

    name: str
    basis: str
    memory_bytes: float
    make_cost: Callable[[Engine, int], CostModel]
    power: PowerModel
    error: float | None = None
    link_bytes_per_s: float = 25e9
    link_latency_s: float = 1e-4
    base_devices: int = 1
    can_share: bool = True  # steps can be shared by more devices
    wake_s: float = 0.0  # what a step takes more that follows on idleness

    @classmethod
    def of(cls, machine: Machine) -> MachineKind:
        power = PowerModel(machine.idle_w, machine.busy_w, machine.usd_per_hour)
        return cls(
            machine.name, machine.basis, machine.memory_bytes, lambda engine, devices: roofline(engine.work, machine.times(devices)), power,
            machine.step_error, machine.link_bytes_per_s, machine.link_latency_s, machine.devices,
        )  # fmt: skip

    @classmethod
    def fitted(cls, coefficients: Coefficients, memory_bytes: float, name: str = "fitted") -> MachineKind:
        """The machine that ``coefficients`` were fitted on, for the model they were fitted with."""
        error, power, wake_s = coefficients.median_error, PowerModel(), coefficients.wake_s
        return cls(name, "measured", memory_bytes, lambda engine, devices: coefficients, power, error, can_share=False, wake_s=wake_s)

    def usable_bytes(self, devices: int) -> int:
        """Of the memory of ``devices`` devices, what weights, activations and KV may take."""
        return int(MEMORY_SHARE * self.memory_bytes * devices)

    def room_bytes(self, engine: Engine, devices: int) -> int:
        """Of these, what the KV pool may; below 0: the rest has no room."""
        return self.usable_bytes(devices) - engine.model.weight_bytes - engine.activation_bytes

    def spec(self, engine: Engine, devices: int, num_blocks: int, role: str = "both", slower: float = 1.0) -> EngineSpec:
        """An engine on ``devices`` devices. ``slower``: its steps take so many times as long as the cost model says."""
        cost, kv, power = self.make_cost(engine, devices), engine.kv, self.power
        usd = None if power.usd_per_hour is None else power.usd_per_hour * devices
        return EngineSpec(
            cost if slower == 1.0 else scaled(cost, slower), num_blocks, engine.model.context, engine.scheduler, engine.cache,
            role=role, name=self.name_of(devices), power=PowerModel(power.idle_w * devices, power.busy_w * devices, usd),
            kv_bytes_per_token=int(kv.bytes_per_token), wake_s=slower * self.wake_s, layout=None if kv.needs is None else kv.layout,
        )  # fmt: skip

    def name_of(self, devices: int) -> str:
        return self.name if devices == 1 else f"{devices}*{self.name}"


@dataclass(frozen=True, slots=True)
class KindFit:
    """What there is room for on ``devices`` devices of a kind. ``missing_bytes`` above 0: for nothing, so many more are needed."""

    kind: MachineKind
    devices: int
    memory_bytes: int  # that may be used
    weight_bytes: int
    activation_bytes: int
    num_blocks: int
    missing_bytes: int
    conversations_mean: int
    conversations_p90: int

    @property
    def fits(self) -> bool:
        return self.missing_bytes <= 0

    @property
    def name(self) -> str:
        return self.kind.name_of(self.devices)

    @property
    def busy_w(self) -> float:
        return self.kind.power.busy_w * self.devices

    @property
    def usd_per_hour(self) -> float | None:
        usd = self.kind.power.usd_per_hour
        return None if usd is None else usd * self.devices

    def spec(self, engine: Engine, role: str = "both", slower: float = 1.0) -> EngineSpec:
        """An engine on it. ``slower``: as of ``MachineKind.spec``."""
        return self.kind.spec(engine, self.devices, self.num_blocks, role, slower)


def fit_kind(kind: MachineKind, engine: Engine, load: PlanLoad, max_devices: int = 8) -> KindFit:
    """On the fewest devices, doubling up to ``max_devices``, that hold the weights and the longest request of ``load``; on most of them
    when none do."""
    devices = kind.base_devices
    found = _fit(kind, engine, load, devices)
    while not found.fits and kind.can_share and 2 * devices <= max_devices:
        devices *= 2
        found = _fit(kind, engine, load, devices)
    return found


def _fit(kind: MachineKind, engine: Engine, load: PlanLoad, devices: int) -> KindFit:
    kv, room = engine.kv, kind.room_bytes(engine, devices)
    blocks = kv.blocks_in(room)
    fitting = [kv.sequences_in(blocks, context) for context in (load.mean_context, load.p90_context)]
    missing = kv.num_bytes(load.max_context) - room
    sizes = kind.usable_bytes(devices), engine.model.weight_bytes, engine.activation_bytes
    return KindFit(kind, devices, *sizes, blocks, missing, *fitting)
