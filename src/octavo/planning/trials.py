"""Trials: fleets of engines under the load at a rate, each simulated once by seed, with a limit on all of them together.

A trial stops as soon as too many requests have missed their limits, so that fleets which fail cost little. Deterministic: what is left out
when the limit is reached depends on the order of questions, never on the clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from octavo.distributed.handoff import Link
from octavo.distributed.router import ShortestQueue
from octavo.planning.bracket import Bracket
from octavo.planning.estimate import Estimate
from octavo.planning.kinds import Engine, KindFit
from octavo.planning.load import PlanLoad
from octavo.simulator.handing_over import HandoffOptions
from octavo.simulator.records import Slo
from octavo.simulator.simulation import Simulation, SimulationOptions
from octavo.workload.requests import WorkloadRequest

_TURNS = 5
_LEAST_REQUESTS = 200


class TrialLimit(RuntimeError):
    """As many requests as were allowed have been simulated."""


@dataclass(frozen=True, slots=True)
class Group:
    """``count`` engines alike. ``name``: that of their ``KindFit``."""

    name: str
    role: str
    count: int


@dataclass(frozen=True, slots=True)
class Fleet:
    """``cells`` equal parts, each with a router of its own and ``groups`` of engines: what is simulated is one of them."""

    groups: tuple[Group, ...]
    cells: int = 1

    @property
    def cell_size(self) -> int:
        return sum(group.count for group in self.groups)

    @property
    def num_engines(self) -> int:
        return self.cells * self.cell_size

    @property
    def is_split(self) -> bool:
        return len(self.groups) > 1

    def count(self, role: str) -> int:
        """Engines of that role, over all cells."""
        return self.cells * sum(group.count for group in self.groups if group.role == role)

    def __str__(self) -> str:
        words = {"both": "", "prefill": " for prefill", "decode": " for decode"}
        return " + ".join(f"{self.cells * group.count} x {group.name}{words[group.role]}" for group in self.groups)


@dataclass(frozen=True, slots=True)
class Trial:
    """A fleet at a rate, with one seed. ``stopped``: too many requests had missed their limits before the end; ``attainment``, the share
    within the limits, then counts those that had ended. ``broken``: share of requests that broke each limit. ``piled_up``: more and more
    were on their way, so that a longer trial would have broken some."""

    fleet: Fleet
    rate: float
    seed: int
    holds: bool
    stopped: bool
    attainment: float
    broken: dict[str, float]
    num_requests: int
    watts: float
    piled_up: bool
    ttft_p90_s: float | None
    itl_p90_s: float | None
    first_refusal: str | None = None

    def to_dict(self) -> dict[str, object]:
        return {
            "fleet": str(self.fleet), "rate": self.rate, "seed": self.seed, "holds": self.holds, "stopped_early": self.stopped,
            "attainment": self.attainment, "broken": self.broken, "piled_up": self.piled_up, "num_requests": self.num_requests,
            "ttft_p90_s": self.ttft_p90_s, "itl_p90_s": self.itl_p90_s,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class TrialOptions:
    """``attainment``: share of requests that are to be within ``slo``. ``most_requests``: of one trial; ``most_simulated``: of all."""

    slo: Slo
    attainment: float = 0.9
    seeds: Seq[int] = (0, 1, 2)
    arrivals: str = "poisson"
    most_requests: int = 2000
    most_simulated: int = 24_000
    link_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        if not 0.0 < self.attainment <= 1.0:
            raise ValueError(f"attainment: {self.attainment!r} is not allowed; above 0 and at most 1")
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise ValueError(f"seeds: {list(self.seeds)!r} is not allowed; at least one, and each once")
        for name in ("most_requests", "most_simulated"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)!r} is not allowed; at least 1")


@dataclass(slots=True)
class Trials:
    """``sizes``: requests of a trial for each engine, by the names of the fits (``trial_size``)."""

    engine: Engine
    load: PlanLoad
    options: TrialOptions
    fits: dict[str, KindFit]
    sizes: dict[str, int]
    progress: Callable[[Trial], None] = lambda trial: None
    share: float = 1.0  # of ``most_simulated`` that may be used for now
    num_simulated: int = 0
    done: list[Trial] = field(default_factory=list)
    _known: dict[tuple[Fleet, float, int, float], Trial] = field(default_factory=dict)

    def holds(self, fleet: Fleet, rate: float, seed: int) -> bool:
        return self.trial(fleet, rate, seed).holds

    def trial(self, fleet: Fleet, rate: float, seed: int, slower: float = 1.0) -> Trial:
        """``rate``: of the whole fleet. ``slower``: every step takes so many times as long. Raises TrialLimit."""
        key = fleet, rate, seed, slower
        if key not in self._known:
            if self.num_simulated >= self.share * self.options.most_simulated:
                raise TrialLimit(f"the limit on simulated requests was reached ({self.options.most_simulated:,})")
            self._known[key] = found = self._run(fleet, rate, seed, slower)
            self.num_simulated += found.num_requests
            if slower == 1.0:
                self.done.append(found)
            self.progress(found)
        return self._known[key]

    def failure_below(self, fleet: Fleet, rate: float, seed: int) -> Trial | None:
        """A trial of ``fleet`` that failed at ``rate`` or a lower one: it fails there too, and need not be tried."""
        return next((one for one in self.done if one.fleet == fleet and one.seed == seed and one.rate <= rate and not one.holds), None)

    def seen(self, fleet: Fleet, seed: int) -> Bracket | None:
        """What the trials of ``fleet`` so far say of its highest rate, wide as it may be; None: nothing yet."""
        done = [one for one in self.done if one.fleet == fleet and one.seed == seed]
        holds_at = max((one.rate for one in done if one.holds), default=0.0)
        fails_at = min((one.rate for one in done if not one.holds and one.rate > holds_at), default=None)
        return Bracket(holds_at, fails_at) if done else None

    def num_requests(self, fleet: Fleet) -> int:
        """Of a trial. Prefill engines see the same requests as the decode engines behind them, and hold them for a shorter time."""
        held = sum(group.count * self.sizes[group.name] for group in fleet.groups if group.role != "prefill")
        return min(held, self.options.most_requests)

    def _run(self, fleet: Fleet, rate: float, seed: int, slower: float) -> Trial:
        options, num_requests = self.options, self.num_requests(fleet)
        specs = [
            self.fits[group.name].spec(self.engine, group.role, slower) for group in fleet.groups for _ in range(group.count)
        ]  # fmt: skip
        most_misses = int((1.0 - options.attainment) * num_requests + 1e-9)
        run_options = SimulationOptions(options.slo, seed, most_misses=most_misses, handoff=HandoffOptions(self._link(fleet)))
        simulation, on_their_way = Simulation(specs, ShortestQueue(), run_options), list[int]()

        def requests() -> Iterator[WorkloadRequest]:
            for i, request in enumerate(self.load.requests(rate / fleet.cells, seed, num_requests, options.arrivals), 1):
                yield request
                if i in (num_requests // 2, num_requests):
                    on_their_way.append(len(simulation.log.live))

        report = simulation.run(requests())
        num_ended = report.num_completed + report.num_refused + report.num_failed
        attained = round((report.slo_attainment or 0.0) * report.num_arrived)
        stopped = num_ended < num_requests
        attainment = attained / num_ended if num_ended else 0.0
        broken = {name: count / num_ended for name, count in report.num_broken.items()}
        watts = (report.energy_j or 0.0) / report.duration_s * fleet.cells if report.duration_s else 0.0
        piled_up = not stopped and len(on_their_way) == 2 and _grows(on_their_way[0], on_their_way[1], num_requests)
        holds = not stopped and not piled_up and attained >= num_requests - most_misses
        return Trial(
            fleet, rate, seed, holds, stopped, attainment, broken, report.num_arrived, watts, piled_up,
            report.ttft_s["p90"], report.itl_s["p90"], report.first_refusal,
        )  # fmt: skip

    def _link(self, fleet: Fleet) -> Link:
        """As fast as the slower end."""
        ends = [self.fits[group.name].kind for group in fleet.groups]
        bytes_per_s = self.options.link_bytes_per_s or min(kind.link_bytes_per_s for kind in ends)
        return Link(bytes_per_s, max(kind.link_latency_s for kind in ends))


def trial_size(estimate: Estimate, slo: Slo) -> int:
    """Requests of a trial for each engine: several times those that run at once, so that a steady state comes about, and so many that a
    queue which grows is longer than the limits at the end."""
    wait_s = min(limit for limit in (slo.ttft_s, slo.e2e_s, math.inf) if limit is not None)
    waiting = 0.0 if wait_s == math.inf else _TURNS * estimate.rate * wait_s
    return max(_LEAST_REQUESTS, _TURNS * estimate.num_sequences, math.ceil(min(waiting, 1e9)))


def _grows(at_half: int, at_end: int, num_requests: int) -> bool:
    """Whether requests pile up: at the last arrival most of them are on their way, and half as many again as in the middle. In a steady
    state a fifth of a trial is, throughout; at twice what an engine can do half of it, growing."""
    return 2 * at_end > num_requests and at_end > 1.5 * at_half
