"""The search for a plan: which machines, how many, both phases together or apart, at what price.

    kinds that fit ─▶ highest rate of one engine of each ─▶ least colocated fleet for the rate ─▶ least split fleet ─▶ the cheaper one

Every fleet that is reported was simulated, with all seeds; estimates (``estimate``) only say where to begin, and which pairs of kinds
cannot come near what has been found. It takes as given that more engines never do worse, and that what fails fails at higher rates too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from octavo.planning.bracket import Bracket, find_bracket
from octavo.planning.estimate import Estimate
from octavo.planning.kinds import ASSUMED_ERROR
from octavo.planning.plans import Considered, KindRates, Plan, SearchOptions, SearchResult, why_not
from octavo.planning.trials import Fleet, Group, Trial, TrialLimit, Trials

MOST_ENGINES = 4  # of a cell, which is what is simulated of a larger fleet; fewer where a trial of so many would be too long
_FIRST_SHARE = 0.9  # of an estimate, which knows no queues
_SHARES = (0.5, 0.75, 1.0)  # of all requests that may be simulated: when single engines, colocated and split fleets have to be done
_MOST_MOVES = 16  # of a walk over the numbers of prefill and decode engines
_POOLING = 1.5  # engines that serve each other's bursts hold at most so many times what each holds alone, it is taken
_WORTH_TRYING = 1.5  # times the best price so far: bounds beyond it are not tried


@dataclass(slots=True)
class PlanSearch:
    """One search: made, ``run`` once. ``estimates``: by the names of the fits."""

    trials: Trials
    estimates: dict[str, Estimate]
    options: SearchOptions
    considered: list[Considered] = field(default_factory=list)
    minimize: str = field(init=False)
    _lacks_seeds: bool = False  # by the limit on requests
    _lacks_fleets: bool = False
    _hopeless: dict[str, str] = field(default_factory=dict)  # kinds that no rate holds on, and why
    _brackets: dict[str, dict[int, Bracket]] = field(default_factory=dict)  # of one engine, by kind and seed
    _kinds: dict[str, KindRates] = field(default_factory=dict)
    _best: float = math.inf  # price of the best plan so far

    def __post_init__(self) -> None:
        fits = [fit for fit in self.trials.fits.values() if fit.fits]
        has_prices = bool(fits) and all(fit.usd_per_hour is not None for fit in fits)
        has_watts = bool(fits) and all(fit.busy_w > 0.0 for fit in fits)
        self.minimize = self.options.minimize or ("usd" if has_prices else "watts" if has_watts else "machines")
        if self.minimize == "usd" and fits and not has_prices:
            lacking = ", ".join(fit.name for fit in fits if fit.usd_per_hour is None)
            raise ValueError(f"minimize: 'usd' is not allowed; there is no usd_per_hour of {lacking}")

    def run(self) -> SearchResult:
        self.trials.share = 1.0 if self.options.rate is None else _SHARES[0]
        self._find_rates()
        colocated = split = None
        if self.options.rate is not None:
            self.trials.share = _SHARES[1]
            colocated = self._best_of(self._colocated(self.options.rate), "colocated fleets")
            self.trials.share = _SHARES[2]
            split = self._best_of(self._split(self.options.rate), "split fleets")
            self._find_rates()  # with what is left
            self.trials.share = math.inf  # two more trials, at most
            colocated, split = self._checked(colocated), self._checked(split)
        plans = [plan for plan in (colocated, split) if plan is not None]
        best = min(plans, key=lambda plan: self.price(plan.fleet), default=None)
        kinds = tuple(self._kinds[name] for name in self.trials.fits)
        return SearchResult(kinds, colocated, split, best, tuple(self.considered), self.minimize, self._lacks_seeds or self._lacks_fleets)

    # --- prices -------------------------------------------------------------------------------------------------------------------------

    def _price_of(self, name: str) -> float:
        fit = self.trials.fits[name]
        if self.minimize == "usd":
            return fit.usd_per_hour or 0.0
        return fit.busy_w if self.minimize == "watts" else float(fit.devices)

    def price(self, fleet: Fleet) -> float:
        return fleet.cells * sum(group.count * self._price_of(group.name) for group in fleet.groups)

    def shown(self, price: float) -> str:
        unit = {"usd": "USD/h", "watts": "W", "machines": "devices"}[self.minimize]
        return f"{price:,.4g} {unit}"

    def _over_budget(self, fleet: Fleet) -> str | None:
        fits, options = self.trials.fits, self.options
        watts = fleet.cells * sum(group.count * fits[group.name].busy_w for group in fleet.groups)
        prices = [(group.count, fits[group.name].usd_per_hour) for group in fleet.groups]
        if options.budget_w is not None and watts > options.budget_w:
            return f"{watts:,.4g} W are over the budget of {options.budget_w:,.4g} W"
        if options.budget_usd is not None:
            if any(usd is None for _, usd in prices):
                return "it has no price to hold against the budget"
            usd = fleet.cells * sum(count * (usd or 0.0) for count, usd in prices)
            if usd > options.budget_usd:
                return f"{usd:,.4g} USD/h are over the budget of {options.budget_usd:,.4g} USD/h"
        return None

    # --- one engine ---------------------------------------------------------------------------------------------------------------------

    def _find_rates(self) -> None:
        """Seed by seed, the most promising kinds first: when the limit is near, every kind has a bracket before the best have two. May be
        called again, with more to spend."""
        fits, seeds = self.trials.fits, self.trials.options.seeds
        if not self._hopeless:
            missing = {name: f"{fit.missing_bytes:,} bytes are missing" for name, fit in fits.items() if not fit.fits}
            slow = {name: why for name, fit in fits.items() if fit.fits and (why := self._too_slow(name)) is not None}
            self._hopeless = {**missing, **slow}
        able = [name for name in fits if name in self.estimates and name not in self._hopeless]
        for name in able:
            self._brackets.setdefault(name, {})
        promising = sorted(able, key=lambda name: self._price_of(name) / self.estimates[name].rate)
        try:
            for seed in seeds:
                for name in promising:
                    if name not in self._hopeless and seed not in self._brackets[name]:
                        self._brackets[name][seed] = bracket = self._bracket(name, seed)
                        if not bracket.holds_at:
                            self._hopeless[name] = f"not even requests that come alone keep the limits: {self._why_never(name, seed)}"
            self._lacks_seeds = False
        except TrialLimit:
            self._lacks_seeds = True
        self._kinds = {name: self._rates(name) for name in fits}

    def _why_never(self, name: str, seed: int) -> str:
        """What the slowest load did that one engine of a kind failed under."""
        fleet = Fleet((Group(name, "both", 1),))
        failures = [one for one in self.trials.done if (one.fleet, one.seed, one.holds) == (fleet, seed, False)]
        return why_not(min(failures, key=lambda one: one.rate))

    def _rates(self, name: str) -> KindRates:
        """What is known of a kind by now; where the limit cut its first bracket short, as far as that was seen."""
        fit, found, seeds = self.trials.fits[name], self._brackets.get(name, {}), self.trials.options.seeds
        guess, why = self.estimates.get(name), self._hopeless.get(name)
        if why is None and not found:
            begun = self.trials.seen(Fleet((Group(name, "both", 1),)), seeds[0])
            why = "not finished: the limit on simulated requests was reached"
            return KindRates(fit, guess, () if begun is None else ((seeds[0], begun),), why)
        if why is None and len(found) < len(seeds):
            why = f"{len(found)} of {len(seeds)} seeds: the limit on simulated requests was reached"
        return KindRates(fit, guess, tuple(found.items()), why)

    def _too_slow(self, name: str) -> str | None:
        """Why no request can keep its limits on this kind, however few there are."""
        slo, guess = self.trials.options.slo, self.estimates[name]
        limit_s = min(limit for limit in (slo.itl_s, slo.gap_s, math.inf) if limit is not None)
        if guess.least_itl_s <= limit_s or any(row.num_output == 1 for row in self.trials.load.rows):
            return None
        return f"one answer alone takes {1000 * guess.least_itl_s:,.4g} ms for a token, more than the limit of {1000 * limit_s:,.4g} ms"

    def _bracket(self, name: str, seed: int) -> Bracket:
        """Beginning where the seed before ended."""
        fleet, before = Fleet((Group(name, "both", 1),)), list(self._brackets[name].values())
        guess = before[-1].holds_at if before else _FIRST_SHARE * self.estimates[name].rate
        return find_bracket(lambda rate: self.trials.holds(fleet, rate, seed), self.options.grid, guess)

    # --- fleets -------------------------------------------------------------------------------------------------------------------------

    def _best_of(self, plans: Iterator[Plan], what: str) -> Plan | None:
        """The cheapest of those that keep the budgets. What the limit leaves out is not among them."""
        found = list[Plan]()
        try:
            for plan in plans:
                found.append(plan)
                self._best = min(self._best, self.price(plan.fleet))
        except TrialLimit as limit:
            self._lacks_fleets = True
            self.considered.append(Considered(f"more {what}", f"not tried: {limit}"))
        return min(found, key=lambda plan: self.price(plan.fleet), default=None)

    def _checked(self, plan: Plan | None) -> Plan | None:
        """With a trial of slower steps: what becomes of it if the cost model is off by its error."""
        if plan is None or not plan.error:
            return plan
        trial = self.trials.trial(plan.fleet, plan.rate, self.trials.options.seeds[0], 1.0 + plan.error)
        return replace(plan, slower=trial)

    def _drop(self, what: str, why: str) -> None:
        self.considered.append(Considered(what, why, self.options.rate))

    def _failure(self, fleet: Fleet, rate: float) -> Trial | None:
        """The trial of the first seed with which ``fleet`` fails, or None."""
        for seed in self.trials.options.seeds:
            known = self.trials.failure_below(fleet, rate, seed)
            if known is not None:
                return known
        for seed in self.trials.options.seeds:
            trial = self.trials.trial(fleet, rate, seed)
            if not trial.holds:
                return trial
        return None

    def _plan(self, fleet: Fleet, rate: float) -> Plan:
        fits, seeds = [self.trials.fits[group.name] for group in fleet.groups], self.trials.options.seeds
        counts = [fleet.cells * group.count for group in fleet.groups]
        usd = [fit.usd_per_hour for fit in fits]
        cost = None if None in usd else sum(count * (one or 0.0) for count, one in zip(counts, usd, strict=True))
        watts = sum(count * fit.busy_w for count, fit in zip(counts, fits, strict=True))
        error = max(ASSUMED_ERROR if fit.kind.error is None else fit.kind.error for fit in fits)
        trials = tuple(self.trials.trial(fleet, rate, seed) for seed in seeds)
        devices = sum(count * fit.devices for count, fit in zip(counts, fits, strict=True))
        return Plan(fleet, rate, trials, cost, watts, devices, error)

    def _colocated(self, rate: float) -> Iterator[Plan]:
        """Given fleets; then of each kind, cheapest first by what one engine can do, the fewest engines that serve ``rate``."""
        yield from self._fixed(rate, False)
        names = self.options.kinds if self.options.kinds is not None else tuple(self._kinds)
        able = [name for name in names if name in self._kinds and self._kinds[name].holds_at]
        for name in names:
            if name not in able and name in self._kinds:
                self._drop(name, self._kinds[name].dropped or "one engine holds at no rate that was tried")
        alone = {name: max(1, math.ceil(rate / (self._kinds[name].holds_at or rate) - 1e-9)) for name in able}
        by_price = sorted(able, key=lambda name: alone[name] * self._price_of(name))
        for i, name in enumerate(by_price):
            try:
                fleet = self._fewest(name, rate)
                plan = None if fleet is None else self._kept(fleet, rate)
            except TrialLimit as limit:
                self._lacks_fleets = True
                for left in by_price[i:]:
                    price = self.shown(alone[left] * self._price_of(left))
                    self._drop(f"{alone[left]} x {left}", f"enough by what one engine holds alone, for {price}; not tried: {limit}")
                return
            if plan is not None:
                yield plan

    def _fewest(self, name: str, rate: float) -> Fleet | None:
        """The fewest engines of a kind that serve ``rate``, if that is cheaper than the best fleet so far."""
        kind, price = self._kinds[name], self._price_of(name)
        guess = max(1, math.ceil(rate / (kind.holds_at or rate) - 1e-9))
        cells = math.ceil(guess / self._most_engines(name))
        most = 2 * math.ceil(guess / cells) + 1
        if self._best < math.inf:  # one cell more would cost as much
            most = min(most, math.ceil(self._best / (cells * price) - 1e-9) - 1) if price else most
        least = cells if kind.fails_at is None else max(cells, math.ceil(rate / (_POOLING * kind.fails_at)))
        if cells * most < least:
            lower = f"it takes at least {least} of them, {self.shown(least * price)}"
            self._drop(name, f"no cheaper: {lower}, and {self.shown(self._best)} is found")
            return None
        size = min(math.ceil(guess / cells), most)
        fleet = Fleet((Group(name, "both", size),), cells)
        failure = self._failure(fleet, rate)
        while failure is not None and size < most:
            size += 1
            fleet = Fleet((Group(name, "both", size),), cells)
            failure = self._failure(fleet, rate)
        if failure is not None:
            why = f"{fleet} do not hold ({why_not(failure)})"
            self._drop(name, why if self._best == math.inf else f"{why}, and more cost more than {self.shown(self._best)}")
            return None
        while size > 1:
            smaller = Fleet((Group(name, "both", size - 1),), cells)
            if self._failure(smaller, rate) is not None:
                break
            fleet, size = smaller, size - 1
        return fleet

    def _kept(self, fleet: Fleet, rate: float) -> Plan | None:
        """As a plan, if it keeps the budgets."""
        over = self._over_budget(fleet)
        if over is not None:
            self._drop(str(fleet), over)
            return None
        plan = self._plan(fleet, rate)
        self.considered.append(Considered(str(fleet), f"holds, for {self.shown(self.price(fleet))}", rate))
        return plan

    def _most_engines(self, *names: str) -> int:
        """Of a cell, so that a trial of it is as long as it has to be."""
        most = self.trials.options.most_requests // max(self.trials.sizes[name] for name in names)
        return min(max(most, 1), MOST_ENGINES)

    def _fixed(self, rate: float, is_split: bool) -> Iterator[Plan]:
        for fleet in self.options.fixed:
            if fleet.is_split is not is_split:
                continue
            failure = self._failure(fleet, rate)
            if failure is not None:
                self._drop(str(fleet), f"does not hold: {why_not(failure)}")
                continue
            plan = self._kept(fleet, rate)
            if plan is not None:
                yield plan

    # --- prefill and decode apart -------------------------------------------------------------------------------------------------------

    def _split(self, rate: float) -> Iterator[Plan]:
        """Given fleets; then for the most promising pairs of kinds, the fewest engines of each that serve ``rate``."""
        yield from self._fixed(rate, True)
        num_tried = 0
        for bound, prefill, decode in self._pairs(rate):
            what = f"{prefill} for prefill, {decode} for decode"
            if bound > _WORTH_TRYING * self._best:
                self._drop(what, f"it takes at least {self.shown(bound)} by the estimate; {self.shown(self._best)} is found")
            elif num_tried >= self.options.most_pairs:
                self._drop(what, f"not tried: {self.options.most_pairs} more promising pairs were")
            else:
                num_tried += 1
                fleet = self._walk(prefill, decode, rate)
                plan = None if fleet is None else self._kept(fleet, rate)
                if plan is not None:
                    yield plan

    def _pairs(self, rate: float) -> Seq[tuple[float, str, str]]:
        """(least price by the estimates, prefill, decode), the most promising first."""
        able = [name for name, kind in self._kinds.items() if kind.estimate is not None and kind.fit.fits]
        pairs = self.options.splits if self.options.splits is not None else [(p, d) for p in able for d in able]
        found = list[tuple[float, str, str]]()
        for prefill, decode in pairs:
            if prefill not in able or decode not in able:
                self._drop(f"{prefill} for prefill, {decode} for decode", "the model does not fit on both")
                continue
            exact = (rate / self.estimates[prefill].prefill_rate, rate / self.estimates[decode].decode_rate)
            found.append((max(1.0, exact[0]) * self._price_of(prefill) + max(1.0, exact[1]) * self._price_of(decode), prefill, decode))
        return sorted(found)

    def _counts(self, prefill: str, decode: str, rate: float) -> tuple[int, int]:
        """Engines of each that the estimates say are enough."""
        return (
            max(1, math.ceil(rate / self.estimates[prefill].prefill_rate - 1e-9)),
            max(1, math.ceil(rate / self.estimates[decode].decode_rate - 1e-9)),
        )

    def _walk(self, prefill: str, decode: str, rate: float) -> Fleet | None:
        """From the numbers of the estimates: one more of what the limits lack until they hold, then one less of either while they do."""
        num_prefill, num_decode = self._counts(prefill, decode, rate)
        cells = math.ceil((num_prefill + num_decode) / max(2, self._most_engines(prefill, decode)))
        at = (math.ceil(num_prefill / cells), math.ceil(num_decode / cells))
        what = f"{prefill} for prefill, {decode} for decode"

        def fleet(place: tuple[int, int]) -> Fleet:
            return Fleet((Group(prefill, "prefill", place[0]), Group(decode, "decode", place[1])), cells)

        failure, moves = self._failure(fleet(at), rate), 0
        while failure is not None:
            if self.price(fleet(at)) > _WORTH_TRYING * self._best or moves == _MOST_MOVES:
                self._drop(what, f"{fleet(at)} does not hold ({why_not(failure)}), for {self.shown(self.price(fleet(at)))} already")
                return None
            at, moves = _grown(at, failure), moves + 1
            failure = self._failure(fleet(at), rate)
        shrinks = True
        while shrinks:
            shrinks = False
            smaller = [(at[0] - 1, at[1]), (at[0], at[1] - 1)]
            for place in sorted((one for one in smaller if min(one) >= 1), key=lambda one: self.price(fleet(one))):
                if self._failure(fleet(place), rate) is None:
                    at, shrinks = place, True
                    break
        return fleet(at)


def _grown(at: tuple[int, int], failure: Trial) -> tuple[int, int]:
    """One more prefill engine where first tokens are late, one more decode engine where the others are; of each where it is both."""
    late_first, late_others = failure.broken.get("ttft", 0.0), max(failure.broken.get(name, 0.0) for name in ("itl", "gap"))
    if late_first > 2.0 * late_others:
        return at[0] + 1, at[1]
    if late_others > 2.0 * late_first:
        return at[0], at[1] + 1
    return at[0] + 1, at[1] + 1
