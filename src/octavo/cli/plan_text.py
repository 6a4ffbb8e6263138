"""What `octavo plan` prints for people: the load, the machines, the fleets, what was looked at, and how sure all that is."""

from __future__ import annotations

from octavo.bench.tables import table
from octavo.cli.plan_fit import size
from octavo.core.words import counted
from octavo.costs.machines import DATASHEET
from octavo.planning.kinds import KindFit
from octavo.planning.planner import PlanReport
from octavo.planning.plans import KindRates, Plan, SearchResult
from octavo.planning.trials import TrialOptions

_SHOWN_CONSIDERED = 12


def shown(report: PlanReport) -> str:
    parts = [_head(report), _machines(report)]
    if report.result is None:
        parts.append(_fits_nowhere(report))
    else:
        if report.rate is not None:
            parts += [_fleets(report, report.result, report.rate), _considered(report.result)]
        parts.append(_how_sure(report, report.result))
    return "\n\n".join(parts)


# --- the question -----------------------------------------------------------------------------------------------------------------------


def _head(report: PlanReport) -> str:
    model, kv, load = report.engine.model, report.engine.kv, report.load
    weights = f"{size(model.weight_bytes)} of weights ({model.weights_from}), KV {kv.bytes_per_token:,} B a token in {kv.dtype}"
    left_out = f" ({load.num_left_out:,} left out: empty, or longer than the model's context)" if load.num_left_out else ""
    own = f", {_rate(load.rate)}/s on average" if load.rate is not None and load.name != "made" else ""
    lengths = f"mean prompt {load.mean_prompt:,.0f}, mean answer {load.mean_output:,.0f} tokens"
    return "\n".join(
        [
            f"Model    {model.name}: {weights}",
            f"Load     {load.name}: {counted(len(load.rows), 'request', form=',')}{left_out}{own}",
            f"         {lengths}; 90 % take up to {load.p90_context:,} together",
            f"Limits   {_limits(report.trial_options)}",
        ]
    )


def _limits(options: TrialOptions) -> str:
    slo = options.slo
    named = (("TTFT", slo.ttft_s), ("mean ITL", slo.itl_s), ("worst gap", slo.gap_s), ("E2E", slo.e2e_s))
    limits = ", ".join(f"{name} {_seconds(value)}" for name, value in named if value is not None)
    how = "as recorded" if options.arrivals == "trace" else "Poisson"
    seeds = "seed" if len(options.seeds) == 1 else "seeds"
    return f"{limits}, kept by {100 * options.attainment:g} % of the requests; arrivals {how}, {seeds} {', '.join(map(str, options.seeds))}"


def _seconds(value: float) -> str:
    return f"{value:g} s" if value >= 1.0 else f"{1000 * value:g} ms"


# --- machines ---------------------------------------------------------------------------------------------------------------------------


def _machines(report: PlanReport) -> str:
    """Best first: those with a rate, by it; then those that fit; then the others."""
    rates = {} if report.result is None else {id(kind.fit): kind for kind in report.result.kinds}
    fits = sorted(report.fits, key=lambda fit: (not fit.fits, -(_holds(rates.get(id(fit))) or 0.0), max(0, fit.missing_bytes)))
    rows = [["machine", "basis", "conversations", "", "requests/s, one engine", "", ""], ["", "", "mean", "90 %", "holds", "fails", ""]]
    for fit in fits:
        rows.append(_machine_row(fit, rates.get(id(fit))))
    note = "Conversations: of mean length, and of the length that 90 % do not exceed, that have room in the KV cache at once."
    shared = [fit for fit in fits if fit.devices > 1]
    if shared:
        note += f"\n{shared[0].name}: {shared[0].devices} devices share each step of an engine."
    return f"{table(rows, '  >>>>')}\n\n{note}"


def _holds(kind: KindRates | None) -> float | None:
    return None if kind is None else kind.holds_at


def _machine_row(fit: KindFit, kind: KindRates | None) -> list[str]:
    row = [fit.name, fit.kind.basis]
    if not fit.fits:
        return [*row, "-", "-", "-", "-", f"does not fit: {size(fit.missing_bytes)} missing"]
    row += [f"{fit.conversations_mean:,}", f"{fit.conversations_p90:,}"]
    if kind is None or not kind.brackets:
        return [*row, "-", "-", "" if kind is None else kind.dropped or ""]
    fails = kind.fails_at
    seeds = f"{len(kind.brackets)} {'seed' if len(kind.brackets) == 1 else 'seeds'}"
    if not kind.holds_at:
        return [*row, "none", "-", kind.dropped or ""]
    if kind.dropped is not None and kind.dropped.startswith("not finished"):
        seeds = "not finished"
    return [*row, _rate(kind.holds_at), "-" if fails is None else _rate(fails), f"({seeds})"]


