"""`octavo bench routing` and `octavo bench goodput`: clusters compared in simulation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from octavo.cli.options import POSITIVE, SHARE
from octavo.distributed.router import ROUTERS

if TYPE_CHECKING:
    from octavo.simulator.engine_spec import EngineSpec
    from octavo.simulator.goodput_study import Arm, BestArm, GoodputOptions, GoodputStudy, Slowdowns
    from octavo.simulator.routing_bounds import Bound
    from octavo.simulator.routing_study import Routed

_MODEL_HELP = "What runs: as for `octavo simulate`."
_WORKLOADS = {"conversation": "AzureLLMInferenceTrace_conv.csv", "code": "AzureLLMInferenceTrace_code.csv"}
_TABLE = "splitwise_perf_model.csv"
_DESIGNS = ("AA", "HH", "HA", "HHcap")
_FRONT_END_HELP = "Requests wait while engines are busy, and engines are seen as they tell, as in a cluster; `soonest` learns its prices."
_LONGEST = 1 << 14  # tokens: conversations are longer than the context of small models, which costs do not depend on
_LOOKUPS = ("two-variable", "context", "published")


@click.command(short_help="Ways of routing conversations, simulated.")
@click.option("--model", "-m", default="smollm2", show_default=True, help=_MODEL_HELP)
@click.option("--machine", default="l4", show_default=True, help="On what: as for `octavo simulate`.")
@click.option("--machines", type=click.Path(exists=True, dir_okay=False), help="TOML file of machines.")
@click.option("--fitted", type=click.Path(exists=True, dir_okay=False), help="In place of --machine: what `octavo calibrate` wrote.")
@click.option("--engines", "num_engines", type=click.IntRange(1), default=4, show_default=True, help="Engines, all alike.")
@click.option("--num-kv-blocks", type=click.IntRange(1), help="KV blocks of each (default: what fits).")
@click.option("--rate", type=POSITIVE, default=1.0, show_default=True, help="Conversations that begin in a second.")
@click.option("--seconds", "duration_s", type=POSITIVE, default=60.0, show_default=True, help="Turns that come in this time are run.")
@click.option("--turns", "mean_turns", type=POSITIVE, default=6.0, show_default=True, help="Turns of a conversation, on average.")
@click.option("--router", "routers", type=click.Choice(ROUTERS), multiple=True, help="These alone, beside round-robin.")
@click.option("--learn", is_flag=True, help="`soonest` learns its prices, as in a cluster, instead of asking the cost model.")
@click.option("--front-end", "fronted", is_flag=True, help=_FRONT_END_HELP)
@click.option("--seed", "seeds", type=click.IntRange(0), multiple=True, default=(0, 1, 2), show_default=True, help="A load for each.")
@click.option("--json", "as_json", is_flag=True, help="Print only the JSON record.")
def routing(
    model: str, machine: str, machines: str | None, fitted: str | None, num_kv_blocks: int | None, routers: tuple[str, ...],
    learn: bool, fronted: bool, seeds: tuple[int, ...], as_json: bool, **case_options: Any,
) -> None:  # fmt: skip
    """Ways of routing conversations, simulated: the same turns over the same engines, each with its own prefix cache.

    How much of the prompts each router lets the engines find in their caches, how much they compute, and the time to the first token; and
    the least that could be computed. The last line printed is a JSON record.
    """
    from octavo.simulator.front_end import FrontEndOptions
    from octavo.simulator.routing_bounds import bounds
    from octavo.simulator.routing_study import BASELINE, COMPARED, RoutingCase, route_once

    try:
        case = RoutingCase(**case_options)
        case.conversations(0)
    except ValueError as error:
        raise click.BadParameter(str(error).partition(": ")[2], param_hint="'--turns'") from None
    spec = _routed_engine(model, machine, machines, fitted, num_kv_blocks)
    names = (BASELINE, *(name for name in (routers or COMPARED) if name != BASELINE))
    front_end = FrontEndOptions() if fronted else None
    runs = [route_once(spec, case, name, seed, learn, front_end) for seed in dict.fromkeys(seeds) for name in names]
    found = [bound for seed in dict.fromkeys(seeds) for bound in bounds(spec, case, seed)]
    if not as_json:
        click.echo(_routing_table(runs, names, found))
    record = {"bench": "routing", "model": model, "machine": spec.name, "learn": learn or fronted}
    record |= {"front_end": fronted, "runs": [run.to_dict() for run in runs]}
    click.echo(json.dumps(record | {"bounds": [bound.to_dict() for bound in found]}))


def _routed_engine(model: str, machine: str, machines: str | None, fitted: str | None, num_kv_blocks: int | None) -> EngineSpec:
    """As `octavo simulate` makes it of the same flags."""
    from octavo.cli.simulated_engines import Source, engine_spec
    from octavo.config import CacheConfig, SchedulerConfig

    options = dict.fromkeys(("replay", "devices", "kv_cache_memory", "kv_bytes", "roles"))
    options |= {"machine": machine, "model": model} if fitted is None else {"machine": None, "model": None}
    options |= {"machines": machines, "fitted": fitted, "num_kv_blocks": num_kv_blocks, "kv_cache_dtype": "bf16"}
    options |= {"max_model_len": _LONGEST, "spec": "off", "block_size": CacheConfig().block_size}
    scheduler = SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=512)
    return engine_spec(options, Source.of(options), CacheConfig(), scheduler)


def _routing_table(runs: list[Routed], names: tuple[str, ...], bounds: list[Bound]) -> str:
    from octavo.bench.tables import table
    from octavo.simulator.routing_study import BASELINE, computed_over

    rows = [["router", "hit %", "computed tokens", f"over {BASELINE}", "TTFT p50, ms", "p90", "ITL p50", "busiest %"]]
    for name in names:
        own = [run for run in runs if run.router == name]
        least, most = computed_over(runs, name)
        figures = [
            _span([100 * run.hit_rate for run in own]), _span([float(run.num_computed) for run in own], ",.0f"),
            f"{least:.2f} to {most:.2f}",
            *(_span([1000 * value for value in values]) for values in (
                [run.ttft_p50_s for run in own], [run.ttft_p90_s for run in own], [run.itl_p50_s for run in own])),
            _span([100 * run.share for run in own]),
        ]  # fmt: skip
        rows.append([name, *figures])
    rows += _bound_rows(runs, bounds)
    first = runs[0]
    head = f"{first.num_requests} turns, {first.num_prompt:,} prompt tokens (seed {first.seed}); least to most over seeds; simulated"
    return f"{head}\n\n{table(rows, ' >>>>>>>')}\n"


def _bound_rows(runs: list[Routed], bounds: list[Bound]) -> list[list[str]]:
    from octavo.simulator.routing_bounds import BOUNDS
    from octavo.simulator.routing_study import BASELINE

    baseline = {run.seed: run.num_computed for run in runs if run.router == BASELINE}
    rows = []
    for name in BOUNDS:
        own = [bound for bound in bounds if bound.name == name]
        shares = [bound.num_computed / baseline[bound.seed] for bound in own]
        figures = [
            _span([100 * (1 - bound.num_computed / bound.num_prompt) for bound in own]),
            _span([float(bound.num_computed) for bound in own], ",.0f"), f"{min(shares):.2f} to {max(shares):.2f}",
        ]  # fmt: skip
        rows.append([f"({name})", *figures, *[""] * 4])
    return rows


def _span(values: list[float], form: str = ".4g") -> str:
    low, high = min(values), max(values)
    return format(low, form) if low == high else f"{low:{form}} to {high:{form}}"


@click.command(short_help="Prefill apart, together or in chunks, on clusters of Splitwise's machines.")
@click.option("--data", required=True, type=click.Path(exists=True, file_okay=False), help="Folder of the published data files.")
@click.option("--workload", type=click.Choice(list(_WORKLOADS)), default="conversation", show_default=True, help="Whose lengths.")
@click.option("--design", "designs", type=click.Choice(_DESIGNS), multiple=True, help="These alone, beside the baselines.")
@click.option("--slowdown", default="ttft=3,itl=1.5", show_default=True, help="Both limits, times what an idle A100 machine takes.")
@click.option("--slo", help="Both limits in seconds, in place of --slowdown, such as ttft=2,itl=0.1.")
@click.option("--attainment", "share", type=SHARE, default=0.9, show_default=True, help="Share of requests that are to keep them.")
@click.option("--seconds", "duration_s", type=POSITIVE, default=60.0, show_default=True, help="Of arrivals.")
@click.option("--scale", type=POSITIVE, default=1.0, show_default=True, help="Machines, times this: 40 H100 and 70 A100 at 1.")
@click.option("--lookup", type=click.Choice(_LOOKUPS), default="two-variable", show_default=True, help="Of the table of measurements.")
@click.option("--precision", type=POSITIVE, default=0.1, show_default=True, help="Steps of rates, as a share.")
@click.option("--chunk", type=click.IntRange(16), default=512, show_default=True, help="Tokens of a step with chunked prefill.")
@click.option("--splits", "num_splits", type=click.IntRange(1), default=5, show_default=True, help="Of the coarse search for the best one.")
@click.option("--mixed", is_flag=True, help="Let prefill and decode machines lend each other a hand.")
@click.option("--seed", "seeds", type=click.IntRange(0), multiple=True, default=(0,), show_default=True, help="A load for each.")
@click.option("--plot", type=click.Path(dir_okay=False), help="Draw the curves to this SVG file.")
@click.option("--json", "as_json", is_flag=True, help="Print only the JSON record.")
def goodput(
    data: str, workload: str, designs: tuple[str, ...], slowdown: str, slo: str | None, precision: float, mixed: bool,
    seeds: tuple[int, ...], plot: str | None, as_json: bool, **options: Any,
) -> None:  # fmt: skip
    """Prefill apart, together or in chunks, on clusters of Splitwise's machines at equal power.

    Every machine runs the engine's own scheduler, priced by the published table of measurements (BLOOM-176B). Goodput: the highest rate at
    which enough requests keep both limits, as a bracket; the best split of each design is searched. The last line printed is a JSON record.
    """
    from octavo.engine.user_files import check_writable, write_whole
    from octavo.reproduce.goodput_plot import goodput_plot
    from octavo.reproduce.svg import plot_svg
    from octavo.simulator.goodput_study import GoodputOptions, GoodputStudy
    from octavo.simulator.records import Slo
    from octavo.simulator.scenario import parse_slo
    from octavo.simulator.splitwise_study import StudyData
    from octavo.workload.traces import read_trace

    try:
        limits: Slo | Slowdowns = Slo(**parse_slo(slo)) if slo is not None else _slowdowns(slowdown)
        study_options = GoodputOptions(limits, seeds=tuple(dict.fromkeys(seeds)), ratio=1.0 + precision, **options)
    except ValueError as error:
        field, _, problem = str(error).partition(": ")
        flag = {"share": "attainment", "duration_s": "seconds"}.get(field, field)
        raise click.BadParameter(problem, param_hint=f"'--{flag}'") from None
    if plot is not None:
        check_writable(plot)
    folder = Path(data)
    tables = StudyData.read(folder / _TABLE, {}).tables
    study = GoodputStudy(tables, {workload: read_trace(folder / _WORKLOADS[workload])}, study_options)
    found = _goodputs(study, workload, designs or _DESIGNS, mixed)
    if not as_json:
        click.echo(_goodput_text(study, workload, found))
    record = _goodput_record(study, workload, found)
    if plot is not None:
        write_whole(plot, plot_svg(goodput_plot(record)))
    click.echo(json.dumps(record))


def _slowdowns(text: str) -> Slowdowns:
    from octavo.simulator.goodput_study import Slowdowns
    from octavo.simulator.scenario import parse_slo

    try:
        limits = parse_slo(text)
        return Slowdowns(ttft=limits.pop("ttft_s"), itl=limits.pop("itl_s"), **limits)
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"slowdown: {text!r} is not allowed; ttft=TIMES,itl=TIMES, each at least 1") from None


def _goodputs(study: GoodputStudy, workload: str, designs: tuple[str, ...], mixed: bool) -> list[BestArm]:
    """Both baselines, prompts first, whole and in chunks; then the best split of each design."""
    from octavo.simulator.goodput_study import APART, CHUNKED, DESIGNS, MIXED, PROMPTS_FIRST, PROMPTS_WHOLE, Arm, BestArm

    options, found = study.options, list[BestArm]()
    for name in ("Baseline-A100", "Baseline-H100"):
        for way in (PROMPTS_FIRST, PROMPTS_WHOLE, CHUNKED):
            arm = Arm(options.scaled(DESIGNS[name]), way)
            found.append(BestArm(arm, study.goodput(arm, workload)))
            _say(study, found[-1])
    power = options.scaled(DESIGNS["Baseline-H100"]).power
    for name in designs:
        design = options.scaled(DESIGNS[name])
        for way in (APART, MIXED) if mixed else (APART,):
            found.append(study.best_split(design, workload, power, way))
            _say(study, found[-1])
    return found


def _say(study: GoodputStudy, best: BestArm) -> None:
    brackets = ", ".join(map(str, best.brackets))
    click.echo(f"{best.arm}: {brackets} requests/s ({study.num_runs} runs, {study.num_requests:,} requests)", err=True)


def _ratios(found: list[BestArm]) -> list[tuple[Arm, Arm, tuple[float, float, float], float | None]]:
    """Every arm apart over the better way of each baseline: (above, below, (least, middle, most), published)."""
    from octavo.simulator.goodput_study import PUBLISHED
    from octavo.simulator.rate_curve import ratio_of

    ratios = []
    for name in dict.fromkeys(best.arm.design.name for best in found if not best.arm.design.num_prompt):
        below = max((best for best in found if best.arm.design.name == name), key=lambda best: min(one.holds_at for one in best.brackets))
        if not all(bracket.holds_at for bracket in below.brackets):
            continue
        for above in found:
            if above.arm.design.num_prompt:
                published = PUBLISHED.get((above.arm.design.name, name))
                ratios.append((above.arm, below.arm, ratio_of(above.brackets, below.brackets), published))
    return ratios


def _goodput_text(study: GoodputStudy, workload: str, found: list[BestArm]) -> str:
    from octavo.bench.tables import table

    options = study.options
    rows = [["design", "goodput, requests/s (holds / fails)", "per unit of power", "per $/h"]]
    for best in found:
        holds = min(bracket.holds_at for bracket in best.brackets)
        design = best.arm.design
        rows.append([str(best.arm), ", ".join(map(str, best.brackets)), f"{holds / design.power:.3g}", f"{holds / design.cost:.3g}"])
    ratio_rows = [["ratio", "middle (least to most)", "published"]]
    for above, below, (least, middle, most), published in _ratios(found):
        shown = "" if published is None or workload != "conversation" else f"{published:g}x"
        ratio_rows.append([f"{above} over {below}", f"{middle:.2f}x ({least:.2f} to {most:.2f})", shown])
    head = (
        f"{workload} lengths, Poisson for {options.duration_s:g} s, seeds {', '.join(map(str, options.seeds))}: {100 * options.share:g} % "
        f"of the requests within {options.in_words}; {options.lookup} look-up; chunks of {options.chunk}; simulated"
    )
    return f"{head}\n\n{table(rows)}\n\n{table(ratio_rows)}\n"


def _goodput_record(study: GoodputStudy, workload: str, found: list[BestArm]) -> dict[str, object]:
    options: GoodputOptions = study.options
    arms = []
    for best in found:
        curves = {seed: study.curve(best.arm, workload, seed).points for seed in options.seeds}
        arms.append({
            "design": best.arm.design.name, "way": best.arm.way, "num_prompt": best.arm.design.num_prompt,
            "num_token": best.arm.design.num_token, "power": best.arm.design.power, "cost": best.arm.design.cost,
            "brackets": [[bracket.holds_at, bracket.fails_at] for bracket in best.brackets],
            "attained": {str(seed): [[rate, 1.0 - missed] for rate, missed in points] for seed, points in curves.items()},
            "tried": [{"num_prompt": design.num_prompt, "num_token": design.num_token, "fails_at": rate} for design, rate in best.tried],
        })  # fmt: skip
    return {
        "bench": "goodput", "workload": workload, "limits": options.in_words,
        "attainment": options.share, "seconds": options.duration_s, "seeds": list(options.seeds), "scale": options.scale,
        "lookup": options.lookup, "chunk": options.chunk, "num_runs": study.num_runs, "num_requests": study.num_requests, "arms": arms,
    }  # fmt: skip
