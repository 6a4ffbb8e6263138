"""`octavo bench serve`: flags to a load, a server of its own when no URL is given, and the figures printed."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from octavo.cli.options import (
    BURSTINESS,
    POSITIVE,
    Finite,
    add_options,
    checked,
    engine_config,
    engine_options,
    given,
    model_options,
    refuse,
    refuse_given,
)
from octavo.cli.progress import fetched, passing_line
from octavo.cli.serve import name_of

if TYPE_CHECKING:
    from octavo.bench.serve import ServeCase
    from octavo.workload.arrivals import Arrivals
    from octavo.workload.requests import Independent, TokenRange, Workload
    from octavo.workload.traces import Trace


@dataclass(frozen=True, slots=True)
class Preset:
    """What holds where no flag says otherwise; lengths as on the command line."""

    prompt_len: str
    output_len: str
    concurrency: int
    num_requests: int
    shared_prefix: str | None = None


PRESETS = {
    "single": Preset("128", "128", 1, 6),
    "chat": Preset("lognormal:161:1:4:1024", "lognormal:120:0.8:4:512", 16, 64),
    "prefix": Preset("64", "64", 16, 48, "512:1"),
}
SPIKE = "spike"
# What a spike has of its own.
_NOT_WITH_SPIKE = ("concurrency", "rate", "burstiness", "trace", "num_requests", "duration", "prompt_len", "output_len", "shared_prefix")
_WITH_TRACE = ("trace_speed", "trace_start", "trace_max_len")

_LENGTHS = "N, uniform:LOW:HIGH or lognormal:MEAN:SIGMA:LOW:HIGH (default: the workload's, or the trace's)."
_OPTIONS: list[Callable] = [
    click.option("--url", help="A running server, such as http://127.0.0.1:8000 (default: an own one for --model, stopped at the end)."),
    click.option("--served-model-name", help="Name of the model in requests (default: the first that the server lists)."),
    click.option("--api-key", envvar="OCTAVO_API_KEY", help="Sent as a bearer token; only with --url (also $OCTAVO_API_KEY)."),
    click.option("--workload", type=click.Choice([*PRESETS, SPIKE]), default="chat", show_default=True, help="What no other flag sets."),
    click.option("--concurrency", type=click.IntRange(1, 65536), help="Closed loop: so many requests at once."),
    click.option("--rate", type=POSITIVE, help="Open loop: requests per second on average."),
    click.option(
        "--burstiness", type=BURSTINESS, default=1.0, show_default=True, help="Shape of --rate's gaps: 1 Poisson, below 1 bursts, inf none."
    ),
    click.option("--trace", type=click.Path(exists=True, dir_okay=False), help="Open loop: arrivals and lengths of a CSV file."),
    click.option("--trace-speed", type=POSITIVE, default=1.0, show_default=True, help="Play the trace so many times as fast."),
    click.option("--trace-start", type=Finite(0), default=0.0, show_default=True, help="Begin so many seconds into the trace."),
    click.option("--trace-max-len", type=click.IntRange(2), help="Leave out rows of more tokens, prompt and output together."),
    click.option("--max-concurrency", type=click.IntRange(1), help="Open loop: most requests at once; others wait, and it counts."),
    click.option("--num-requests", type=click.IntRange(1), help="Stop after so many (default: the workload's, or the trace's)."),
    click.option("--duration", type=POSITIVE, help="Send nothing new after so many seconds."),
    click.option("--prompt-len", help=f"Prompt tokens: {_LENGTHS}"),
    click.option("--output-len", help=f"Output tokens: {_LENGTHS}"),
    click.option("--shared-prefix", help="TOKENS[:GROUPS] before each prompt, the same for all of a group."),
    click.option("--token-ids", default="100:32000", show_default=True, help="LOW:HIGH: prompts are random ids from LOW below HIGH."),
    click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="The same seed makes the same requests."),
    click.option("--warmup", type=click.IntRange(0), default=1, show_default=True, help="Requests before that are not counted."),
    click.option("--no-ignore-eos", is_flag=True, help="Let answers end by themselves; then only standard fields are sent."),
    click.option("--goodput", help="Limits in ms, such as ttft:500,itl:50 (also tpot, e2e): the share of requests within them."),
    click.option("--timeout", type=POSITIVE, default=300.0, show_default=True, help="Seconds of silence after which a request has failed."),
    click.option("--json", "as_json", is_flag=True, help="Print only the JSON record."),
]


@click.command(short_help="Load on a server: latencies and throughput.")
@model_options
@add_options(_OPTIONS)
@engine_options
def serve(**options: Any) -> None:
    """Load on a server: latencies and throughput.

    Any server with OpenAI's completions API that takes token ids as prompts. Latencies of an open loop count from when a request was due.
    The last line printed is a JSON record.
    """
    case = _case(options)
    from octavo.bench.serve import Target, report, run_serve

    with _server(options) as url:
        api_key = options["api_key"] if "url" in given() else None
        target = Target(url, options["served_model_name"], api_key, options["timeout"])
        with contextlib.nullcontext() if options["as_json"] else passing_line() as progress:
            record = run_serve(target, case, progress)
    if not options["as_json"]:
        for line in report(record):
            click.echo(line)
    click.echo(json.dumps(record))
    if not record["num_completed"]:
        raise RuntimeError(f"no request was answered whole: {record['first_error']}")


def _case(options: dict[str, Any]) -> ServeCase:
    """The load that the flags describe. Raises BadParameter before anything is fetched or started; TraceError."""
    from octavo.bench.latency import Goodput
    from octavo.bench.serve import ServeCase
    from octavo.bench.spike import Spike
    from octavo.workload.requests import TokenRange

    tokens = checked("token-ids", lambda: TokenRange.parse(options["token_ids"]))
    described = {name: options[name] for name in ("workload", "seed", "token_ids", "duration")}
    described["ignore_eos"] = not options["no_ignore_eos"]
    load: Workload | Spike
    if options["workload"] == SPIKE:
        refuse_given((*_NOT_WITH_SPIKE, *_WITH_TRACE, "max_concurrency"), "the spike workload has its own arrivals and lengths")
        load = Spike(tokens=tokens, seed=options["seed"])
        described["load"] = f"{load.num_streams} streams, then a prompt of {load.long_prompt} tokens"
    else:
        load, words = _workload(options, tokens)
        described |= words
    goodput = checked("goodput", lambda: Goodput.parse(options["goodput"])) if options["goodput"] is not None else None
    shared = (options["max_concurrency"], options["duration"], options["warmup"], not options["no_ignore_eos"])
    return ServeCase(load, described, *shared, goodput)


def _workload(options: dict[str, Any], tokens: TokenRange) -> tuple[Workload, dict[str, Any]]:
    """The workload, and the record's words for it."""
    from octavo.workload.requests import SharedPrefix, Workload

    preset, trace = PRESETS[options["workload"]], _trace(options)
    arrivals, arrival_words = _arrivals(options, preset, trace)
    lengths, length_words = _lengths(options, preset, trace)
    prefix_text = options["shared_prefix"] or preset.shared_prefix
    prefix = checked("shared-prefix", lambda: SharedPrefix.parse(prefix_text)) if prefix_text else None
    num_requests = options["num_requests"]
    if num_requests is None and trace is None and options["duration"] is None:
        num_requests = preset.num_requests
    load = Workload(arrivals, lengths, num_requests, prefix, tokens, options["seed"])
    described = {"load": f"{arrival_words}; {length_words}", "shared_prefix": prefix_text}
    names = ["rate", "burstiness"] if options["rate"] is not None else []
    names += ["trace", *_WITH_TRACE] if trace is not None else []
    described |= {name: options[name] for name in [*names, "max_concurrency"]}
    if described.get("burstiness") == math.inf:
        described["burstiness"] = "inf"  # JSON has no infinity
    described["concurrency"] = getattr(arrivals, "concurrency", None)
    return load, described | ({"num_left_out": trace.num_left_out} if trace is not None else {})


