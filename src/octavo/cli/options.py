"""Command-line options made from EngineConfig, shared by the commands. Explicit code, one option per field."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import click

from octavo.config import BackendConfig, CacheConfig, ConfigError, EngineConfig, ModelConfig, SchedulerConfig

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
        return int(float(match[1]) * _UNITS[match[2]])


def _add(options: list[Callable], function: Callable) -> Callable:
    for option in reversed(options):
        function = option(function)
    return function


def model_options(function: Callable) -> Callable:
    """--model and what limits it."""
    model_help = "Catalogue name (see `octavo models`), .gguf file, folder with safetensors, or hf:owner/repo[:file]."
    len_help = "Longest sequence in tokens, prompt and output together (default: what the model was trained for)."
    return _add(
        [
            click.option("--model", "-m", default="smollm2", show_default=True, help=model_help),
            click.option("--max-model-len", type=int, help=len_help),
        ],
        function,
    )


def engine_options(function: Callable) -> Callable:
    """Options of cache, scheduler and backend."""
    backend_help = "cpu: packed weights, native kernels. reference: NumPy, slow and obvious."
    compute_help = "f32: all weights and KV in float32, slower; for checking the fast mode."
    dtype_help = "Type of keys and values. auto: f16, or f32 with --compute f32."
    pool_help = "Memory of the KV pool, such as 2GiB (default: a quarter of the free memory, at most 4GiB)."
    return _add(
        [
            click.option("--max-num-seqs", type=int, default=64, show_default=True, help="Most sequences that run at once."),
            click.option("--max-num-batched-tokens", type=int, default=512, show_default=True, help="Most tokens computed in one step."),
            click.option("--block-size", type=int, default=16, show_default=True, help="Tokens of a KV block."),
            click.option("--num-kv-blocks", type=int, help="KV blocks in the pool; not together with --kv-cache-memory."),
            click.option("--kv-cache-memory", type=ByteSize(), help=pool_help),
            click.option(
                "--kv-cache-dtype", type=click.Choice(["auto", "f16", "bf16", "f32"]), default="auto", show_default=True, help=dtype_help
            ),
            click.option("--no-enable-prefix-caching", is_flag=True, help="Compute every prompt from its first token."),
            click.option("--no-enable-chunked-prefill", is_flag=True, help="Compute each prompt in one step, never in pieces."),
            click.option("--backend", type=click.Choice(["cpu", "reference"]), default="cpu", show_default=True, help=backend_help),
            click.option("--compute", type=click.Choice(["fast", "f32"]), default="fast", show_default=True, help=compute_help),
            click.option("--threads", type=int, help="Compute threads (default: one per core this process may use)."),
        ],
        function,
    )


def engine_config(options: dict[str, Any]) -> EngineConfig:
    """EngineConfig of the options' values; missing ones keep their defaults. Raises BadParameter that names the flag."""
    o = options
    config = EngineConfig(
        model=ModelConfig(model=o["model"], served_model_name=o.get("served_model_name"), max_model_len=o.get("max_model_len")),
        cache=CacheConfig(
            block_size=o.get("block_size", 16),
            num_kv_blocks=o.get("num_kv_blocks"),
            kv_cache_memory_bytes=o.get("kv_cache_memory"),
            kv_cache_dtype=o.get("kv_cache_dtype", "auto"),
            enable_prefix_caching=not o.get("no_enable_prefix_caching", False),
        ),
        scheduler=SchedulerConfig(
            max_num_seqs=o.get("max_num_seqs", 64),
            max_num_batched_tokens=o.get("max_num_batched_tokens", 512),
            enable_chunked_prefill=not o.get("no_enable_chunked_prefill", False),
        ),
        backend=BackendConfig(backend=o.get("backend", "cpu"), compute=o.get("compute", "fast"), threads=o.get("threads")),
    )
    try:
        return config.validate()
    except ConfigError as error:
        raise bad_flag(error) from None


def bad_flag(error: ValueError) -> click.BadParameter:
    """An error "field: value is not allowed; limit" as click shows a bad flag. Fields are flags with underscores."""
    field, _, problem = str(error).partition(": ")
    return click.BadParameter(problem, click.get_current_context(silent=True), param_hint=f"'--{field.replace('_', '-')}'")
