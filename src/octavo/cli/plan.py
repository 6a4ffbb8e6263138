"""`octavo plan`: what a model takes in memory (`--fit`), and which machines serve a load within limits."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from octavo.cli.options import POSITIVE, SHARE, ByteSize, add_options, bad_flag, refuse, refuse_given
from octavo.config import CacheConfig, ConfigError, EngineConfig, SchedulerConfig

if TYPE_CHECKING:
    from octavo.costs.machines import Design
    from octavo.planning.kinds import Engine, MachineKind
    from octavo.planning.load import PlanLoad
    from octavo.planning.plans import SearchOptions
    from octavo.planning.trials import Trial, TrialOptions

_D = EngineConfig()
_DTYPES = ("bf16", "f16", "f32", "int8")
_FIT_ONLY = ("context", "sequences")
_BOTH = ("fit", "model", "kv_dtype", "block_size", "max_num_batched_tokens", "no_enable_kv_groups", "memory", "as_json")
_LENGTHS = "N, uniform:LOW:HIGH or lognormal:MEAN:SIGMA:LOW:HIGH"


class RateRange(click.ParamType):
    """LOW:HIGH, requests per second."""

    name = "low:high"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, float]:
        if isinstance(value, tuple):
            return value
        parts = str(value).split(":")
        if len(parts) != 2:
            self.fail(f"{value!r} is not allowed; LOW:HIGH in requests per second", param, ctx)
        rate = POSITIVE
        return rate.convert(parts[0], param, ctx), rate.convert(parts[1], param, ctx)


class Seeds(click.ParamType):
    """Whole numbers, separated by commas."""

    name = "n,n,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        parts = str(value).split(",")
        if not all(part.strip().isdecimal() and len(part) < 20 for part in parts):
            self.fail(f"{value!r} is not allowed; whole numbers from 0, separated by commas", param, ctx)
        return tuple(int(part) for part in parts)


_OPTIONS: list[Callable] = [
    click.option("--fit", is_flag=True, help="Memory alone: what --sequences of --context take, by the model's config or header."),
    click.option("--model", "-m", help="config.json, .gguf (its first part will do), folder, or name as for `serve` (default: smollm2)."),
    click.option("--context", type=click.IntRange(1), help="With --fit: tokens of a sequence (default: what the model was trained for)."),
    click.option("--sequences", type=click.IntRange(1), default=1, show_default=True, help="With --fit: so many of them at once."),
    click.option("--kv-dtype", "kv_dtype", type=click.Choice(_DTYPES), default="bf16", show_default=True, help="Type of keys and values."),
    click.option("--memory", type=ByteSize(), help="With --fit: what there is. With --fitted: the memory of that machine."),
    click.option("--block-size", type=int, default=_D.cache.block_size, show_default=True, help="Tokens of a KV block."),
    click.option("--no-enable-kv-groups", is_flag=True, help="Keep the KV of window layers for all positions."),
    click.option("--max-num-batched-tokens", type=int, default=512, show_default=True, help="Most tokens computed in one step."),
    click.option("--max-num-seqs", type=int, default=256, show_default=True, help="Most sequences that run at once on an engine."),
    click.option("--machines", type=click.Path(exists=True, dir_okay=False), help="TOML file of machines (default: those of Octavo)."),
    click.option("--design", multiple=True, help="This cluster alone: of --machines, or AA, HH, HA, HHcap, baseline-a100, baseline-h100."),
    click.option("--machine", multiple=True, help="This one alone, by its name; may be given several times."),
    click.option("--fitted", type=click.Path(exists=True, dir_okay=False), help="One more machine: coefficients that were fitted on it."),
    click.option("--max-devices", type=click.IntRange(1), default=8, show_default=True, help="Most devices that share steps."),
    click.option("--trace", type=click.Path(exists=True, dir_okay=False), help="CSV or .jsonl: lengths, and how often requests come."),
    click.option("--prompt-len", default="lognormal:161:1:4:1024", show_default=True, help=f"Without --trace: {_LENGTHS}."),
    click.option("--output-len", default="lognormal:120:0.8:4:512", show_default=True, help="Without --trace: answers."),
    click.option("--slo", help="Limits in seconds, such as ttft=0.5,itl=0.05 (also e2e, gap)."),
    click.option("--attainment", type=SHARE, default=0.9, show_default=True, help="Share of requests that are to keep them."),
    click.option("--rate", type=POSITIVE, help="Requests per second to be served (default: the trace's own)."),
    click.option("--arrivals", type=click.Choice(("poisson", "trace")), default="poisson", show_default=True, help="trace: as recorded."),
    click.option("--rate-range", type=RateRange(), help="Look for highest rates between LOW:HIGH alone."),
    click.option("--precision", type=POSITIVE, default=0.1, show_default=True, help="Steps of rates, as a share."),
    click.option("--seeds", type=Seeds(), default="0,1,2", show_default=True, help="A load for each; their spread is the error."),
    click.option("--minimize", type=click.Choice(("usd", "watts", "machines")), help="What is cheapest (default: usd if all have prices)."),
    click.option("--budget", type=POSITIVE, help="Most USD per hour."),
    click.option("--power-budget", type=POSITIVE, help="Most watts, all machines busy."),
    click.option("--pairs", type=click.IntRange(0), default=3, show_default=True, help="Pairs of kinds tried for prefill and decode."),
    click.option("--link", type=ByteSize(), help="Bytes per second between prefill and decode engines (default: the machines')."),
    click.option("--max-simulated", type=click.IntRange(1), default=24_000, show_default=True, help="Requests simulated in all, about."),
    click.option("--json", "as_json", is_flag=True, help="Print a JSON record in place of the tables."),
]


@click.command(short_help="Plan memory and machines for a model and a load.")
@add_options(_OPTIONS)
def plan(**options: Any) -> None:
    """Plan memory and machines for a model and a load.

    With --fit: the bytes of weights and KV cache, from a config.json or the first part of a GGUF file, before anything is downloaded.
    Without: which machines fit, the highest rate that each serves within --slo, and the cheapest fleet for --rate, with prefill and decode
    together or apart. All rates are simulated with the engine's own scheduler. Exit code 1: nothing fits, or nothing keeps the limits.
    """
    _check_mode(options)
    options["model"] = options["model"] or _D.model.model
    _check_settings(options)
    if options["fit"]:
        from octavo.cli.plan_fit import fit

        fit(options)
        return
    _plan(options)


def _check_mode(options: dict[str, Any]) -> None:
    """Flags of the other mode are refused."""
    if options["fit"]:
        refuse_given([name for name in options if name not in (*_BOTH, *_FIT_ONLY)], "it has no meaning with --fit")
        return
    refuse_given(_FIT_ONLY, "it is for --fit")
    if options["memory"] is not None and options["fitted"] is None:
        refuse("memory", "it is for --fit and for --fitted; a machine of --machines has its own")
    if options["fitted"] is not None and options["memory"] is None:
        refuse("memory", "it is needed with --fitted: coefficients do not tell how much there is")
    if options["slo"] is None:
        refuse("slo", "limits are needed, such as ttft=0.5,itl=0.05 (or --fit, for memory alone)")


def _check_settings(options: dict[str, Any]) -> None:
    try:
        EngineConfig(
            cache=CacheConfig(block_size=options["block_size"]),
            scheduler=SchedulerConfig(
                max_num_seqs=min(options["max_num_seqs"], options["max_num_batched_tokens"]) if options["fit"] else options["max_num_seqs"],
                max_num_batched_tokens=options["max_num_batched_tokens"],
            ),
        ).validate()
    except ConfigError as error:
        raise bad_flag(error) from None


# --- machines for a load ----------------------------------------------------------------------------------------------------------------


def _plan(options: dict[str, Any]) -> None:
    from octavo.planning.planner import make_plan

    trial_options = _trial_options(options)
    kinds, designs = _kinds(options)
    _check_budgets(options, kinds)
    load = _load(options)
    engine = _engine(options, load)
    load = load.fitting(engine.model.context)
    search = _search_options(options, load)
    progress = _Progress(options["max_simulated"])
    report = _checked(lambda: make_plan(engine, load, kinds, trial_options, search, designs, options["max_devices"], progress))
    if options["as_json"]:
        click.echo(json.dumps(report.to_dict(), allow_nan=False))
    else:
        from octavo.cli.plan_text import shown

        click.echo(shown(report))
    if not report.is_answered:
        sys.exit(1)


def _checked(make: Callable[[], Any], *names: tuple[str, str]) -> Any:
    """What ``make`` makes; a ValueError "field: problem" becomes one of the field's flag. ``names``: (field, flag) that differ."""
    try:
        return make()
    except ValueError as error:
        field, _, problem = str(error).partition(": ")
        flag, ctx = f"--{dict(names).get(field, field.replace('_', '-'))}", click.get_current_context()
        if all(flag not in param.opts for param in ctx.command.params):
            raise
        raise click.BadParameter(problem, ctx, param_hint=f"'{flag}'") from None


