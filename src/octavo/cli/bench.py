"""`octavo bench`: measurements of this engine on this machine."""

from __future__ import annotations

from typing import IO, Any

import click

from octavo.cli.bench_advice import advice
from octavo.cli.bench_cascade import cascade
from octavo.cli.bench_cluster import goodput, routing
from octavo.cli.bench_cluster_ways import cluster_ways
from octavo.cli.bench_front_end import cluster
from octavo.cli.bench_handoff import handoff
from octavo.cli.bench_prefix import prefix
from octavo.cli.bench_serve import serve
from octavo.cli.bench_simulator import simulator
from octavo.cli.bench_waste import waste
from octavo.cli.options import SHARE, Finite, drafting_config, engine_config, engine_options, given, model_options, refuse_given
from octavo.cli.progress import fetched
from octavo.config import KV_DTYPES


@click.group()
def bench() -> None:
    """Measure this engine on this machine."""


@bench.command(short_help="Speed of prompts and of decoding, without a server.")
@model_options
@click.option("--prompt", "num_prompt", type=click.IntRange(1), default=512, show_default=True, help="Prompt tokens of each sequence.")
@click.option("--output", "num_output", type=click.IntRange(2), default=128, show_default=True, help="Output tokens of each sequence.")
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True, help="Sequences at once (default of --max-num-seqs).")
@click.option("--repeat", type=click.IntRange(1), default=3, show_default=True, help="Measured runs; the medians are reported.")
@click.option("--json", "as_json", is_flag=True, help="Print only the JSON record.")
@engine_options
def offline(num_prompt: int, num_output: int, batch: int, repeat: int, as_json: bool, **options: Any) -> None:
    """Speed of prompts and of decoding, without a server.

    Random tokens, no end of text, one run to warm up. The last line printed is a JSON record.
    """
    if "max_num_seqs" not in given():
        options["max_num_seqs"] = batch
    config = drafting_config(options)
    from octavo.bench.offline import OfflineCase, run_offline

    run_offline(fetched(config), OfflineCase(num_prompt, num_output, batch, repeat), click.echo, as_json)


@bench.command(short_help="Time until `octavo serve` answers, and its memory.", context_settings={"ignore_unknown_options": True})
@click.option("--model", "-m", default="smollm2", show_default=True, help="The model to serve, as for `octavo serve`.")
@click.option("--repeat", type=click.IntRange(1), default=5, show_default=True, help="Measured starts; the medians are reported.")
@click.option("--json", "as_json", is_flag=True, help="Print only the JSON record.")
@click.argument("serve_args", nargs=-1, type=click.UNPROCESSED)
def start(model: str, repeat: int, as_json: bool, serve_args: tuple[str, ...]) -> None:
    """Time until `octavo serve` answers GET /health, and its peak memory by then.

    All other flags go to `octavo serve` as they are. One start warms the page cache. The last line printed is a JSON record.
    """
    from octavo.bench.start import run_start
    from octavo.cli.progress import fetch

    run_start(fetch(model), serve_args, repeat, click.echo, as_json)


_FORMATS = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "bf16", "f16", "f32")
_FORMAT_HELP = "Format of packed weights; may be given more than once (default: all)."
_ROWS_HELP = "Activation rows; may be given more than once (default: 1, 4, 16, 64, 512)."
_KV_HELP = "Type of keys and values of attention; may be given more than once (default: all)."


@bench.command(short_help="Speed of single kernels, beside what bounds them.")
@click.option("--format", "formats", type=click.Choice(_FORMATS), multiple=True, help=_FORMAT_HELP)
@click.option("--rows", type=click.IntRange(1, 4096), multiple=True, help=_ROWS_HELP)
@click.option("--kv-cache-dtype", "kv_dtypes", type=click.Choice(KV_DTYPES), multiple=True, help=_KV_HELP)
@click.option("--threads", type=click.IntRange(1, 1024), help="Compute threads (default: one per core this process may use).")
@click.option("--seconds", type=Finite(0.001, 3600), default=0.1, show_default=True, help="Time for each figure.")
@click.option("--json", "as_json", is_flag=True, help="Print only the JSON record.")
def kernels(
    formats: tuple[str, ...], rows: tuple[int, ...], kv_dtypes: tuple[str, ...], threads: int | None, seconds: float, as_json: bool
) -> None:
    """Speed of single kernels, beside what bounds them.

    Products on packed weights by format and number of rows, attention of a prompt and of decoding, each with its share of what memory
    or arithmetic allows, measured in the same run. The last line printed is a JSON record. `octavo doctor` also checks their results.
    """
    from octavo.bench.kernels import KernelCases, run_kernels

    every = KernelCases()
    cases = KernelCases(formats or every.formats, rows or every.rows, kv_dtypes or every.kv_dtypes)
    run_kernels(cases, threads, seconds, click.echo, as_json)


