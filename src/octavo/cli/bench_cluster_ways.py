"""`octavo bench cluster-ways`: two workers in three ways under the same loads, measured and simulated."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from octavo.cli.options import POSITIVE, engine_options, given, model_options, predictable_config
from octavo.cli.progress import fetched, progress_line

_TRACES = {"conversation": ("AzureLLMInferenceTrace_conv.csv", 8.0, 8.0), "code": ("AzureLLMInferenceTrace_code.csv", 8.0, 2.0)}
"""File, and by how much prompts and answers are shorter here."""
_NUM_KV_BLOCKS = 1024  # of each worker, where nothing is said: six share this host
_MAX_NUM_SEQS = 16
_LOAD_HELP = "Lengths: conversations (prompts and answers an eighth of the recorded ones) or code (prompts an eighth, answers half)."
_CALIBRATE_HELP = "Time to measure steps and hand-offs, in all."


@click.command(short_help="Prefill and decode apart, chunks, and whole prompts: measured and simulated.")
@model_options
@click.option("--data", required=True, type=click.Path(exists=True, file_okay=False), help="Folder of the published data files.")
@click.option("--load", "loads", type=click.Choice(list(_TRACES)), multiple=True, help=f"{_LOAD_HELP} Both, if not given.")
@click.option("--chunk", type=click.IntRange(16), default=128, show_default=True, help="Tokens of a step of the replicas in chunks.")
@click.option("--repeat", type=click.IntRange(1), default=2, show_default=True, help="Real runs of each load by each way.")
@click.option("--requests", "num_requests", type=click.IntRange(1), default=35, show_default=True, help="Requests of a run.")
@click.option("--calibrate-seconds", "calibrate_s", type=POSITIVE, default=60.0, show_default=True, help=_CALIBRATE_HELP)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="The same seed makes the same requests.")
@click.option("--json", "as_json", is_flag=True, help="Print only the JSON record.")
@engine_options
def cluster_ways(
    data: str, loads: tuple[str, ...], chunk: int, repeat: int, num_requests: int, calibrate_s: float, seed: int, as_json: bool,
    **options: Any,
) -> None:  # fmt: skip
    """Two workers in three ways under the same loads, and what the simulator says of each.

    Prefill and decode apart, two replicas that compute prompts in chunks, and two whose prompts are whole and go before running answers.
    Time to the first token, between tokens, throughput, goodput: of each real run and simulated, and whether they agree to 15 %. HTTP is
    not part of it. Let nothing else run meanwhile. The last line printed is a JSON record.
    """
    config = _config(options)
    from octavo.engine.event_stream import EngineUnavailable
    from octavo.reproduce.cluster_accuracy import Scaled, WaysCase, measure_ways, two_workers
    from octavo.workload.traces import TraceError, read_trace

    least = config.scheduler.max_num_seqs
    if chunk < least:
        raise click.BadParameter(f"{chunk} is not allowed; at least --max-num-seqs ({least})", param_hint="'--chunk'")
    named = fetched(config)
    try:
        traces = {name: read_trace(Path(data) / _TRACES[name][0]) for name in loads or _TRACES}
        lengths = {name: Scaled(trace, *_TRACES[name][1:], named.model.max_model_len or 2048) for name, trace in traces.items()}
        case = WaysCase(lengths, repeat, num_requests, calibrate_s, seed=seed)
        with progress_line("measuring") as progress:
            accuracy = measure_ways(two_workers(named, chunk), named.model.model, case, progress)
    except (TraceError, OSError, EngineUnavailable) as error:
        raise click.ClickException(str(error)) from None
    if not as_json:
        click.echo(accuracy.text())
    click.echo(json.dumps(accuracy.record()))


def _config(options: dict[str, Any]) -> Any:
    """Of all workers; what a small machine gives each is the default here."""
    if "max_num_seqs" not in given():
        options["max_num_seqs"] = _MAX_NUM_SEQS
    config = predictable_config(options)
    cache = config.cache
    if cache.num_kv_blocks is None and cache.kv_cache_memory is None:
        config = replace(config, cache=replace(cache, num_kv_blocks=_NUM_KV_BLOCKS))
    return replace(config, backend=replace(config.backend, threads=config.backend.threads or 1))