def _trial_options(options: dict[str, Any]) -> TrialOptions:
    from octavo.planning.trials import TrialOptions
    from octavo.simulator.records import Slo
    from octavo.simulator.scenario import parse_slo

    slo = _checked(lambda: Slo(**parse_slo(options["slo"])))
    if slo.ttft_s is None and slo.e2e_s is None:
        refuse("slo", f"{options['slo']!r} is not allowed; without ttft or e2e requests may wait for ever, and every rate keeps it")
    link = None if options["link"] is None else float(options["link"])
    if link == 0.0:
        refuse("link", "0 is not allowed; at least a byte per second")
    return _checked(  # type: ignore[no-any-return]
        lambda: TrialOptions(
            slo, options["attainment"], options["seeds"], options["arrivals"],
            most_simulated=options["max_simulated"], link_bytes_per_s=link,
        )  # fmt: skip
    )


def _search_options(options: dict[str, Any], load: PlanLoad) -> SearchOptions:
    from octavo.planning.bracket import RateGrid
    from octavo.planning.plans import SearchOptions

    low, high = options["rate_range"] or (RateGrid().low, RateGrid().high)
    grid = _checked(lambda: RateGrid(options["precision"], low, high))
    rate = options["rate"]
    if rate is None and options["trace"] is not None:
        rate = load.rate
        if rate is None:
            refuse("rate", "it is needed: all requests of the trace come at once")
    if options["arrivals"] == "trace" and (options["trace"] is None or load.rate is None):
        refuse("arrivals", "'trace' needs a --trace whose requests do not all come at once")
    names = (("budget_usd", "budget"), ("budget_w", "power-budget"))
    make = lambda: SearchOptions(rate, grid, options["minimize"], options["budget"], options["power_budget"], options["pairs"])  # noqa: E731
    return _checked(make, *names)  # type: ignore[no-any-return]