def _rate(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100.0 else f"{rate:.3g}"


def _fits_nowhere(report: PlanReport) -> str:
    least = min(report.fits, key=lambda fit: fit.missing_bytes)
    needs = least.weight_bytes + least.activation_bytes + report.engine.kv.num_bytes(report.load.max_context)
    return "\n".join(
        [
            "The model fits on none of these machines.",
            f"Weights, activations and the KV of the longest request ({report.load.max_context:,} tokens) take {needs:,} bytes;",
            f"{least.name} has {least.memory_bytes:,} to give: {least.missing_bytes:,} bytes ({size(least.missing_bytes)}) are missing.",
        ]
    )


# --- fleets -----------------------------------------------------------------------------------------------------------------------------


def _fleets(report: PlanReport, result: SearchResult, rate: float) -> str:
    served = f"To serve {_rate(rate)} {'request' if rate == 1 else 'requests'}/s"
    plans = [(name, plan) for name, plan in (("together", result.colocated), ("apart", result.split)) if plan is not None]
    if not plans:
        if result.was_limited:
            return f"{served}: no fleet was found within the limit on simulated requests (--max-simulated)."
        return f"{served}: nothing that was tried keeps the limits{' within the budget' * _has_budget(result)}."
    rows = [["", "prefill and decode", "fleet", "W, all busy", "W, mean", "USD/h", "USD/M tokens", "within limits", "if steps take longer"]]
    for name, plan in sorted(plans, key=lambda item: item[1] is not result.best):
        rows.append(_fleet_row("->" if plan is result.best else "", name, plan, report.load.mean_output))
    title = f"{served}, least {_unit(result.minimize)} first:"
    ratios = [_ratio(plan) for _, plan in plans if plan.fleet.is_split]
    return "\n".join([title, "", table(rows, "   >>>>>"), *ratios])


def _has_budget(result: SearchResult) -> bool:
    return any("over the budget" in one.outcome for one in result.considered)


def _fleet_row(mark: str, name: str, plan: Plan, mean_output: float) -> list[str]:
    attained = sorted({f"{100 * trial.attainment:.3g}" for trial in plan.trials}, key=float)
    usd = plan.usd_per_hour
    per_million = "-" if usd is None else f"{usd / (3600 * plan.rate * mean_output) * 1e6:,.3g}"
    slower = "-" if plan.slower is None else f"{'holds' if plan.slower.holds else 'fails'} at +{100 * plan.error:.3g} %"
    share = attained[0] if len(attained) == 1 else f"{attained[0]} to {attained[-1]}"
    power = [f"{plan.peak_w:,.0f}", f"{plan.mean_w:,.0f}"] if plan.peak_w else ["-", "-"]
    return [mark, name, str(plan.fleet), *power, "-" if usd is None else f"{usd:,.4g}", per_million, f"{share} %", slower]


def _ratio(plan: Plan) -> str:
    cells = f", as {plan.fleet.cells} cells of {plan.fleet.cell_size} engines" if plan.fleet.cells > 1 else ""
    return f"\nApart: {plan.fleet.count('prefill')} prefill to {plan.fleet.count('decode')} decode engines{cells}."


def _unit(minimize: str) -> str:
    return {"usd": "USD per hour", "watts": "watts", "machines": "devices"}[minimize]


def _considered(result: SearchResult) -> str:
    rows = [["looked at", "what came of it"]]
    rows += [[one.what, one.outcome] for one in result.considered[:_SHOWN_CONSIDERED]]
    more = len(result.considered) - _SHOWN_CONSIDERED
    return table(rows) + (f"\nand {more} more, which --json shows" if more > 0 else "")


# --- how sure ---------------------------------------------------------------------------------------------------------------------------


def _how_sure(report: PlanReport, result: SearchResult) -> str:
    trials = f"{counted(len(report.trials), 'trial', form=',')} with {counted(report.num_simulated, 'request', form=',')}"
    lines = [f"{trials}; rates lie between one that held and one that failed."]
    spread = _spread(result)
    if spread is not None:
        lines.append(f"Seeds: highest rates of a kind differ by up to {100 * spread:.0f} % between them.")
    kinds = [fit.kind for fit in report.fits if fit.fits]
    stated = [f"{kind.name} {100 * kind.error:.2g} %" for kind in kinds if kind.error is not None]
    if stated:
        lines.append(f"Seconds of a step, stated error: {', '.join(stated)}.")
    for basis in dict.fromkeys(kind.basis for kind in kinds if kind.error is None):
        guessed = [kind.name for kind in kinds if kind.error is None and kind.basis == basis]
        where = "" if len(guessed) == len(kinds) else f" on {', '.join(guessed)}"
        by = "makers' figures" if basis == DATASHEET else f"figures that the file of machines calls {basis}"
        lines.append(f"Seconds of a step{where}: by {by}, no error stated; trust the order of machines before single figures.")
    lines.append("Steps shared by several devices are taken to be shared evenly, with nothing lost on the way between them.")
    if result.was_limited:
        lines.append("The limit on simulated requests was reached (--max-simulated): what is missing above was not tried.")
    return "\n".join(lines)


def _spread(result: SearchResult) -> float | None:
    """Largest difference between seeds of what a kind holds at, as a share."""
    shares = []
    for kind in result.kinds:
        rates = [bracket.holds_at for _, bracket in kind.brackets if bracket.holds_at]
        if len(rates) > 1:
            shares.append(max(rates) / min(rates) - 1.0)
    return max(shares, default=None)
