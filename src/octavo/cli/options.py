"""Command-line options made from EngineConfig, shared by the commands. Explicit code, one option per field."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

import click
from click.core import ParameterSource

from octavo.config import (
    KV_DTYPES,
    KV_HOST_DTYPES,
    KV_RESERVATIONS,
    PREEMPTIONS,
    PREFIX_GRANULARITIES,
    SCHEDULING_POLICIES,
    SPEC_METHODS,
    SPEC_RULES,
    BackendConfig,
    CacheConfig,
    ConfigError,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
)

Value = TypeVar("Value")
Section = TypeVar("Section", ModelConfig, CacheConfig, SchedulerConfig, BackendConfig, SpeculativeConfig)

_DEFAULTS = EngineConfig()
_NOT_GIVEN = (ParameterSource.DEFAULT, ParameterSource.DEFAULT_MAP, None)
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


class ByteSize(click.ParamType):
    """A number of bytes, with an optional unit: 500M, 4GiB, 1.5g. Units are powers of 1024."""

    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", str(value).strip().lower())
        if not match:
            self.fail(f"{value!r} is not a size such as 500M or 4GiB", param, ctx)
        num_bytes = float(match[1]) * _UNITS[match[2]]
        if num_bytes >= 1 << 63:
            self.fail(f"{value!r} is not allowed; below 8388608 TiB", param, ctx)
        return int(num_bytes)


class Finite(click.FloatRange):
    """A number within limits that is neither NaN nor, unless ``or_infinite``, infinite. click's own range lets NaN and infinity through.

    Every flag with a fraction is of this type, but for those whose limits the configuration and the sampling parameters own.
    """

    def __init__(
        self, min: float | None = None, max: float | None = None, min_open: bool = False, or_infinite: bool = False
    ) -> None:  # fmt: skip
        super().__init__(min, max, min_open=min_open)
        self.or_infinite = or_infinite

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(click.FLOAT.convert(value, param, ctx))
        low, high = -math.inf if self.min is None else self.min, math.inf if self.max is None else self.max
        within = low <= number <= high and not (self.min_open and number == low)
        if not within or (math.isinf(number) and not self.or_infinite):  # NaN is within nothing
            self.fail(f"{number} is not allowed; {self._limits()}", param, ctx)
        return number

    def _limits(self) -> str:
        low = "" if self.min is None else f" {'above' if self.min_open else 'from'} {self.min:g}"
        if self.max is not None:
            return f"a number{low}{',' if self.min_open else ''} {'up to' if self.min_open or not low else 'to'} {self.max:g}"
        return f"a number{low}, or inf" if self.or_infinite else f"a finite number{low}"


POSITIVE = Finite(0, min_open=True)
SHARE = Finite(0, 1, min_open=True)
BURSTINESS = Finite(1e-4, or_infinite=True)


class SpecLength(click.ParamType):
    """off, auto, or a number of drafts."""

    name = "off|auto|K"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        return int(value) if isinstance(value, int) or str(value).isdigit() else str(value)


def _add(options: list[Callable], function: Callable) -> Callable:
    for option in reversed(options):
        function = option(function)
    return function


def add_options(options: list[Callable]) -> Callable[[Callable], Callable]:
    """A decorator that adds options, in their order."""
    return lambda function: _add(options, function)


def _shown(flag: str, default: Any, kind: Any, text: str) -> Callable:
    return click.option(flag, type=kind, default=default, show_default=True, help=text)


def model_options(function: Callable) -> Callable:
    """--model and what limits it."""
    model_help = "Catalogue name (see `octavo models`), .gguf file, folder with safetensors, or hf:owner/repo[:file]."
    len_help = "Longest sequence in tokens, prompt and output together (default: what the model was trained for)."
    return _add(
        [
            click.option("--model", "-m", default=_DEFAULTS.model.model, show_default=True, help=model_help),
            click.option("--max-model-len", type=int, help=len_help),
        ],
        function,
    )


def pool_size_options(otherwise: str) -> list[Callable]:
    """How large the KV pool is. ``otherwise``: what it is without them."""
    return [
        click.option("--num-kv-blocks", type=int, help="KV blocks in the pool; not together with --kv-cache-memory."),
        click.option("--kv-cache-memory", type=ByteSize(), help=f"Memory of the KV pool, such as 2GiB (default: {otherwise})."),
    ]


def engine_options(function: Callable) -> Callable:
    """Options of cache, scheduler and backend."""
    return _add([*_scheduler_options(), *_pool_options(), *_policy_options(), *_draft_options(), *_backend_options()], function)


def _scheduler_options() -> list[Callable]:
    """How steps are filled, and what makes room."""
    cache, scheduler = _DEFAULTS.cache, _DEFAULTS.scheduler
    itl_help = "Bound on the gaps between a running answer's tokens, in milliseconds: prompts are computed in pieces that keep it."
    preemption_help = "What becomes of KV that must make room: recompute, swap (to --swap-space), or auto: what is cheaper."
    swap_help = "Host memory for the KV of preempted sequences, such as 2GiB; 0: none, they are computed again."
    lookahead_help = "Tokens of each running sequence that admission leaves room for."
    return [
        _shown("--max-num-seqs", scheduler.max_num_seqs, int, "Most sequences that run at once."),
        _shown("--max-num-batched-tokens", scheduler.max_num_batched_tokens, int, "Most tokens computed in one step."),
        click.option("--max-itl-ms", type=float, help=itl_help),
        _shown("--preemption", scheduler.preemption, click.Choice(PREEMPTIONS), preemption_help),
        _shown("--admission-lookahead", scheduler.admission_lookahead, int, lookahead_help),
        click.option("--record", metavar="FILE", help="Write all that the scheduler is told, prompts included, to replay it."),
        _shown("--swap-space", cache.swap_space, ByteSize(), swap_help),
    ]


def _pool_options() -> list[Callable]:
    """Where keys and values are kept."""
    cache = _DEFAULTS.cache
    dtype_help = "Type of keys and values. auto: bf16, or f32 with --compute f32."
    host_dtype_help = "Blocks in host memory and on disk. auto: as in the pool. int8: half the memory, but what comes back is rounded."
    flush_help = "How often an idle server writes cached blocks to --kv-disk-path, in seconds; 0: at the end alone (default: 30)."
    return [
        _shown("--block-size", cache.block_size, int, "Tokens of a KV block."),
        *pool_size_options("a quarter of the free memory, at most 4GiB"),
        _shown("--kv-cache-dtype", cache.kv_cache_dtype, click.Choice(["auto", *KV_DTYPES]), dtype_help),
        click.option("--kv-host-memory", type=ByteSize(), help="Memory for cached blocks that the KV pool evicts (default: none)."),
        click.option("--kv-disk-path", help="Folder for blocks that no longer fit in memory; they survive a restart."),
        click.option("--kv-disk-size", type=ByteSize(), help="Most bytes in --kv-disk-path (default: 10GiB)."),
        click.option("--kv-disk-flush-seconds", type=float, help=flush_help),
        _shown("--kv-host-dtype", cache.kv_host_dtype, click.Choice(KV_HOST_DTYPES), host_dtype_help),
    ]


def _policy_options() -> list[Callable]:
    """What is computed when, and kept how."""
    cache, scheduler = _DEFAULTS.cache, _DEFAULTS.scheduler
    grain_help = "token: a cached block that begins as the prompt goes on is used too, by copying it. block: only whole blocks are."
    policy_help = "fcfs: by arrival. priority, fair (by user), srf (fewest tokens left). static, prefill_first: for comparison."
    reservation_help = "paged: blocks as they are needed. Others reserve a contiguous chunk for a sequence's whole life; for comparison."
    return [
        click.option("--no-enable-prefix-caching", is_flag=True, help="Compute every prompt from its first token."),
        click.option("--no-enable-kv-groups", is_flag=True, help="Keep the KV of window layers for all positions."),
        _shown("--prefix-granularity", cache.prefix_granularity, click.Choice(PREFIX_GRANULARITIES), grain_help),
        click.option("--no-enable-chunked-prefill", is_flag=True, help="Compute each prompt in one step, never in pieces."),
        _shown("--scheduling-policy", scheduler.scheduling_policy, click.Choice(SCHEDULING_POLICIES), policy_help),
        _shown("--kv-reservation", cache.kv_reservation, click.Choice(KV_RESERVATIONS), reservation_help),
    ]


def _draft_options() -> list[Callable]:
    """Speculative decoding."""
    spec_help = "Draft tokens that a step verifies: auto (as many as pay), off, or a number. No text changes."
    rule_help = "How drafts are verified. coupling: no text changes. resample: the accept/resample rule, which keeps the law of a text."
    return [
        click.option("--spec", type=SpecLength(), default="off", show_default=True, help=spec_help),
        _shown("--spec-method", _DEFAULTS.speculative.spec_method, click.Choice(SPEC_METHODS), "Where drafts come from."),
        click.option("--draft-model", help="A smaller model of the same tokenizer, to draft; named as --model."),
        click.option("--self-draft-layers", type=int, help="First layers of the model itself that draft."),
        _shown("--spec-rule", _DEFAULTS.speculative.spec_rule, click.Choice(SPEC_RULES), rule_help),
    ]


def _backend_options() -> list[Callable]:
    """What computes."""
    backend = _DEFAULTS.backend
    backend_help = "cpu: packed weights, native kernels. reference: NumPy, slow and obvious."
    compute_help = "f32: all weights and KV in float32, slower; for checking the fast mode."
    return [
        _shown("--backend", backend.backend, click.Choice(["cpu", "reference"]), backend_help),
        _shown("--compute", backend.compute, click.Choice(["fast", "f32"]), compute_help),
        click.option("--threads", type=int, help="Compute threads (default: one per core this process may use)."),
    ]


def engine_config(options: dict[str, Any]) -> EngineConfig:
    """EngineConfig of the options' values; missing ones keep their defaults. Raises BadParameter that names the flag."""
    d = _DEFAULTS
    tier_fields = ("kv_host_memory", "kv_disk_path", "kv_disk_size", "kv_host_dtype", "kv_disk_flush_seconds")
    pool_fields = ("block_size", "num_kv_blocks", "kv_cache_memory", "kv_cache_dtype", "kv_reservation", "swap_space", *tier_fields)
    scheduler_fields = (
        "record", "max_num_seqs", "max_num_batched_tokens", "max_itl_ms", "scheduling_policy", "preemption", "admission_lookahead",
    )  # fmt: skip
    cache, scheduler = _replaced(d.cache, options, "prefix_granularity", *pool_fields), _replaced(d.scheduler, options, *scheduler_fields)
    config = EngineConfig(
        model=_replaced(d.model, options, "model", "served_model_name", "max_model_len"),
        cache=replace(
            cache,
            enable_prefix_caching=not options.get("no_enable_prefix_caching", False),
            enable_kv_groups=not options.get("no_enable_kv_groups", False),
        ),
        scheduler=replace(scheduler, enable_chunked_prefill=not options.get("no_enable_chunked_prefill", False)),
        backend=_replaced(d.backend, options, "backend", "compute", "threads"),
        speculative=_replaced(d.speculative, options, "spec", "spec_method", "draft_model", "self_draft_layers", "spec_rule"),
    )
    try:
        return config.validate()
    except ConfigError as error:
        raise bad_flag(error) from None


