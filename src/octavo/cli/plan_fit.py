"""`octavo plan --fit`: what a model and its conversations take, in bytes, before it is downloaded."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from octavo.models.outline import ModelOutline
    from octavo.planning.memory import MemoryNeeds


def outline_of(spec: str) -> ModelOutline:
    """What a model takes, of a path, a catalogue name or hf:owner/repo, of which no more than the config is fetched.

    Raises ModelFileError, PullError.
    """
    from octavo.cli.progress import fetch
    from octavo.models.outline import read_outline

    if spec.startswith("hf:"):
        from octavo.models.hub import fetch_config

        return read_outline(fetch_config(spec))
    return read_outline(fetch(spec))


def needs_of(options: dict[str, Any], model: ModelOutline) -> MemoryNeeds:
    """Raises BadParameter."""
    from octavo.planning.memory import KVSizing, MemoryNeeds, activation_bytes

    chunk, sequences = options["max_num_batched_tokens"], options["sequences"]
    kv = KVSizing.of(model.kv_layers, options["kv_dtype"], options["block_size"], chunk, not options["no_enable_kv_groups"])
    activations = None if model.program is None else activation_bytes(model.program, chunk, min(sequences, chunk))
    return MemoryNeeds(model, kv, options["context"], sequences, activations)


def fit(options: dict[str, Any]) -> None:
    """Print it, as a table or as JSON."""
    model = outline_of(options["model"])
    options["context"] = options["context"] or model.context
    needs, memory = needs_of(options, model), options["memory"]
    record = needs.to_dict()
    warnings = list[str]()
    if needs.context > model.context:
        warnings.append(f"context: {needs.context} is more than the {model.context} tokens that the model was trained for")
    if memory is not None:
        record |= {"memory_bytes": memory, "sequences_that_fit": needs.sequences_in(memory), "fits": needs.total_bytes <= memory}
    record["warnings"] = warnings
    if options["as_json"]:
        click.echo(json.dumps(record))
    else:
        click.echo(_shown(needs, memory, warnings))
    if memory is not None and needs.total_bytes > memory:
        sys.exit(1)


def _shown(needs: MemoryNeeds, memory: int | None, warnings: list[str]) -> str:
    from octavo.bench.tables import table

    model, kv = needs.model, needs.kv
    rows = [["", "bytes", "", ""]]
    rows.append(["weights", f"{model.weight_bytes:,}", size(model.weight_bytes), f"from {model.weights_from}"])
    what = f"{needs.num_sequences:,} {'sequence' if needs.num_sequences == 1 else 'sequences'} of {needs.context:,} tokens"
    blocks = f"{kv.num_blocks(needs.context, needs.num_sequences):,} blocks of {kv.block_size} tokens"
    rows.append(["KV cache", f"{needs.kv_bytes:,}", size(needs.kv_bytes), f"{what}: {blocks}"])
    if needs.activation_bytes is not None:
        rows.append(["activations", f"{needs.activation_bytes:,}", size(needs.activation_bytes), "of a step, about"])
    rows.append(["together", f"{needs.total_bytes:,}", size(needs.total_bytes), ""])
    per_token = [["KV, each token", f"{kv.bytes_per_token:,}", size(kv.bytes_per_token), f"{kv.dtype}, in all {_layers(needs)}"]]
    if kv.needs is not None:
        late, what = kv.bytes_per_late_token, f"from {kv.needs.window:,} tokens on: layers with a window give back what left it"
        per_token.append(["  beyond windows", f"{late:,}", size(late), what])
    lines = [_head(model), "", table([*rows, ["", "", "", ""], *per_token], " >>", "  ")]
    lines += [f"\nNote: {warning}." for warning in warnings]
    if model.program is None:
        lines.append(f"\nNote: {model.architecture} models can be sized here, but not served by Octavo.")
    if memory is not None:
        fitting, missing = needs.sequences_in(memory), needs.total_bytes - memory
        verdict = f"no room for {what}: {missing:,} bytes ({size(missing)}) are missing"
        if missing <= 0:
            verdict = f"room for {what}, with {size(-missing)} to spare"
        lines.append(f"\n{size(memory)} of memory: {verdict}.")
        lines.append(f"At most {fitting:,} such {'sequence has' if fitting == 1 else 'sequences have'} room beside the weights.")
    return "\n".join(lines)


def _head(model: ModelOutline) -> str:
    kv = model.kv_layers[0]
    heads = f"{kv.kv_heads} KV {'head' if kv.kv_heads == 1 else 'heads'} of {kv.head_dim}"
    return f"{model.name}: {model.architecture}, {len(model.kv_layers)} layers, {heads}, trained for {model.context:,} tokens"


def _layers(needs: MemoryNeeds) -> str:
    layers = needs.model.kv_layers
    num_windowed = sum(kv.window is not None for kv in layers)
    return f"{len(layers)} layers" + (f", {num_windowed} of them with a window" if num_windowed else "")


def size(num_bytes: float) -> str:
    """For people, in powers of 1024."""
    value, units = float(num_bytes), ("B", "KiB", "MiB", "GiB", "TiB")
    for unit in units:
        if abs(value) < 1024 or unit == units[-1]:
            return f"{value:.0f} B" if unit == "B" else f"{value:,.2f} {unit}"
        value /= 1024
    raise AssertionError