def _load(options: dict[str, Any]) -> PlanLoad:
    from octavo.planning.load import made_load, read_load
    from octavo.workload.lengths import parse_lengths
    from octavo.workload.requests import Independent

    if options["trace"] is not None:
        return read_load(options["trace"])
    lengths = []
    for flag in ("prompt-len", "output-len"):
        try:
            lengths.append(parse_lengths(options[flag.replace("-", "_")]))
        except ValueError as error:
            refuse(flag, str(error))
    return made_load(Independent(*lengths))


def _engine(options: dict[str, Any], load: PlanLoad) -> Engine:
    from octavo.cli.plan_fit import outline_of
    from octavo.planning.kinds import Engine

    cache = CacheConfig(
        block_size=options["block_size"],
        enable_prefix_caching=load.prompts is not None,  # of random prompts it finds nothing
        enable_kv_groups=not options["no_enable_kv_groups"],
    )
    scheduler = SchedulerConfig(max_num_seqs=options["max_num_seqs"], max_num_batched_tokens=options["max_num_batched_tokens"])
    return _checked(lambda: Engine(outline_of(options["model"]), options["kv_dtype"], scheduler, cache))  # type: ignore[no-any-return]


def _kinds(options: dict[str, Any]) -> tuple[list[MachineKind], list[Design]]:
    """The kinds of machines that may be taken, and the designs of --machines, if it has any."""
    from octavo.costs.machines import MachineFile, known_designs, known_machines, read_machine_file
    from octavo.planning.kinds import MachineKind

    if options["machines"] is not None:
        file = read_machine_file(options["machines"])
    else:
        file = known_designs() if options["design"] else MachineFile(known_machines(), {})
    machines = dict(file.machines)
    designs = list(file.designs.values())
    if options["design"]:
        unknown = [name for name in options["design"] if name not in file.designs]
        if unknown:
            refuse("design", f"{unknown[0]!r} is not allowed; one of {', '.join(file.designs) or 'none, in this file'}")
        designs = [design for design in designs if design.name in options["design"]]
    for design in designs:
        machines |= {name: known_machines()[name] for name in design.machines if name not in machines}
    if options["machine"]:
        for name in options["machine"]:
            if name not in machines:
                refuse("machine", f"{name!r} is not allowed; one of {', '.join(machines)}")
        machines = {name: machine for name, machine in machines.items() if name in options["machine"]}
        designs = [design for design in designs if set(design.machines) <= set(machines)]
    elif designs:
        named = {name for design in designs for name in design.machines}
        machines = {name: machine for name, machine in machines.items() if name in named}
    kinds = [MachineKind.of(machine) for machine in machines.values()]
    if options["fitted"] is not None:
        from octavo.costs.coefficients import read_coefficients

        kinds = [kind for kind in kinds if options["machines"] is not None or options["machine"]]
        fitted = MachineKind.fitted(read_coefficients(options["fitted"]), float(options["memory"]))
        if any(kind.name == fitted.name for kind in kinds):
            refuse("fitted", f"a machine of --machines is named {fitted.name!r} too")
        kinds.append(fitted)
    if not kinds:
        refuse("machines", "there is no machine in it")
    return kinds, designs


