"""A plan from what a user says: a model, machines, a load and limits. Joins memory, estimates and search, and makes the report."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from octavo.costs.machines import Design
from octavo.planning.estimate import Estimate, estimate
from octavo.planning.kinds import Engine, KindFit, MachineKind, fit_kind
from octavo.planning.load import PlanLoad
from octavo.planning.plans import KindRates, Plan, SearchOptions, SearchResult
from octavo.planning.search import PlanSearch
from octavo.planning.trials import Fleet, Group, Trial, TrialOptions, Trials, trial_size

MAX_DEVICES = 8


@dataclass(frozen=True, slots=True)
class PlanReport:
    """``result`` None: the model fits on no kind. ``load``: requests that the model's context has room for. ``rate``: to be served."""

    engine: Engine
    load: PlanLoad
    fits: tuple[KindFit, ...]
    trial_options: TrialOptions
    rate: float | None
    result: SearchResult | None
    trials: tuple[Trial, ...]
    num_simulated: int

    @property
    def fits_somewhere(self) -> bool:
        return any(fit.fits for fit in self.fits)

    @property
    def is_answered(self) -> bool:
        """A fleet was found; or, where no rate was asked for, a kind that holds at some."""
        if self.result is None:
            return False
        if self.rate is None:
            return any(kind.holds_at for kind in self.result.kinds)
        return self.result.best is not None

    def to_dict(self) -> dict[str, object]:
        model, kv, options, result = self.engine.model, self.engine.kv, self.trial_options, self.result
        rates = {} if result is None else {id(kind.fit): kind for kind in result.kinds}
        return {
            "model": {
                "name": model.name, "architecture": model.architecture,
                "weight_bytes": model.weight_bytes, "weights_from": model.weights_from,
                "kv_dtype": kv.dtype, "kv_bytes_per_token": kv.bytes_per_token, "activation_bytes": self.engine.activation_bytes,
            },
            "load": self.load.to_dict(),
            "slo": {name: value for name in ("ttft_s", "itl_s", "e2e_s", "gap_s") if (value := getattr(options.slo, name)) is not None},
            "attainment": options.attainment,
            "seeds": list(options.seeds),
            "arrivals": options.arrivals,
            "rate": self.rate,
            "fits": self.fits_somewhere,
            "machines": [_kind_dict(fit, rates.get(id(fit))) for fit in self.fits],
            "minimize": None if result is None else result.minimize,
            "colocated": None if result is None else _plan_dict(result.colocated),
            "split": None if result is None else _plan_dict(result.split),
            "best": None if result is None else _plan_dict(result.best),
            "considered": [] if result is None else [
                {"what": one.what, "rate": one.rate, "outcome": one.outcome} for one in result.considered
            ],
            "tried": [trial.to_dict() for trial in self.trials],
            "num_simulated": self.num_simulated,
            "limit_reached": result is not None and result.was_limited,
        }  # fmt: skip


def _kind_dict(fit: KindFit, rates: KindRates | None) -> dict[str, object]:
    brackets = () if rates is None else rates.brackets
    return {
        "machine": fit.kind.name,
        "basis": fit.kind.basis,
        "step_error": fit.kind.error,
        "devices": fit.devices,
        "fits": fit.fits,
        "missing_bytes": max(0, fit.missing_bytes),
        "memory_bytes": fit.memory_bytes,
        "kv_blocks": fit.num_blocks,
        "conversations_mean": fit.conversations_mean,
        "conversations_p90": fit.conversations_p90,
        "usd_per_hour": fit.usd_per_hour,
        "busy_w": fit.busy_w,
        "holds_at": None if rates is None else rates.holds_at,
        "fails_at": None if rates is None else rates.fails_at,
        "brackets": [{"seed": seed, **bracket.to_dict()} for seed, bracket in brackets],
        "dropped": None if rates is None else rates.dropped,
    }