@bench.command(short_help="What planning and applying a step costs.")
@click.option("--seqs", "num_seqs", type=click.IntRange(1, 4096), default=16, show_default=True, help="Sequences that decode at once.")
@click.option("--prompt", "num_prompt", type=click.IntRange(1), default=500, show_default=True, help="Prompt tokens of each sequence.")
@click.option("--steps", type=click.IntRange(1), default=350, show_default=True, help="Measured steps; the medians are reported.")
@click.option("--json", "as_json", is_flag=True, help="Print only the JSON record.")
def scheduler(num_seqs: int, num_prompt: int, steps: int, as_json: bool) -> None:
    """What planning and applying a step costs.

    No model: microseconds of the scheduler per decoding step. The last line printed is a JSON record.
    """
    from octavo.bench.scheduler import run_scheduler

    run_scheduler(num_seqs, num_prompt, steps, click.echo, as_json)


@bench.command(short_help="Prompts restored from host memory and disk, beside computing them.")
@model_options
@click.option("--prompt", "num_prompt", type=click.IntRange(1), default=2000, show_default=True, help="Prompt tokens.")
@click.option("--output", "num_output", type=click.IntRange(1), default=8, show_default=True, help="Output tokens, which are compared.")
@click.option("--repeat", type=click.IntRange(1), default=5, show_default=True, help="Prompts; the medians are reported.")
@click.option("--json", "as_json", is_flag=True, help="Print only the JSON record.")
@engine_options
def kv(num_prompt: int, num_output: int, repeat: int, as_json: bool, **options: Any) -> None:
    """Time to the first token of prompts whose KV is restored, beside computing them.

    From host memory, and from disk after a restart, with a warm and a cold page cache; of blocks as they are, whose answers have to be
    equal to the bit, and of blocks in int8. The last line printed is a JSON record.
    """
    refuse_given(["kv_host_dtype"], "both forms of blocks are measured")
    config = engine_config(options)
    from octavo.bench.kv import KVCase, run_kv

    run_kv(fetched(config), KVCase(num_prompt, num_output, repeat), click.echo, as_json)


@bench.command("kv-rounding", short_help="What answers lose behind a prefix that was kept in int8.")
@model_options
@click.option("--prompt", "num_prompt", type=click.IntRange(1), default=500, show_default=True, help="Prompt tokens.")
@click.option("--output", "num_output", type=click.IntRange(1), default=48, show_default=True, help="Positions that are compared.")
@click.option("--passages", "num_passages", type=click.IntRange(1), default=14, show_default=True, help="Prompts, of a real text.")
@click.option("--json", "as_json", is_flag=True, help="Print only the JSON record.")
@engine_options
def kv_rounding(num_prompt: int, num_output: int, num_passages: int, as_json: bool, **options: Any) -> None:
    """How far log-probabilities behind a prefix from --kv-host-dtype int8 are from exact ones, along the exact greedy path.

    No time is measured. The last line printed is a JSON record.
    """
    config = engine_config(options)
    from octavo.bench.kv_rounding import RoundingCase, run_rounding

    run_rounding(fetched(config), RoundingCase(num_prompt, num_output, num_passages), click.echo, as_json)


_DATASETS = ("alpaca", "sharegpt")
_DATASET_HELP = "Lengths as in this data set; may be given more than once (default: both)."
_WIDTH_HELP = "Samples or beams of each request; may be given more than once (default: 2, 4, 6)."


@bench.command(short_help="KV blocks saved by sharing: n samples and beam search.")
@model_options
@click.option("--dataset", "datasets", type=click.Choice(_DATASETS), multiple=True, help=_DATASET_HELP)
@click.option("--width", "widths", type=click.IntRange(1, 10), multiple=True, help=_WIDTH_HELP)
@click.option("--requests", "num_requests", type=click.IntRange(1), default=32, show_default=True, help="Requests, all at once.")
@click.option("--text", "text_file", type=click.File(encoding="utf-8"), help="Take prompts from this text (default: one of the package's).")
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed pairs prompts and outputs in the same way.")
@click.option("--json", "as_json", is_flag=True, help="Print only the JSON record.")
@engine_options
def sharing(
    datasets: tuple[str, ...],
    widths: tuple[int, ...],
    num_requests: int,
    text_file: IO[str] | None,
    seed: int,
    as_json: bool,
    **options: Any,
) -> None:
    """KV blocks saved by sharing within requests, beside the figures of the PagedAttention paper.

    Parallel samples and beam search on passages of a real text. The last line printed is a JSON record.
    """
    config = engine_config(options)
    from octavo.bench.sharing import DATASETS, SharingCase, run_sharing

    text = None if text_file is None else text_file.read()
    case = SharingCase(datasets or tuple(DATASETS), widths or (2, 4, 6), num_requests, text, seed)
    run_sharing(fetched(config), case, click.echo, as_json)