def drafting_config(options: dict[str, Any]) -> EngineConfig:
    """``engine_config`` of a command whose requests never ask for drafts themselves: flags that say how, without --spec, are refused."""
    config = engine_config(options)
    field = config.speculative.waits_to_be_asked
    if field is not None:
        hint = f"'--{field.replace('_', '-')}'"
        raise click.BadParameter("it drafts nothing without --spec, such as --spec auto", click.get_current_context(), param_hint=hint)
    return config


def predictable_config(options: dict[str, Any]) -> EngineConfig:
    """``engine_config`` of a command that measures what it simulates as well: what no simulation can tell beforehand is refused."""
    config = engine_config(options)
    if config.speculative.spec != "off":
        refuse("spec", "drafts that come true cannot be told beforehand")
    if config.cache.has_kv_tiers or config.cache.swap_space:
        refuse("kv-host-memory", "blocks in host memory and on disk are not simulated")
    return config


def _replaced(section: Section, options: dict[str, Any], *names: str) -> Section:
    """A section of the configuration with those of its fields that the options have a value for."""
    return replace(section, **{name: options[name] for name in names if options.get(name) is not None})


def bad_flag(error: ValueError) -> click.BadParameter:
    """An error "field: value is not allowed; limit" as click shows a bad flag. Fields are flags with underscores."""
    field, _, problem = str(error).partition(": ")
    return click.BadParameter(problem, click.get_current_context(silent=True), param_hint=f"'--{field.replace('_', '-')}'")


def refuse(flag: str, why: str) -> NoReturn:
    """Raises BadParameter for a flag, by its name without dashes."""
    raise click.BadParameter(why, click.get_current_context(), param_hint=f"'--{flag}'")


def given() -> set[str]:
    """Parameters of the command that have a value from the command line or the environment; none outside of a command."""
    context = click.get_current_context(silent=True)
    return set() if context is None else {name for name in context.params if context.get_parameter_source(name) not in _NOT_GIVEN}


def refuse_given(names: Iterable[str], why: str) -> None:
    """A flag that would do nothing is a mistake: raises BadParameter for the first of these parameters of the command that is given."""
    found = given()
    for name in names:
        if name in found:
            refuse(_flag_of(name), why)


def _flag_of(name: str) -> str:
    """Of a parameter of the command, without dashes."""
    return next(param.opts[0] for param in click.get_current_context().command.params if param.name == name).removeprefix("--")


def checked(flag: str, make: Callable[[], Value]) -> Value:
    """What ``make`` makes; its ValueError becomes one of ``flag``."""
    try:
        return make()
    except ValueError as error:
        problem = str(error).removeprefix(f"{flag.replace('-', '_')}: ")
    refuse(flag, problem)
