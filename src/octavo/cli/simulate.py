"""`octavo simulate`: flags to engines and a load, and the figures of a simulation printed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import click

from octavo.cli.options import (
    BURSTINESS,
    POSITIVE,
    ByteSize,
    Finite,
    SpecLength,
    add_options,
    bad_flag,
    checked,
    given,
    refuse,
    refuse_given,
)
from octavo.cli.simulated_engines import Source, engine_spec
from octavo.config import SCHEDULING_POLICIES, CacheConfig, ConfigError, EngineConfig, SchedulerConfig, SpeculativeConfig
from octavo.core.words import counted
from octavo.distributed.router import ROUTERS

if TYPE_CHECKING:
    from octavo.simulator.engine_spec import EngineSpec
    from octavo.simulator.report import SimulationReport
    from octavo.simulator.simulation import SimulationOptions
    from octavo.workload.arrivals import Arrivals
    from octavo.workload.requests import LengthPairs, WorkloadRequest

_KV_DTYPES = ("bf16", "f16", "f32", "int8")
_LENGTHS = "N, uniform:LOW:HIGH or lognormal:MEAN:SIGMA:LOW:HIGH"
_D = EngineConfig()
_OPTIONS: list[Callable] = [
    click.option("--model", "-m", help="What runs: as for `octavo serve`. Weights and KV are counted from it (default: smollm2)."),
    click.option("--machine", help="On what: a name of --machines, or of those that come with Octavo; \"list\" lists these."),
    click.option("--machines", type=click.Path(exists=True, dir_okay=False), help="TOML file of machines."),
    click.option("--devices", type=click.IntRange(1), help="Devices that share each step of an engine (default: the machine's own)."),
    click.option("--fitted", type=click.Path(exists=True, dir_okay=False), help="In place of --machine: coefficients, or a recording."),
    click.option("--kv-bytes", type=click.IntRange(1), help="Bytes of KV per token, in place of --model's, with --fitted."),
    click.option("--kv-cache-memory", type=ByteSize(), help="Memory of the KV pool (default: what weights and activations leave of 90 %)."),
    click.option("--num-kv-blocks", type=click.IntRange(1), help="KV blocks in the pool, in place of --kv-cache-memory."),
    click.option("--kv-cache-dtype", type=click.Choice(_KV_DTYPES), default="bf16", show_default=True, help="Type of KV."),
    click.option("--max-model-len", type=click.IntRange(2), help="Longest sequence in tokens (default: --model's)."),
    click.option("--max-num-seqs", type=int, default=_D.scheduler.max_num_seqs, show_default=True, help="Most sequences at once."),
    click.option("--max-num-batched-tokens", type=int, default=_D.scheduler.max_num_batched_tokens, show_default=True, help="Of one step."),
    click.option("--max-itl-ms", type=float, help="Bound on the gaps between a running answer's tokens, in milliseconds."),
    click.option("--scheduling-policy", type=click.Choice(SCHEDULING_POLICIES), default="fcfs", show_default=True, help="Who comes first."),
    click.option("--admission-lookahead", type=int, default=_D.scheduler.admission_lookahead, show_default=True, help="As for serve."),
    click.option("--block-size", type=click.IntRange(1, 1024), default=_D.cache.block_size, show_default=True, help="Of the KV."),
    click.option("--no-enable-prefix-caching", is_flag=True, help="Compute every prompt from its first token."),
    click.option("--no-enable-chunked-prefill", is_flag=True, help="Compute each prompt in one step."),
    click.option("--no-enable-kv-groups", is_flag=True, help="Keep the KV of window layers for all positions."),
    click.option("--spec", type=SpecLength(), default="off", show_default=True, help="Drafts: off, auto, or a number."),
    click.option("--acceptance", type=Finite(0, 1), default=0.7, show_default=True, help="Chance that a draft comes true."),
    click.option("--draft-ms", type=Finite(0, 1e6), default=0.0, show_default=True, help="What making a draft takes."),
    click.option("--rate", type=POSITIVE, help="Requests per second on average."),
    click.option("--burstiness", type=BURSTINESS, default=1.0, show_default=True, help="Of --rate: 1 Poisson, below 1 bursts, inf none."),
    click.option("--concurrency", type=click.IntRange(1), help="Closed loop: so many requests at once, in place of --rate."),
    click.option("--trace", type=click.Path(exists=True, dir_okay=False), help="CSV or .jsonl: arrivals and lengths; with --rate lengths."),
    click.option("--trace-speed", type=POSITIVE, default=1.0, show_default=True, help="Play the trace so many times as fast."),
    click.option("--replay", type=click.Path(exists=True, dir_okay=False), help="Requests of a recording (`serve --record`)."),
    click.option("--prompt-len", default="lognormal:161:1:4:1024", show_default=True, help=f"Prompt tokens: {_LENGTHS}."),
    click.option("--output-len", default="lognormal:120:0.8:4:512", show_default=True, help=f"Output tokens: {_LENGTHS}."),
    click.option("--shared-prefix", help="TOKENS[:GROUPS] before each prompt, the same for all of a group."),
    click.option("--num-requests", type=click.IntRange(0), help="Stop after so many (default: the trace's, else 1000)."),
    click.option("--duration", type=POSITIVE, help="Stop the clock after so many seconds."),
    click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="The same seed makes the same run."),
    click.option("--engines", type=click.IntRange(1), default=1, show_default=True, help="Engines, all alike."),
    click.option("--roles", help="prefill=N,decode=M: prompts and answers on separate engines, in place of --engines."),
    click.option("--max-engines", metavar="N|prefill=N,decode=N", help="Engines come and go with the load, up to so many."),
    click.option("--router", type=click.Choice(ROUTERS), default=ROUTERS[0], show_default=True, help="Which engine a request goes to."),
    click.option("--link", type=ByteSize(), default=str(25 * 10**9), show_default=True, help="Bytes per second between engines."),
    click.option("--links", help="SENDER-RECEIVER=BYTES_PER_S[:LATENCY_S],... of engines, by number, with a link of their own."),
    click.option("--mixed", is_flag=True, help="Let prefill and decode engines lend each other a hand under pressure."),
    click.option("--outage", "outages", multiple=True, help="ENGINE@AT[-BACK]: kill an engine, by number, and bring it back; in seconds."),
    click.option("--slo", help="Limits in seconds, such as ttft=0.5,itl=0.05 (also e2e, gap): the share of requests within them."),
    click.option("--json", "as_json", is_flag=True, help="Print only the JSON record."),
]


@click.command(short_help="Simulate engines under a load, on any machine.")
@add_options(_OPTIONS)
def simulate(**options: Any) -> None:
    """Simulate engines under a load, on any machine.

    The scheduler is the engine's own, in virtual time; only the device is a cost model: a roofline of --model on --machine, or what was
    fitted on a real one (--fitted). The last line printed is a JSON record.
    """
    if options["machine"] == "list":
        _list_machines(options["machines"])
        return
    _check_together(options)
    cache, scheduler = _configs(options)
    source = Source.of(options)
    spec = engine_spec(options, source, cache, scheduler)
    from octavo.simulator.scenario import engines

    specs = checked("roles", lambda: engines(spec, options["engines"], options["roles"]))
    run_options = _run_options(options, specs)
    load = _load(options, source)
    from octavo.distributed.router import create_router
    from octavo.simulator.sim_costs import SimCosts
    from octavo.simulator.simulation import Simulation

    router = create_router(options["router"], cache.block_size, SimCosts())
    report = Simulation(specs, router, run_options).run(load)
    error = None if source.coefficients is None else source.coefficients.median_error
    num_left_out = None if source.replay is None else source.replay.num_left_out
    if not options["as_json"]:
        click.echo(_shown(report, bool(options["slo"])))
        if source.replay is not None and num_left_out:
            click.echo(f"\nleft out of the recording's requests: {source.replay.left_out()}")
        if error is not None:
            click.echo(f"\nthe cost of a step is off by {100 * error:.1f} % (median)")
    click.echo(json.dumps(report.to_dict() | {"step_cost_error": error, "num_left_out": num_left_out}))


def _check_together(options: dict[str, Any]) -> None:
    """Flags that others leave without a meaning are refused."""
    found = given()
    if {"engines", "roles"} <= found:
        refuse("engines", "--roles says how many engines there are")
    if options["rate"] is None:
        refuse_given(["burstiness"], "it shapes the gaps of --rate, which is not given")
    for flag, needed, why in _NEEDED:
        if flag in found and options[needed] in (None, "off"):
            refuse(flag.replace("_", "-"), f"it has no meaning without --{needed.replace('_', '-')}: {why}")
    for flag, other, why in _OVERRIDDEN:
        if flag in found and options[other] is not None:
            refuse(flag.replace("_", "-"), f"it has no meaning with --{other.replace('_', '-')}: {why}")
    if options["trace"] is None or options["rate"] is not None or options["concurrency"] is not None:
        refuse_given(["trace_speed"], "it is for the times of --trace, and --rate and --concurrency have their own")


_NEEDED = (
    ("machines", "machine", "it is a file of them"),
    ("devices", "machine", "fitted steps are shared as they were"),
    ("acceptance", "spec", "nothing is drafted"),
    ("draft_ms", "spec", "nothing is drafted"),
    ("link", "roles", "nothing is handed over"),
    ("links", "roles", "nothing is handed over"),
    ("mixed", "roles", "all engines do both"),
)
"""(flag, the one without which it means nothing, why)"""
_OVERRIDDEN = (
    ("prompt_len", "trace", "a trace has its own lengths"),
    ("output_len", "trace", "a trace has its own lengths"),
    ("prompt_len", "replay", "a recording has its own requests"),
    ("output_len", "replay", "a recording has its own requests"),
    ("shared_prefix", "replay", "a recording has its own requests"),
)
"""(flag, the one beside which it means nothing, why)"""


def _configs(options: dict[str, Any]) -> tuple[CacheConfig, SchedulerConfig]:
    cache = CacheConfig(
        block_size=options["block_size"],
        enable_prefix_caching=not options["no_enable_prefix_caching"],
        enable_kv_groups=not options["no_enable_kv_groups"],
    )
    names = ("max_num_seqs", "max_num_batched_tokens", "max_itl_ms", "scheduling_policy", "admission_lookahead")
    scheduler = SchedulerConfig(
        enable_chunked_prefill=not options["no_enable_chunked_prefill"], **{name: options[name] for name in names}
    )
    try:
        has_model = options["machine"] is not None or options["model"] is not None
        blocks = cache if has_model else CacheConfig()  # of an engine of which only KV tokens are known any block will do
        EngineConfig(cache=blocks, scheduler=scheduler, speculative=SpeculativeConfig(spec=options["spec"])).validate()
    except ConfigError as error:
        raise bad_flag(error) from None
    return cache, scheduler


def _list_machines(path: str | None) -> None:
    from octavo.bench.tables import table
    from octavo.costs.machines import known_machines, read_machines

    rows = [["machine", "basis", "16-bit TFLOP/s", "GB/s", "GB", "W"]]
    for machine in (known_machines() if path is None else read_machines(path)).values():
        figures = (machine.ops_per_s / 1e12, machine.bytes_per_s / 1e9, machine.memory_bytes / 1e9, machine.busy_w)
        rows.append([machine.name, machine.basis, *(f"{value:.4g}" for value in figures)])
    click.echo(table(rows, "  >>>>"))


# --- the load ---------------------------------------------------------------------------------------------------------------------------


def _run_options(options: dict[str, Any], specs: Sequence[EngineSpec]) -> SimulationOptions:
    from octavo.distributed.cluster_options import parse_most
    from octavo.distributed.handoff import Link
    from octavo.distributed.roles import MixedLimits
    from octavo.simulator.handing_over import HandoffOptions
    from octavo.simulator.links import parse_links
    from octavo.simulator.outages import moments, parse_outage
    from octavo.simulator.records import Slo
    from octavo.simulator.scenario import parse_slo
    from octavo.simulator.simulation import SimulationOptions

    num_engines, of, most = len(specs), "roles" if options["roles"] else "engines", options["max_engines"]
    try:
        scale = {} if most is None else parse_most(most, Counter(spec.role for spec in specs), "max_engines", of)
    except ConfigError as error:
        raise bad_flag(error) from None
    slo = Slo(**checked("slo", lambda: parse_slo(options["slo"]))) if options["slo"] else Slo()
    link = checked("link", lambda: Link(float(options["link"]), 1e-4))
    links = checked("links", lambda: parse_links(options["links"])) if options["links"] else {}
    beyond = [max(pair) for pair in links if max(pair) >= num_engines]
    if beyond:
        refuse("links", f"there is no engine {beyond[0]}; they are numbered from 0 to {num_engines - 1}")
    outages = [checked("outage", lambda text=text: parse_outage(text)) for text in options["outages"]]  # type: ignore[misc]
    checked("outage", lambda: moments(outages, num_engines))
    return SimulationOptions(
        slo, options["seed"], options["concurrency"], options["duration"], handoff=HandoffOptions(link, links=links),
        mixed=MixedLimits() if options["mixed"] else None, outages=outages, scale=scale,
    )  # fmt: skip


def _load(options: dict[str, Any], source: Source) -> Iterable[WorkloadRequest]:
    """The requests of a recording, of a trace, or made of a rate and lengths."""
    from itertools import islice

    from octavo.workload.arrivals import ClosedLoop, OpenLoop
    from octavo.workload.jsonl_traces import JsonlTrace
    from octavo.workload.requests import SharedPrefix, Workload

    pace = [name for name in ("rate", "concurrency") if options[name] is not None]
    if len(pace) == 2:
        refuse("concurrency", "a closed loop has no --rate")
    if source.replay is not None:
        for name in (*pace, *(["trace"] if options["trace"] else [])):
            refuse(name, "the recording of --replay has its own requests")
        return islice(source.replay.requests, options["num_requests"])
    if not pace and options["trace"] is None:
        refuse("rate", "it, --concurrency, --trace or --replay is needed")
    if options["trace"] is not None and not pace and options["trace"].endswith(".jsonl"):
        return islice(JsonlTrace(options["trace"], seed=options["seed"], speed=options["trace_speed"]).requests(), options["num_requests"])
    lengths = _lengths(options)
    arrivals: Arrivals = lengths
    if options["rate"] is not None:
        arrivals = checked("rate", lambda: OpenLoop.of_burstiness(options["rate"], options["burstiness"]))
    elif options["concurrency"] is not None:
        arrivals = ClosedLoop(options["concurrency"])
    num_requests = options["num_requests"]
    if num_requests is None and pace and options["duration"] is None:
        num_requests = 1000
    prefix = checked("shared-prefix", lambda: SharedPrefix.parse(options["shared_prefix"])) if options["shared_prefix"] else None
    return Workload(arrivals, lengths, num_requests, prefix, seed=options["seed"]).requests()


def _lengths(options: dict[str, Any]) -> Any:
    """Of --trace, drawn from it where --rate or --concurrency sets the pace; else of the distributions."""
    from octavo.workload.jsonl_traces import JsonlTrace, lengths_of
    from octavo.workload.lengths import parse_lengths
    from octavo.workload.requests import Independent
    from octavo.workload.traces import Resampled, read_trace

    if options["trace"] is None:
        prompt = checked("prompt-len", lambda: parse_lengths(options["prompt_len"]))
        pairs: LengthPairs = Independent(prompt, checked("output-len", lambda: parse_lengths(options["output_len"])))
        return pairs
    path = options["trace"]
    trace = lengths_of(JsonlTrace(path, seed=options["seed"])) if path.endswith(".jsonl") else read_trace(path, strict=True)
    if options["rate"] is not None or options["concurrency"] is not None:
        return Resampled(trace)
    return checked("trace-speed", lambda: trace.faster(options["trace_speed"]))


# --- what is printed --------------------------------------------------------------------------------------------------------------------


def _number(value: float | int | None, scale: float = 1.0) -> str:
    """To four digits, and without an exponent where it is large."""
    if value is None:
        return "-"
    value *= scale
    return f"{value:,.0f}" if abs(value) >= 9999.5 else f"{value:.4g}"


def _shown(report: SimulationReport, has_limits: bool) -> str:
    from octavo.bench.tables import table

    number = _number
    rows = [["ms", "mean", "p50", "p90", "p99", "max"]]
    for name, summary in (("TTFT", report.ttft_s), ("ITL", report.itl_s), ("gap", report.gap_s), ("E2E", report.e2e_s)):
        rows.append([name, *(number(summary[key], 1000.0) for key in ("mean", "p50", "p90", "p99", "max"))])
    comes = any(engine.there_s < report.duration_s for engine in report.engines)
    engine_rows = [["engine", "role", *(["there, s"] if comes else []), "requests", "steps", "busy %", "KV pool %", "most %", "preempted"]]
    for engine in report.engines[:16]:
        shares = (number(engine.busy_share, 100.0), number(engine.pool_mean, 100.0), number(engine.pool_most, 100.0))
        counts = (*([number(engine.there_s)] if comes else []), str(engine.num_requests), str(engine.num_steps))
        engine_rows.append([engine.name, engine.role, *counts, *shares, str(engine.num_preemptions)])
    lines = [
        f"{report.num_completed} of {counted(report.num_arrived, 'request')} in {number(report.duration_s)} s (simulated): "
        f"{number(report.requests_per_s)} requests/s, {number(report.output_tokens_per_s)} output token/s",
        *([f"{report.num_refused} refused: {report.first_refusal}"] if report.num_refused else []),
        *([f"{report.num_moved} went on elsewhere, their engine being gone"] if report.num_moved else []),
        *([f"{report.num_unfinished} on their way at the end"] if report.num_unfinished else []),
        "; ".join(
            [
                *([f"within the limits: {number(report.slo_attainment, 100.0)} %"] if has_limits else []),
                f"energy {number(report.energy_j, 1 / 3.6e6)} kWh, cost {number(report.cost_usd)} USD",
            ]
        ),
        "",
        table(rows, " >>>>>"),
        "",
        table(engine_rows, "  >>>>>>>" if comes else "  >>>>>>"),
        *([f"and {len(report.engines) - 16} more"] if len(report.engines) > 16 else []),
    ]
    return "\n".join(lines)
