"""What `octavo simulate` runs: its flags to the engines of a simulation, from a model on a machine, a fitted cost or a recording."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo.cli.options import checked, refuse
from octavo.config import CacheConfig, EngineConfig, SchedulerConfig

if TYPE_CHECKING:
    from octavo.costs.coefficients import Coefficients
    from octavo.planning.kinds import Engine, MachineKind
    from octavo.simulator.engine_spec import EngineSpec
    from octavo.simulator.replay import Replay


@dataclass(frozen=True, slots=True)
class Source:
    """What is known beforehand: the run of ``--replay`` and of ``--fitted``, if these are recordings."""

    replay: Replay | None = None
    coefficients: Coefficients | None = None

    @classmethod
    def of(cls, options: dict[str, Any]) -> Source:
        if (options["fitted"] is None) == (options["machine"] is None) and options["replay"] is None:
            refuse("machine", "it or --fitted is needed, and not both; `octavo simulate --machine list` lists machines")
        if options["fitted"] is not None and options["machine"] is not None:
            refuse("fitted", "it prices steps, and so does --machine")
        replay = coefficients = None
        if options["replay"] is not None:
            from octavo.simulator.replay import replay_recording

            replay = replay_recording(options["replay"])
            if not replay.requests:
                left_out = replay.left_out()
                refuse("replay", f"{options['replay']}: no request is in it{left_out and ': '}{left_out}")
        if options["fitted"] is not None:
            coefficients = _coefficients(options["fitted"])
        elif options["machine"] is None and replay is not None:
            coefficients = _fitted_on("replay", options["replay"], replay)
        return cls(replay, coefficients)


def _coefficients(path: str) -> Coefficients:
    """Of a file of coefficients, or of a recording, told again."""
    from octavo.costs.coefficients import read_coefficients

    with open(path, encoding="utf-8-sig", errors="replace") as file:
        is_recording = '"octavo-recording"' in file.read(200)
    if not is_recording:
        return read_coefficients(path)
    from octavo.simulator.replay import replay_recording

    return _fitted_on("fitted", path, replay_recording(path))


def _fitted_on(flag: str, path: str, replay: Replay) -> Coefficients:
    """Of the steps of a recording; refused for too few."""
    from octavo.costs.fitting import FitError

    try:
        return replay.coefficients()
    except FitError as error:
        refuse(flag, f"{path}: {error}" + ("; --fitted or --machine can price them instead" if flag == "replay" else ""))


def engine_spec(options: dict[str, Any], source: Source, cache: CacheConfig, scheduler: SchedulerConfig) -> EngineSpec:
    from dataclasses import replace

    from octavo.core.recording import layout_of
    from octavo.costs.machines import find_machine
    from octavo.planning.kinds import MachineKind
    from octavo.simulator.engine_spec import Speculation
    from octavo.simulator.scenario import fitted_engine

    if options["num_kv_blocks"] is not None and options["kv_cache_memory"] is not None:
        refuse("num-kv-blocks", "give either it or --kv-cache-memory")
    engine = _engine(options, cache, scheduler)
    num_blocks = _num_blocks(options, source, engine)
    if engine is not None and options["machine"] is not None:
        machine = checked("machine", lambda: find_machine(options["machine"], options["machines"]))
        kind, devices = MachineKind.of(machine), options["devices"] or machine.devices
        if num_blocks is None:
            num_blocks = _blocks_on(kind, engine, devices)
        spec = kind.spec(engine, devices, num_blocks)
    else:
        if num_blocks is None:
            refuse("num-kv-blocks", "it, or --kv-cache-memory with --model or --kv-bytes, is needed with --fitted")
        kv_bytes = options["kv_bytes"] or (0 if engine is None else int(engine.kv.bytes_per_token))
        if options["roles"] is not None and not kv_bytes:
            refuse("kv-bytes", "it or --model is needed with --roles: KV is handed over")
        assert source.coefficients is not None  # without a machine it is from a file or a recording
        spec = fitted_engine(source.coefficients, num_blocks or 0, 1 << 20, scheduler, cache, kv_bytes)
        if engine is not None:
            spec = replace(spec, max_model_len=engine.model.context, layout=None if engine.kv.needs is None else engine.kv.layout)
        elif source.replay is not None:
            head = source.replay.header
            is_same = head["cache"]["block_size"] == cache.block_size
            spec = replace(spec, max_model_len=head["max_model_len"], layout=layout_of(head["layout"]) if is_same else None)
    if options["max_model_len"] is not None:
        spec = replace(spec, max_model_len=options["max_model_len"])
    if options["spec"] == "off":
        return spec
    return replace(spec, speculation=Speculation(options["spec"], options["acceptance"], options["draft_ms"] / 1000.0))


def _engine(options: dict[str, Any], cache: CacheConfig, scheduler: SchedulerConfig) -> Engine | None:
    """The model with what runs it; None: no model is needed."""
    if options["machine"] is None and options["model"] is None:
        return None
    if options["kv_bytes"] is not None:
        refuse("kv-bytes", "--model tells it")
    from octavo.cli.plan_fit import outline_of
    from octavo.planning.kinds import Engine

    outline = outline_of(options["model"] or EngineConfig().model.model)
    return checked("model", lambda: Engine(outline, options["kv_cache_dtype"], scheduler, cache))


def _blocks_on(kind: MachineKind, engine: Engine, devices: int) -> int:
    """KV blocks that fit beside weights and activations."""
    room = kind.room_bytes(engine, devices)
    num_blocks = engine.kv.blocks_in(room)
    if num_blocks < 1:
        block, usable = engine.kv.layout.block_bytes, kind.usable_bytes(devices)
        why = f"{kind.name_of(devices)!r} is not allowed; of its {usable:,} bytes weights and activations leave {max(0, room):,}"
        refuse("machine", f"{why}, and a KV block takes {block:,}")
    return num_blocks


def _num_blocks(options: dict[str, Any], source: Source, engine: Engine | None) -> int | None:
    """As told; of a replayed run as many as hold what its own did; None: what fits."""
    block_size = options["block_size"]
    if options["num_kv_blocks"] is not None:
        return int(options["num_kv_blocks"])
    if options["kv_cache_memory"] is not None:
        if engine is None and options["kv_bytes"] is None:
            refuse("kv-cache-memory", "--model or --kv-bytes is needed to tell how many tokens fit")
        block_bytes = options["kv_bytes"] * block_size if engine is None else engine.kv.layout.block_bytes
        num_blocks = int(options["kv_cache_memory"] // block_bytes)
        if num_blocks < 1:
            refuse("kv-cache-memory", f"{options['kv_cache_memory']} bytes hold no block of {block_size} tokens")
        return num_blocks
    if source.replay is None:
        return None
    head = source.replay.header
    return max(1, head["num_blocks"] * head["cache"]["block_size"] // block_size)