def _arrivals(options: dict[str, Any], preset: Preset, trace: Trace | None) -> tuple[Arrivals, str]:
    """--rate, else --concurrency, else the trace's times, else the preset's closed loop; and the words for it."""
    from octavo.workload.arrivals import ClosedLoop, OpenLoop

    rate, burstiness = options["rate"], options["burstiness"]
    if rate is None:
        refuse_given(["burstiness"], "it shapes the gaps of --rate, which is not given")
    else:
        refuse_given(["concurrency"], "a closed loop has no --rate; --max-concurrency bounds an open one")
    if trace is not None and rate is None and options["concurrency"] is None:
        return trace, f"open loop, times of {options['trace']} at {options['trace_speed']:g} x"
    refuse_given(["trace_speed"], "--rate or --concurrency sets the pace, not the trace")
    if trace is not None and {"prompt_len", "output_len"} <= given():
        refuse("trace", "other flags set pace and lengths, so nothing of it would be used")
    if rate is not None:
        loop = checked("rate", lambda: OpenLoop.of_burstiness(rate, burstiness))
        return loop, f"open loop, {rate:g} requests/s, burstiness {burstiness:g}"
    refuse_given(["max_concurrency"], "it bounds an open loop (--rate or --trace); --concurrency is that of a closed one")
    concurrency = options["concurrency"] or preset.concurrency
    return ClosedLoop(concurrency), f"closed loop, {concurrency} at once"