_SIZES_HELP = "Tokens of a KV block; may be given more than once (default: 16, 32, 64, 128, 256)."
_SHARE_HELP = "Share of what all requests need together that the pool holds."
_SET_BY_PREEMPTION = ("block_size", "num_kv_blocks", "kv_cache_memory", "swap_space", "preemption")


@bench.command(short_help="Preemption by recomputing and by swapping, in a small pool.")
@model_options
@click.option("--requests", "num_requests", type=click.IntRange(2), default=16, show_default=True, help="Requests, all at once.")
@click.option("--prompt", "num_prompt", type=click.IntRange(1), default=128, show_default=True, help="Prompt tokens of each request.")
@click.option("--output", "num_output", type=click.IntRange(2), default=256, show_default=True, help="Output tokens of each request.")
@click.option("--share", type=SHARE, default=0.1, show_default=True, help=_SHARE_HELP)
@click.option("--kv-block-size", "block_sizes", type=click.IntRange(1, 1024), multiple=True, help=_SIZES_HELP)
@click.option("--repeat", type=click.IntRange(1), default=3, show_default=True, help="Measured rounds; the medians are reported.")
@click.option("--json", "as_json", is_flag=True, help="Print only the JSON record.")
@engine_options
def preemption(
    num_requests: int,
    num_prompt: int,
    num_output: int,
    share: float,
    block_sizes: tuple[int, ...],
    repeat: int,
    as_json: bool,
    **options: Any,
) -> None:
    """Preemption by recomputing and by swapping, in a pool too small for all requests.

    Output tokens per second of recompute, swap and auto by block size, on the same prompts, in turn; the outputs must be equal. Then what
    one sequence takes to come back either way, predicted and measured, and the block size from which swapping is cheaper. Where
    --admission-lookahead is not given it is 1, so that there is much to preempt. The last line printed is a JSON record.
    """
    refuse_given(_SET_BY_PREEMPTION, "this bench sets it")
    options |= {name: value for name, value in (("admission_lookahead", 1), ("max_num_seqs", num_requests)) if name not in given()}
    config = engine_config(options)
    from octavo.bench.preemption import PreemptionCase, run_preemption

    case = PreemptionCase(num_requests, num_prompt, num_output, share, block_sizes or (16, 32, 64, 128, 256), repeat)
    run_preemption(fetched(config), case, click.echo, as_json)


_WORK_HELP = "What is answered; may be given more than once (default: all)."
_BATCH_HELP = "Sequences at once; may be given more than once (default: 1, 4, 16)."
_WORKS = ("edit", "json", "stories", "facts", "code")


@bench.command(short_help="Speculative decoding beside plain decoding.")
@model_options
@click.option("--work", "works", type=click.Choice(_WORKS), multiple=True, help=_WORK_HELP)
@click.option("--batch", "batches", type=click.IntRange(1), multiple=True, help=_BATCH_HELP)
@click.option("--output", "num_output", type=click.IntRange(2), default=128, show_default=True, help="Output tokens of each sequence.")
@click.option("--repeat", type=click.IntRange(1), default=3, show_default=True, help="Measured pairs of runs; the medians are reported.")
@click.option("--temperature", type=Finite(0, 100), default=0.0, show_default=True, help="Of sampling; 0 is greedy.")
@click.option("--no-lengths", is_flag=True, help="Leave out the table of fixed lengths 1 to 8.")
@click.option("--json", "as_json", is_flag=True, help="Print only the JSON record.")
@engine_options
def spec(
    works: tuple[str, ...],
    batches: tuple[int, ...],
    num_output: int,
    repeat: int,
    temperature: float,
    no_lengths: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Speculative decoding beside plain decoding, on the same prompts, in turn.

    --spec (auto, unless given) and --spec-method say how. There is work that copies (edit, json) and work that does not (stories,
    facts, code). Texts are compared: they must be equal, but for sampled ones with --spec-rule resample. The last line printed is a
    JSON record.
    """
    if options["spec"] == "off":
        options["spec"] = "auto"
    config = engine_config(options)
    from octavo.bench.spec import SpecCase, run_spec

    how = config.speculative
    case = SpecCase(works or _WORKS, batches or (1, 4, 16), num_output, repeat, temperature, how.spec, how.spec_method, not no_lengths)
    run_spec(fetched(config), case, click.echo, as_json)


bench.add_command(advice)
bench.add_command(routing)
bench.add_command(goodput)
bench.add_command(cascade)
bench.add_command(cluster)
bench.add_command(cluster_ways)
bench.add_command(handoff)
bench.add_command(prefix)
bench.add_command(serve)
bench.add_command(simulator)
bench.add_command(waste)