def _plan_dict(plan: Plan | None) -> dict[str, object] | None:
    if plan is None:
        return None
    attained = [trial.attainment for trial in plan.trials]
    return {
        "fleet": str(plan.fleet),
        "cells": plan.fleet.cells,
        "engines": [{"machine": group.name, "role": group.role, "count": plan.fleet.cells * group.count} for group in plan.fleet.groups],
        "rate": plan.rate,
        "num_devices": plan.num_devices,
        "usd_per_hour": plan.usd_per_hour,
        "peak_w": plan.peak_w,
        "mean_w": plan.mean_w,
        "attainment_least": min(attained),
        "attainment_most": max(attained),
        "step_error": plan.error,
        "holds_with_slower_steps": None if plan.slower is None else plan.slower.holds,
        "attainment_with_slower_steps": None if plan.slower is None or plan.slower.stopped else plan.slower.attainment,
    }


def make_plan(
    engine: Engine,
    load: PlanLoad,
    kinds: Iterable[MachineKind],
    trial_options: TrialOptions,
    options: SearchOptions,
    designs: Seq[Design] = (),
    max_devices: int = MAX_DEVICES,
    progress: Callable[[Trial], None] = lambda trial: None,
) -> PlanReport:
    """Search for a plan. ``designs``: the clusters that may be tried, in place of all. Raises ValueError for a load that nothing can take.

    Requests that are longer than the model's context are left out, and counted.
    """
    load = load.fitting(engine.model.context)
    fits, estimates = dict[str, KindFit](), dict[str, Estimate]()
    for kind in kinds:
        fit, guess = _sized(kind, engine, load, trial_options, max_devices)
        fits[fit.name] = fit
        if guess is not None:
            estimates[fit.name] = guess
    sizes = {name: trial_size(guess, trial_options.slo) for name, guess in estimates.items()}
    trials = Trials(engine, load, trial_options, fits, sizes, progress)
    result = None
    if estimates:
        result = PlanSearch(trials, estimates, _with_designs(options, designs, fits)).run()
    return PlanReport(engine, load, tuple(fits.values()), trial_options, options.rate, result, tuple(trials.done), trials.num_simulated)


def _sized(
    kind: MachineKind, engine: Engine, load: PlanLoad, options: TrialOptions, max_devices: int
) -> tuple[KindFit, Estimate | None]:
    """On the fewest devices that hold it; on more, where a single answer would be too slow on these and is not on more."""
    fit = first = fit_kind(kind, engine, load, max_devices)
    if not fit.fits:
        return fit, None
    limit_s = min(limit for limit in (options.slo.itl_s, options.slo.gap_s, float("inf")) if limit is not None)
    guess = first_guess = estimate(fit.spec(engine), load, options.slo, fit.conversations_mean)
    while guess.least_itl_s > limit_s and kind.can_share and 2 * fit.devices <= max_devices:
        fit = fit_kind(replace(kind, base_devices=2 * fit.devices), engine, load, max_devices)
        guess = estimate(fit.spec(engine), load, options.slo, fit.conversations_mean)
    return (fit, guess) if guess.least_itl_s <= limit_s else (first, first_guess)


def _with_designs(options: SearchOptions, designs: Seq[Design], fits: dict[str, KindFit]) -> SearchOptions:
    """Names of machines become those of their fits."""
    if not designs:
        return options
    names = {fit.kind.name: name for name, fit in fits.items()}
    kinds, splits, fixed = list[str](), list[tuple[str, str]](), list[Fleet]()
    for design in designs:
        if design.both is not None:
            if design.num_both is None:
                kinds.append(names[design.both])
            elif fits[names[design.both]].fits:
                fixed.append(Fleet((Group(names[design.both], "both", design.num_both),)))
        elif design.prefill is not None and design.decode is not None:
            pair = names[design.prefill], names[design.decode]
            if design.num_prefill is None or design.num_decode is None:
                splits.append(pair)
            elif all(fits[name].fits for name in pair):
                fixed.append(Fleet((Group(pair[0], "prefill", design.num_prefill), Group(pair[1], "decode", design.num_decode))))
    return replace(options, kinds=tuple(kinds), splits=tuple(splits), fixed=tuple(fixed))