def _check_budgets(options: dict[str, Any], kinds: list[MachineKind]) -> None:
    """A budget that no machine could be held against would change nothing."""
    lacking = (
        ("budget", "usd_per_hour", all(kind.power.usd_per_hour is None for kind in kinds)),
        ("power_budget", "busy_w", not any(kind.power.busy_w for kind in kinds)),
    )
    for name, figure, is_unknown in lacking:
        if options[name] is None:
            continue
        if options["rate"] is None and options["trace"] is None:
            refuse(name.replace("_", "-"), "it has no meaning without --rate or --trace: no fleet is looked for")
        if is_unknown:
            names = ", ".join(kind.name for kind in kinds)
            refuse(name.replace("_", "-"), f"there is no {figure} of {names}; a file of --machines gives it")


class _Progress:
    """A line on stderr for each trial; one that is written over where that is a terminal."""

    def __init__(self, most_simulated: int) -> None:
        self._most = most_simulated
        self._num_trials = self._num_requests = self._width = 0

    def __call__(self, trial: Trial) -> None:
        self._num_trials += 1
        self._num_requests += trial.num_requests
        done = min(100, math.floor(100 * self._num_requests / self._most))
        what = f"{trial.fleet} at {trial.rate:.3g}/s, seed {trial.seed}: {'holds' if trial.holds else 'fails'}"
        line = f"trial {self._num_trials} ({done} % of what may be simulated): {what}"
        if sys.stderr.isatty():
            sys.stderr.write("\r" + line[:118].ljust(self._width))
            self._width = min(len(line), 118)
        else:
            sys.stderr.write(line + "\n")
        sys.stderr.flush()