def _lengths(options: dict[str, Any], preset: Preset, trace: Trace | None) -> tuple[Trace | Independent, str]:
    """Lengths of the trace unless flags give both; those of the preset where nothing does."""
    from octavo.workload.lengths import parse_lengths
    from octavo.workload.requests import Independent

    texts = {"prompt-len": options["prompt_len"], "output-len": options["output_len"]}
    if trace is not None:
        missing = [name for name, text in texts.items() if text is None]
        if len(missing) == 2:
            return trace, "lengths of the trace"
        if missing:
            refuse(missing[0], "with a trace both lengths are the trace's, or neither")
    prompt_text, output_text = texts["prompt-len"] or preset.prompt_len, texts["output-len"] or preset.output_len
    prompt = checked("prompt-len", lambda: parse_lengths(prompt_text))
    output = checked("output-len", lambda: parse_lengths(output_text))
    return Independent(prompt, output), f"{prompt} in, {output} out"


def _trace(options: dict[str, Any]) -> Trace | None:
    if options["trace"] is None:
        refuse_given(_WITH_TRACE, "there is no --trace")
        return None
    from octavo.workload.traces import read_trace

    trace = read_trace(options["trace"])
    if options["trace_max_len"] is not None:
        trace = trace.fitting(options["trace_max_len"])
    trace = checked("trace-start", lambda: trace.window(options["trace_start"]))
    if not trace.rows:
        raise ValueError(f"--trace: {options['trace']} has no request left from --trace-start on, within --trace-max-len")
    return checked("trace-speed", lambda: trace.faster(options["trace_speed"]))


@contextlib.contextmanager
def _server(options: dict[str, Any]) -> Iterator[str]:
    """The URL to measure. Engine flags are for a server of our own; beside --url they would do nothing, so they are refused."""
    if "url" in given():
        refuse_given(sorted(_engine_names()), "it is a flag of a server started here, and --url names one that runs")
        yield options["url"]
        return
    config = fetched(engine_config(options))
    name = options["served_model_name"] or name_of(options["model"])
    flags = ["--model", config.model.model, *(["--served-model-name", name] if name else [])]
    from octavo.bench.own_server import OwnServer

    with OwnServer(flags + _flags_of(options, given() & _engine_names() - {"model"})) as url:
        yield url


def _engine_names() -> set[str]:
    """Parameters that `octavo serve` has for its engine."""
    return {str(param.name) for param in click.command()(model_options(engine_options(lambda: None))).params}


def _flags_of(options: dict[str, Any], names: set[str]) -> list[str]:
    flags: list[str] = []
    for param in click.get_current_context().command.params:
        if isinstance(param, click.Option) and param.name in names:
            flags += [param.opts[0]] if param.is_flag else [param.opts[0], str(options[param.name])]
    return flags
